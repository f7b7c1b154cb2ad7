"""The plan of a step: samples -> optimizer steps -> data-parallel ranks -> bins, from lengths alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_mcore.batching.fitting import decreasing
from grpo_mcore.batching.packing import PackingError, bin_room, check_sizes, pack, spread

Bin = tuple[int, ...]


@dataclass(frozen=True)
class CostModel:
    """Predicted time of a sample in any unit: linear * length + quadratic * length**2 (attention).

    The default ratio is that of a dense transformer of hidden size 2048: 12 * hidden**2 weights a layer
    against hidden * length multiplications of causal attention.
    """

    linear: float = 1.0
    quadratic: float = 1.0 / (12 * 2048)

    def __call__(self, length: int) -> float:
        return self.linear * length + self.quadratic * length * length


@dataclass(frozen=True)
class BatchPlan:
    """One optimizer step's global batch: `ranks[rank][bin]` holds sample indices; all ranks have as many
    bins.
    """

    ranks: tuple[tuple[Bin, ...], ...]

    @property
    def num_bins(self) -> int:
        """Bins (micro-batches) of every rank."""
        return len(self.ranks[0])

    @property
    def samples(self) -> tuple[int, ...]:
        """All samples of the batch, in order."""
        return tuple(sorted(sample for bins in self.ranks for bin in bins for sample in bin))


@dataclass(frozen=True)
class StepPlan:
    """What every rank computes in a step, in order. Plain ints, so it can be sent, compared and hashed."""

    lengths: tuple[int, ...]
    batches: tuple[BatchPlan, ...]
    """One for each optimizer step."""
    cost: CostModel

    @property
    def dp(self) -> int:
        return len(self.batches[0].ranks)

    def for_rank(self, rank: int) -> tuple[tuple[Bin, ...], ...]:
        """The rank's bins for each optimizer step."""
        return tuple(batch.ranks[rank] for batch in self.batches)

    def samples_of(self, rank: int) -> tuple[int, ...]:
        """The samples the rank needs, in order."""
        return tuple(sorted(sample for bins in self.for_rank(rank) for bin in bins for sample in bin))

    def report(self) -> dict[str, float]:
        """Figures for the log: bins a rank has over the step, tokens of the longest bin and of the mean one.

        rank_imbalance: the time that waiting for the slowest rank adds, as a share of the work; 0 is perfect.
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
    """Deal the samples out: each exactly once, as many bins on every rank, ranks balanced by predicted cost.

    Samples are cut in order into `optimizer_steps` global batches, equal in size (they differ by one where
    failed samples left a number that does not divide). Each batch is dealt to `dp` ranks from the costliest
    sample down, and each rank packs its own: with `capacity`, bins of so many tokens by `algorithm` (see
    `pack` for these, `multiple` and `seed`); with `micro_batch_size` (packing disabled), bins of so many
    samples of similar length. Bins come in the order of falling size, so that a row that does not fit in
    memory shows at once. Samples in a bin are in order. A bin is empty only where a batch has too few samples
    for one in every bin; it is last, and run as padding.

    Raises PackingError as `pack` does, if an optimizer step has fewer samples than there are ranks, or unless
    exactly one of capacity and micro_batch_size is given.
    """
    fill = _bin_maker(capacity, algorithm, multiple, micro_batch_size, seed)
    sizes = tuple(int(length) for length in lengths)
    _check(sizes, dp, optimizer_steps, None if capacity is None else bin_room(capacity, multiple))
    cost = cost or CostModel()
    costs = [cost(size) for size in sizes]
    batches = tuple(_plan_batch(samples, sizes, costs, dp, fill) for samples in _cut(len(sizes), optimizer_steps))
    return StepPlan(sizes, batches, cost)


def forward_plan(
    plan: StepPlan,
    *,
    capacity: int | None = None,
    algorithm: str = "balanced",
    multiple: int = 1,
    micro_batch_size: int | None = None,
    seed: int = 0,
) -> StepPlan:
    """The same samples on the same ranks in one batch with bins of another size, for a forward-only pass.

    A forward pass needs less memory, so its bins may be larger than those it is trained in; no sample changes
    rank. Arguments as for `plan_step`.
    """
    fill = _bin_maker(capacity, algorithm, multiple, micro_batch_size, seed)
    dealt = [list(plan.samples_of(rank)) for rank in range(plan.dp)]
    return StepPlan(plan.lengths, (_bins_of_ranks(dealt, plan.lengths, fill),), plan.cost)


BinMaker = Callable[[Sequence[int], int], list[list[int]]]
"""(lengths of a rank's samples, wanted number of bins) -> at least so many bins of positions in that list."""


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
    # A rank got fewer samples than another one needs bins. With equal shares that happens only if it must.
    return _bins_of_ranks(_equal_shares(order, costs, dp), sizes, fill)


def _equal_shares(order: list[int], costs: Sequence[float], dp: int) -> list[list[int]]:
    """In rounds of one sample a rank, the costliest of the round to the rank with the least cost so far."""
    shares: list[list[int]] = [[] for _ in range(dp)]
    loads = [0.0] * dp
    for start in range(0, len(order), dp):
        lightest_first = sorted(range(dp), key=lambda rank: (loads[rank], rank))
        for rank, sample in zip(lightest_first, order[start : start + dp], strict=False):
            shares[rank].append(sample)
            loads[rank] += costs[sample]
    return shares


def _bins_of_ranks(dealt: list[list[int]], sizes: Sequence[int], fill: BinMaker) -> BatchPlan:
    dealt = [sorted(samples) for samples in dealt]
    lengths = [[sizes[i] for i in samples] for samples in dealt]
    packed = [fill(rank_lengths, 1) for rank_lengths in lengths]
    count = max(len(bins) for bins in packed)
    ranks = []
    for samples, rank_lengths, bins in zip(dealt, lengths, packed, strict=True):
        if len(bins) < count:
            bins = fill(rank_lengths, min(count, len(samples)))
        named = [tuple(sorted(samples[position] for position in bin)) for bin in bins]
        named.sort(key=lambda bin: (-sum(sizes[i] for i in bin), bin))
        ranks.append(tuple(named) + ((),) * (count - len(named)))
    return BatchPlan(tuple(ranks))


def _cut(total: int, parts: int) -> list[range]:
    """range(total) in `parts` runs whose lengths differ by at most one."""
    return [range(total * part // parts, total * (part + 1) // parts) for part in range(parts)]
