"""The policy's own kernels beside references (values) and beside fused ones (seconds), at the sizes of Nemotron 3 Nano
and, for the delta rule, of Qwen3.5-35B-A3B.

The scan against Mamba2's recurrence in float64 and, where it is installed, `mamba_ssm`. The gated delta rule against
its recurrence in float64 and, where it is installed, `fla`. Experts one by one against one grouped product. Attention
over packed rows against softmax in float64 and, without packing, torch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.gpu.kit import Row, Setting
from grpo_mcore.base.imports import why_not_imported
from grpo_mcore.parallel.mesh import prepare_megatron


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this part."""
    prepare_megatron(setting.platform)
    yield from scans(setting)
    yield from delta_rules(setting)
    yield from experts(setting)
    yield from attention(setting)


def scans(setting: Setting) -> Iterator[Row]:
    """Compare Mamba2 scans: 64 heads of 64, 8 groups, states of 128, chunks of 128."""
    from grpo_mcore.parallel.layers.mamba import scan

    chunk = 8 if setting.tiny else 128
    *inputs, sequence = scan_inputs(setting, 50 if setting.tiny else 300)
    exact = recurrence(*inputs, sequence)
    yield error("scan", scan(*inputs, sequence, chunk), exact, 1e-4, "Mamba2's recurrence in float64")
    *inputs, sequence = scan_inputs(setting, 64 if setting.tiny else 4096)
    seconds = forward_backward(setting, lambda *t: scan(*t, sequence, chunk), inputs)
    yield Row("scan", "ours: forward + backward", f"{1e3 * seconds:.3g} ms", f"{len(sequence)} tokens, one layer")
    if (why := why_not_imported("mamba_ssm")) is not None:
        yield Row("scan", "mamba_ssm", why)
        return
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def fused(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
        one = (t[None] for t in (x, dt))
        return mamba_chunk_scan_combined(*one, decay, b[None], c[None], chunk, seq_idx=sequence[None].int())[0]

    yield error("scan", fused(*inputs), scan(*inputs, sequence, chunk), 1e-2, "ours", "mamba_ssm")
    yield Row("scan", "mamba_ssm: forward + backward", f"{1e3 * forward_backward(setting, fused, inputs):.3g} ms")


def scan_inputs(setting: Setting, tokens: int) -> list[Tensor]:
    """Return x, dt, decay, B, C and the sequence of each token, for three sequences."""
    heads, size, groups, state = (4, 8, 2, 8) if setting.tiny else (64, 64, 8, 128)
    generator = torch.Generator(setting.torch_device).manual_seed(1)
    shapes = [(tokens, heads, size), (tokens, heads), (heads,), (tokens, groups, state), (tokens, groups, state)]
    x, dt, decay, b, c = (torch.randn(s, device=setting.torch_device, generator=generator) for s in shapes)
    sequence = torch.arange(tokens, device=setting.torch_device) // (tokens // 3 + 1)
    return [x, torch.nn.functional.softplus(dt - 3), -decay.exp(), b, c, sequence]


def recurrence(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, sequence: Tensor) -> Tensor:
    """Return h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t, in float64, token by token."""
    x, dt, decay, b, c = (t.double() for t in (x, dt, decay, b, c))
    repeat = x.size(1) // b.size(1)
    b, c = b.repeat_interleave(repeat, 1), c.repeat_interleave(repeat, 1)
    state, rows = x.new_zeros(x.size(1), x.size(2), b.size(2)), []
    for t in range(len(x)):
        if t and sequence[t] != sequence[t - 1]:
            state = torch.zeros_like(state)
        state = state * (dt[t] * decay).exp()[:, None, None] + dt[t][:, None, None] * x[t][..., None] * b[t][:, None]
        rows.append((state * c[t][:, None]).sum(-1))
    return torch.stack(rows)


def delta_rules(setting: Setting) -> Iterator[Row]:
    """Compare gated delta rules: 16 heads of queries and keys, 32 of values, all of 128, chunks of 64."""
    from grpo_mcore.parallel.layers.delta import delta_rule, fused_delta_rule, unit
    from grpo_mcore.parallel.layers.packed_row import chunks_of

    keys, heads, size, chunk = (2, 4, 8, 4) if setting.tiny else (16, 32, 128, 64)
    generator = torch.Generator(setting.torch_device).manual_seed(4)

    def inputs(lengths: Sequence[int]) -> list[Tensor]:
        shapes = [(keys, size), (keys, size), (heads, size), (heads,), (heads,)]
        *qkv, decay, strength = (
            torch.randn(sum(lengths), *shape, device=setting.torch_device, generator=generator) for shape in shapes
        )
        return [*qkv, -torch.nn.functional.softplus(decay - 3), strength.sigmoid()]

    def ours(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
        return delta_rule(unit(q) * size**-0.5, unit(k), v, log_decay, strength, row, chunk)

    def fused(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
        ends = torch.tensor([0, *lengths], device=setting.torch_device).cumsum(0)
        return fused_delta_rule(q.bfloat16(), k.bfloat16(), v.bfloat16(), log_decay, strength, ends, lengths)

    lengths = (13, 1, 36) if setting.tiny else (130, 1, 169)
    row, few = chunks_of(lengths, chunk, setting.torch_device), inputs(lengths)
    exact = torch.cat([delta_recurrence(*part) for part in zip(*(t.split(lengths) for t in few), strict=True)])
    yield error("delta rule", ours(*few), exact, 1e-4, "its recurrence in float64")
    why = why_not_imported("fla")
    if why is None:
        yield error("delta rule", fused(*few), exact, 2e-2, "its recurrence in float64", "fla")
    lengths = (16,) * 4 if setting.tiny else (1024,) * 4
    row, many = chunks_of(lengths, chunk, setting.torch_device), inputs(lengths)
    seconds = forward_backward(setting, ours, many)
    yield Row("delta rule", "ours: forward + backward", f"{1e3 * seconds:.3g} ms", f"sequences of {lengths}, one layer")
    if why is None:
        try:
            yield Row("delta rule", "fla: forward + backward", f"{1e3 * forward_backward(setting, fused, many):.3g} ms")
        except RuntimeError as refusal:  # of backward passes on Hopper, with Triton before 3.7.1
            why = str(refusal)
    if why is not None:
        yield Row("delta rule", "fla", why[:100])


def delta_recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
    """Return S_t = a_t S_{t-1} + b_t (v_t - a_t S_{t-1} k_t) k_t', y_t = S_t q_t of one sequence, in float64. The
    lengths of q and k are set to 1, and q is divided by the root of its size."""
    q, k, v, log_decay, strength = (t.double() for t in (q, k, v, log_decay, strength))
    repeat = v.size(1) // k.size(1)
    q, k = (torch.nn.functional.normalize(t, dim=-1).repeat_interleave(repeat, 1) for t in (q, k))
    state, rows = v.new_zeros(v.size(1), v.size(2), k.size(2)), []
    for t in range(len(v)):
        state = state * log_decay[t].exp()[:, None, None]
        missing = strength[t][:, None] * (v[t] - (state * k[t][:, None]).sum(-1))
        state = state + missing[..., None] * k[t][:, None]
        rows.append((state * q[t][:, None]).sum(-1) * q.size(-1) ** -0.5)
    return torch.stack(rows)


def experts(setting: Setting) -> Iterator[Row]:
    """Compare experts one after the other with one grouped product: 16 of a rank, two layers with squared ReLU."""
    count, hidden, inner, tokens = (4, 16, 32, 40) if setting.tiny else (16, 2688, 1856, 4096 * 6 // 8)
    kind, generator = torch.bfloat16, torch.Generator(setting.torch_device).manual_seed(2)

    def values(*shape: int) -> Tensor:
        return (0.1 * torch.randn(shape, device=setting.torch_device, generator=generator)).to(kind)

    rows, up, down = values(tokens, hidden), values(count, inner, hidden), values(count, hidden, inner)
    sizes = [tokens // count + (i < tokens % count) for i in range(count)]
    ends = torch.tensor(sizes, device=setting.torch_device).cumsum(0).int()

    def one_by_one(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
        parts = zip(rows.split(sizes), up, down, strict=True)
        return torch.cat([linear(linear(row, first).relu().square(), second) for row, first, second in parts])

    def grouped(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
        middle = torch._grouped_mm(rows, up.transpose(1, 2), ends).relu().square()
        return torch._grouped_mm(middle, down.transpose(1, 2), ends)

    exact = one_by_one(*(t.double() for t in (rows, up, down)))
    yield error("experts", one_by_one(rows, up, down), exact, 2e-2, "one by one in float64", "one by one")
    seconds = forward_backward(setting, one_by_one, [rows, up, down])
    yield Row("experts", "one by one: forward + backward", f"{1e3 * seconds:.3g} ms", f"{tokens} rows, {count} experts")
    yield error("experts", grouped(rows, up, down), exact, 2e-2, "one by one in float64", "grouped product")
    seconds = forward_backward(setting, grouped, [rows, up, down])
    yield Row("experts", "grouped product: forward + backward", f"{1e3 * seconds:.3g} ms")


def attention(setting: Setting) -> Iterator[Row]:
    """Compare attention over packed rows: 32 heads of 128, 2 groups."""
    from grpo_mcore.parallel.layers.attention import PackedAttention
    from grpo_mcore.parallel.layers.packed_row import describe_row

    heads, groups, size = (4, 2, 16) if setting.tiny else (32, 2, 128)
    kind = torch.bfloat16 if setting.platform.on_gpu else torch.float32
    packed = PackedAttention(
        SimpleNamespace(kv_channels=size, window_size=None, window_attn_skip_freq=None, softmax_type="vanilla"),
        1,
        None,
        "self",
        platform=setting.platform,
    )
    for lengths, exact in (((7, 40, 1, 29), True), ((16,) * 4 if setting.tiny else (1024,) * 4, False)):
        generator = torch.Generator(setting.torch_device).manual_seed(3)
        query, key, value = (
            torch.randn(sum(lengths), n, size, device=setting.torch_device, generator=generator).to(kind)
            for n in (heads, groups, groups)
        )
        ends = torch.tensor([0, *lengths], device=setting.torch_device).cumsum(0).int()
        row = describe_row(ends, setting.platform)

        def ours(query: Tensor, key: Tensor, value: Tensor, row: Any = row) -> Tensor:
            return packed(query, key, value, None, packed_seq_params=row)

        if exact:
            wanted = softmax_attention(query, key, value, lengths)
            limit = 2e-2 if kind is torch.bfloat16 else 1e-5
            yield error("attention", ours(query, key, value), wanted, limit, "softmax in float64")
            continue
        seconds = forward_backward(setting, ours, [query, key, value])
        yield Row("attention", "ours: forward + backward", f"{1e3 * seconds:.3g} ms", f"sequences of {lengths}")

        def one_sequence(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            heads_first = (t.transpose(0, 1)[None] for t in (query, key, value))
            return scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)

        few = [t[: lengths[0]] for t in (query, key, value)]
        seconds = len(lengths) * forward_backward(setting, one_sequence, few)
        yield Row("attention", "torch's kernel, one sequence at a time", f"{1e3 * seconds:.3g} ms")


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return causal attention within each sequence by its formula, in float64."""
    repeat, rows = query.size(1) // key.size(1), []
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    parts = zip(*(t.double().split(list(lengths)) for t in (query, key, value)), strict=True)
    for q, k, v in parts:
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.size(-1) ** -0.5
        hidden = torch.ones(scores.shape[1:], device=q.device).triu(1).bool()
        rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(rows).flatten(1)


def forward_backward(setting: Setting, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> float:
    """Return the seconds of a forward pass and its backward pass with respect to all inputs."""
    inputs = [t.detach().requires_grad_() for t in inputs]

    def both() -> None:
        output = function(*inputs)
        torch.autograd.grad(output, inputs, torch.ones_like(output))

    return setting.seconds(both)


def error(part: str, found: Tensor, wanted: Tensor, limit: float, against: str, which: str = "ours") -> Row:
    """Return the row of a comparison: the norm of the difference over the norm of the reference."""
    relative = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
    return Row(part, f"{which}: relative error", f"{relative:.1e}", f"below {limit:g} of {against}", relative < limit)
