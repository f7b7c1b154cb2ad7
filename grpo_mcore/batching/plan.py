"""The plan of a step, from lengths alone: samples -> optimizer steps -> data-parallel ranks -> bins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_mcore.batching.fitting import decreasing
from grpo_mcore.batching.packing import PackingError, bin_room, check_sizes, pack, spread

Bin = tuple[int, ...]


@dataclass(frozen=True)
class CostModel:
    """Predicted time of a sample, in any unit: linear * length + quadratic * length**2 (attention).

    The default ratio is that of a dense transformer of hidden size 2048: 12 * hidden**2 weights per layer against
    hidden * length multiplications of causal attention.
    """

    linear: float = 1.0
    quadratic: float = 1.0 / (12 * 2048)

    def __call__(self, length: int) -> float:
        return self.linear * length + self.quadratic * length * length


@dataclass(frozen=True)
class BatchPlan:
    """The global batch of one optimizer step: `ranks[rank][bin]` holds sample indices; bins per rank are equal."""

    ranks: tuple[tuple[Bin, ...], ...]

    @property
    def num_bins(self) -> int:
        """Number of bins (micro-batches) per rank."""
        return len(self.ranks[0])

    @property
    def samples(self) -> tuple[int, ...]:
        """All samples of the batch, in order."""
        return tuple(sorted(sample for bins in self.ranks for bin in bins for sample in bin))


@dataclass(frozen=True)
class StepPlan:
    """The samples that every rank computes in a step, in order. Plain ints: it can be sent, compared and hashed."""

    lengths: tuple[int, ...]
    batches: tuple[BatchPlan, ...]
    """One per optimizer step."""
    cost: CostModel

    @property
    def dp(self) -> int:
        return len(self.batches[0].ranks)

    def for_rank(self, rank: int) -> tuple[tuple[Bin, ...], ...]:
        """Return the rank's bins for each optimizer step."""
        return tuple(batch.ranks[rank] for batch in self.batches)

    def samples_of(self, rank: int) -> tuple[int, ...]:
        """Return the samples that the rank needs, in order."""
        return tuple(sorted(sample for bins in self.for_rank(rank) for bin in bins for sample in bin))

    def report(self) -> dict[str, float]:
        """Return figures for the log: bins per rank over the step, and tokens of the longest and the mean bin.

        rank_imbalance: time added by waiting for the slowest rank, as a share of the work; 0 is perfect.
        """
        tokens = [sum(self.lengths[i] for i in bin) for batch in self.batches for r in batch.ranks for bin in r]
        slowest = work = 0.0
        for batch in self.batches:
            costs = [sum(self.cost(self.lengths[i]) for bin in bins for i in bin) for bins in batch.ranks]
            slowest += max(costs)
            work += sum(costs) / len(costs)
        return {
            "bins_per_rank": float(sum(batch.num_bins for batch in self.batches)),
            "bin_tokens_max": float(max(tokens)),
            "bin_tokens_mean": sum(tokens) / len(tokens),
            "rank_imbalance": slowest / work - 1.0,
        }


def plan_step(
    lengths: Sequence[int],
    *,
    dp: int,
    optimizer_steps: int = 1,
    capacity: int | None = None,
    algorithm: str = "balanced",
    multiple: int = 1,
    micro_batch_size: int | None = None,
    cost: CostModel | None = None,
    seed: int = 0,
) -> StepPlan:
    """Distribute samples over ranks and bins: each exactly once, equally many bins per rank, balanced predicted cost.

    Samples are cut in order into `optimizer_steps` global batches of equal size (sizes differ by one if the number does
    not divide, because samples failed). Each batch is distributed over `dp` ranks from the costliest sample down, and
    each rank packs its own samples: with `capacity`, into bins of that many tokens by `algorithm` (see `pack` for
    these, `multiple` and `seed`); with `micro_batch_size` (packing disabled), into bins of that many samples of similar
    length. Bins are in order of decreasing size, so that a row that does not fit in memory fails at once. Samples in a
    bin are in order. A bin is empty only if a batch has fewer samples than bins; it is last, and runs as padding.

    Raises PackingError as `pack` does, if an optimizer step has fewer samples than there are ranks, and unless exactly
    one of capacity and micro_batch_size is given.
    """
    fill = _bin_maker(capacity, algorithm, multiple, micro_batch_size, seed)
    sizes = tuple(int(length) for length in lengths)
    _check(sizes, dp, optimizer_steps, None if capacity is None else bin_room(capacity, multiple))
    cost = cost or CostModel()
    costs = [cost(size) for size in sizes]
    batches = tuple(_plan_batch(samples, sizes, costs, dp, fill) for samples in _cut(len(sizes), optimizer_steps))
    return StepPlan(sizes, batches, cost)


