"""The parameters of a policy rank, as Megatron-Core arranges them in buffers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from grpo_mcore.families import AdapterShape, ModelShape, Param, Split, Stage, adapters_of, local_shape, params_of
from grpo_mcore.families.shards import Shard, shard_of
from grpo_mcore.layout import Coordinates, PolicyLayout


@dataclass(frozen=True)
class RankParams:
    """Parameters of one rank, by model chunk. Those in `common` are replicated over data- and context-parallel ranks,
    those in `experts` over fewer ranks. `frozen` elements have neither gradient nor optimizer state."""

    common: tuple[Shard, ...]
    experts: tuple[Shard, ...]
    frozen: int

    @property
    def numel(self) -> int:
        """Number of elements, without padding."""
        return sum(shard.numel for shard in (*self.common, *self.experts)) + self.frozen

    @property
    def expert_numel(self) -> int:
        return sum(shard.numel for shard in self.experts)

    @property
    def buffer(self) -> int:
        """Number of elements of the weight buffers, or of the gradient buffers, with padding."""
        return sum(shard.buffer for shard in (*self.common, *self.experts))

    @property
    def largest(self) -> int:
        """Number of elements, of one parameter at most, whose optimizer state a rank keeps."""
        return max((shard.largest for shard in (*self.common, *self.experts)), default=0)

    @property
    def updated_together(self) -> int:
        """Number of elements that a rank updates at a time, at most: those of the experts have an optimizer of their
        own."""
        return max(sum(shard.most_owned for shard in shards) for shards in (self.common, self.experts))

    def owned(self, layout: PolicyLayout, rank: Coordinates | None) -> int:
        """Return the number of elements whose optimizer state a rank keeps, or without a rank the largest of any."""
        if rank is None:
            return sum(shard.most_owned for shard in (*self.common, *self.experts))
        among = rank.data * layout.context + rank.context
        return sum(shard.owned[among] for shard in self.common) + sum(
            shard.owned[rank.expert_copy] for shard in self.experts
        )


def rank_params(
    shape: ModelShape,
    layout: PolicyLayout,
    stage: int,
    chunks: tuple[range, ...],
    frozen: tuple[str, ...],
    adapters: AdapterShape | None = None,
) -> RankParams:
    """Return the parameters of a rank of this pipeline stage, whose model chunks have the layers `chunks`."""
    # Adapters may be attached to some of several layers that are alike otherwise.
    kinds = chunks if adapters else tuple(tuple(_first_alike(shape)[layer] for layer in chunk) for chunk in chunks)
    return _rank_params(
        shape, layout, stage == 0, stage == layout.pipeline - 1, tuple(map(tuple, kinds)), frozen, adapters
    )


@lru_cache(maxsize=4096)
def _rank_params(
    shape: ModelShape,
    layout: PolicyLayout,
    first: bool,
    last: bool,
    chunks: tuple[tuple[int, ...], ...],
    frozen: tuple[str, ...],
    adapters: AdapterShape | None,
) -> RankParams:
    """Cached: `chunks` names each layer by the first one like it, so that stages that are alike are counted once."""
    copies = layout.stage_size // (layout.expert * layout.expert_tensor)
    apart = shape.tied_embeddings and layout.pipeline > 1
    common, experts, still = [], [], 0
    for index, layers in enumerate(chunks):
        starts, ends = first and index == 0, last and index == len(chunks) - 1
        parts: list[Stage | int] = [*layers]
        # The last stage has a copy of tied embeddings, unless it is the first one too.
        parts = [Stage.FIRST] * starts + parts + [Stage.LAST] * ends
        groups = [
            _group(
                shape, layout.tensor, layout.expert, layout.expert_tensor, frozen, adapters, part,
                copied=not starts,
            )
            for part in parts
        ]  # fmt: skip
        whole = [size for group in groups for size in group.whole]
        common.append(
            shard_of(
                [size for size, _ in whole],
                layout.data * layout.context,
                {index for index, (_, vocabulary) in enumerate(whole) if vocabulary and apart},
            )
        )
        sizes = [size for group in groups for size in group.experts]
        if sizes:
            experts.append(shard_of(sizes, copies))
        still += sum(group.frozen for group in groups)
    return RankParams(tuple(common), tuple(experts), still)


class _Group(NamedTuple):
    """Elements of a rank's parameters of one layer, or before or behind all layers. `whole`: (number of elements,
    whether the vocabulary is split) of those that are no expert's."""

    whole: list[tuple[int, bool]]
    experts: list[int]
    frozen: int


@lru_cache(maxsize=4096)
def _group(
    shape: ModelShape,
    tensor: int,
    expert: int,
    expert_tensor: int,
    frozen: tuple[str, ...],
    adapters: AdapterShape | None,
    part: Stage | int,
    *,
    copied: bool,
) -> _Group:
    """Return the parameters of one part: a layer, or FIRST or LAST for those before or behind all layers. `copied` says
    whether copies are counted too."""
    before, by_layer, behind = _sorted(shape)
    params = by_layer[part] if isinstance(part, int) else before if part is Stage.FIRST else behind
    kept = [
        param
        for param in params
        if not param.buffer
        and not (param.expert and param.expert[0] >= param.expert[1] // expert)
        and (copied or not param.copy)
    ]
    trained, still = [], 0
    for param in kept:
        if adapters is None and not any(name in param.megatron for name in frozen):
            trained.append(param)
        else:
            still += _numel(param, shape, tensor, expert_tensor)
    if adapters is not None:
        trained = [side for pair in adapters_of(kept, adapters).values() for side in (pair.down, pair.up)]
    sizes = [(param, _numel(param, shape, tensor, expert_tensor)) for param in trained]
    return _Group(
        [(size, param.split is Split.VOCAB) for param, size in sizes if param.expert is None],
        [size for param, size in sizes if param.expert],
        still,
    )


def _numel(param: Param, shape: ModelShape, tensor: int, expert_tensor: int) -> int:
    return math.prod(local_shape(param, shape, expert_tensor if param.expert else tensor))


@cache
def _first_alike(shape: ModelShape) -> tuple[int, ...]:
    """Return, for each layer, the first one with parameters of the same sizes."""
    kinds = [
        (shape.blocks[i] if shape.blocks else None, shape.is_expert_layer(i), shape.is_delta_layer(i))
        for i in range(shape.num_layers)
    ]
    return tuple(kinds.index(kind) for kind in kinds)


@cache
def _sorted(shape: ModelShape) -> tuple[Sequence[Param], Sequence[Sequence[Param]], Sequence[Param]]:
    """Return the parameters before the layers, by layer, and behind the layers."""
    before: list[Param] = []
    behind: list[Param] = []
    by_layer: list[list[Param]] = [[] for _ in range(shape.num_layers)]
    for param in params_of(shape):
        if param.layer is not None:
            by_layer[param.layer].append(param)
        else:
            (before if param.stage is Stage.FIRST else behind).append(param)
    return before, by_layer, behind
