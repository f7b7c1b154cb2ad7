"""One policy rank in the comparison with transformers: log-probs, and the gradients of a loss.

The functions are module-level, so that the processes of a `RankPool` can import them.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from grpo_mcore.batching.packed_batch import PackedBatch, pack_rows, share_prefixes
from grpo_mcore.batching.row_images import RowImages, row_images
from grpo_mcore.families import ModelShape, VisionShape, head_of, read_hf_config
from grpo_mcore.families.images import image_settings
from grpo_mcore.objective import ClippedPGLossConfig, ClippedPGLossFn
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.parallel.weights.hf_folder import StoredTensor, stored_tensors
from grpo_mcore.recipe import PolicyConfig
from grpo_mcore.tools.parity.images import STANDARD_IMAGES, ParityImage, put_in

LENGTHS = (5, 17, 9, 30, 2, 12, 23, 3)
BINS = ((0, 3), (1, 2, 4), (5, 7), (6,))  # micro-batches, distributed over the data-parallel ranks in order


DEFAULT_LAYOUTS = ("TP1", "TP2", "PP2", "VPP2", "CP2", "EP2", "ETP2", "TP2xPP2", "TP2xCP2", "EP2xPP2", "EP2xTP2")
DIMENSIONS = ("TP", "PP", "VPP", "CP", "DP", "EP", "ETP")


@dataclass(frozen=True)
class LayoutCase:
    """A layout to compare, with its name."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    recompute_modules: tuple[str, ...] = ()  # only these parts of a layer; (): the whole layer
    context: int = 1
    virtual: int | None = None
    first_stage: int | None = None  # layers of the first pipeline stage
    expert: int = 1
    expert_tensor: int = 1
    dispatcher: str = "alltoall"

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context


class LayoutNameError(ValueError):
    """A name that does not denote a layout."""


def layout_named(name: str, shape: ModelShape) -> LayoutCase:
    """Return the smallest layout with these sizes. Upper and lower case are equal: tp2 is TP2.

    Sequence parallelism is added if experts under tensor parallelism need it, data parallelism if EP x ETP needs more
    ranks. Raises LayoutNameError.
    """
    name = name.upper().replace("X", "x")
    sizes = dict.fromkeys(DIMENSIONS, 0)
    for part in name.replace("-SP", "").split("x"):
        match = re.fullmatch(r"([A-Z]+)([1-9]\d*)", part)
        if match is None or match[1] not in sizes:
            raise LayoutNameError(f"--layouts: {name!r}: {part!r} is not one of {', '.join(DIMENSIONS)} with a number")
        sizes[match[1]] = int(match[2])
    tensor = sizes["TP"] or sizes["ETP"] or 1
    context, expert, expert_tensor = (sizes[dimension] or 1 for dimension in ("CP", "EP", "ETP"))
    return LayoutCase(
        name,
        tensor=tensor,
        pipeline=sizes["PP"] or (2 if sizes["VPP"] > 1 else 1),
        data=sizes["DP"] or ceil(expert * expert_tensor / (tensor * context)),
        sequence_parallel="-SP" in name or (shape.experts is not None and tensor > 1),
        context=context,
        virtual=sizes["VPP"] if sizes["VPP"] > 1 else None,
        expert=expert,
        expert_tensor=expert_tensor,
    )


ENTROPY_COEFF = 0.1
"""The loss has an entropy term, so that gradients of log-probs and of entropies are compared."""


@dataclass(frozen=True)
class ParityWorkload:
    """The sequences of a comparison, and what is computed of them."""

    lengths: tuple[int, ...] = LENGTHS
    bins: tuple[tuple[int, ...], ...] = BINS
    prompts: tuple[int, ...] = (1,) * len(LENGTHS)
    """Tokens at the start of each sequence that are not trained on; at least the first."""
    left_out: tuple[int, ...] = ()
    """Sequences whose sample_mask is 0."""
    common: int = 0
    """Tokens with which all sequences begin alike. Above 0, bins compute common blocks of SHARED_BLOCK tokens once."""
    entropy_coeff: float = ENTROPY_COEFF
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    images: tuple[ParityImage, ...] = ()
    """Images in the sequences, whose tokens are not trained on."""

    def images_of(self, sequence: int) -> list[ParityImage]:
        return [image for image in self.images if image.sequence == sequence]

    def counts(self, sequence: int) -> torch.Tensor:
        """Return which tokens of a sequence are trained on, bool [n], if it is not left out."""
        counts = torch.arange(self.lengths[sequence]) >= self.prompts[sequence]
        for image in self.images_of(sequence):
            counts[image.offset : image.offset + image.tokens] = False
        return counts

    @property
    def trained(self) -> int:
        return sum(int(self.counts(i).sum()) for i in range(len(self.lengths)) if i not in self.left_out)


