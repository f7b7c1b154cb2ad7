"""Cut a refit plan into parts, one for each process: a policy rank gets its own blocks, a receiver those that arrive
for its node, an engine rank its own copies. The driver does it once and sends each process its part, compressed."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from grpo_mcore.families import Box
from grpo_mcore.layout import WHOLE
from grpo_mcore.refit.plan.delivery import Deliveries, engine_ranks
from grpo_mcore.refit.plan.plan import DTYPE_BYTES, Block, RefitPlan

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
    """One process's part of the plan with `digest`: rows by bucket, of the kind that it needs. `block_bytes`: size of
    all blocks of the plan."""

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

    @classmethod
    def unpacked(cls, packed: bytes) -> Part:
        return _unpacked(packed)


def texts_of(packed: bytes) -> Iterator[str]:
    """Yield the JSON objects that make up a part: what is its own, then rows that many parts share."""
    while packed:
        reader = zlib.decompressobj()
        yield reader.decompress(packed).decode()
        packed = reader.unused_data


@lru_cache(maxsize=4)
def _unpacked(packed: bytes) -> Part:
    plain: dict[str, Any] = {}
    for text in texts_of(packed):
        plain |= json.loads(text)
    to, senders = (dict(plain.pop(name, ())) for name in ("to", "senders"))
    plain["fills"] = tuple(
        tuple(
            Fill(number, param, _box(box), offset, nbytes, dtype, negative_exp, tuple(to[route]))
            for number, param, box, offset, nbytes, dtype, negative_exp, route in rows
        )
        for rows in plain.get("fills", ())
    )
    plain["arrivals"] = tuple(
        tuple(Arrival(offset, nbytes, senders[route]) for offset, nbytes, route in rows if route in senders)
        for rows in plain.get("arrivals", ())
    )
    plain["loads"] = tuple(
        tuple(Load(number, copy, param, _box(box), offset, dtype) for number, copy, param, box, offset, dtype in rows)
        for rows in plain.get("loads", ())
    )
    return Part(**plain)


def _box(spans: Sequence[Sequence[int]]) -> Box:
    return tuple((start, stop) for start, stop in spans)


class RefitParts(NamedTuple):
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
) -> RefitParts:
    """Cut a plan for `ranks` policy ranks. `node_of_rank`, `readers`: as in `Deliveries`. `receivers`: the policy rank
    that receives on each node; from `ranks` on, a process that only receives."""
    routes = _Routes(plan, Deliveries(plan, node_of_rank, readers), receivers, node_of_rank)
    loads: list[list[list[Load]]] = [[[] for _ in plan.buckets] for _ in range(engine_ranks(plan))]
    for index, bucket in enumerate(plan.buckets):
        for number, block in enumerate(bucket.blocks):
            for copy, read in enumerate(block.reads):
                loads[read.rank][index].append(Load(number, copy, read.param, read.box, block.offset, block.dtype))
    head = {name: getattr(plan, name) for name in ("digest", "dtype", "half_bytes", "buffer_bytes", "block_bytes")}
    fills = routes.rows("fills", {rank: routes.brought[rank] for rank in range(ranks)}, _fill)
    arrivals = routes.rows("arrivals", {member: routes.reaching[member] for member in receivers}, _arrival)

    def part(member: int) -> bytes:
        routes_of_member = {"to": list(routes.brought[member].items()), "senders": list(routes.awaited[member].items())}
        return _packed(head | routes_of_member) + fills.get(member, b"") + arrivals.get(member, b"")

    return RefitParts(
        tuple(map(part, range(ranks))),
        tuple(part(member) for member in receivers if member >= ranks),
        tuple(_packed(head | {"loads": rows}) for rows in loads),
        tuple(routes.sent[rank] for rank in range(ranks)),
    )


def _fill(number: int, block: Block, route: int) -> tuple[Any, ...]:
    """Return what a `Fill` has of a block."""
    return (
        number, block.param, block.box, block.offset, block.nbytes, block.dtype, block.negative_exp, route
    )  # fmt: skip


def _arrival(number: int, block: Block, route: int) -> tuple[Any, ...]:
    """Return what an `Arrival` has of a block."""
    return block.offset, block.nbytes, route


def _packed(plain: Mapping[str, Any]) -> bytes:
    return zlib.compress(json.dumps(plain, separators=(",", ":")).encode(), 1)


class _Routes:
    """The ways that blocks take to nodes, numbered: few, for most blocks share theirs. So rows of blocks are the same
    text for many processes, each of which needs only a small table of its own.

    `brought`: the nodes to which a policy rank brings blocks of a route, by rank and route. `reaching`: the routes that
    end on a receiver's node, by receiver; `awaited`: the ranks of other nodes that bring them there. `sent`: bytes that
    each policy rank brings to all nodes."""

    def __init__(
        self, plan: RefitPlan, deliveries: Deliveries, receivers: Sequence[int], node_of_rank: Sequence[int]
    ) -> None:
        self._buckets = plan.buckets
        self._of_blocks: list[list[int]] = []  # by bucket
        ways: list[list[tuple[int, int]]] = []
        numbers: dict[int, int] = {}  # by the id of a way, which `deliveries` keeps
        nbytes: Counter[int] = Counter()
        for bucket in plan.buckets:
            routes = []
            for block in bucket.blocks:
                way = deliveries.of(block)
                if (route := numbers.setdefault(id(way), len(ways))) == len(ways):
                    ways.append(way)
                routes.append(route)
                nbytes[route] += block.nbytes
            self._of_blocks.append(routes)
        self.brought: dict[int, dict[int, list[int]]] = defaultdict(dict)
        self.reaching: dict[int, list[int]] = defaultdict(list)
        self.awaited: dict[int, dict[int, int]] = defaultdict(dict)
        self.sent: Counter[int] = Counter()
        for route, way in enumerate(ways):
            for node, sender in way:
                self.brought[sender].setdefault(route, []).append(node)
                self.sent[sender] += nbytes[route]
                if receivers:
                    self.reaching[receivers[node]].append(route)
                    if not (node_of_rank and node_of_rank[sender] == node):
                        self.awaited[receivers[node]][route] = sender

    def rows(
        self, kind: str, wanted: Mapping[int, Iterable[int]], row: Callable[[int, Block, int], tuple[Any, ...]]
    ) -> dict[int, bytes]:
        """Return, for each process, the rows of all blocks on the routes that it wants, packed."""
        texts: dict[tuple[int, ...], list[list[Any]]] = {}
        on_route: dict[int, list[list[list[Any]]]] = defaultdict(list)
        for routes in map(tuple, wanted.values()):
            if routes not in texts:
                texts[routes] = [[] for _ in self._buckets]
                for route in routes:
                    on_route[route].append(texts[routes])
        for index, (bucket, of_blocks) in enumerate(zip(self._buckets, self._of_blocks, strict=True)):
            for number, (block, route) in enumerate(zip(bucket.blocks, of_blocks, strict=True)):
                if route in on_route:
                    made = row(number, block, route)
                    for text in on_route[route]:
                        text[index].append(made)
        packed = {routes: _packed({kind: rows}) for routes, rows in texts.items()}
        return {member: packed[tuple(routes)] for member, routes in wanted.items()}
