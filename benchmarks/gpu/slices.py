"""A training step of one rank at real sizes: seconds, MFU, peak bytes beside `plan`, and seconds by kind of layer.

Two models: a slice of Nemotron 3 Nano as a rank of EP 8 has it (16 of the 128 experts, all layers, the router cut to
16), and a dense one of 1.5 B (Qwen2.5-1.5B). The slice is measured with the fused kernels too where they are
installed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.kit import GIB, Row, Setting, make_model, number, policy, recipe, rows_of, train
from grpo_mcore.families import Block, forward_flops
from grpo_mcore.families.known import known_config
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.tools.plan.memory import gradient_bytes, optimizer_bytes, stage_memory, weight_bytes
from grpo_mcore.tools.plan.run_plan import make_plan

EXPERTS = 16
MEGATRON = "policy.megatron_cfg."
NAMES = {Block.MAMBA: "Mamba layer", Block.ATTENTION: "attention layer", Block.EXPERTS: "expert layer"}


def models(setting: Setting) -> dict[str, tuple[dict[str, Any], list[str]]]:
    """Return name -> (Hugging Face config, overrides of the recipe)."""
    nano = dict(known_config("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16") or {}) | {"n_routed_experts": EXPERTS}
    dense = dict(known_config("Qwen/Qwen2.5-1.5B") or {})
    # The whole optimizer state of the slice (16 ranks share it in the real layout) fits a GPU of 141 GB, not one of 80.
    memory = setting.data_sheet().memory
    light = memory is not None and memory < 120 * GIB and not setting.tiny
    optimizer = f"{MEGATRON}optimizer."
    on_host = [f"{optimizer}optimizer_cpu_offload=true", f"{optimizer}optimizer_offload_fraction=0.75"] if light else []
    if setting.tiny:
        common = {"hidden_size": 64, "vocab_size": 131, "num_attention_heads": 4, "num_key_value_heads": 2}
        nano |= common | {
            "num_hidden_layers": 4, "hybrid_override_pattern": "MEM*", "head_dim": 16, "mamba_num_heads": 8,
            "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "intermediate_size": 32, "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
        }  # fmt: skip
        dense |= common | {"num_hidden_layers": 2, "intermediate_size": 96}
    return {
        "nanov3 slice": (
            nano,
            [f"{MEGATRON}activation_checkpointing=true", f"{MEGATRON}moe_router_dtype=fp32", *on_host],
        ),
        "dense 1.5B": (dense, []),
    }


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this part."""
    length, count = (64, 2) if setting.tiny else (4096, 4)
    for name, (hf, overrides) in models(setting).items():
        folder = setting.folder / name.replace(" ", "-")
        model = make_model(hf, folder, setting.torch_device, getattr(torch, setting.precision))
        platform = f"cluster.platform={'gpu' if setting.platform.on_gpu else 'cpu'}"
        config = recipe(model, f"policy.precision={setting.precision}", platform, *overrides, rows=count, length=length)
        for where in [setting, *fused(name, setting)]:
            with policy(config, where) as rank:
                yield from measure(f"{name}, fused" if where.fused else name, rank, config, where, length, count)
            del rank
            setting.free()


def fused(name: str, setting: Setting) -> list[Setting]:
    """Return the setting with Mamba2's kernels, where they are installed and the model has such layers."""
    installed = setting.platform.on_gpu and Platform.detect("gpu").mamba_kernels
    return [replace(setting, fused=True)] if installed and "nano" in name else []


