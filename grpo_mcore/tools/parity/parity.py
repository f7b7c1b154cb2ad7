"""Run the same tokens through transformers, the policy on several layouts, and an engine, in float32.

Which cases, sequences and layers differ tells whether weights, kernels or parallelism are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_mcore.families import (
    FamilyError,
    ModelShape,
    check_settings,
    engine_options,
    missing_on_cpu,
    params_of,
    read_hf_config,
    shape_of,
)
from grpo_mcore.layout import LayoutError, fits
from grpo_mcore.parallel.weights.hf_folder import check_weights
from grpo_mcore.recipe import policy_layout
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Turn
from grpo_mcore.tools.parity.rank import (
    LENGTHS,
    STANDARD,
    LayoutCase,
    ParityWorkload,
    advantages,
    policy_config,
    sequences,
)
from grpo_mcore.tools.parity.rank_pool import RankPool

if TYPE_CHECKING:  # it imports vLLM's settings
    from grpo_mcore.generation import Engine

LOGPROB_LIMIT, GRADIENT_LIMIT = 1e-4, 1e-3
"""Largest difference of a log-prob, and largest relative error of a parameter's gradient, that are accepted."""

ROUNDING = 3e-5
"""Part of the norm of all gradients below which that of a router counts as 0, in models with one expert a token of
weight 1: it is 0, and transformers computes its rounding there."""
NEW_TOKENS, RANK_TIMEOUT_S = 24, 600.0


