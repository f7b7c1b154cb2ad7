"""Plan which bytes move from which policy rank to which engine rank. Pure, torch-free, the same in every process.

A policy rank copies blocks of its own parameters into a buffer; every engine rank copies the blocks that it needs to
their places in its own parameters. A block is cut so that whoever reads it reads all of it, and it lies contiguously:
nobody moves a byte that it does not need. The buffer has two halves used in turn, so that one bucket of blocks is
filled while the engines read the one before it. Each bucket takes an equal share of every policy rank's blocks, so that
all ranks, of all pipeline stages, are at work in all of them.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from grpo_mcore.families import AdapterShape, Box, ModelShape, Param, adapter_params, params_of
from grpo_mcore.layout import WHOLE, EngineLayout, PolicyLayout

DTYPE_BYTES = {"float64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30
ALIGNMENT = 64
GOLDEN = 0.6180339887
TURNS = 8
"""Deliveries of a block by one holder, from which on one more or less does not matter."""


class RefitError(RuntimeError):
    """A refit cannot be planned, or failed; the message names the tensor or bucket."""


class Read(NamedTuple):
    """One copy: a block becomes `box` of an engine parameter, on one rank of every engine."""

    rank: int
    param: str  # or `WHOLE` and the name of a Hugging Face tensor
    box: Box  # may have one more dimension in front, of width 1


class Block(NamedTuple):
    """Box `box` of the parameter `param` of policy rank `source`, row-major in the buffer. `offset` and `nbytes` count
    from the bucket's start; `holders`: index in `RefitPlan.holders` of the ranks that could send it. `dtype`: number
    format of the bytes; `negative_exp`: they are -exp(values)."""

    source: int
    param: str
    box: Box
    offset: int
    nbytes: int
    holders: int
    dtype: str
    negative_exp: bool
    reads: tuple[Read, ...]


class Bucket(NamedTuple):
    """Blocks that are filled, then read, together. `nbytes` includes the alignment gaps."""

    blocks: tuple[Block, ...]
    nbytes: int


@dataclass(frozen=True)
class RefitPlan:
    """Every byte that an engine needs exactly once, in buckets that fit half the buffer.

    `half_bytes`: the largest bucket. Bucket i lies in half i % 2 of the buffer. `dtype`: number format of all blocks
    except those of parameters that are always float32.
    """

    buckets: tuple[Bucket, ...]
    half_bytes: int
    dtype: str
    holders: tuple[tuple[int, ...], ...]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer that the transport allocates: one half is enough for one bucket."""
        return self.half_bytes * min(2, len(self.buckets))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes that are written into the buffer, without gaps."""
        return sum(block.nbytes for block in self.blocks())

    @cached_property
    def fallbacks(self) -> tuple[str, ...]:
        """The Hugging Face tensors that are sent whole, for vLLM's own loading."""
        return tuple(name.removeprefix(WHOLE) for name in self.destinations if name.startswith(WHOLE))

    @cached_property
    def destinations(self) -> tuple[str, ...]:
        """Everything that the plan fills, by name."""
        return tuple(sorted({read.param for block in self.blocks() for read in block.reads}))

    def blocks(self) -> Iterator[Block]:
        for bucket in self.buckets:
            yield from bucket.blocks

    def start(self, index: int) -> int:
        """First byte of bucket `index` in the buffer."""
        return index % 2 * self.half_bytes

    def to_json(self) -> str:
        """Return the plan as canonical JSON: equal plans give equal text."""
        plain = [self.half_bytes, self.dtype, self.holders, self.buckets]
        return json.dumps(plain, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan. Each process's part of it bears this digest."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)


@lru_cache(maxsize=8)
def plan_model_refit(
    shape: ModelShape,
    trainer: PolicyLayout,
    engine: EngineLayout,
    *,
    dtype: str,
    buffer_bytes: int,
    deliveries: int = 1,
    adapters: AdapterShape | None = None,
) -> RefitPlan:
    """Return `plan_refit` of all parameters of a model, or of its `adapters` alone; cached by arguments."""
    params = params_of(shape) if adapters is None else adapter_params(params_of(shape), adapters)
    return plan_refit(params, shape, trainer, engine, dtype=dtype, buffer_bytes=buffer_bytes, deliveries=deliveries)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Keep Python from collecting garbage: it would look through a million tuples again and again, and find nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_garbage_kept()
def plan_refit(
    params: Sequence[Param],
    shape: ModelShape,
    trainer: PolicyLayout,
    engine: EngineLayout,
    *,
    dtype: str,
    buffer_bytes: int,
    deliveries: int = 1,
    alignment: int = ALIGNMENT,
) -> RefitPlan:
    """Plan each slice of `params` from the least loaded policy rank that holds it to the engine ranks that need it.

    `deliveries`: how often the weights go out: to each node with engines, or to each group of nodes that an engine
    spans. All holders of a slice take turns, whichever the plan names. So with many deliveries it names few, and the
    number of blocks does not grow with the cluster.
    `dtype`: "bfloat16" or "float32", of the bytes that move; parameters that always are float32 stay so.
    Blocks start at multiples of `alignment` bytes. A block at the end of a rank's share of a bucket, or larger than
    half the buffer, is cut by rows.
    Raises RefitError for a row larger than that, a slice that nobody holds or reads, or no parameters; LayoutError.
    """
    moved = _moved_params(params, dtype)
    packer = _Packer(buffer_bytes, alignment)
    loads = [0] * trainer.world_size
    holders: dict[tuple[int, ...], int] = {}
    templates: dict[Any, list[list[_Template]]] = {}
    queues: list[list[Block]] = [[] for _ in loads]  # by policy rank, what it sends
    large = _large(moved, dtype, trainer, buffer_bytes)
    for param in moved:
        readers = engine.readers(param, shape.num_layers)
        if param.form not in templates:
            templates[param.form] = _templates(param, shape, trainer, engine)
        names, expert = _destinations(param, engine)
        wire = wire_dtype(param, dtype)
        for part, cells in zip(trainer.parts(param, shape), templates[param.form], strict=True):
            index = holders.setdefault(part.ranks, len(holders))
            for cell in cells:
                nbytes = _volume(cell.box) * DTYPE_BYTES[wire]
                reads = tuple(
                    Read(rank, names[tensor], (*expert, *box))
                    for reader, tensor, box in cell.reads
                    for rank in readers[reader]
                )
                nodes = len({read.rank * engine.nodes // engine.ranks for read in reads})
                form = param.engine_form.negative_exp
                block = Block(-1, part.name, cell.box, 0, nbytes, index, wire, form, reads)
                packer.check_row(block)
                sources = _sources(part.ranks, nodes * deliveries)
                for piece in _pieces(block, large) if len(sources) > 1 else (block,):
                    source = min(sources, key=loads.__getitem__)
                    loads[source] += piece.nbytes * nodes
                    queues[source].append(piece._replace(source=source))
    buckets = packer.pack([_Queue(queue, engine) for queue in queues if queue])
    return RefitPlan(buckets, max(bucket.nbytes for bucket in buckets), dtype, tuple(holders))


class RefitBytes(NamedTuple):
    """Bytes that a refit moves. `written`: bytes that each policy rank writes. `held`: bytes by (policy ranks that hold
    them, nodes of an engine that read them)."""

    written: tuple[int, ...]
    held: dict[tuple[tuple[int, ...], frozenset[int]], int]


def count_refit(
    params: Sequence[Param],
    shape: ModelShape,
    trainer: PolicyLayout,
    engine: EngineLayout,
    *,
    dtype: str,
    buffer_bytes: int,
    deliveries: int = 1,
) -> RefitBytes:
    """Count the bytes of `plan_refit` with the same arguments, in a fraction of its time: parameters that are cut alike
    and have the same holders and readers are planned once. Raises as `plan_refit` does."""
    moved = _moved_params(params, dtype)
    packer = _Packer(buffer_bytes, ALIGNMENT)
    large = _large(moved, dtype, trainer, buffer_bytes)
    templates: dict[Any, list[list[_Template]]] = {}
    counted: dict[Any, list[_Share]] = {}
    loads, written = [0] * trainer.world_size, [0] * trainer.world_size
    held: Counter[tuple[tuple[int, ...], frozenset[int]]] = Counter()
    for param in moved:
        wire = wire_dtype(param, dtype)
        readers = engine.readers(param, shape.num_layers)
        alike = param.form, wire, readers, trainer.place(param, shape.num_layers)
        shares = counted.get(alike)
        if shares is None:
            if param.form not in templates:
                templates[param.form] = _templates(param, shape, trainer, engine)
            shares = counted[alike] = []
            for part, cells in zip(trainer.parts(param, shape), templates[param.form], strict=True):
                for cell in cells:
                    ranks = {rank for reader, *_ in cell.reads for rank in readers[reader]}
                    nodes = frozenset(rank * engine.nodes // engine.ranks for rank in ranks)
                    nbytes = _volume(cell.box) * DTYPE_BYTES[wire]
                    block = Block(-1, part.name, cell.box, 0, nbytes, 0, wire, False, ())
                    packer.check_row(block)
                    sources = _sources(part.ranks, len(nodes) * deliveries)
                    pieces = [piece.nbytes for piece in _pieces(block, large)] if len(sources) > 1 else [nbytes]
                    shares.append(_Share(part.ranks, nodes, sources, nbytes, pieces))
        for share in shares:
            held[share.holders, share.nodes] += share.nbytes
            for nbytes in share.pieces:
                source = min(share.sources, key=loads.__getitem__)
                loads[source] += nbytes * len(share.nodes)
                written[source] += nbytes
    return RefitBytes(tuple(written), dict(held))


class _Share(NamedTuple):
    """A block as `count_refit` sees it: who holds it, which nodes of an engine read it, who may send it, its pieces."""

    holders: tuple[int, ...]
    nodes: frozenset[int]
    sources: Sequence[int]
    nbytes: int
    pieces: list[int]


def _moved_params(params: Sequence[Param], dtype: str) -> list[Param]:
    moved = [param for param in params if not param.copy]
    if not moved:
        raise RefitError("nothing to refit: the plan was asked for no parameters")
    if dtype not in DTYPE_BYTES:
        raise RefitError(f"refit in {dtype!r} is not possible; use one of {sorted(DTYPE_BYTES)}")
    return moved


def _large(params: Sequence[Param], dtype: str, trainer: PolicyLayout, buffer_bytes: int) -> int:
    """Return the bytes above which a block is divided among the ranks that hold it."""
    total = sum(param.numel * DTYPE_BYTES[wire_dtype(param, dtype)] for param in params)
    return max(total // (8 * trainer.world_size), buffer_bytes // 16)


def _sources(holders: Sequence[int], times: int) -> Sequence[int]:
    """Return the holders that the plan may name for a block that goes to `times` nodes. From there on all holders take
    turns."""
    return holders[:: max(1, times // TURNS)]


def wire_dtype(param: Param, dtype: str) -> str:
    """Return the dtype in which a parameter is sent in a refit in `dtype`."""
    return "float32" if param.travels_in_float32 and DTYPE_BYTES[dtype] < DTYPE_BYTES["float32"] else dtype


class _Template(NamedTuple):
    """A block of a parameter without its names, equal in all layers: its box, and its copies as (reader's slice, number
    of the destination, box in it)."""

    box: Box
    reads: list[tuple[int, int, Box]]


def _templates(param: Param, shape: ModelShape, trainer: PolicyLayout, engine: EngineLayout) -> list[list[_Template]]:
    """Return templates of the blocks of each slice of the policy's parameter; none if it is all padding. Each overlap
    of held and needed slices is a copy."""
    names, expert = _destinations(param, engine)
    needed = [engine.places(param, shape, reader) for reader in range(engine.split(param))]
    got = [0] * len(needed)
    parts = []
    for part in range(trainer.split(param)):
        slices: list[tuple[int, int, Box, Box]] = []
        held: set[Box] = set()
        for reader, boxes in enumerate(needed):
            copies: dict[int, list[tuple[Box, Box]]] = {}
            for piece in trainer.pieces(param, shape, part):
                for name, box in boxes:
                    overlap = _overlap(piece.hf_box, box.hf_box) if piece.hf == box.hf else None
                    if overlap is None:
                        continue
                    source = _moved(overlap, piece.hf_box, piece.local_box)
                    target = _moved(overlap, box.hf_box, box.local_box[len(expert) if name == param.engine else 0 :])
                    copies.setdefault(names.index(name), []).append((source, target))
                    held.add(source)
                    got[reader] += _volume(source)
            for tensor, pairs in copies.items():
                slices += [(reader, tensor, target, source) for source, target in _merged(pairs)]
        if sum(map(_volume, held)) != _volume(_around(held)):
            raise RefitError(f"the engines do not read all that policy slice {part} of {param.megatron!r} holds")
        parts.append(_cells(slices))
    for reader, boxes in enumerate(needed):
        if got[reader] != sum(_volume(piece.hf_box) for _, piece in boxes):
            tensors = ", ".join(tensor.name for tensor in param.hf)
            raise RefitError(f"the policy ranks do not hold each element of {tensors} exactly once")
    return parts


def _cells(slices: Sequence[tuple[int, int, Box, Box]]) -> list[_Template]:
    """Cut what is read wherever a slice begins or ends, so that each cell is read as a whole or not at all.

    `slices`: (reader's slice, number of the destination, box in it, box in the policy's parameter)."""
    sources = [source for *_, source in slices]
    edges = [sorted({edge for spans in sides for edge in spans}) for sides in zip(*sources, strict=True)]
    cells = []
    for cell in itertools.product(*map(itertools.pairwise, edges)) if edges else ():
        reads = [
            (reader, tensor, _moved(cell, source, target))
            for reader, tensor, target, source in slices
            if _overlap(cell, source) == cell
        ]
        if reads:
            cells.append(_Template(cell, reads))
    return cells


def _destinations(param: Param, engine: EngineLayout) -> tuple[list[str], Box]:
    """Return (names of what the parameter fills, the expert dimension in front of its boxes)."""
    if param.engine is None:
        return [WHOLE + tensor.name for tensor in param.hf], ()
    if param.expert is None:
        return [param.engine], ()
    index, count = param.expert
    local = index % (count // engine.tensor) if engine.expert_parallel else index
    return [param.engine], ((local, local + 1),)


class _Packer:
    """Packs the blocks that each policy rank sends into buckets of at most half the buffer."""

    def __init__(self, buffer_bytes: int, alignment: int) -> None:
        self.buffer_bytes, self.alignment = buffer_bytes, alignment
        self.half = buffer_bytes // 2 // alignment * alignment
        self.buckets: list[Bucket] = []
        self.open: list[Block] = []
        self.end = 0

    def pack(self, queues: Sequence[_Queue]) -> tuple[Bucket, ...]:
        """Give every bucket an equal share of each queue."""
        room = sum(self._room(block.nbytes) for queue in queues for block, _ in queue.blocks)
        fewest = max(1, -(-room // max(1, self.half)))
        for count in range(fewest, fewest + 5 + fewest // 10, 1 + fewest // 50):
            shares = [queue.shares(count) for queue in queues]
            if self._largest(shares, count) <= self.half:  # rounded to rows, shares are not quite equal
                break
        for index in range(count):
            for share in shares:
                for block in share[index]:
                    self._add(block)
            if self.open:
                self._next()
        return tuple(self.buckets)

    def _largest(self, shares: Sequence[Sequence[Sequence[Block]]], count: int) -> int:
        sizes = [sum(self._room(block.nbytes) for share in shares for block in share[index]) for index in range(count)]
        return max(sizes)

    def _add(self, block: Block) -> None:
        for part in self._by_rows(block):
            room = self._room(part.nbytes)
            if self.end + room > self.half:
                self._next()
            self.open.append(part._replace(offset=self.end))
            self.end += room

    def _next(self) -> None:
        self.buckets.append(Bucket(tuple(self.open), self.end))
        self.open, self.end = [], 0

    def _room(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def _by_rows(self, block: Block) -> Iterator[Block]:
        if self._room(block.nbytes) <= self.half:
            yield block
        else:
            yield from _pieces(block, self.half)

    def check_row(self, block: Block) -> None:
        """Raise RefitError if no row of the block fits a bucket."""
        if (row := _row_bytes(block)) > self.half:
            room = 2 * self._room(row)
            raise RefitError(
                f"one row of {block.param!r} has {row:,} bytes and does not fit half of the refit buffer of "
                f"{self.buffer_bytes:,} bytes; the smallest policy.refit_buffer_size_gb that holds it is "
                f"{_gib_up(room)} ({room:,} bytes)"
            )


class _Queue:
    """The blocks that one policy rank sends, in the order in which it sends them."""

    def __init__(self, blocks: Sequence[Block], engine: EngineLayout) -> None:
        """Order the blocks so that all readers are served at the rate of their bytes, each in the model's order."""
        readers = [tuple(read.rank for read in block.reads) for block in blocks]
        totals: Counter[tuple[int, ...]] = Counter()
        for ranks, block in zip(readers, blocks, strict=True):
            totals[ranks] += block.nbytes
        # Policy ranks whose queues are alike begin with different readers.
        phases = {ranks: GOLDEN * (1 + blocks[0].source) * (1 + turn) % 1 for turn, ranks in enumerate(totals)}
        done: Counter[tuple[int, ...]] = Counter()
        order = []
        for number, (ranks, block) in enumerate(zip(readers, blocks, strict=True)):
            order.append(((done[ranks] + block.nbytes * phases[ranks]) / totals[ranks], number))
            done[ranks] += block.nbytes
        nodes = {ranks: len({rank * engine.nodes // engine.ranks for rank in ranks}) or 1 for ranks in totals}
        self.blocks = [(blocks[number], nodes[readers[number]]) for _, number in sorted(order)]
        """With the number of nodes of an engine to which each goes."""
        self.sent = sum(block.nbytes * times for block, times in self.blocks)

    def shares(self, count: int) -> list[list[Block]]:
        """Divide the queue into `count` parts with which the rank is busy equally long. A block across a border is cut,
        unless it is small."""
        shares: list[list[Block]] = [[] for _ in range(count)]
        done = index = 0
        for block, times in self.blocks:
            rest: Block | None = block
            while rest is not None:
                room = -(-self.sent * (index + 1) // count) - done  # until the end of this share
                size = rest.nbytes * times
                rows = round(room / size * _rows(rest))
                small = size * 16 * count <= self.sent
                part, after = rest, None
                if index < count - 1 and rows < _rows(rest) and not (small and 2 * room >= size):
                    if small or rows < 1:
                        index += 1
                        continue
                    part, after = _rows_of(rest, 0, rows), _rows_of(rest, rows, _rows(rest))
                shares[index].append(part)
                done += part.nbytes * times
                rest = after
        return shares


def _rows(block: Block) -> int:
    (first, last), *_ = block.box
    return last - first


def _row_bytes(block: Block) -> int:
    return block.nbytes // _rows(block)


def _pieces(block: Block, nbytes: int) -> Iterator[Block]:
    """Cut a block by rows into pieces of at most `nbytes`, or of one row."""
    count, rows = max(1, nbytes // _row_bytes(block)), _rows(block)
    if count >= rows:
        yield block
        return
    for start in range(0, rows, count):
        yield _rows_of(block, start, min(start + count, rows))


def _rows_of(block: Block, start: int, stop: int) -> Block:
    (first, _), *tail = block.box
    reads = []
    for read in block.reads:
        front = len(read.box) - len(block.box)  # the expert's dimension
        low = read.box[front][0] + start
        reads.append(read._replace(box=(*read.box[:front], (low, low + stop - start), *read.box[front + 1 :])))
    box = ((first + start, first + stop), *tail)
    return block._replace(box=box, nbytes=(stop - start) * _row_bytes(block), reads=tuple(reads))


def _merged(copies: list[tuple[Box, Box]]) -> list[tuple[Box, Box]]:
    """Merge touching (source, target) boxes."""
    copies = sorted(copies)
    index = 0
    while index + 1 < len(copies):
        joined = _joined(copies[index], copies[index + 1])
        if joined is None:
            index += 1
        else:
            copies[index : index + 2] = [joined]
            index = max(index - 1, 0)
    return copies


def _joined(first: tuple[Box, Box], other: tuple[Box, Box]) -> tuple[Box, Box] | None:
    """Return two copies as one if they touch along one dimension on both sides, else None."""
    dims = range(len(first[0]))
    differ = [d for d in dims if first[0][d] != other[0][d] or first[1][d] != other[1][d]]
    if len(differ) != 1:
        return None
    (d,) = differ
    if any(a[d][1] != b[d][0] for a, b in zip(first, other, strict=True)):
        return None
    source, target = ((*a[:d], (a[d][0], b[d][1]), *a[d + 1 :]) for a, b in zip(first, other, strict=True))
    return source, target


def _overlap(first: Box, other: Box) -> Box | None:
    overlap = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, other, strict=True))
    return overlap if all(start < stop for start, stop in overlap) else None


def _moved(box: Box, origin: Box, target: Box) -> Box:
    """Return `box`, which lies in `origin`, shifted as `origin` is shifted onto `target`."""
    by = [to - start for (start, _), (to, _) in zip(origin, target, strict=True)]
    return tuple((start + offset, stop + offset) for (start, stop), offset in zip(box, by, strict=True))


def _around(boxes: set[Box]) -> Box:
    return tuple((min(a for a, _ in spans), max(b for _, b in spans)) for spans in zip(*boxes, strict=True))


def _volume(box: Box) -> int:
    volume = 1 if box else 0
    for start, stop in box:
        volume *= stop - start
    return volume


def _gib_up(nbytes: int) -> float:
    """Return GiB rounded up to four decimals, so that the number in the message is enough."""
    return math.ceil(nbytes / GIB * 10_000) / 10_000