def measure(name: str, rank: Policy, config: MasterConfig, setting: Setting, length: int, count: int) -> Iterator[Row]:
    """Yield the rows of one model."""
    rows = rows_of(rank, count, length)
    train(rank, rows)  # optimizer state and kernels come into being
    if setting.platform.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with timed_updates(rank, setting) as updates:
        whole = setting.seconds(lambda: train(rank, rows), 2)
    update = sorted(updates)[len(updates) // 2]
    seconds = whole - update
    sheet = setting.data_sheet()
    kernels = "torch" if setting.platform.on_gpu else "cpu"
    plan = make_plan(config, rank.shape, sheet, mean_length=length // 4, kernels=kernels)
    flops = forward_flops(rank.shape, [length // 4] * 4) * count
    recompute = config.policy.megatron_cfg.activation_checkpointing
    tokens = count * length
    yield Row(name, "training, without the update", number(seconds, "s"), f"{tokens} tokens, {count} micro-batches")
    on_host = config.policy.megatron_cfg.optimizer.optimizer_cpu_offload
    yield Row(name, "the update", number(update, "s"), "most of it on the host" if on_host else "on the device")
    yield Row(name, "tokens per second", number(tokens / seconds, "tokens/s"))
    yield Row(
        name,
        "MFU (without recomputation)",
        f"{3 * flops / seconds / sheet.flops:.1%}",
        f"of {number(sheet.flops / 1e12, 'TFLOP/s')}",
    )
    if recompute:
        yield Row(name, "of the FLOPs done", f"{4 * flops / seconds / sheet.flops:.1%}", "with recomputation")
    planned = {
        "weights": weight_bytes(plan.load, 0), "gradients": gradient_bytes(plan.load, 0),
        "optimizer": optimizer_bytes(plan.load, 0),
    }  # fmt: skip
    held = rank.memory()
    for part, expected in planned.items():
        ok = abs(held[part] - expected) <= 0.05 * max(expected, 1)
        yield Row(name, f"bytes of {part}", number(held[part] / GIB, "GiB"), f"plan: {expected / GIB:.4g} GiB", ok)
    if "peak" in held:
        phases = stage_memory(plan.load, sheet, 0, plan.engine).phases
        expected = max(phase.total for phase in phases if phase.name in ("training", "optimizer")) - sheet.reserved
        # The plan counts the activations of the torch code, which the fused kernels do not all keep.
        least = 0.0 if setting.fused else 0.95
        ok = None if setting.tiny else least * expected <= held["peak"] <= 1.05 * expected
        yield Row(name, "peak in training", number(held["peak"] / GIB, "GiB"), f"plan: {expected / GIB:.4g} GiB", ok)
    logprobs = setting.seconds(lambda: rank.logprobs(rows), 1)
    yield Row(name, "log-probs", number(logprobs, "s"), f"{flops / logprobs / sheet.flops:.1%} of the FLOP/s")
    yield from by_layer(name, rank, rows, setting)


@contextmanager
def timed_updates(rank: Policy, setting: Setting) -> Iterator[list[float]]:
    """Yield a list that gets the seconds of every update of the weights meanwhile."""
    updates: list[float] = []
    step = rank.optimizer.step

    def timed() -> Any:
        result: list[Any] = []
        updates.append(setting.timed(lambda: result.append(step())))
        return result[0]

    rank.optimizer.step = timed
    yield updates
    rank.optimizer.step = step


def by_layer(name: str, rank: Policy, rows: list[Any], setting: Setting) -> Iterator[Row]:
    """Time one layer of each kind, forward and backward, on the inputs that it gets in a log-prob pass."""
    network = rank.chunks[0].module
    caught: dict[int, tuple[Any, dict[str, Any]]] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, index=index: caught.__setitem__(index, (args, kwargs)), with_kwargs=True
        )
        for index, layer in enumerate(network.decoder.layers)
    ]
    rank.logprobs(rows[:1])
    for hook in hooks:
        hook.remove()
    kinds: dict[str, list[int]] = defaultdict(list)
    for index in caught:
        block = rank.shape.blocks[index] if rank.shape.blocks else None
        kinds[NAMES.get(block, "layer") if block is not None else "layer"].append(index)
    for kind, members in kinds.items():
        args, kwargs = caught[members[len(members) // 2]]
        layer = network.decoder.layers[members[len(members) // 2]]
        layer.train()
        forward, backward = _times(layer, args, kwargs, setting)
        total = len(members) * (forward + backward)
        yield Row(
            name, f"{kind}: forward, backward", f"{1e3 * forward:.3g} ms, {1e3 * backward:.3g} ms",
            f"{len(members)} of them: {1e3 * total:.3g} ms a micro-batch",
        )  # fmt: skip


def _times(layer: torch.nn.Module, args: Any, kwargs: dict[str, Any], setting: Setting) -> tuple[float, float]:
    """Return median seconds of a layer's forward pass and of its backward pass."""
    where = "hidden_states" if "hidden_states" in kwargs else 0
    hidden = (kwargs[where] if where else args[0]).detach().requires_grad_()  # type: ignore[index]
    args, kwargs = (args, kwargs | {where: hidden}) if where else ((hidden, *args[1:]), kwargs)
    wanted = [hidden, *(p for p in layer.parameters() if p.requires_grad)]
    found = []
    for _ in range(4):
        setting.synchronize()
        began = time.perf_counter()
        output = layer(*args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        setting.synchronize()
        middle = time.perf_counter()
        # Not .backward(): Megatron-Core's hooks would add to the gradient buffers and start reductions.
        torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
        setting.synchronize()
        found.append((middle - began, time.perf_counter() - middle))
    forward, backward = zip(*found[1:], strict=True)
    return sorted(forward)[1], sorted(backward)[1]