STANDARD = ParityWorkload()


def standard_work(shape: ModelShape) -> ParityWorkload:
    """Return the workload of a model: with images if it has a tower."""
    return STANDARD if shape.vision is None else replace(STANDARD, images=STANDARD_IMAGES)


SHARED_BLOCK = 4
"""Tokens of the blocks that sequences share, if they begin alike."""


def sequences(
    vocab_size: int, work: ParityWorkload = STANDARD, vision: VisionShape | None = None
) -> list[torch.Tensor]:
    """Return sequences of random tokens, int64 [n] each, always the same. `vision`: of a workload with images."""
    generator = torch.Generator().manual_seed(7)
    tokens = [torch.randint(0, vocab_size, (n,), generator=generator) for n in work.lengths]
    start = torch.randint(0, vocab_size, (work.common,), generator=generator)
    for ids in tokens:
        ids[: work.common] = start[: len(ids)]
    if vision is not None:
        put_in(tokens, work.images, vision)
    return tokens


def advantages(work: ParityWorkload = STANDARD) -> list[float]:
    """Return the advantage of each sequence."""
    return [(-1) ** i * (0.5 + 0.25 * i) for i in range(len(work.lengths))]


def compared_loss(work: ParityWorkload = STANDARD, *, entropy: bool = True) -> ClippedPGLossFn:
    """Return the loss that `parity.reference_of` computes with transformers. `entropy`: false for values, which take
    the place of log-probs."""
    coefficient = work.entropy_coeff if entropy else None
    settings = ClippedPGLossConfig(reference_policy_kl_penalty=0.0, entropy_coeff=coefficient)
    return ClippedPGLossFn(settings, prev_equals_curr=True)


def policy_config(model: Path | str, case: LayoutCase, **overrides: Any) -> PolicyConfig:
    """Return a policy section whose first step changes a weight by g / (1 + |g| / 1e4): Adam with lr = eps, far above
    every gradient."""
    parts = list(case.recompute_modules)
    config = PolicyConfig.model_validate(
        {
            "model_name": str(model),
            "precision": "float32",
            "max_grad_norm": 0.0,
            "head": head_of(read_hf_config(model)),
            "logprob_chunk_size": 16,
            "megatron_cfg": {
                "tensor_model_parallel_size": case.tensor,
                "pipeline_model_parallel_size": case.pipeline,
                "virtual_pipeline_model_parallel_size": case.virtual,
                "num_layers_in_first_pipeline_stage": case.first_stage,
                "context_parallel_size": case.context,
                "expert_model_parallel_size": case.expert,
                "expert_tensor_parallel_size": case.expert_tensor,
                "moe_token_dispatcher_type": case.dispatcher,
                "freeze_moe_router": False,
                "sequence_parallel": case.sequence_parallel,
                "activation_checkpointing": case.recompute,
                **({"recompute_granularity": "selective", "recompute_modules": parts} if parts else {}),
            },
        }
        | overrides
    )
    # No recipe may set such values, so they are set after the validation.
    megatron, steep = config.megatron_cfg, {"lr": 1.0e4, "min_lr": 1.0e4, "adam_eps": 1.0e4, "weight_decay": 0.0}
    megatron.optimizer = megatron.optimizer.model_copy(update=steep)
    megatron.scheduler = megatron.scheduler.model_copy(update={"lr_warmup_iters": 0, "lr_warmup_init": 1.0e4})
    return config


