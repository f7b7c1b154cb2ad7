"""Plan which bytes move from which policy rank to which engine rank. Pure, torch-free, the same in every process.

A policy rank copies blocks of its own parameters into a buffer; every engine rank copies what it needs of each block to
its place in its own parameters. The buffer has two halves used in turn, so that one bucket of blocks is filled while
the engines read the one before it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from grpo_mcore.families import AdapterShape, Box, ModelShape, Param, adapter_params, params_of
from grpo_mcore.refit.layout import WHOLE, EngineLayout, TrainerLayout, trainer_pieces

DTYPE_BYTES = {"float64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30
ALIGNMENT = 64


class RefitError(RuntimeError):
    """A refit cannot be planned, or failed; the message names the tensor or bucket."""


class Read(NamedTuple):
    """One copy: box `at` of a block becomes `box` of an engine parameter, on one rank of every engine."""

    rank: int
    param: str  # or `WHOLE` and the name of a Hugging Face tensor
    box: Box  # may have one more dimension in front, of width 1
    at: Box


class Block(NamedTuple):
    """Box `box` of the parameter `param` of policy rank `source`, row-major in the buffer. `offset` and `nbytes` count
    from the bucket's start; `holders`: index in `RefitPlan.holders` of the ranks that could send it. `dtype`: of the
    bytes; `negative_exp`: they are -exp(values)."""

    source: int
    param: str
    box: Box
    offset: int
    nbytes: int
    holders: int
    dtype: str
    negative_exp: bool
    reads: tuple[Read, ...]


def read_bytes(block: Block, read: Read) -> int:
    """Return the bytes of one copy."""
    return _volume(read.at) * DTYPE_BYTES[block.dtype]


class Bucket(NamedTuple):
    """Blocks that are filled, then read, together. `nbytes` includes the alignment gaps."""

    blocks: tuple[Block, ...]
    nbytes: int


@dataclass(frozen=True)
class RefitPlan:
    """Every byte that an engine needs exactly once, in buckets that fit half the buffer.

    `half_bytes`: the largest bucket. Bucket i lies in half i % 2 of the buffer. `dtype`: of all blocks except those
    of parameters that always are float32.
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

    @cached_property
    def _json(self) -> str:
        plain = {
            "half_bytes": self.half_bytes,
            "dtype": self.dtype,
            "holders": self.holders,
            "buckets": self.buckets,
        }
        return json.dumps(plain, separators=(",", ":"))

    def to_json(self) -> str:
        """Return the plan as canonical JSON: equal plans give equal text."""
        return self._json

    @classmethod
    def from_json(cls, text: str) -> RefitPlan:
        found: dict[str, Any] = json.loads(text)
        buckets = tuple(
            Bucket(
                tuple(
                    Block(
                        *(source, param, _box(box), offset, nbytes, holders, dtype, negative_exp),
                        tuple(Read(rank, name, _box(place), _box(at)) for rank, name, place, at in reads),
                    )
                    for source, param, box, offset, nbytes, holders, dtype, negative_exp, reads in blocks
                ),
                size,
            )
            for blocks, size in found["buckets"]
        )
        return cls(buckets, found["half_bytes"], found["dtype"], tuple(map(tuple, found["holders"])))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan: both sides compare it before the first byte moves."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


@lru_cache(maxsize=8)
def plan_model_refit(
    shape: ModelShape,
    trainer: TrainerLayout,
    engine: EngineLayout,
    *,
    dtype: str,
    buffer_bytes: int,
    adapters: AdapterShape | None = None,
) -> RefitPlan:
    """Return `plan_refit` of all parameters of a model, or of its `adapters` alone; cached by arguments."""
    params = params_of(shape) if adapters is None else adapter_params(params_of(shape), adapters)
    return plan_refit(params, shape, trainer, engine, dtype=dtype, buffer_bytes=buffer_bytes)


def whole_shapes(plan: RefitPlan, rank: int) -> dict[str, list[int]]:
    """Return the shapes of the Hugging Face tensors that an engine rank gets whole, by name."""
    found: dict[str, list[int]] = {}
    for block in plan.blocks():
        for read in block.reads:
            if read.rank == rank and read.param.startswith(WHOLE):
                name, ends = read.param.removeprefix(WHOLE), [stop for _, stop in read.box]
                found[name] = list(map(max, ends, found.get(name, ends)))
    return found