BinMaker = Callable[[Sequence[int], int], list[list[int]]]
"""(lengths of a rank's samples, minimum number of bins) -> bins of positions in that list."""


def _bin_maker(
    capacity: int | None, algorithm: str, multiple: int, micro_batch_size: int | None, seed: int
) -> BinMaker:
    if (capacity is None) == (micro_batch_size is None):
        raise PackingError("give either capacity (sequence packing) or micro_batch_size (packing disabled)")
    if capacity is not None:
        return lambda sizes, count: pack(sizes, capacity, algorithm, multiple, min_bins=count, seed=seed)
    size = micro_batch_size or 0
    if size < 1:
        raise PackingError(f"micro_batch_size is {size}; it must be at least 1")

    def by_count(sizes: Sequence[int], count: int) -> list[list[int]]:
        order = decreasing(sizes)
        return [order[cut.start : cut.stop] for cut in _cut(len(order), max(count, -(-len(order) // size)))]

    return by_count


def _check(sizes: Sequence[int], dp: int, optimizer_steps: int, room: int | None) -> None:
    if dp < 1 or optimizer_steps < 1:
        raise PackingError(f"dp {dp} and optimizer_steps {optimizer_steps} must be at least 1")
    check_sizes(sizes, room if room is not None else max(sizes, default=0))
    if len(sizes) < dp * optimizer_steps:
        raise PackingError(
            f"{len(sizes)} samples are too few for {optimizer_steps} optimizer steps on {dp} data-parallel "
            f"ranks: at least {dp * optimizer_steps} are needed"
        )


def _plan_batch(
    samples: Sequence[int], sizes: Sequence[int], costs: Sequence[float], dp: int, fill: BinMaker
) -> BatchPlan:
    order = sorted(samples, key=lambda sample: (-costs[sample], sample))
    plan = _bins_of_ranks(spread(order, costs, dp), sizes, fill)
    if all(bin for bins in plan.ranks for bin in bins):
        return plan
    # A rank has fewer samples than another one needs bins. With equal shares that happens only if it is unavoidable.
    return _bins_of_ranks(_equal_shares(order, costs, dp), sizes, fill)


def _equal_shares(order: list[int], costs: Sequence[float], dp: int) -> list[list[int]]:
    """Distribute in rounds of one sample per rank, the costliest to the rank with the least cost so far."""
    shares: list[list[int]] = [[] for _ in range(dp)]
    loads = [0.0] * dp
    for start in range(0, len(order), dp):
        lightest_first = sorted(range(dp), key=lambda rank: (loads[rank], rank))
        for rank, sample in zip(lightest_first, order[start : start + dp], strict=False):
            shares[rank].append(sample)
            loads[rank] += costs[sample]
    return shares


def _bins_of_ranks(shares: list[list[int]], sizes: Sequence[int], fill: BinMaker) -> BatchPlan:
    shares = [sorted(samples) for samples in shares]
    lengths = [[sizes[i] for i in samples] for samples in shares]
    packed = [fill(rank_lengths, 1) for rank_lengths in lengths]
    count = max(len(bins) for bins in packed)
    ranks = []
    for samples, rank_lengths, bins in zip(shares, lengths, packed, strict=True):
        if len(bins) < count:
            bins = fill(rank_lengths, min(count, len(samples)))
        named = [tuple(sorted(samples[position] for position in bin)) for bin in bins]
        named.sort(key=lambda bin: (-sum(sizes[i] for i in bin), bin))
        ranks.append(tuple(named) + ((),) * (count - len(named)))
    return BatchPlan(tuple(ranks))


def _cut(total: int, parts: int) -> list[range]:
    """Cut range(total) into `parts` ranges whose lengths differ by at most one."""
    return [range(total * part // parts, total * (part + 1) // parts) for part in range(parts)]
