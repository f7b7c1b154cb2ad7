"""Sizes of the policy's parallel dimensions, and what follows from them for each rank: its place, its layers and its
slices of the parameters, without a process group or a model."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from grpo_mcore.families import ModelShape, Param, Piece, Split, Stage, pieces
from grpo_mcore.layout.findings import Finding, Key, LayoutError


@dataclass(frozen=True)
class Coordinates:
    """Indices of one rank in the parallel dimensions."""

    tensor: int
    data: int
    pipeline: int
    context: int = 0
    expert: int = 0
    expert_tensor: int = 0
    expert_copy: int = 0  # index among the ranks that hold the same slice of the same experts


@dataclass(frozen=True)
class HeldSlice:
    """One slice of a parameter. All of `ranks` hold it, under `name`."""

    name: str
    ranks: tuple[int, ...]
    index: int  # tensor-parallel coordinate, or expert-tensor-parallel of an expert's weight


@dataclass(frozen=True)
class PolicyLayout:
    """Sizes of the parallel dimensions. Ranks run over tensor first, then context, data, pipeline.

    For experts, the ranks of a stage run over expert tensor first, then expert, then copies of the same experts.
    `virtual`: model chunks on each pipeline rank. `first_layers`, `last_layers`: number of layers of the first and last
    pipeline stage; None: as many as the others have.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1
    first_layers: int | None = None
    last_layers: int | None = None
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pipeline

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    def optimizer_parts(self) -> dict[str, int | None]:
        """Return what decides which values a model-parallel rank's optimizer holds, and in which order. A checkpoint
        with the optimizer in parts (dist_ckpt_optim_fully_reshardable: false) resumes where all of it is the same."""
        return {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "virtual": self.virtual,
            "expert": self.expert,
            "expert_tensor": self.expert_tensor,
            "first_stage": self.first_layers,
            "last_stage": self.last_layers,
        }

    def coordinates(self, rank: int) -> Coordinates:
        in_stage = rank % self.stage_size
        return Coordinates(
            tensor=rank % self.tensor,
            data=in_stage // (self.tensor * self.context),
            pipeline=rank // self.stage_size,
            context=rank // self.tensor % self.context,
            expert_tensor=in_stage % self.expert_tensor,
            expert=in_stage // self.expert_tensor % self.expert,
            expert_copy=in_stage // (self.expert_tensor * self.expert),
        )

    def is_reporting_rank(self, rank: int) -> bool:
        """Return whether the rank reports for its data-parallel rank: one of the ranks with the same samples does."""
        coordinates = self.coordinates(rank)
        return coordinates.tensor == 0 and coordinates.context == 0 and coordinates.pipeline == self.pipeline - 1

    def layers(self, num_layers: int) -> tuple[tuple[range, ...], ...]:
        """Return the layers of each model chunk of each pipeline stage; a forward pass visits all stages `virtual`
        times. Raises LayoutError if the layers do not divide or a stage would have none."""
        return _layers(self, num_layers)

    def experts_per_rank(self, count: int) -> int:
        """Return how many of `count` experts a rank holds. Raises LayoutError if they do not divide."""
        if count % self.expert:
            raise LayoutError(
                Finding((Key.EXPERT,), f"{self.expert} does not divide the {count} experts of this model")
            )
        return count // self.expert

    def split(self, param: Param) -> int:
        """Return the number of slices that the parameter is cut into."""
        if param.split is Split.REPLICATED:
            return 1
        return self.expert_tensor if param.expert else self.tensor

    def pieces(self, param: Param, shape: ModelShape, part: int) -> list[Piece]:
        """Return the slices of the Hugging Face tensors in slice `part` of the parameter."""
        return pieces(param, shape, part, self.split(param))

    def parts(self, param: Param, shape: ModelShape) -> list[HeldSlice]:
        """Return every slice of the parameter with the ranks that hold it. Raises LayoutError if it cannot be cut."""
        stage, name = self._stage_and_name(param, shape.num_layers)
        first, width = stage * self.stage_size, self.split(param)
        if param.expert is None:
            groups = [list(range(first + part, first + self.stage_size, width)) for part in range(width)]
        else:
            index, count = param.expert
            group = self.expert * self.expert_tensor  # ranks that together hold every expert once
            start = first + index // self.experts_per_rank(count) * self.expert_tensor
            groups = [
                [
                    replica + offset
                    for replica in range(start, first + self.stage_size, group)
                    for offset in range(part, self.expert_tensor, width)
                ]
                for part in range(width)
            ]
        return [HeldSlice(name, tuple(ranks), part) for part, ranks in enumerate(groups)]

    def place(self, param: Param, num_layers: int) -> tuple[int, int]:
        """Return (pipeline stage, number of the group of ranks there that holds the expert). Parameters of one place
        that are split alike are held by the same ranks."""
        group = param.expert[0] // self.experts_per_rank(param.expert[1]) if param.expert else 0
        return self._chunk(param, num_layers)[0] % self.pipeline, group

    def _chunk(self, param: Param, num_layers: int) -> tuple[int, int]:
        """Return (model chunk, the parameter's layer in it)."""
        if param.stage is not Stage.LAYER:
            return (0 if param.stage is Stage.FIRST else self.pipeline * self.virtual - 1), 0
        assert param.layer is not None
        starts = _chunk_starts(self, num_layers)
        chunk = bisect_right(starts, param.layer) - 1
        return chunk, param.layer - starts[chunk]

    def _stage_and_name(self, param: Param, num_layers: int) -> tuple[int, str]:
        """Return (pipeline stage, name of the parameter there)."""
        chunk, layer = self._chunk(param, num_layers)
        expert = 0
        if param.expert:
            index, count = param.expert
            expert = index % self.experts_per_rank(count)
        name = param.megatron.format(layer=layer, expert=expert)
        return chunk % self.pipeline, f"{chunk // self.pipeline}:{name}" if self.virtual > 1 else name

    def describe(self) -> str:
        """Describe the sizes for a person, such as "TP 2 x PP 1 x DP 4 + sequence parallel"."""
        sizes = [f"TP {self.tensor}", f"PP {self.pipeline}"]
        sizes += [f"CP {self.context}"] if self.context > 1 else []
        sizes.append(f"DP {self.data}")
        text = " x ".join(sizes)
        if self.expert * self.expert_tensor > 1:
            text += f", experts over EP {self.expert} x ETP {self.expert_tensor}"
        if self.virtual > 1:
            text += f", {self.virtual} model chunks a stage"
        return text + (" + sequence parallel" if self.sequence_parallel else "")


