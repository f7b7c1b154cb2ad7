"""The refit of a layout: its buckets, and the bytes that each rank writes and reads. The one place of `plan` that
calls the refit's own planning."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from grpo_mcore.families import params_of
from grpo_mcore.refit.layout import EngineLayout, TrainerLayout
from grpo_mcore.refit.plan import DTYPE_BYTES, plan_refit, wire_dtype
from grpo_mcore.tools.plan.devices import Device
from grpo_mcore.tools.plan.workload import Workload

DTYPE = {2: "bfloat16", 4: "float32"}


@dataclass(frozen=True)
class RefitTraffic:
    """`written`: bytes that each policy rank puts into the buffer; `read`: that an engine's busiest rank takes out.
    `to_other_nodes`: over each node's network link."""

    buckets: int
    buffer: int
    tensor_bytes: int
    written: tuple[int, ...]
    read: int
    to_other_nodes: int
    link: str

    def seconds(self, load: Workload, device: Device) -> float:
        """Floor: the slowest link."""
        through_host = load.world > 1
        bandwidth = device.host_bandwidth if through_host else device.memory_bandwidth
        return max(max(self.written) / bandwidth, self.read / bandwidth, self.to_other_nodes / device.node_bandwidth)


def refit_traffic(load: Workload) -> RefitTraffic:
    """Raises RefitError where a row does not fit the buffer, LayoutError where the layouts do not fit the model."""
    layout = load.layout
    trainer = TrainerLayout(
        layout.tensor, layout.pipeline, layout.data, layout.context, layout.expert, layout.expert_tensor,
        layout.virtual, first_layers=load.first_layers or 0, last_layers=load.last_layers or 0,
    )  # fmt: skip
    span = load.engine_span
    replicas = max(1, load.engines * span // load.engine_nodes)
    engine = EngineLayout(load.engine_tensor, 1, load.engine_whole_experts, replicas, span)
    dtype = DTYPE[load.element]
    params = [param for param in params_of(load.shape) if not param.copy]
    plan = plan_refit(params, load.shape, trainer, engine, dtype=dtype, buffer_bytes=load.refit_buffer, copies=span > 1)
    written: Counter[int] = Counter()
    held: Counter[tuple[int, frozenset[int]]] = Counter()  # by who holds it, and which nodes of an engine read it
    for block in plan.blocks():
        written[block.source] += block.nbytes
        parts = frozenset(read.rank * span // engine.ranks for read in block.reads) or frozenset((0,))
        held[block.holders, parts] += block.nbytes
    read = engine.bytes_by_rank(params, load.shape, lambda param: DTYPE_BYTES[wire_dtype(param, dtype)])
    homes = [{rank * load.nodes // load.world for rank in ranks} if load.colocated else () for ranks in plan.holders]
    other_nodes = max(
        sum(nbytes for (holders, parts), nbytes in held.items() if node % span in parts and node not in homes[holders])
        for node in range(load.nodes)
    )
    link = (
        "network between nodes" if other_nodes else "host memory (PCIe)" if load.world > 1 else "memory of the device"
    )
    return RefitTraffic(
        len(plan.buckets),
        plan.buffer_bytes,
        plan.block_bytes,
        tuple(written[rank] for rank in range(load.world)),
        max(read),
        other_nodes,
        link,
    )
