"""Parallel sizes of a policy, and the place of each rank in them. Imports no torch: `plan` starts fast."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mcore.recipe import PolicyConfig


class LayoutError(ValueError):
    """Parallel sizes do not fit the number of ranks, or each other."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions. Ranks run over tensor first, then context, data, pipeline.

    For experts, the ranks of a stage run over expert tensor first, then expert, then copies of the same experts.
    """

    tensor: int
    pipeline: int
    data: int
    sequence_parallel: bool = False
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1  # model chunks per pipeline rank

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pipeline

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    def coordinates(self, rank: int) -> Coordinates:
        """Return a rank's coordinates, without a process group."""
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
        """Whether the rank reports for its data-parallel rank: of the ranks with the same samples, one reports."""
        here = self.coordinates(rank)
        return here.tensor == 0 and here.context == 0 and here.pipeline == self.pipeline - 1

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


def layout_of(config: PolicyConfig, world_size: int) -> Layout:
    """Return the layout that config.megatron_cfg describes on `world_size` ranks. Raises LayoutError."""
    megatron = config.megatron_cfg
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    context = megatron.context_parallel_size
    copy = tensor * pipeline * context
    if world_size % copy:
        raise LayoutError(
            f"{world_size} policy ranks are not TP {tensor} x PP {pipeline} x CP {context} x DP; the number of ranks "
            f"must be a multiple of {copy}"
        )
    layout = Layout(
        tensor,
        pipeline,
        world_size // copy,
        megatron.sequence_parallel,
        context=context,
        expert=megatron.expert_model_parallel_size,
        expert_tensor=megatron.expert_tensor_parallel_size,
        virtual=megatron.virtual_pipeline_model_parallel_size or 1,
    )
    if layout.stage_size % (layout.expert * layout.expert_tensor):
        raise LayoutError(
            f"the {layout.stage_size} ranks of a pipeline stage (TP {tensor} x CP {context} x DP {layout.data}) are "
            f"not EP {layout.expert} x ETP {layout.expert_tensor} x copies of the experts; their number must be a "
            f"multiple of {layout.expert * layout.expert_tensor}"
        )
    return layout
