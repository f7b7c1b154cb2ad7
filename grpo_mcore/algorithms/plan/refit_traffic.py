"""The refit of a layout: its buckets, and the bytes that each rank writes and reads. The one place of `plan` that
calls the refit's own planning."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_mcore.algorithms.plan.devices import Device
from grpo_mcore.algorithms.plan.workload import Workload
from grpo_mcore.families import Split, params_of, pieces
from grpo_mcore.families.shards import stage_params
from grpo_mcore.refit.plan import plan_refit

DTYPE = {2: "bfloat16", 4: "float32"}


@dataclass(frozen=True)
class RefitTraffic:
    """`written`: bytes that each stage's ranks put into the buffer, by tensor-parallel rank of data-parallel rank 0;
    `read`: by each engine rank. `to_other_nodes`: over each node's network link."""

    buckets: int
    buffer: int
    tensor_bytes: int
    written: tuple[tuple[int, ...], ...]
    read: int
    to_other_nodes: int
    link: str

    def seconds(self, load: Workload, device: Device) -> float:
        """Floor: the slowest link."""
        through_host = load.world > 1
        bandwidth = device.host_bandwidth if through_host else device.memory_bandwidth
        busiest = max(max(stage) for stage in self.written)
        return max(busiest / bandwidth, self.read / bandwidth, self.to_other_nodes / device.node_bandwidth)


def refit_traffic(load: Workload) -> RefitTraffic:
    """Raises RefitError where a tensor does not fit the buffer."""
    tensors = [tensor for param in params_of(load.shape) if not param.copy for tensor in param.hf]
    plan = plan_refit(tensors, dtype=DTYPE[load.element], buffer_bytes=load.refit_buffer)
    params = params_of(load.shape)
    written = tuple(
        tuple(
            sum(
                math.prod(stop - start for start, stop in piece.hf_box)
                for param in stage_params(params, layers, stage, load.layout.pipeline)
                if not param.copy and not (param.split is Split.REPLICATED and tensor)
                for piece in pieces(param, load.shape, tensor, load.layout.tensor)
            )
            * load.element
            for tensor in range(load.layout.tensor)
        )
        for stage, layers in enumerate(load.layers)
    )
    other_nodes = plan.tensor_bytes if load.nodes > 1 else 0
    link = (
        "network between nodes" if other_nodes else "host memory (PCIe)" if load.world > 1 else "memory of the device"
    )
    return RefitTraffic(
        len(plan.buckets), plan.buffer_bytes, plan.tensor_bytes, written, plan.tensor_bytes, other_nodes, link
    )