def plan_refit(
    params: Sequence[Param],
    shape: ModelShape,
    trainer: TrainerLayout,
    engine: EngineLayout,
    *,
    dtype: str,
    buffer_bytes: int,
    alignment: int = ALIGNMENT,
    copies: bool = True,
) -> RefitPlan:
    """Plan each slice of `params` from the least loaded policy rank that holds it to the engine ranks that need it.

    `dtype`: "bfloat16" or "float32", of the bytes that move; parameters that always are float32 stay so.
    Blocks start at multiples of `alignment` bytes. Those of one parameter share a bucket if they fit, and a block
    larger than half the buffer is cut by rows. `copies` False: omit the reads, to count blocks only.
    Raises RefitError for a row larger than that, a slice that nobody holds or reads, or no parameters; LayoutError.
    """
    moved = [param for param in params if not param.copy]
    if not moved:
        raise RefitError("nothing to refit: the plan was asked for no parameters")
    if dtype not in DTYPE_BYTES:
        raise RefitError(f"refit in {dtype!r} is not possible; use one of {sorted(DTYPE_BYTES)}")
    packer = _Packer(buffer_bytes, alignment)
    loads = [0] * trainer.world_size
    holders: dict[tuple[int, ...], int] = {}
    templates: dict[Any, list[_Template]] = {}
    for param in moved:
        readers, blocks = engine.readers(param, shape.num_layers), []
        structure = (
            param.split, param.engine_form, tuple(tensor.shape for tensor in param.hf), bool(param.expert),
            param.engine is None,
        )  # fmt: skip
        if structure not in templates:
            templates[structure] = _templates(param, shape, trainer, engine)
        names, expert = _destinations(param, engine)
        wire = wire_dtype(param, dtype)
        for part, template in zip(trainer.parts(param, shape), templates[structure], strict=True):
            nbytes = _volume(template.box) * DTYPE_BYTES[wire]
            if not nbytes:  # nothing but padding of the vocabulary
                continue
            source = min(part.ranks, key=loads.__getitem__)
            loads[source] += nbytes
            reads = tuple(
                Read(rank, names[tensor], (*expert, *box), at)
                for reader, tensor, box, at in (template.reads if copies else ())
                for rank in readers[reader]
            )
            index = holders.setdefault(part.ranks, len(holders))
            form = param.engine_form.negative_exp
            blocks.append(Block(source, part.name, template.box, 0, nbytes, index, wire, form, reads))
        packer.add(blocks)
    buckets = packer.close()
    return RefitPlan(buckets, max(bucket.nbytes for bucket in buckets), dtype, tuple(holders))


def wire_dtype(param: Param, dtype: str) -> str:
    """Return the dtype in which a parameter is sent in a refit in `dtype`."""
    return "float32" if param.travels_in_float32 and DTYPE_BYTES[dtype] < DTYPE_BYTES["float32"] else dtype


class _Template(NamedTuple):
    """The copies of one slice of a parameter, equal in all layers: (reader's slice, number of the destination, box in
    it, box in the block)."""

    box: Box
    reads: list[tuple[int, int, Box, Box]]