def micro_batches(policy: Policy, packed: bool = True, work: ParityWorkload = STANDARD) -> list[PackedBatch]:
    """Return the rows of this data-parallel rank, equally many on every one: the workload's bins if `packed`, else
    each sequence in a row of its own."""
    vision = policy.shape.vision if work.images else None
    tokens, weights = sequences(policy.shape.vocab_size, work, vision), advantages(work)
    settings = image_settings(policy.config.model_name, vision) if vision else None
    if settings is not None and policy.tower is not None:
        policy.tower.see({image.span(settings).digest: image.file(settings) for image in work.images})
    bins = work.bins if packed else tuple((i,) for i in range(len(work.lengths)))

    def columns(i: int) -> dict[str, torch.Tensor]:
        mask = work.counts(i).float()
        counts = torch.tensor(float(i not in work.left_out))
        return {"token_mask": mask, "sample_mask": counts, "advantages": torch.tensor(weights[i])}

    def images(bin: tuple[int, ...]) -> RowImages | None:
        if settings is None:
            return None
        spans = [[image.span(settings) for image in work.images_of(i)] for i in bin]
        return row_images([work.lengths[i] for i in bin], spans, settings.merge_size)

    rows = [
        pack_rows(
            [tokens[i] for i in bin],
            [columns(i) for i in bin],
            policy.row_multiple,
            names=[str(i) for i in bin],
            images=images(bin),
        )
        for bin in bins
    ]
    if work.common:
        rows = [share_prefixes(row, policy.row_multiple, SHARED_BLOCK) for row in rows]
    data = policy.layout.data
    rows += [replace(rows[0].empty_like(policy.row_multiple), names=())] * (-len(rows) % data)
    return rows[policy.here.data :: data]


def make_policy(
    address: Address,
    model: str,
    case: LayoutCase,
    platform: Platform | None = None,
    *,
    images: bool = False,
    **overrides: Any,
) -> Policy:
    """Build this rank of the policy of `model`, a Hugging Face folder. `platform`: detected if not given. A policy that
    computes in float32 has the values that one in the precision of the folder holds."""
    config = policy_config(model, case, **overrides)
    policy = Policy(config, address, seed=1, timeout_s=60, reference=False, platform=platform, images=images)
    # Megatron-Core may be imported only after the policy has joined the mesh.
    from grpo_mcore.parallel.model import build_model
    from grpo_mcore.parallel.weights.weights import ShardedWeights

    if policy.dtype is torch.float32 and (precision := precision_of(stored_tensors(Path(model)))) != policy.dtype:
        with torch.device("meta"):
            megatron = policy.config.megatron_cfg
            networks = build_model(policy.shape, policy.layout, megatron, precision, Platform("cpu"))
        held = ShardedWeights(networks, policy.shape, policy.layout, policy.here)
        for (_, values), (_, form) in zip(policy.weights.local, held.local, strict=True):
            values.data.copy_(values.to(form.dtype))
    return policy


def precision_of(stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """Return the precision of a policy that holds most bytes of these tensors as they are: bfloat16 or float32."""
    nbytes = Counter[bool]()
    for tensor in stored.values():
        nbytes[tensor.dtype == "BF16"] += prod(tensor.shape) * (2 if tensor.dtype in ("BF16", "F16") else 4)
    return torch.bfloat16 if nbytes[True] > nbytes[False] else torch.float32


def owned_slices(policy: Policy) -> list[tuple[str, Any, torch.Tensor]]:
    """Return (Hugging Face name, box in it, values) of the slices that this rank of the mesh owns."""
    return [(name, box, view.clone()) for name, box, view in policy.weights.slices(owned_only=True)]


def logprobs_and_gradients(
    address: Address,
    model: str,
    case: LayoutCase,
    packed: bool = True,
    work: ParityWorkload = STANDARD,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    platform: Platform | None = None,
) -> dict[str, Any]:
    """Return the log-probs by sequence (last stage), and the gradient of the loss: the change of the owned slices.
    `overrides` change the policy section; `platform` is detected if not given."""
    policy = make_policy(address, model, case, platform, images=bool(work.images), **overrides)
    batches = micro_batches(policy, packed, work)
    logprobs: dict[int, torch.Tensor] = {}
    for batch, row in zip(batches, policy.logprobs(batches) or (), strict=False):
        logprobs |= {int(name): part for name, part in zip(batch.names, batch.split(row), strict=True)}
    before = owned_slices(policy)
    report = policy.train_step(
        batches,
        compared_loss(work, entropy=policy.shape.head == "tokens"),
        global_valid_seqs=len(work.lengths) - len(work.left_out),
        global_valid_toks=work.trained,
    )
    gradients = [
        (name, box, was - now) for (name, box, was), (_, _, now) in zip(before, owned_slices(policy), strict=True)
    ]
    return {"logprobs": logprobs, "gradients": gradients, "grad_norm": report.grad_norm}
