"""Ranks and process groups of one policy: which rank holds which shard, and how the ranks communicate."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from grpo_mcore.base.addresses import gloo_towards, hosted_store, is_address, with_port
from grpo_mcore.base.processes import bind_near_gpu
from grpo_mcore.layout import Coordinates, PolicyLayout
from grpo_mcore.parallel import cpu_platform
from grpo_mcore.parallel.platform import Platform, PlatformError


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


class RendezvousError(ConnectionError):
    """The ranks of a policy did not meet in time: a loss, which another attempt may not meet."""


def prepare_megatron(platform: Platform) -> None:
    """Import Megatron-Core for a rank of this platform. Must run before anything else imports it.

    Raises PlatformError if the rank is to use a GPU and this process already belongs to the CPU.
    """
    if platform.torch_device(0).type == "cuda" and cpu_platform.installed():
        raise PlatformError("this process has run a rank on the CPU and cannot run one on a GPU; use another process")
    if not platform.transformer_engine:
        cpu_platform.hide_kernels()
    warnings.filterwarnings("ignore", module=r"megatron\.core")  # it warns of its fallbacks for TransformerEngine
    if platform.torch_device(0).type == "cpu":
        cpu_platform.install()
    cpu_platform.fill_in_transformer_engine()


def join_mesh(
    layout: PolicyLayout, address: Address, seed: int, timeout_s: float, platform: Platform, *, beside: bool = False
) -> torch.device:
    """Join torch.distributed and create Megatron-Core's process groups. Return this rank's device.

    A process may hold several models of one rank each, as a teacher beside the policy without Ray: they share the mesh,
    and each leaves it. `beside`: so does a critic on all ranks of the policy's layout. Raises RendezvousError if the
    other ranks do not join within `timeout_s`, ValueError if the sizes disagree.
    """
    global _members
    if layout.world_size != address.world_size:
        raise ValueError(f"{layout.describe()} needs {layout.world_size} ranks, there are {address.world_size}")
    device = platform.torch_device(address.local_rank)
    if _members and (layout.world_size == 1 or beside):
        _members += 1
        return device
    prepare_megatron(platform)
    from megatron.core import parallel_state, tensor_parallel

    if device.type == "cuda":
        torch.cuda.set_device(device)
        bind_near_gpu(torch.cuda.get_device_properties(device))
    if platform.backend == "gloo" and address.world_size > 1:
        gloo_towards(address.master_addr)
    try:
        torch.distributed.init_process_group(
            platform.backend,
            **_meeting_point(address, platform, timeout_s),
            rank=address.rank,
            world_size=address.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except torch.distributed.DistError as error:
        raise RendezvousError(
            f"policy rank {address.rank} waited {timeout_s:.0f} s at "
            f"{with_port(address.master_addr, address.master_port)} for the other {address.world_size - 1} ranks: "
            f"{error}"
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
    coordinates = Coordinates(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        data=parallel_state.get_data_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        context=parallel_state.get_context_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
        expert_copy=parallel_state.get_expert_data_parallel_rank(),
    )
    assert coordinates == layout.coordinates(address.rank), f"Megatron-Core orders ranks differently: {coordinates}"
    _members = 1
    return device


def _meeting_point(address: Address, platform: Platform, timeout_s: float) -> dict[str, Any]:
    """Return where the ranks meet, as `init_process_group` takes it. A single rank listens nowhere. Where a cluster
    gave an address, rank 0 listens there alone; under torchrun its agent listens, or torch at all addresses of the
    machine."""
    if platform.traced:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        return {"store": FakeStore()}
    if address.world_size == 1:
        return {"store": torch.distributed.HashStore()}
    host, port = address.master_addr, address.master_port
    if is_address(host) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if address.rank == 0:
            return {"store": hosted_store(host, port, address.world_size, timeout_s, wait=True)}
        limit = timedelta(seconds=timeout_s)
        return {"store": torch.distributed.TCPStore(host, port, address.world_size, False, limit)}
    return {"init_method": f"tcp://{with_port(host, port)}"}


_members = 0
"""Models of this process that have joined the mesh."""
_leave_callbacks: list[Callable[[], None]] = []


def on_leave(release: Callable[[], None]) -> None:
    """Call `release` when this process leaves its mesh."""
    _leave_callbacks.append(release)


def leave_mesh(*, whole_process: bool = False) -> None:
    """Destroy the process groups of this process, so that it can join another mesh. The last of its models does, or the
    first one with `whole_process`."""
    global _members
    from megatron.core import parallel_state

    _members -= 1
    if _members > 0 and not whole_process:
        return
    _members = 0
    for release in _leave_callbacks:
        release()
    _leave_callbacks.clear()
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()  # a policy is a reference cycle that keeps the groups alive, with dozens of polling threads
