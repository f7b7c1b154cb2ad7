"""Overview of what a refit moves: bytes by pair of ranks and by rank, buffer, fastest possible time, a picture."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from grpo_mcore.families import ModelShape, Param, params_of
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.delivery import Deliveries, bytes_to, readers_by_node
from grpo_mcore.refit.plan.parts import CALLS_PER_PROCESS, parts_of
from grpo_mcore.refit.plan.plan import DTYPE_BYTES, GIB, RefitPlan, plan_refit, wire_dtype

LINKS = {"a 400 Gb/s network card": 50e9, "NVLink of an H100": 450e9}
"""Bytes/s in one direction, for the fastest possible time."""
SHOWN = 16
"""Maximum number of ranks that are listed one by one."""


@dataclass(frozen=True)
class Overview:
    """A plan with its layouts. All nodes have the same engines and get the weights once; if an engine spans several
    nodes, each gets what is read there."""

    trainer: PolicyLayout
    engine: EngineLayout
    plan: RefitPlan
    nodes: int
    needed_bytes: int
    engine_bytes: int
    """Bytes of the weights of one engine's ranks, counted from their layout."""
    plan_seconds: float
    replicas: int = 1
    """Engines on each node, or on the nodes that one engine spans; they read the same bytes."""
    node_of_rank: tuple[int, ...] = ()
    """The node of each policy rank, as in `Deliveries`."""

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        trainer: PolicyLayout,
        engine: EngineLayout,
        *,
        dtype: str,
        buffer_gb: float,
        nodes: int = 1,
        replicas: int = 1,
        params: Sequence[Param] | None = None,
        node_of_rank: tuple[int, ...] = (),
    ) -> Overview:
        """Plan a refit. `params`: instead of the family's own. `node_of_rank`: if policy and engines share nodes.
        Raises RefitError, LayoutError."""
        started_at = time.perf_counter()
        params = params_of(shape) if params is None else params
        nbytes, times = int(buffer_gb * GIB), nodes // engine.nodes
        plan = plan_refit(params, shape, trainer, engine, dtype=dtype, buffer_bytes=nbytes, deliveries=times)
        seconds = time.perf_counter() - started_at
        tensors = {
            tensor.name: tensor.numel * DTYPE_BYTES[wire_dtype(param, dtype)]
            for param in params
            if not param.copy
            for tensor in param.hf
        }
        by_rank = engine.bytes_by_rank(
            [param for param in params if not param.copy], shape, lambda param: DTYPE_BYTES[wire_dtype(param, dtype)]
        )
        return cls(trainer, engine, plan, nodes, sum(tensors.values()), sum(by_rank), seconds, replicas, node_of_rank)

    @cached_property
    def readers(self) -> list[list[int]]:
        """The engine ranks on each node."""
        span = self.engine.nodes
        return readers_by_node([range(first, first + span) for first in range(0, self.nodes, span)], self.engine.ranks)

    def traffic(self) -> np.ndarray:
        """int64 [policy ranks, nodes / nodes of an engine, ranks of an engine]: bytes that a rank reads of what a
        policy rank wrote. Nodes share the policy ranks that hold the same slice."""
        shape = self.trainer.world_size, self.nodes // self.engine.nodes, self.engine.ranks
        nbytes = np.zeros(shape, dtype=np.int64)
        deliveries = Deliveries(self.plan, (), self.readers)
        together: dict[int, tuple[list[tuple[int, int]], np.ndarray]] = {}  # of the blocks that go alike
        for block in self.plan.blocks():
            routes = deliveries.of(block)
            _, row = together.setdefault(id(routes), (routes, np.zeros(self.engine.ranks, dtype=np.int64)))
            for read in block.reads:
                row[read.rank] += block.nbytes
        for routes, row in together.values():
            for node, sender in routes:
                readers = self.readers[node]
                nbytes[sender, node // self.engine.nodes, readers] += row[readers]
        return nbytes

    def sent(self) -> np.ndarray:
        """Return int64 [policy ranks]: bytes that each writes, over all nodes."""
        nbytes = np.zeros(self.trainer.world_size, dtype=np.int64)
        deliveries = Deliveries(self.plan, (), self.readers)
        for block in self.plan.blocks():
            for _, sender in deliveries.of(block):
                nbytes[sender] += block.nbytes
        return nbytes

    def numbers(self) -> dict[str, Any]:
        """Return what a refit costs beyond the bytes that it needs.

        `bytes_needed`, `bytes_read`: sums over all ranks of all engines. `serial_path_ratio`: bytes that the busiest
        policy rank sends, summed over the buckets, over an even share of all that is sent. `reader_path_ratio`: the
        same of what an engine's ranks read. `calls_per_process`: the driver's. `plan_bytes`: the plan as text.
        `plan_bytes_sent`: compressed bytes of the plan that all processes together get."""
        plan, engines = self.plan, self.nodes // self.engine.nodes * self.replicas
        deliveries = Deliveries(plan, self.node_of_rank, self.readers)
        sent = np.zeros(self.trainer.world_size, dtype=np.int64)
        read = np.zeros(self.engine.ranks, dtype=np.int64)
        serial_sent = serial_read = 0
        for bucket in plan.buckets:
            sent_now, read_now = np.zeros_like(sent), np.zeros_like(read)
            for block in bucket.blocks:
                for _, sender in deliveries.of(block):
                    sent_now[sender] += block.nbytes
                for copy in block.reads:
                    read_now[copy.rank] += block.nbytes
            sent, serial_sent = sent + sent_now, serial_sent + int(sent_now.max())
            read, serial_read = read + read_now, serial_read + int(read_now.max())
        first = [nodes.index(node) for nodes in [self.node_of_rank] for node in range(self.nodes) if node in nodes]
        ranks = self.trainer.world_size
        receivers = first if self.node_of_rank else range(ranks, ranks + self.nodes)
        parts = parts_of(plan, ranks, self.node_of_rank, tuple(map(tuple, self.readers)), tuple(receivers))
        of_engines = engines * sum(map(len, parts.readers))
        return {
            "bytes_needed": engines * self.engine_bytes,
            "bytes_read": engines * int(read.sum()),
            "serial_path_ratio": serial_sent / float(sent.mean()),
            "reader_path_ratio": serial_read / float(read.mean()),
            "calls_per_process": CALLS_PER_PROCESS,
            "buckets": len(plan.buckets),
            "plan_bytes": len(plan.to_json()),
            "plan_bytes_sent": sum(map(len, parts.senders)) + sum(map(len, parts.receivers)) + of_engines,
        }

    def text(self) -> str:
        """Return the overview as several lines of text."""
        plan, links, sent = self.plan, self.traffic(), self.sent()
        moved = plan.block_bytes
        read = links.sum(axis=0)  # [engines, ranks]
        span = self.engine.nodes
        engines = f"{self.nodes // span * self.replicas} engine(s) of {self.engine.describe()}"
        where = f"each of {self.nodes} node(s)" if span == 1 else f"each {span} of {self.nodes} nodes"
        to = (
            "each node"
            if span == 1
            else f"an engine, at most {_size(max(bytes_to(plan, ranks) for ranks in self.readers[:span]))} a node"
        )
        lines = [
            f"policy   {self.trainer.describe()}, {self.trainer.world_size} ranks",
            f"engines  {engines}, {self.replicas} on {where}",
            f"moves    {_size(moved)} to {to} in {plan.dtype}: {moved / self.needed_bytes:.3f} of what is needed",
            f"buffer   2 x {_size(plan.half_bytes)}, {len(plan.buckets)} buckets, "
            f"{sum(1 for _ in plan.blocks()):,} blocks, "
            f"{sum(len(block.reads) for block in plan.blocks()):,} copies into an engine",
            f"whole    {len(plan.fallbacks)} tensors travel whole, for vLLM's own loading",
            f"planned  in {self.plan_seconds:.3f} s, digest {plan.digest[:12]}",
            f"sends    {_spread(sent)}",
            f"reads    {_spread(read.ravel())}",
        ]
        busiest = max(int(sent.max()), int(read.max()))
        floors = ", ".join(f"{busiest / speed:.3f} s over {name}" for name, speed in LINKS.items())
        lines.append(f"floor    the busiest rank moves {_size(busiest)}: {floors}")
        if links.shape[0] <= SHOWN and links[0].size <= SHOWN:
            lines += ["", *_table(links, self.engine.nodes)]
        return "\n".join(lines)


def draw(path: Path, overview: Overview) -> None:
    """Draw a PNG of what each policy rank writes and each engine rank reads. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    links = overview.traffic().reshape(overview.trainer.world_size, -1) / 1e6
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes, bars = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    image = axes.imshow(np.ma.masked_equal(links, 0), aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set(xlabel="engine rank, node by node", ylabel="policy rank", title="MB read, by link")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    for node in range(1, overview.nodes):
        axes.axvline(node * len(overview.readers[0]) - 0.5, color="white", linewidth=0.5)
    figure.colorbar(image, ax=axes, location="left", shrink=0.6)
    bars.barh(range(overview.trainer.world_size), overview.sent() / 1e6, color="tab:blue")
    bars.set(xlabel="MB written", title="by policy rank")
    engines = overview.nodes // overview.engine.nodes * overview.replicas
    figure.suptitle(
        f"{overview.trainer.describe()}  to  {engines} x {overview.engine.describe()}: "
        f"{_size(overview.plan.block_bytes)} in {len(overview.plan.buckets)} buckets"
    )
    figure.savefig(path, dpi=120)


def _table(links: np.ndarray, span: int) -> list[str]:
    """Return bytes by pair of ranks, one line for each policy rank. `span`: nodes of one engine."""
    _, engines, ranks = links.shape
    names = [
        f"node {engine * span + rank * span // ranks} rank {rank}" if engines * span > 1 else f"rank {rank}"
        for engine in range(engines)
        for rank in range(ranks)
    ]
    width = max(10, *map(len, names))
    lines = ["read by " + " " * 7 + "".join(f"{name:>{width + 2}}" for name in names)]
    for source, row in enumerate(links.reshape(len(links), -1)):
        cells = "".join(f"{_size(int(count)) if count else '-':>{width + 2}}" for count in row)
        lines.append(f"policy rank {source:<3}{cells}")
    return lines


def _spread(values: np.ndarray) -> str:
    if len(values) <= SHOWN:
        return " ".join(f"[{rank}] {_size(int(count))}" for rank, count in enumerate(values))
    low, middle, high = (int(value) for value in np.percentile(values, [0, 50, 100]))
    return f"{len(values)} ranks: least {_size(low)}, median {_size(middle)}, most {_size(high)}"


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"
