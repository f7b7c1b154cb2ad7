"""Run the same tokens through transformers, the policy on several layouts, and an engine, in float32, with the weights
in the precision in which a run holds them.

Which cases, sequences and layers differ tells whether weights, kernels or parallelism are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from grpo_mcore.families import (
    FamilyError,
    ModelShape,
    check_settings,
    engine_options,
    head_of,
    missing_on_cpu,
    params_of,
    read_hf_config,
    shape_of,
)
from grpo_mcore.families.images import image_settings
from grpo_mcore.layout import LayoutError, fits
from grpo_mcore.parallel.weights.hf_folder import check_weights, stored_tensors
from grpo_mcore.recipe import policy_layout
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Turn
from grpo_mcore.tools.parity.images import network_inputs
from grpo_mcore.tools.parity.rank import (
    STANDARD,
    LayoutCase,
    ParityWorkload,
    advantages,
    policy_config,
    precision_of,
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
    work: ParityWorkload = STANDARD


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


def as_held(folder: Path, scratch: Path) -> tuple[Path, list[str]]:
    """Return a model's folder with the values that policy and engine hold, and the names of the tensors that they
    round: `folder` itself, or for a bfloat16 model with such tensors a copy in `scratch`."""
    shape, stored = _shape(folder), stored_tensors(folder)
    kept = {tensor.stored.name for param in params_of(shape) for tensor in param.hf if tensor.float32}
    wide = [name for name, tensor in stored.items() if tensor.dtype in ("F32", "F64") and name not in kept]
    rounded = {name for name in wide if not any(part in name for part in shape.carried)}
    if not rounded or precision_of(stored) is torch.float32:
        return folder, []
    held = scratch / "held"
    held.mkdir()
    files = {stored[name].file for name in rounded}
    for path in folder.iterdir():
        if path not in files:
            (held / path.name).symlink_to(path.resolve())
    for path in files:
        tensors = load_file(path)
        values = {name: tensor.bfloat16() if name in rounded else tensor for name, tensor in tensors.items()}
        save_file(values, held / path.name, metadata={"format": "pt"})
    return held, sorted(rounded)


def _shape(folder: Path) -> ModelShape:
    """Return the shape of a model: with a head for a value, if it is a classifier's folder."""
    config = read_hf_config(folder)
    return shape_of(config, head_of(config))


def reference_of(folder: Path, dtype: torch.dtype = torch.float32, work: ParityWorkload = STANDARD) -> Reference:
    """Run transformers forward and backward in `dtype`. Raises FamilyError for a model without a family."""
    from transformers.core_model_loading import revert_weight_conversion

    shape = _shape(folder)
    check_weights(Path(folder), shape)
    network = load_network(folder, dtype)
    network.get_input_embeddings().padding_idx = None  # for which torch gives no gradient
    vision = shape.vision if work.images else None
    settings = image_settings(folder, vision) if vision else None
    logprobs, loss = {}, torch.zeros((), dtype=dtype)
    drawn = zip(sequences(shape.vocab_size, work, vision), advantages(work), strict=True)
    for i, (tokens, advantage) in enumerate(drawn):
        if shape.head == "value":  # of what comes before each token
            chosen = network.score(network.base_model(tokens[None]).last_hidden_state)[0, :-1, 0]
            entropies = torch.zeros_like(chosen)
        else:
            logits = network(**network_inputs(tokens, work.images_of(i), settings)).logits[0, :-1] / work.temperature
            scores = torch.log_softmax(cut(logits, tokens[1:], work.top_k, work.top_p), -1)
            chosen = scores.gather(1, tokens[1:, None]).squeeze(1)
            entropies = -(scores.exp() * scores.clamp(min=-1e30)).sum(-1)
        counts = work.counts(i)[1:] & (i not in work.left_out)
        logprobs[i] = torch.cat([torch.zeros(1, dtype=dtype), chosen.detach() * counts])
        loss = loss - ((advantage * chosen + work.entropy_coeff * entropies) * counts).sum() / work.trained
    loss.backward()
    # Without a gradient are parameters that the loss does not depend on, such as the indexer of sparse attention.
    gradients = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
    gradients = unstacked(revert_weight_conversion(network, gradients), shape)
    return Reference(folder, shape.family, network, logprobs, gradients, work)