@dataclass(frozen=True)
class Reference:
    """Results of transformers: `logprobs` of each token by sequence, 0 for the first, and `gradients` of the loss in
    `rank.py`, by name in the checkpoint."""

    folder: Path
    family: str
    network: nn.Module
    logprobs: dict[int, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class ParityCase:
    """One comparison. `logprobs` has the largest absolute difference by sequence, `gradients` the relative error by
    parameter. For an engine `gradients` is empty, and `packed` None."""

    family: str
    layout: str
    packed: bool | None
    logprobs: dict[int, float]
    gradients: dict[str, float]

    @property
    def ok(self) -> bool:
        """Whether all differences are within the limits. False for NaN."""
        return all(error <= LOGPROB_LIMIT for error in self.logprobs.values()) and all(
            error <= GRADIENT_LIMIT for error in self.gradients.values()
        )

    def by_layer(self) -> dict[str, tuple[float, str]]:
        """Return (largest relative error, its parameter) by layer; a parameter outside the layers has its own entry."""
        largest: dict[str, tuple[float, str]] = {}
        for name, error in self.gradients.items():
            layer = re.search(r"\.layers\.(\d+)\.", name)
            key = f"layer {layer[1]}" if layer else name
            largest[key] = max(largest.get(key, (-1.0, "")), (error, name))
        return largest

    def plain(self) -> dict[str, Any]:
        """Return the case as plain values, for --json."""
        return {
            "family": self.family,
            "layout": self.layout,
            "packed": self.packed,
            "max_logprob_diff": max(self.logprobs.values()),
            "max_grad_rel_diff": max(self.gradients.values(), default=None),
            "logprob_diff_by_sequence": [self.logprobs[i] for i in sorted(self.logprobs)],
            "grad_rel_diff_by_layer": {key: error for key, (error, _) in self.by_layer().items()},
        }


def reference_of(folder: Path, dtype: torch.dtype = torch.float32, work: ParityWorkload = STANDARD) -> Reference:
    """Run transformers forward and backward in `dtype`. Raises FamilyError for a model without a family."""
    from transformers.core_model_loading import revert_weight_conversion

    shape = shape_of(read_hf_config(folder))
    check_weights(Path(folder), shape)
    network = load_network(folder, dtype)
    network.get_input_embeddings().padding_idx = None  # for which torch gives no gradient
    logprobs, loss = {}, torch.zeros((), dtype=dtype)
    for i, (tokens, advantage) in enumerate(zip(sequences(shape.vocab_size, work), advantages(work), strict=True)):
        logits = network(tokens[None]).logits[0, :-1] / work.temperature
        scores = torch.log_softmax(cut(logits, tokens[1:], work.top_k, work.top_p), -1)
        chosen = scores.gather(1, tokens[1:, None]).squeeze(1)
        entropies = -(scores.exp() * scores.clamp(min=-1e30)).sum(-1)
        counts = (torch.arange(1, len(tokens)) >= work.prompts[i]) & (i not in work.left_out)
        logprobs[i] = torch.cat([torch.zeros(1, dtype=dtype), chosen.detach() * counts])
        loss = loss - ((advantage * chosen + work.entropy_coeff * entropies) * counts).sum() / work.trained
    loss.backward()
    # Without a gradient are parameters that the loss does not depend on, such as the indexer of sparse attention.
    gradients = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
    gradients = unstacked(revert_weight_conversion(network, gradients), shape)
    return Reference(folder, shape.family, network, logprobs, gradients)


def load_network(folder: Path, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Load a model in transformers, with the settings of Mamba2 that policy and engine have."""
    from transformers import AutoModelForCausalLM

    # torch has no grouped product in float64
    eager = dtype is torch.float64 and shape_of(read_hf_config(folder)).experts
    options = {"experts_implementation": "eager"} if eager else {}
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    for module in network.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return network


def cut(logits: Tensor, tokens: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Return logits [n, vocabulary] with those lowered that a cut leaves out. It always keeps the `tokens` [n]."""
    likeliest = logits.detach().topk(min(top_k or logits.size(-1), logits.size(-1))).values
    mass = likeliest.softmax(-1)
    floor = likeliest.masked_fill(mass.cumsum(-1) - mass >= top_p, torch.inf).amin(-1, keepdim=True)
    kept = (logits >= floor).scatter(1, tokens[:, None], True)
    return logits.masked_fill(~kept, -1e30)


def unstacked(tensors: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return tensors of a checkpoint by the names that the family declares, experts apart."""
    by_name = dict(tensors)
    for tensor in (tensor for param in params_of(shape) for tensor in param.hf):
        if tensor.stack is not None:
            stack = tensors[tensor.stored.name]
            by_name[tensor.name] = stack[tensor.stack[0]].permute(*reversed(range(stack.dim() - 1)))
            by_name.pop(tensor.stored.name, None)
    return by_name


def fitting(folder: Path, layouts: Iterable[LayoutCase]) -> tuple[list[LayoutCase], dict[str, str]]:
    """Return (the layouts that the model allows, reasons by name for the others)."""
    shape, allowed, refused = shape_of(read_hf_config(folder)), [], {}
    for case in layouts:
        megatron = policy_config(folder, case).megatron_cfg
        try:
            if findings := fits(policy_layout(megatron, case.world_size), case.world_size, shape):
                raise LayoutError(*findings)
            check_settings(shape, megatron)
            allowed.append(case)
        except (FamilyError, LayoutError) as error:
            refused[case.name] = str(error)
    return allowed, refused


def compare_layouts(reference: Reference, layouts: Sequence[LayoutCase], pool: RankPool) -> list[ParityCase]:
    """Compare each layout with packed rows and without. Raises RankFailed."""
    target, cases = "grpo_mcore.tools.parity.rank:logprobs_and_gradients", []
    experts = shape_of(read_hf_config(reference.folder)).experts
    smallest = ROUNDING if experts is not None and experts.one_of_weight_1 else 0.0
    for case in layouts:
        for packed in (False, True):
            ranks = pool.run(case.world_size, target, str(reference.folder), case, packed, timeout_s=RANK_TIMEOUT_S)
            cases.append(compare(reference, ranks, case.name, packed, smallest))
    return cases


def compare(
    reference: Reference, ranks: Sequence[dict[str, Any]], layout: str, packed: bool, smallest: float = 0.0
) -> ParityCase:
    """Compare the results of all ranks of a mesh with transformers. A gradient's error is relative to its norm, or to
    the part `smallest` of the norm of all. Raises ValueError if the results are not complete."""
    logprobs: dict[int, Tensor] = {}
    for result in ranks:
        logprobs |= result["logprobs"]
    if logprobs.keys() != reference.logprobs.keys():
        raise ValueError(f"{layout}: log-probs of the sequences {sorted(logprobs)} of {len(reference.logprobs)}")
    moved = {name: torch.full_like(gradient, torch.nan) for name, gradient in reference.gradients.items()}
    for name, box, part in (piece for result in ranks for piece in result["gradients"]):
        if name not in moved:  # a buffer
            if part.any():
                raise ValueError(f"{layout}: {name} is not trained, but changed")
            continue
        slot = moved[name][tuple(slice(*span) for span in box)]
        if not slot.isnan().all():
            raise ValueError(f"{layout}: two ranks own {name} {box}")
        slot.copy_(part)
    differences = {i: (logprobs[i] - expected).abs().max().item() for i, expected in reference.logprobs.items()}
    whole = torch.stack([expected.norm() for expected in reference.gradients.values()]).norm().item()
    errors = {
        name: ((moved[name] - expected).norm() / expected.norm().clamp(min=max(1e-12, smallest * whole))).item()
        for name, expected in reference.gradients.items()
    }
    return ParityCase(reference.family, layout, packed, differences, errors)


def compare_engine(reference: Reference) -> tuple[ParityCase | None, str | None]:
    """Compare the log-probs of samples of a vLLM engine on CPU with transformers. Return (case, None), or
    (None, reason) if the engine cannot run the model."""
    shape = shape_of(read_hf_config(reference.folder))
    if (missing := missing_on_cpu(shape)) is not None:
        return None, f"vLLM's CPU build cannot run this {shape.family} model: {missing}"
    engine, requests = cpu_engine(reference.folder, shape)
    differences: dict[int, float] = {}
    try:
        for sample in engine.generate(requests, Sampling(max_new_tokens=NEW_TOKENS)):
            tokens, start = sample.token_ids(), sample.prompt_length
            with torch.no_grad():
                scores = torch.log_softmax(reference.network(tokens[None]).logits[0, start - 1 : -1], -1)
            expected = scores.gather(1, tokens[start:, None]).squeeze(1)
            differences[int(sample.uid)] = (sample.logprobs()[start:] - expected).abs().max().item()
    finally:
        engine.shutdown()
    return ParityCase(reference.family, "engine", None, differences, {}), None


def cpu_engine(folder: Path, shape: ModelShape, **options: Any) -> tuple[Engine, list[GenerationRequest]]:
    """Start a vLLM engine on CPU, in float32. Return it, and requests for NEW_TOKENS after each of `sequences`.
    `options` are further fields of its EngineConfig."""
    from grpo_mcore.generation import Engine, EngineConfig

    length = max(LENGTHS) + NEW_TOKENS
    options = engine_options(shape) | options
    engine = Engine(EngineConfig(str(folder), dtype="float32", max_model_len=length, kv_cache_memory_gb=0.1, **options))
    tokens = enumerate(sequences(shape.vocab_size))
    return engine, [GenerationRequest(str(i), 0, (Turn("user", ids),), seed=i) for i, ids in tokens]
