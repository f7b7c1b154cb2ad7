"""Layouts: which slices of a model the policy's ranks hold in Megatron-Core, and one engine's ranks in vLLM.

Both follow from the model families' declarations, without a process group or a model.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from grpo_mcore.families import ModelShape, Param, Piece, Split, Stage, engine_pieces, pieces
from grpo_mcore.families.shards import stage_layers

WHOLE = "hf:"
"""Prefix of destinations that are whole tensors for vLLM's own loading instead of engine parameters."""


class LayoutError(ValueError):
    """The parallel sizes do not fit each other or the model."""


@dataclass(frozen=True)
class Part:
    """One slice of a parameter on the policy. All of `ranks` hold it, under `name`."""

    name: str
    ranks: tuple[int, ...]
    index: int  # tensor-parallel coordinate, or expert-tensor-parallel of an expert's weight


@dataclass(frozen=True)
class TrainerLayout:
    """Sizes of the policy's parallel dimensions. Ranks run tensor, context, data, then pipeline; experts lie across
    the tensor x context x data ranks of a stage: expert-tensor first, then expert, then their replicas.

    `virtual`: model chunks on each pipeline rank; `expert_tensor` 0: same as `tensor`. `first_layers`, `last_layers`:
    number of layers of the first and last pipeline stage if it differs from the others.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 0
    virtual: int = 1
    first_layers: int = 0
    last_layers: int = 0

    def __post_init__(self) -> None:
        if self.stage_ranks % (self.expert * self.expert_split):
            raise LayoutError(
                f"EP {self.expert} x ETP {self.expert_split} does not divide the {self.stage_ranks} ranks of a stage"
            )

    @property
    def expert_split(self) -> int:
        return self.expert_tensor or self.tensor

    @property
    def stage_ranks(self) -> int:
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        return self.stage_ranks * self.pipeline

    def split(self, param: Param) -> int:
        """Return the number of slices that the parameter is cut into."""
        if param.split is Split.REPLICATED:
            return 1
        return self.expert_split if param.expert else self.tensor

    def parts(self, param: Param, shape: ModelShape) -> list[Part]:
        """Return every slice of the parameter with the ranks that hold it. Raises LayoutError or FamilyError if it
        cannot be cut."""
        stage, name = self._stage_and_name(param, shape.num_layers)
        first, width = stage * self.stage_ranks, self.split(param)
        if param.expert is None:
            groups = [list(range(first + part, first + self.stage_ranks, width)) for part in range(width)]
        else:
            index, count = param.expert
            if count % self.expert:
                raise LayoutError(f"EP {self.expert} does not divide the {count} experts")
            group = self.expert * self.expert_split  # ranks that together hold every expert once
            at = first + index // (count // self.expert) * self.expert_split
            groups = [
                [
                    replica + offset
                    for replica in range(at, first + self.stage_ranks, group)
                    for offset in range(part, self.expert_split, width)
                ]
                for part in range(width)
            ]
        return [Part(name, tuple(ranks), part) for part, ranks in enumerate(groups)]

    def _stage_and_name(self, param: Param, num_layers: int) -> tuple[int, str]:
        """Return (pipeline stage, name of the parameter there)."""
        chunks = self.pipeline * self.virtual
        layer = 0
        if param.stage is Stage.LAYER:
            assert param.layer is not None
            starts = _first_layers(self, num_layers)
            chunk = bisect_right(starts, param.layer) - 1
            layer = param.layer - starts[chunk]
        else:
            chunk = 0 if param.stage is Stage.FIRST else chunks - 1
        expert = 0
        if param.expert:
            index, count = param.expert
            expert = index % (count // self.expert)
        name = param.megatron.format(layer=layer, expert=expert)
        return chunk % self.pipeline, f"{chunk // self.pipeline}:{name}" if self.virtual > 1 else name

    def describe(self) -> str:
        sizes = {"TP": self.tensor, "PP": self.pipeline, "VPP": self.virtual, "CP": self.context, "DP": self.data}
        if self.expert > 1 or self.expert_tensor:
            sizes |= {"EP": self.expert, "ETP": self.expert_split}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name in ("TP", "DP"))


@dataclass(frozen=True)
class EngineLayout:
    """The ranks of one engine: tensor first, then pipeline. With `expert_parallel` each rank has whole experts, else
    a slice of every one. `nodes`: number of nodes of one engine, over which its ranks are spread evenly and in order.
    `replicas`: engines on the same node or nodes; they read the same bytes."""

    tensor: int = 1
    pipeline: int = 1
    expert_parallel: bool = False
    replicas: int = 1
    nodes: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks of one engine."""
        return self.tensor * self.pipeline

    def split(self, param: Param) -> int:
        """Return the number of slices that the parameter is cut into."""
        whole = param.engine_split is Split.REPLICATED or param.engine is None
        return 1 if whole or (param.expert and self.expert_parallel) else self.tensor

    def stages(self, param: Param, num_layers: int) -> range:
        """Return the pipeline stages that read the parameter.

        What is outside the layers goes to all: in some of vLLM's models the first and the last stage alone have it, in
        others every one. `engine_weights.py` leaves out what the model lacks.
        """
        if self.pipeline == 1 or param.layer is None or param.engine is None:
            return range(self.pipeline)
        stage = bisect_right(_engine_stages(self.pipeline, num_layers), param.layer) - 1
        return range(stage, stage + 1)

    def readers(self, param: Param, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Return the engine ranks that read each slice of the parameter, by slice."""
        owner = None
        if param.expert and param.engine is not None and self.expert_parallel:
            index, count = param.expert
            if count % self.tensor:
                raise LayoutError(f"{count} experts do not divide over the {self.tensor} ranks of an engine")
            owner = index // (count // self.tensor)
        return _readers(self.tensor, self.split(param), self.stages(param, num_layers), owner)

    def places(self, param: Param, shape: ModelShape, part: int) -> list[tuple[str, Piece]]:
        """Return (destination, slice) for a reader of slice `part`. A destination is an engine parameter, or `WHOLE` +
        a tensor's name. An expert's slice of an engine parameter has one more dimension in front: the expert.
        """
        if param.engine is None:
            boxes = {tensor.name: tuple((0, size) for size in tensor.shape) for tensor in param.hf}
            return [(WHOLE + name, Piece(name, box, box)) for name, box in boxes.items()]
        found = engine_pieces(param, shape, part, self.split(param))
        if param.expert:
            index, count = param.expert
            local = index % (count // self.tensor) if self.expert_parallel else index
            found = [Piece(p.hf, p.hf_box, ((local, local + 1), *p.local_box)) for p in found]
        return [(param.engine, piece) for piece in found]

    def bytes_by_rank(self, params: Iterable[Param], shape: ModelShape, width: Callable[[Param], int]) -> list[int]:
        """Return the bytes that each rank reads of all these parameters. `width`: bytes of an element."""
        alike: dict[object, tuple[Param, int]] = {}  # one of each kind, and the width of all of them
        for param in params:
            shapes, expert = tuple(tensor.shape for tensor in param.hf), param.expert is not None
            kind = (param.split.value, param.engine_form, shapes, expert, param.engine is None)
            place = (param.layer if self.pipeline > 1 else None, param.expert if self.expert_parallel else None)
            first, sum_of_widths = alike.get((kind, place), (param, 0))
            alike[kind, place] = first, sum_of_widths + width(param)
        found = [0] * self.ranks
        for param, sum_of_widths in alike.values():
            for part, ranks in enumerate(self.readers(param, shape.num_layers)):
                boxes = [piece.hf_box for _, piece in self.places(param, shape, part)]
                numel = sum(math.prod(stop - start for start, stop in box) for box in boxes)
                for rank in ranks:
                    found[rank] += numel * sum_of_widths
        return found

    def describe(self) -> str:
        sizes = {"TP": self.tensor, "PP": self.pipeline}
        text = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "TP")
        text += " with expert parallelism" if self.expert_parallel else ""
        return text + (f" over {self.nodes} nodes" if self.nodes > 1 else "")


@lru_cache(maxsize=8)  # asked for each of a model's parameters
def _first_layers(layout: TrainerLayout, num_layers: int) -> list[int]:
    """Return the first layer of every model chunk."""
    first, last = layout.first_layers or None, layout.last_layers or None
    counts = [len(layers) for layers in stage_layers(num_layers, layout.pipeline, first, last)]
    if any(count % layout.virtual for count in counts):
        raise LayoutError(f"VPP {layout.virtual} does not divide the layers of every stage ({counts})")
    chunks = [count // layout.virtual for count in counts] * layout.virtual
    return list(accumulate(chunks, initial=0))[:-1]


@lru_cache(maxsize=4096)  # asked for each of a model's parameters
def _readers(tensor: int, width: int, stages: range, owner: int | None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that read each of `width` slices. `owner`: the only reader on its stage."""
    parts = [range(part, tensor, width) for part in range(width)] if owner is None else [range(owner, owner + 1)]
    return tuple(tuple(stage * tensor + rank for stage in stages for rank in part) for part in parts)


@lru_cache(maxsize=8)  # asked for each of a model's parameters
def _engine_stages(stages: int, num_layers: int) -> list[int]:
    """Return the first layer of every stage of an engine, as vLLM's get_pp_indices divides them: of the layers that
    remain, one goes to each stage from the last but one down."""
    each, more = divmod(num_layers, stages)
    counts = [each + (stages - 1 - more <= stage < stages - 1) for stage in range(stages)]
    return list(accumulate(counts, initial=0))[:-1]


def trainer_pieces(layout: TrainerLayout, param: Param, shape: ModelShape, part: int) -> list[Piece]:
    """Return the slices of the Hugging Face tensors in slice `part` of the policy's parameter."""
    return pieces(param, shape, part, layout.split(param))