def _templates(param: Param, shape: ModelShape, trainer: TrainerLayout, engine: EngineLayout) -> list[_Template]:
    """Return a template for each slice of the policy's parameter. Each overlap of held and needed slices is a copy."""
    names, expert = _destinations(param, engine)
    needed = [engine.places(param, shape, reader) for reader in range(engine.split(param))]
    got = [0] * len(needed)
    found = []
    for part in range(trainer.split(param)):
        reads: list[tuple[int, int, Box, Box]] = []
        held: set[Box] = set()
        for reader, wanted in enumerate(needed):
            copies: dict[int, list[tuple[Box, Box]]] = {}
            for piece in trainer_pieces(trainer, param, shape, part):
                for name, place in wanted:
                    overlap = _overlap(piece.hf_box, place.hf_box) if piece.hf == place.hf else None
                    if overlap is None:
                        continue
                    source = _moved(overlap, piece.hf_box, piece.local_box)
                    target = _moved(
                        overlap, place.hf_box, place.local_box[len(expert) if name == param.engine else 0 :]
                    )
                    copies.setdefault(names.index(name), []).append((source, target))
                    held.add(source)
                    got[reader] += _volume(source)
            for tensor, pairs in copies.items():
                reads += [(reader, tensor, target, source) for source, target in _merged(pairs)]
        box = _around(held)
        if sum(map(_volume, held)) != _volume(box):
            raise RefitError(f"the engines do not read all that policy slice {part} of {param.megatron!r} holds")
        corner = [start for start, _ in box]
        found.append(_Template(box, [(r, t, place, _shifted(at, corner)) for r, t, place, at in reads]))
    for reader, wanted in enumerate(needed):
        if got[reader] != sum(_volume(piece.hf_box) for _, piece in wanted):
            tensors = ", ".join(tensor.name for tensor in param.hf)
            raise RefitError(f"the policy ranks do not hold each element of {tensors} exactly once")
    return found


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
    """Packs blocks in order into buckets of at most half the buffer."""

    def __init__(self, buffer_bytes: int, alignment: int) -> None:
        self.buffer_bytes, self.alignment = buffer_bytes, alignment
        self.half = buffer_bytes // 2 // alignment * alignment
        self.buckets: list[Bucket] = []
        self.open: list[Block] = []
        self.end = 0

    def add(self, blocks: list[Block]) -> None:
        """Add the blocks of one parameter, in one bucket if they fit."""
        room = sum(self._room(block.nbytes) for block in blocks)
        if room <= self.half and self.end + room > self.half:
            self._next()
        for block in blocks:
            for part in self._by_rows(block):
                room = self._room(part.nbytes)
                if self.end + room > self.half:
                    self._next()
                self.open.append(part._replace(offset=self.end))
                self.end += room

    def close(self) -> tuple[Bucket, ...]:
        if self.open:
            self._next()
        return tuple(self.buckets)

    def _next(self) -> None:
        self.buckets.append(Bucket(tuple(self.open), self.end))
        self.open, self.end = [], 0

    def _room(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def _by_rows(self, block: Block) -> Iterator[Block]:
        if self._room(block.nbytes) <= self.half:
            yield block
            return
        (first, last), *tail = block.box
        row = math.prod(stop - start for start, stop in tail) * DTYPE_BYTES[block.dtype]
        count = self.half // row
        if not count:
            room = 2 * self._room(row)
            raise RefitError(
                f"one row of {block.param!r} has {row:,} bytes and does not fit half of the refit buffer of "
                f"{self.buffer_bytes:,} bytes; the smallest policy.refit_buffer_size_gb that holds it is "
                f"{_gib_up(room)} ({room:,} bytes)"
            )
        for start in range(first, last, count):
            stop = min(start + count, last)
            reads = tuple(_rows_of(block.reads, start - first, stop - first))
            yield block._replace(box=((start, stop), *tail), nbytes=(stop - start) * row, reads=reads)


def _rows_of(reads: Iterable[Read], start: int, stop: int) -> Iterator[Read]:
    """Restrict the copies to rows start..stop of their block, with boxes relative to these rows."""
    for read in reads:
        low, high = max(read.at[0][0], start), min(read.at[0][1], stop)
        if low < high:
            front = len(read.box) - len(read.at)  # the expert's dimension
            (first, _), *tail = read.box[front:]
            first += low - read.at[0][0]
            rows = (first, first + high - low)
            at = ((low - start, high - start), *read.at[1:])
            yield Read(read.rank, read.param, (*read.box[:front], rows, *tail), at)


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


def _joined(one: tuple[Box, Box], other: tuple[Box, Box]) -> tuple[Box, Box] | None:
    """Return two copies as one if they touch along one dimension on both sides, else None."""
    dims = range(len(one[0]))
    differ = [d for d in dims if one[0][d] != other[0][d] or one[1][d] != other[1][d]]
    if len(differ) != 1:
        return None
    (d,) = differ
    if any(a[d][1] != b[d][0] for a, b in zip(one, other, strict=True)):
        return None
    source, target = ((*a[:d], (a[d][0], b[d][1]), *a[d + 1 :]) for a, b in zip(one, other, strict=True))
    return source, target


def _overlap(one: Box, other: Box) -> Box | None:
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


def _moved(box: Box, origin: Box, target: Box) -> Box:
    """Return `box`, which lies in `origin`, shifted as `origin` is shifted onto `target`."""
    return _shifted(box, [start - to for (start, _), (to, _) in zip(origin, target, strict=True)])


def _shifted(box: Box, by: Sequence[int]) -> Box:
    return tuple((start - offset, stop - offset) for (start, stop), offset in zip(box, by, strict=True))


def _around(boxes: set[Box]) -> Box:
    return tuple((min(a for a, _ in spans), max(b for _, b in spans)) for spans in zip(*boxes, strict=True))


def _volume(box: Box) -> int:
    volume = 1 if box else 0
    for start, stop in box:
        volume *= stop - start
    return volume


def _box(found: Iterable[Sequence[int]]) -> Box:
    return tuple((start, stop) for start, stop in found)


def _gib_up(nbytes: int) -> float:
    """Return GiB rounded up to four decimals, so that the number in the message is enough."""
    return math.ceil(nbytes / GIB * 10_000) / 10_000
