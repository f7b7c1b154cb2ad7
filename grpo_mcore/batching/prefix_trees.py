"""Planning with shared prefixes: samples that begin alike stay together, and count only what is new of each.

The planner knows a sample's tokens by hashes of its first block, its first two, and so on. Rows are built from the
tokens themselves (shared_prefixes.py): two prefixes with one hash would make a bin larger than planned, not wrong.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

BLOCK_TOKENS = 32
"""Samples share prefixes in whole blocks of this many tokens, or of a multiple of it."""

MIN_SAVED = 0.1
"""Samples share prefixes where that saves at least this share of their tokens: less is not worth its extra work."""

Prefixes = tuple[int, ...]
"""`prefix_hashes` of a sample."""


@dataclass(frozen=True)
class Tree:
    """Samples that are planned as one: they stay in one bin, in this order."""

    samples: tuple[int, ...]
    tokens: int
    """Tokens to compute: each shared prefix once."""
    cost: float


def prefix_hashes(token_ids: Sequence[int], block: int = BLOCK_TOKENS) -> Prefixes:
    """Return a hash of the first block of tokens, of the first two, and so on, as far as whole blocks go."""
    running, hashes = blake2b(digest_size=8), []
    for start in range(0, len(token_ids) - block + 1, block):
        running.update(array("q", token_ids[start : start + block]).tobytes())
        hashes.append(int.from_bytes(running.digest(), "little"))
    return tuple(hashes)


def prefix_sketch(token_ids: Sequence[int], block: int = BLOCK_TOKENS) -> str:
    """Return the hashes of the first 1, 2, 4, 8, ... blocks of tokens and of all whole blocks, each in 8 characters of
    one byte. The driver keeps this of a sample whose tokens stay in the object store."""
    hashes = prefix_hashes(token_ids, block)
    return array("Q", (hashes[count - 1] for count in _sketched(len(hashes)))).tobytes().decode("latin-1")


def prefixes_of(sketch: str, length: int, block: int = BLOCK_TOKENS) -> Prefixes:
    """Return the prefixes of the `length` tokens with this sketch. Samples that begin alike throughout share all of
    them; others share at least half of what they have in common."""
    counts = _sketched(length // block)
    hashes = array("Q", sketch.encode("latin-1"))
    starts = [0, *counts]
    return tuple(
        known - (count - blocks)  # another one for each number of blocks, known by the next hash of the sketch
        for start, count, known in zip(starts, counts, hashes, strict=False)
        for blocks in range(start + 1, count + 1)
    )


def _sketched(blocks: int) -> list[int]:
    """Return the lengths, in blocks, of the prefixes whose hashes a sketch keeps: powers of two, and the whole."""
    powers = [1 << power for power in range(blocks.bit_length())]
    return powers if not blocks or powers[-1] == blocks else [*powers, blocks]


def in_blocks(prefixes: Prefixes, block: int) -> Prefixes:
    """Return the hashes of blocks of `block` tokens, a multiple of BLOCK_TOKENS, of a sample with these."""
    return prefixes[block // BLOCK_TOKENS - 1 :: block // BLOCK_TOKENS]


def computed_tokens(lengths: Sequence[int], prefixes: Sequence[Prefixes], block: int = BLOCK_TOKENS) -> int:
    """Return how many tokens of one bin's samples have to be computed. The arguments are the samples' lengths and
    prefixes."""
    hashes = [block_hash for of_sample in prefixes for block_hash in of_sample]
    return sum(lengths) - block * (len(hashes) - len(set(hashes)))


def saves_enough(computed: int, tokens: int) -> bool:
    """Return whether sharing prefixes is worth its extra work if it leaves `computed` of `tokens` tokens to compute."""
    return computed <= (1 - MIN_SAVED) * tokens


def make_trees(
    samples: Sequence[int],
    lengths: Sequence[int],
    prefixes: Sequence[Prefixes],
    cost: Callable[[int], float],
    *,
    room: int,
    most: int,
    block: int = BLOCK_TOKENS,
) -> list[Tree]:
    """Gather the samples that share a first block into trees of at most `room` tokens and `most` samples.

    lengths and prefixes: of all samples of the step, by index. cost: predicted time of a sequence by its length.
    """
    by_first_block: dict[object, list[int]] = {}
    for sample in samples:
        by_first_block.setdefault(prefixes[sample][:1] or ("alone", sample), []).append(sample)
    trees = []
    for members in by_first_block.values():
        members.sort(key=lambda sample: prefixes[sample])  # neighbours share the longest prefixes
        tree = Tree((), 0, 0.0)
        for sample in members:
            length = lengths[sample]
            shared = block * _common(prefixes[tree.samples[-1]], prefixes[sample]) if tree.samples else 0
            if tree.samples and (len(tree.samples) == most or tree.tokens + length - shared > room):
                trees.append(tree)
                tree, shared = Tree((), 0, 0.0), 0
            new_cost = cost(length) - cost(shared)
            tree = Tree((*tree.samples, sample), tree.tokens + length - shared, tree.cost + new_cost)
        trees.append(tree)
    return trees


def _common(first: Prefixes, second: Prefixes) -> int:
    """Return how many hashes at the start are equal."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