def load_network(folder: Path, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Load a model in transformers, with the settings of Mamba2 that policy and engine have, and a frozen tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    # torch has no grouped product in float64
    shape = _shape(folder)
    options = {"experts_implementation": "eager"} if dtype is torch.float64 and shape.experts else {}
    auto = AutoModelForCausalLM if shape.vision is None else AutoModelForImageTextToText
    auto = auto if shape.head == "tokens" else AutoModelForSequenceClassification
    network = auto.from_pretrained(folder, dtype=dtype, **options).eval()
    if shape.vision is not None:
        network.model.visual.requires_grad_(False)
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
            part = stack[tensor.stack[0]]
            # transformers 5.19 gives Qwen3-VL's experts as it holds them, not as they are published
            transposed = stack.shape == tensor.stored.shape
            by_name[tensor.name] = part.permute(*reversed(range(part.dim()))) if transposed else part
            by_name.pop(tensor.stored.name, None)
    return by_name


def fitting(folder: Path, layouts: Iterable[LayoutCase]) -> tuple[list[LayoutCase], dict[str, str]]:
    """Return (the layouts that the model allows, reasons by name for the others)."""
    shape, allowed, refused = _shape(folder), [], {}
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
    experts = _shape(reference.folder).experts
    smallest = ROUNDING if experts is not None and experts.one_of_weight_1 else 0.0
    for case in layouts:
        for packed in (False, True):
            ranks = pool.run(
                case.world_size, target, str(reference.folder), case, packed, reference.work, timeout_s=RANK_TIMEOUT_S
            )
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
    engine, requests = cpu_engine(reference.folder, shape, reference.work)
    vision = shape.vision if reference.work.images else None
    settings = image_settings(reference.folder, vision) if vision else None
    differences: dict[int, float] = {}
    try:
        for sample in engine.generate(requests, Sampling(max_new_tokens=NEW_TOKENS)):
            tokens, start = sample.token_ids(), sample.prompt_length
            images = reference.work.images_of(int(sample.uid))
            if vision is not None and images:  # transformers would take an id that the engine sampled for an image
                sampled = (tokens[start:-1] == vision.image_token).nonzero()
                tokens = tokens[: start + 1 + int(sampled[0])] if len(sampled) else tokens
            with torch.no_grad():
                logits = reference.network(**network_inputs(tokens[:-1], images, settings)).logits[0, start - 1 :]
            expected = torch.log_softmax(logits, -1).gather(1, tokens[start:, None]).squeeze(1)
            found = sample.logprobs()[start : len(tokens)]
            differences[int(sample.uid)] = (found - expected).abs().max().item()
    finally:
        engine.shutdown()
    return ParityCase(reference.family, "engine", None, differences, {}), None


def cpu_engine(
    folder: Path, shape: ModelShape, work: ParityWorkload = STANDARD, **options: Any
) -> tuple[Engine, list[GenerationRequest]]:
    """Start a vLLM engine on CPU, in float32. Return it, and requests for NEW_TOKENS after each of `sequences`.
    `options` are further fields of its EngineConfig."""
    from grpo_mcore.generation import Engine, EngineConfig

    length = max(work.lengths) + NEW_TOKENS
    vision = shape.vision if work.images else None
    settings = image_settings(folder, vision) if vision else None
    shown = [work.images_of(i) for i in range(len(work.lengths))]
    options = engine_options(shape, images=max(map(len, shown))) | options
    engine = Engine(EngineConfig(str(folder), dtype="float32", max_model_len=length, kv_cache_memory_gb=0.1, **options))
    requests = []
    for i, ids in enumerate(sequences(shape.vocab_size, work, vision)):
        spans = tuple(image.span(settings) for image in shown[i]) if settings else ()
        files = {image.span(settings).digest: image.file(settings) for image in shown[i]} if settings else {}
        requests.append(GenerationRequest(str(i), 0, (Turn("user", ids, images=spans),), seed=i, images=files))
    return engine, requests
