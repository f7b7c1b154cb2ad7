"""Name why policy and engine disagree: find the one change of the judge that gives the wrong side's numbers.

Each explanation is a computation: the judge's, with older weights, with positions that are off by one, in bfloat16, and
so on. It is accepted if it meets the numbers of the side that differs as closely as rounding allows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from grpo_mcore.refit.engine_side.fp8 import Format
from grpo_mcore.rollout.trajectory import Sampling
from grpo_mcore.tools.verdict.judge import Judge, JudgedSample, drawn

Side = Literal["policy", "engine"]
SIDES: tuple[Side, ...] = ("policy", "engine")
ROUNDING = 4.0
"""Gaps up to this many times the judge's own rounding are none."""
SMALLEST_LIMIT = 2e-4
SIZE_OF_ROUNDING = (0.2, 5.0)
"""A side whose mean gap is this many times that of bfloat16, and that nothing else explains, rounds as bfloat16."""
MOST_TENSORS = 2000
KEPT = 6
"""Explanations nearest to a side's first sample, which are tried on all samples and shown."""
CERTAIN = 1e-3
"""A log-prob closer to 0 may be exactly 0 in float32."""
THETAS = (1e4, 5e4, 1.5e5, 5e5, 1e6, 5e6, 1e7)
TOP_P, TOP_K = (0.8, 0.9, 0.95, 0.99), (5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Explanation:
    """One way to be wrong. `change` describes it, and `logprobs` computes a sample with it: float64 [n]."""

    cause: str
    change: str
    logprobs: Callable[[JudgedSample], Tensor]


@dataclass(frozen=True)
class Evidence:
    """The largest and the mean gap of a side from the judge (`cause` ""), or from an explanation, over all trained
    tokens. `what` describes what the side was compared with."""

    side: Side
    cause: str
    what: str
    largest: float
    mean: float


@dataclass(frozen=True)
class Verdict:
    """The judgement of policy and engine. `causes` has a cause for each side that differs, "unknown" if nothing
    explains it; `limit` is the largest gap that is rounding."""

    causes: dict[Side, Evidence]
    evidence: tuple[Evidence, ...]
    limit: float

    @property
    def line(self) -> str:
        if not self.causes:
            gaps = ", ".join(f"{item.side} {item.largest:.1e}" for item in self.evidence)
            return f"none: within {self.limit:.1e} of transformers in float64 (largest gap of a log-prob: {gaps})"
        return "; ".join(f"{side}: {item.cause} ({item.what})" for side, item in self.causes.items())

    def table(self) -> list[str]:
        """Return the evidence as lines, the closest explanations first."""
        lines = [f"{'side':6}  {'largest gap':>11}  {'mean gap':>9}  cause         compared with"]
        for item in self.evidence:
            lines.append(f"{item.side:6}  {item.largest:11.1e}  {item.mean:9.1e}  {item.cause or '-':12}  {item.what}")
        return lines


def judge_samples(judge: Judge, samples: Sequence[JudgedSample], precision: torch.dtype) -> Verdict:
    """Return the verdict on the log-probs of policy and engine, which are to compute in `precision`."""
    right = {id(sample): judge.logprobs(sample) for sample in samples}
    rounded = [judge.logprobs(sample, dtype=precision) for sample in samples]
    rounding, _ = _gap(samples, rounded, [right[id(sample)] for sample in samples])
    limit = max(SMALLEST_LIMIT, ROUNDING * rounding)
    causes: dict[Side, Evidence] = {}
    evidence: list[Evidence] = []
    for side in SIDES:
        judged = [sample for sample in samples if getattr(sample, side) is not None]
        if not judged:
            continue
        logprobs, should = [getattr(sample, side) for sample in judged], [right[id(sample)] for sample in judged]
        if mask := _wrong_mask(judged, logprobs, should):
            causes[side] = Evidence(side, "mask", mask, float("nan"), float("nan"))
            evidence.append(causes[side])
            continue
        base = Evidence(side, "", "transformers in float64", *_gap(judged, logprobs, should))
        evidence.append(base)
        if base.largest <= limit:
            continue
        screened = {
            id(way): (way, _gap(judged[:1], logprobs[:1], [way.logprobs(judged[0])]))
            for way in explanations(judge, judged, logprobs)
        }
        nearest = sorted(screened.values(), key=lambda pair: pair[1][1])[:KEPT]
        tried = [
            Evidence(side, way.cause, way.change, *_gap(judged, logprobs, [way.logprobs(sample) for sample in judged]))
            for way, _ in nearest
        ]
        tried.sort(key=lambda way: way.mean)
        evidence += tried
        causes[side] = _cause(base, tried, limit, judge, judged, should)
        if (parted := first_layer(judge, judged, precision, side)) is not None:
            evidence.append(parted)
    return Verdict(causes, tuple(evidence), limit)


def first_layer(
    judge: Judge, samples: Sequence[JudgedSample], precision: torch.dtype, side: Side = "policy"
) -> Evidence | None:
    """Return the first layer of a side whose output parts from the judge's by more than rounding to `precision` does,
    relative to its norm; None if the side's layers are not known. `largest` and `mean` are over the layer's tokens."""
    traces = [sample.layers if side == "policy" else sample.engine_layers for sample in samples]
    numbers = sorted({number for layers in traces for number in layers})
    right = [(judge.layers(sample), judge.layers(sample, precision)) for sample in samples if numbers]
    for number in numbers:
        gaps, rounding = [], 0.0
        for layers, (exact, rounded) in zip(traces, right, strict=True):
            if number not in exact or number not in layers:
                return None
            values, norm = layers[number], exact[number][0].clamp(min=1e-12)
            known = values.size(1)
            gap = (values - exact[number][:, :known]).abs().amax(0) / norm[:known]
            gaps.append(gap.nan_to_num(nan=torch.inf))
            rounding = max(rounding, ((rounded[number] - exact[number]).abs().amax(0) / norm).max().item())
        every = torch.cat(gaps)
        if every.max() > max(SMALLEST_LIMIT, ROUNDING * rounding):
            worst = max(range(len(gaps)), key=lambda index: gaps[index].max().item())
            text = f"layer {number} is the first to part, most at token {int(gaps[worst].argmax())} of sample "
            return Evidence(side, "layer", text + samples[worst].name, every.max().item(), every.mean().item())
    return (
        Evidence(side, "layer", f"all {len(numbers)} agree: it is what comes after them", 0.0, 0.0) if numbers else None
    )


def merged(verdicts: Sequence[Verdict]) -> Verdict:
    """Return verdicts on different sides, or samples, as one."""
    return Verdict(
        {side: item for verdict in verdicts for side, item in verdict.causes.items()},
        tuple(item for verdict in verdicts for item in verdict.evidence),
        max(verdict.limit for verdict in verdicts),
    )


def _cause(
    base: Evidence,
    tried: Sequence[Evidence],
    limit: float,
    judge: Judge,
    samples: Sequence[JudgedSample],
    right: list[Tensor],
) -> Evidence:
    """Return the explanation that meets the side's numbers; else bfloat16 if the gaps are of its size and as evenly
    spread over the tokens, else unknown."""
    if tried and tried[0].largest <= limit:
        return tried[0]
    coarse = [judge.logprobs(sample, dtype=torch.bfloat16) for sample in samples]
    largest, size = _gap(samples, coarse, right)
    least, most = SIZE_OF_ROUNDING
    even = base.largest / base.mean <= 2 * largest / size if size else False
    if even and least * size <= base.mean <= most * size:
        return replace(base, cause="precision", what="its gaps are of the size of bfloat16's rounding")
    near = f"; nearest: {tried[0].cause}, {tried[0].what}" if tried and tried[0].mean < base.mean / 4 else ""
    return replace(base, cause="unknown", what=f"largest gap {base.largest:.1e}, which nothing tried explains{near}")


def explanations(judge: Judge, samples: Sequence[JudgedSample], logprobs: Sequence[Tensor]) -> Iterator[Explanation]:
    """Yield the ways to be wrong that are tried. Temperatures are fitted to `logprobs`, the side's own."""
    yield from _of_sampling(judge, samples, logprobs)
    yield from _of_weights(judge)
    for shift in (1, -1):
        change = f"positions of the answer shifted by {shift}"
        yield Explanation("positions", change, partial(judge.logprobs, shift=shift))
    yield from _of_rotary(judge)
    cast = {"RMSNorm": _cast_before_multiply}
    yield Explanation("precision", "norms rounded to bfloat16 before the weight", partial(judge.logprobs, hooks=cast))
    yield Explanation("precision", "all in bfloat16", partial(judge.logprobs, dtype=torch.bfloat16))
    for kind in get_args(Format):
        change = f"linear layers and experts quantised to {kind}"
        yield Explanation("quantisation", change, partial(_quantized, judge, kind))
    if judge.shape.experts is not None:
        for by in (1, -1):
            hooks = {end: partial(_of_other_token, by) for end in (".gate", ".router", "TopkRouter", "TopKRouter")}
            change = "each token sent to the experts of the token " + ("before" if by == 1 else "after")
            yield Explanation("routing", change, partial(judge.logprobs, hooks=hooks))
    before = {id(sample): samples[index - 1].tokens for index, sample in enumerate(samples)}
    yield Explanation(
        "packing",
        "the sample before it in the row can be seen",
        lambda sample: judge.logprobs(sample, before=before[id(sample)]),
    )


def _quantized(judge: Judge, kind: Format, sample: JudgedSample) -> Tensor:
    return judge.logprobs(sample, tensors=judge.quantized(kind))


def _of_sampling(judge: Judge, samples: Sequence[JudgedSample], logprobs: Sequence[Tensor]) -> Iterator[Explanation]:
    logits = {id(sample): judge.logits(sample) for sample in samples}

    def at(sampling: Sampling, sample: JudgedSample) -> Tensor:
        return drawn(logits[id(sample)], sample.tokens, sampling)

    set_to = judge.sampling
    if set_to.top_p < 1 or set_to.top_k:
        yield Explanation(
            "sampling cut", "without top-p and top-k", partial(at, replace(set_to, top_p=1.0, top_k=None))
        )
    for top_p in TOP_P:
        yield Explanation("sampling cut", f"top-p {top_p}", partial(at, replace(set_to, top_p=top_p)))
    for top_k in TOP_K:
        yield Explanation("sampling cut", f"top-k {top_k}", partial(at, replace(set_to, top_k=top_k)))

    def gap(temperature: float) -> float:
        other = replace(set_to, temperature=temperature)
        return _gap(samples, logprobs, [at(other, sample) for sample in samples])[1]

    low, high = 0.2, 5.0
    for _ in range(60):  # the gap has one minimum
        third = (high - low) / 3
        low, high = (low + third, high) if gap(low + third) > gap(high - third) else (low, high - third)
    change = f"temperature {low:.4g} in place of {set_to.temperature:g}"
    yield Explanation("temperature", change, partial(at, replace(set_to, temperature=low)))


def _of_weights(judge: Judge) -> Iterator[Explanation]:
    older = judge.older
    if older:
        yield Explanation("version", "all weights of the older version", partial(judge.logprobs, tensors=older))
        part = "keys and values of the prompt from the older version"
        yield Explanation("version", part, lambda sample: judge.logprobs(sample, prompt_tensors=older, tensors={}))
    stacks = _stacks(judge)
    for name, tensor in list(older.items())[:MOST_TENSORS]:
        if tensor.dim() < 3:
            part = f"{name} of the older version"
            yield Explanation("weights", part, partial(judge.logprobs, tensors={name: tensor}))
    for group, stack in stacks.items():
        stale = {name: older[name] for name in stack if name in older}
        parts = [(group, stale), *((name, {name: tensor}) for name, tensor in stale.items())] if stale else []
        for part, tensors in parts:
            for expert in range(len(next(iter(tensors.values())))):
                mixed = {name: _with_row(judge.weights[name], tensor, expert) for name, tensor in tensors.items()}
                text = f"expert {expert} of {part} of the older version"
                yield Explanation("weights", text, partial(judge.logprobs, tensors=mixed))
    heads = judge.shape.num_heads
    for name, tensor in list(judge.weights.items())[:MOST_TENSORS]:
        if name.endswith(".bias"):
            zero = {name: torch.zeros_like(tensor)}
            yield Explanation("weights", f"without {name}", partial(judge.logprobs, tensors=zero))
        elif name.endswith(("q_proj.weight", "o_proj.weight")) and tensor.size(int("o_proj" in name)) % heads == 0:
            swapped = _halves_swapped(tensor, int("o_proj" in name))
            yield Explanation("layout", f"halves of the heads of {name} swapped", _with(judge, name, swapped))
            if heads > 1:
                pairs = _first_two_swapped(tensor, int("o_proj" in name), heads)
                yield Explanation("layout", f"the first two heads of {name} swapped", _with(judge, name, pairs))
        elif name.endswith(("gate_proj.weight", "up_proj.weight", "down_proj.weight")) and tensor.dim() == 2:
            dim = int("down_proj" in name)
            swapped = _halves_swapped(tensor, dim)
            yield Explanation("layout", f"the two halves of {name} swapped", _with(judge, name, swapped))
    for group, stack in stacks.items():
        for by in sorted({1, len(next(iter(stack.values()))) // 2}):
            rolled = {name: tensor.roll(by, 0) for name, tensor in stack.items()}
            part = f"experts of {group} in another order, moved by {by}"
            yield Explanation("layout", part, partial(judge.logprobs, tensors=rolled))
    every = {name: tensor for stack in stacks.values() for name, tensor in stack.items()}
    for by in sorted({1, len(next(iter(every.values()))) // 2}) if every else ():
        rolled = {name: tensor.roll(by, 0) for name, tensor in every.items()}
        yield Explanation("layout", f"all experts moved by {by}", partial(judge.logprobs, tensors=rolled))


def _stacks(judge: Judge) -> dict[str, dict[str, Tensor]]:
    """Return the stacked weights of the experts of each layer, by the layer's name."""
    stacks: dict[str, dict[str, Tensor]] = {}
    for name, tensor in judge.weights.items():
        group, experts, _ = name.partition(".experts.")
        if experts and tensor.dim() >= 2 and not name.endswith("bias"):
            stacks.setdefault(group, {})[name] = tensor
    return stacks


def _with_row(tensor: Tensor, other: Tensor, index: int) -> Tensor:
    mixed = tensor.clone()
    mixed[index] = other[index]
    return mixed


def _with(judge: Judge, name: str, tensor: Tensor) -> Callable[[JudgedSample], Tensor]:
    return partial(judge.logprobs, tensors={name: tensor})


def _of_rotary(judge: Judge) -> Iterator[Explanation]:
    frequencies = {n: buffer for n, buffer in judge.network.named_buffers() if n.endswith("inv_freq")}
    for theta in THETAS if frequencies else ():
        other = {
            name: theta ** -(torch.arange(len(buffer), dtype=buffer.dtype) / len(buffer))
            for name, buffer in frequencies.items()
        }
        if not all(torch.allclose(other[name], buffer) for name, buffer in frequencies.items()):
            yield Explanation("positions", f"rotary base {theta:g}", partial(judge.logprobs, tensors=other))


def _halves_swapped(tensor: Tensor, dim: int) -> Tensor:
    return tensor.roll(tensor.size(dim) // 2, dim)


def _first_two_swapped(tensor: Tensor, dim: int, heads: int) -> Tensor:
    size = tensor.size(dim) // heads
    order = torch.arange(tensor.size(dim))
    order[: 2 * size] = order[: 2 * size].roll(size)
    return tensor.index_select(dim, order)


def _cast_before_multiply(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Round the normed values to bfloat16 before the weight: an output is their product with it."""
    eps = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), 1e-6)
    normed = inputs[0] * torch.rsqrt(inputs[0].pow(2).mean(-1, keepdim=True) + eps)
    factor = torch.where(normed == 0, 0.0, output / normed)
    return normed.bfloat16().to(output.dtype) * factor


def _of_other_token(by: int, module: nn.Module, inputs: Any, output: Any) -> Any:
    parts = output if isinstance(output, tuple) else (output,)
    moved = tuple(part.roll(by, 0) if isinstance(part, Tensor) and part.dim() > 1 else part for part in parts)
    return moved if isinstance(output, tuple) else moved[0]


def _gap(samples: Sequence[JudgedSample], logprobs: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[float, float]:
    """Return (largest, mean) absolute difference of the generated tokens."""
    triples = zip(samples, logprobs, other, strict=True)
    gaps = [(values.double() - others).abs()[sample.generated] for sample, values, others in triples]
    every = torch.cat(gaps).nan_to_num(nan=torch.inf)
    return every.max().item(), every.mean().item()


def _wrong_mask(samples: Sequence[JudgedSample], logprobs: Sequence[Tensor], right: Sequence[Tensor]) -> str | None:
    """Return what is wrong with which tokens have a log-prob; None if exactly those that were generated have one."""
    for sample, values, should in zip(samples, logprobs, right, strict=True):
        missing = (values == 0) & sample.generated & (should < -CERTAIN)
        extra = (values != 0) & ~sample.generated
        cases = (missing, "was generated and has no log-prob"), (extra, "was not generated and has one")
        for wrong, problem in cases:
            if wrong.any():
                token = int(wrong.nonzero()[-1])
                last = ", the last" if token == len(values) - 1 else ""
                return f"token {token} of sample {sample.name}{last}, {problem}"
    return None