@lru_cache(maxsize=256)  # asked for each of a model's parameters
def _layers(layout: PolicyLayout, num_layers: int) -> tuple[tuple[range, ...], ...]:
    stages = layout.pipeline
    fixed = {0: layout.first_layers, stages - 1: layout.last_layers}
    fixed_counts = {stage: count for stage, count in fixed.items() if count is not None and stages > 1}
    others, rest = stages - len(fixed_counts), num_layers - sum(fixed_counts.values())
    if rest < others or (rest % others if others else rest):
        among = f"the other {others} stages" if fixed_counts else f"{others} stages"
        message = f"{rest} of {num_layers} layers do not divide over {among}; set {Key.FIRST} or {Key.LAST}"
        raise LayoutError(Finding((Key.PIPELINE, Key.FIRST, Key.LAST), message))
    counts = [fixed_counts.get(stage, rest // others if others else 0) for stage in range(stages)]
    if any(count % layout.virtual for count in counts):
        different = ", ".join(map(str, sorted(set(counts))))
        message = f"{layout.virtual} does not divide the layers of every stage ({different})"
        raise LayoutError(Finding((Key.VIRTUAL, Key.PIPELINE), message))
    sizes = [count // layout.virtual for count in counts] * layout.virtual
    ends = list(accumulate(sizes))
    ranges = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return tuple(tuple(ranges[stage::stages]) for stage in range(stages))


@lru_cache(maxsize=8)  # asked for each of a model's parameters
def _chunk_starts(layout: PolicyLayout, num_layers: int) -> list[int]:
    """Return the first layer of every model chunk, in the order of the layers."""
    return sorted(layers.start for chunks in layout.layers(num_layers) for layers in chunks)
