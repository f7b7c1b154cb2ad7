"""Cut a refit plan into parts, one for each process: a policy rank gets its own blocks, a receiver those that arrive
for its node, an engine rank its own copies. The driver does it once and sends each process its part, compressed."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from grpo_mcore.families import Box
from grpo_mcore.layout import WHOLE
from grpo_mcore.refit.delivery import Deliveries
from grpo_mcore.refit.plan import DTYPE_BYTES, RefitPlan

CALLS_PER_PROCESS = 4
"""Most calls that a process gets in a refit, whatever the number of buckets: an engine's start, stage, commit and
finish."""


class Seat(NamedTuple):
    """A place on the board of a node: first come the writers, then the readers. `session`: another number in each
    refit; a seat with an old one has not been taken yet. `timeout_s`: longest wait."""

    session: int
    seat: int
    writers: int
    readers: int
    timeout_s: float


class Fill(NamedTuple):
    """A block that a policy rank brings to the nodes `to`. `number`: its index in the bucket."""

    number: int
    param: str
    box: Box
    offset: int
    nbytes: int
    dtype: str
    negative_exp: bool
    to: tuple[int, ...]


class Arrival(NamedTuple):
    """A block that comes over the network from the policy rank `sender`."""

    offset: int
    nbytes: int
    sender: int


class Load(NamedTuple):
    """A copy: block `number` of the bucket becomes `box` of an engine parameter. `copy`: its index among the copies of
    the block."""

    number: int
    copy: int
    param: str
    box: Box
    offset: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(stop - start for start, stop in self.box) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Part:
    """One process's part of the plan with `digest`: rows by bucket, of the kind that it needs. `block_bytes`: of the
    whole plan."""

    digest: str
    dtype: str
    half_bytes: int
    buffer_bytes: int
    block_bytes: int
    fills: tuple[tuple[Fill, ...], ...] = ()
    arrivals: tuple[tuple[Arrival, ...], ...] = ()
    loads: tuple[tuple[Load, ...], ...] = ()

    def start(self, index: int) -> int:
        """First byte of bucket `index` in the buffer."""
        return index % 2 * self.half_bytes

    @property
    def buckets(self) -> int:
        return max(len(self.fills), len(self.arrivals), len(self.loads))

    def all_loads(self) -> Iterator[Load]:
        for loads in self.loads:
            yield from loads

    def whole_shapes(self) -> dict[str, list[int]]:
        """Return the shapes of the Hugging Face tensors that this engine rank gets whole, by name."""
        shapes: dict[str, list[int]] = {}
        for load in self.all_loads():
            if load.param.startswith(WHOLE):
                name, ends = load.param.removeprefix(WHOLE), [stop for _, stop in load.box]
                shapes[name] = list(map(max, ends, shapes.get(name, ends)))
        return shapes

    def packed(self) -> bytes:
        """Return the part as compressed text."""
        plain = self.__dict__ | {kind: getattr(self, kind) for kind in ("fills", "arrivals", "loads")}
        return zlib.compress(json.dumps(plain, separators=(",", ":")).encode(), 1)

    @classmethod
    def unpacked(cls, packed: bytes) -> Part:
        return _unpacked(packed)


@lru_cache(maxsize=4)
def _unpacked(packed: bytes) -> Part:
    plain: dict[str, Any] = json.loads(zlib.decompress(packed))
    plain["fills"] = tuple(
        tuple(
            Fill(number, param, _box(box), offset, nbytes, dtype, negative_exp, tuple(to))
            for number, param, box, offset, nbytes, dtype, negative_exp, to in rows
        )
        for rows in plain["fills"]
    )
    plain["arrivals"] = tuple(tuple(Arrival(*row) for row in rows) for rows in plain["arrivals"])
    plain["loads"] = tuple(
        tuple(Load(number, copy, param, _box(box), offset, dtype) for number, copy, param, box, offset, dtype in rows)
        for rows in plain["loads"]
    )
    return Part(**plain)


def _box(spans: Sequence[Sequence[int]]) -> Box:
    return tuple((start, stop) for start, stop in spans)


class Parts(NamedTuple):
    """The packed parts of every policy rank, of every node's receiver that is no policy rank, and of every engine rank.
    `sent`: bytes that each policy rank brings to all nodes."""

    senders: tuple[bytes, ...]
    receivers: tuple[bytes, ...]
    readers: tuple[bytes, ...]
    sent: tuple[int, ...]


@lru_cache(maxsize=4)
def parts_of(
    plan: RefitPlan,
    ranks: int,
    node_of_rank: tuple[int, ...],
    readers: tuple[tuple[int, ...], ...],
    receivers: tuple[int, ...],
) -> Parts:
    """Cut a plan for `ranks` policy ranks. `node_of_rank`, `readers`: as in `Deliveries`. `receivers`: by node, the
    policy rank that receives there; from `ranks` on, a process that only receives."""
    deliveries = Deliveries(plan, node_of_rank, readers)
    engine = 1 + max((read.rank for block in plan.blocks() for read in block.reads), default=0)
    fills: list[list[list[Fill]]] = [[[] for _ in plan.buckets] for _ in range(ranks)]
    arrivals: dict[int, list[list[Arrival]]] = {member: [[] for _ in plan.buckets] for member in receivers}
    loads: list[list[list[Load]]] = [[[] for _ in plan.buckets] for _ in range(engine)]
    for index, bucket in enumerate(plan.buckets):
        for number, block in enumerate(bucket.blocks):
            to: dict[int, list[int]] = {}
            for node, sender in deliveries.of(block):
                to.setdefault(sender, []).append(node)
                if receivers and not (node_of_rank and node_of_rank[sender] == node):
                    arrivals[receivers[node]][index].append(Arrival(block.offset, block.nbytes, sender))
            for sender, nodes in to.items():
                fills[sender][index].append(
                    Fill(
                        number,
                        block.param,
                        block.box,
                        block.offset,
                        block.nbytes,
                        block.dtype,
                        block.negative_exp,
                        tuple(nodes),
                    )  # fmt: skip
                )
            for copy, read in enumerate(block.reads):
                loads[read.rank][index].append(Load(number, copy, read.param, read.box, block.offset, block.dtype))

    def packed(**rows: Any) -> bytes:
        return Part(plan.digest, plan.dtype, plan.half_bytes, plan.buffer_bytes, plan.block_bytes, **rows).packed()

    return Parts(
        tuple(packed(fills=rows, arrivals=arrivals.get(rank, ())) for rank, rows in enumerate(fills)),
        tuple(packed(arrivals=arrivals[member]) for member in receivers if member >= ranks),
        tuple(packed(loads=rows) for rows in loads),
        tuple(sum(fill.nbytes * len(fill.to) for rows in of_rank for fill in rows) for of_rank in fills),
    )
