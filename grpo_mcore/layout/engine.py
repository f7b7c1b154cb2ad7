"""Layout of one engine's ranks in vLLM: what each of them reads in a refit, from the families' declarations alone."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from grpo_mcore.families import ModelShape, Param, Piece, Split, engine_pieces
from grpo_mcore.layout.findings import Finding, Key, LayoutError

WHOLE = "hf:"
"""Prefix of destinations that are whole tensors for vLLM's own loading instead of engine parameters."""


@dataclass(frozen=True)
class EngineLayout:
    """The ranks of one engine: tensor first, then pipeline. With `expert_parallel` each rank has whole experts, else
    a slice of every one. `nodes`: number of nodes of one engine, over which its ranks are spread evenly and in order.
    """

    tensor: int = 1
    pipeline: int = 1
    expert_parallel: bool = False
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

    def experts_per_rank(self, count: int) -> int:
        """Return how many of `count` experts a rank holds. Raises LayoutError if they do not divide."""
        if not self.expert_parallel:
            return count
        if count % self.tensor:
            message = f"{self.tensor} does not divide the {count} experts of this model"
            raise LayoutError(Finding((Key.ENGINE_EXPERT, Key.ENGINE_TENSOR), message))
        return count // self.tensor

    def readers(self, param: Param, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Return the engine ranks that read each slice of the parameter, by slice."""
        owner = None
        if param.expert and param.engine is not None and self.expert_parallel:
            index, count = param.expert
            owner = index // self.experts_per_rank(count)
        return _readers(self.tensor, self.split(param), self.stages(param, num_layers), owner)

    def places(self, param: Param, shape: ModelShape, part: int) -> list[tuple[str, Piece]]:
        """Return (destination, slice) for a reader of slice `part`. A destination is an engine parameter, or `WHOLE` +
        a tensor's name. An expert's slice of an engine parameter has one more dimension in front: the expert.
        """
        if param.engine is None:
            boxes = {tensor.name: tuple((0, size) for size in tensor.shape) for tensor in param.hf}
            return [(WHOLE + name, Piece(name, box, box)) for name, box in boxes.items()]
        placed = engine_pieces(param, shape, part, self.split(param))
        if param.expert:
            index, count = param.expert
            local = index % self.experts_per_rank(count)
            placed = [Piece(p.hf, p.hf_box, ((local, local + 1), *p.local_box)) for p in placed]
        return [(param.engine, piece) for piece in placed]

    def bytes_by_rank(self, params: Iterable[Param], shape: ModelShape, width: Callable[[Param], int]) -> list[int]:
        """Return the bytes that each rank reads of all these parameters. `width`: bytes of an element."""
        alike: dict[object, tuple[Param, int]] = {}  # one of each kind, and the width of all of them
        for param in params:
            home = (param.layer if self.pipeline > 1 else None, param.expert if self.expert_parallel else None)
            first, sum_of_widths = alike.get((param.form, home), (param, 0))
            alike[param.form, home] = first, sum_of_widths + width(param)
        nbytes = [0] * self.ranks
        for param, sum_of_widths in alike.values():
            for part, ranks in enumerate(self.readers(param, shape.num_layers)):
                boxes = [piece.hf_box for _, piece in self.places(param, shape, part)]
                numel = sum(math.prod(stop - start for start, stop in box) for box in boxes)
                for rank in ranks:
                    nbytes[rank] += numel * sum_of_widths
        return nbytes

    def describe(self) -> str:
        sizes = {"TP": self.tensor, "PP": self.pipeline}
        text = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "TP")
        text += " with expert parallelism" if self.expert_parallel else ""
        return text + (f" over {self.nodes} nodes" if self.nodes > 1 else "")


@lru_cache(maxsize=4096)  # asked for each of a model's parameters
def _readers(tensor: int, width: int, stages: range, owner: int | None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that read each of `width` slices. `owner`: the only reader on its stage."""
    parts = [range(part, tensor, width) for part in range(width)] if owner is None else [range(owner, owner + 1)]
    return tuple(tuple(stage * tensor + rank for stage in stages for rank in part) for part in parts)


@lru_cache(maxsize=8)  # asked for each of a model's parameters
def _engine_stages(stages: int, num_layers: int) -> list[int]:
    """Return the first layer of every stage of an engine, as vLLM's get_pp_indices divides them: of the layers that
    remain, one goes to each stage from the last but one down."""
    per_stage, more = divmod(num_layers, stages)
    counts = [per_stage + (stages - 1 - more <= stage < stages - 1) for stage in range(stages)]
    return list(accumulate(counts, initial=0))[:-1]
