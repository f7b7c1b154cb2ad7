"""Ranks and process groups of one policy: which rank holds which shard, and how the ranks communicate."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch

from grpo_mcore.parallel import cpu_platform
from grpo_mcore.parallel.platform import Platform


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


@dataclass(frozen=True)
class Address:
    """One rank of a group, and where the group's ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int

    @classmethod
    def from_environment(cls) -> Address:
        """Read torchrun's environment variables. Raises RendezvousError if one is missing."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in names if name not in os.environ]:
            raise RendezvousError(f"not under torchrun: {', '.join(missing)} not set")
        rank, world, local, host, port = (os.environ[name] for name in names)
        return cls(int(rank), int(world), int(local), host, int(port))


class RendezvousError(RuntimeError):
    """The ranks of a policy did not meet in time."""


def join_mesh(layout: Layout, address: Address, seed: int, timeout_s: float, platform: Platform) -> torch.device:
    """Join torch.distributed and create Megatron-Core's process groups. Return this rank's device.

    Raises RendezvousError if the other ranks do not join within `timeout_s`, ValueError if the sizes disagree.
    """
    if layout.world_size != address.world_size:
        raise ValueError(f"{layout.describe()} needs {layout.world_size} ranks, there are {address.world_size}")
    if not platform.on_gpu:
        cpu_platform.install()
    warnings.filterwarnings("ignore", module=r"megatron\.core")  # it warns of its fallbacks for TransformerEngine
    from megatron.core import parallel_state, tensor_parallel

    cpu_platform.fill_in_transformer_engine()
    device = platform.torch_device(address.local_rank)
    if platform.on_gpu:
        torch.cuda.set_device(device)
    try:
        torch.distributed.init_process_group(
            platform.backend,
            init_method=f"tcp://{address.master_addr}:{address.master_port}",
            rank=address.rank,
            world_size=address.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except torch.distributed.DistError as error:
        raise RendezvousError(
            f"policy rank {address.rank} waited {timeout_s:.0f} s at {address.master_addr}:{address.master_port} "
            f"for the other {address.world_size - 1} ranks: {error}"
        ) from error
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    here = Coordinates(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        data=parallel_state.get_data_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        context=parallel_state.get_context_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
        expert_copy=parallel_state.get_expert_data_parallel_rank(),
    )
    assert here == layout.coordinates(address.rank), f"Megatron-Core orders ranks differently: {here}"
    return device


_leave_callbacks: list[Callable[[], None]] = []


def on_leave(release: Callable[[], None]) -> None:
    """Call `release` when this process leaves its mesh."""
    _leave_callbacks.append(release)


def leave_mesh() -> None:
    """Destroy the process groups of this process, so that it can join another mesh."""
    from megatron.core import parallel_state

    for release in _leave_callbacks:
        release()
    _leave_callbacks.clear()
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()  # a policy is a reference cycle that keeps the groups alive, with dozens of polling threads
