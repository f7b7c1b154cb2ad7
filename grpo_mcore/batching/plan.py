"""The plan of a step, from lengths and shared prefixes: samples -> optimizer steps -> data-parallel ranks -> bins."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_mcore.batching.fitting import decreasing
from grpo_mcore.batching.packing import PackingError, bin_room, check_sizes, pack, spread
from grpo_mcore.batching.prefix_trees import BLOCK_TOKENS, Prefixes, Tree, make_trees, saves_enough

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
    tokens: tuple[tuple[int, ...], ...]
    """Tokens to compute in each bin of each rank: less than those of its samples where these share prefixes."""
    costs: tuple[float, ...]
    """Predicted time of each rank."""

    @property
    def computed(self) -> int:
        """Tokens to compute."""
        return sum(map(sum, self.tokens))

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

    @property
    def dp(self) -> int:
        return len(self.batches[0].ranks)

    @property
    def shares_prefixes(self) -> bool:
        """Whether samples of a bin share prefixes."""
        return sum(batch.computed for batch in self.batches) < sum(self.lengths)

    def for_rank(self, rank: int) -> tuple[tuple[Bin, ...], ...]:
        """Return the rank's bins for each optimizer step."""
        return tuple(batch.ranks[rank] for batch in self.batches)

    def samples_of(self, rank: int) -> tuple[int, ...]:
        """Return the samples that the rank needs, in order."""
        return tuple(sorted(sample for bins in self.for_rank(rank) for bin in bins for sample in bin))

    def report(self) -> dict[str, float]:
        """Return figures for the log: bins per rank over the step, and tokens of the longest and the mean bin.

        computed_tokens: share of the samples' tokens that is computed; below 1 where samples share prefixes.
        rank_imbalance: time added by waiting for the slowest rank, as a share of the work; 0 is perfect.
        """
        tokens = [count for batch in self.batches for bins in batch.tokens for count in bins]
        slowest = sum(max(batch.costs) for batch in self.batches)
        work = sum(sum(batch.costs) / len(batch.costs) for batch in self.batches)
        return {
            "bins_per_rank": float(sum(batch.num_bins for batch in self.batches)),
            "bin_tokens_max": float(max(tokens)),
            "bin_tokens_mean": sum(tokens) / len(tokens),
            "computed_tokens": sum(tokens) / sum(self.lengths),
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
    prefixes: Sequence[Prefixes] | None = None,
    block: int = BLOCK_TOKENS,
    cost: CostModel | None = None,
    seed: int = 0,
    owners: Sequence[int] | None = None,
) -> StepPlan:
    """Distribute samples over ranks and bins: each exactly once, equally many bins per rank, balanced predicted cost.

    Samples are cut in order into `optimizer_steps` global batches of equal size (sizes differ by one if the number does
    not divide, because samples failed). Each batch is distributed over `dp` ranks from the costliest sample down, and
    each rank packs its own samples: with `capacity`, into bins of that many tokens by `algorithm` (see `pack` for
    these, `multiple` and `seed`); with `micro_batch_size` (packing disabled), into bins of that many samples of similar
    length. Bins are in order of decreasing size, so that a row that does not fit in memory fails at once. Samples in a
    bin are in order. A bin is empty only if a batch has fewer samples than bins; it is last, and runs as padding.

    prefixes: `prefix_hashes` of each sample, by blocks of `block` tokens. Samples that begin alike then stay in one
    bin, where what they share counts once; they are separated where they do not fit, or where that makes the slowest
    rank faster. A batch of which this would save less than a tenth (MIN_SAVED) is planned without. Needs capacity.

    owners: number of the sample that each of `lengths` is a part of, 0, 0, 1, ...: a sample's parts go to one optimizer
    step, and otherwise are planned like samples. None: all are whole.

    Raises PackingError as `pack` does, if an optimizer step has fewer samples than there are ranks, and unless exactly
    one of capacity and micro_batch_size is given.
    """
    fill = _bin_maker(capacity, algorithm, multiple, micro_batch_size, seed)
    sizes = tuple(int(length) for length in lengths)
    _check(sizes, dp, optimizer_steps, None if capacity is None else bin_room(capacity, multiple))
    cost = cost or CostModel()
    room = bin_room(capacity, multiple) if capacity is not None else 0
    batches = []
    for samples in _cut(len(sizes), optimizer_steps, owners):
        alone = [Tree((i,), sizes[i], cost(sizes[i])) for i in samples]
        plan = _plan_batch(alone, dp, fill)
        if prefixes is not None:
            share = -(-len(samples) // dp)
            trees = [
                make_trees(samples, sizes, prefixes, cost, room=room, most=-(-share // k), block=block)
                for k in (1, 2, 4)
            ]
            plans = [_plan_batch(tree_plan, dp, fill) for tree_plan in trees if len(tree_plan) >= dp]
            enough = [tree_plan for tree_plan in plans if saves_enough(tree_plan.computed, plan.computed)]
            plan = min([*enough, plan], key=lambda plan: max(plan.costs))
        batches.append(plan)
    return StepPlan(sizes, tuple(batches))


def plan_alone(lengths: Sequence[int], *, dp: int, optimizer_steps: int = 1) -> StepPlan:
    """Put each sample into a bin of its own and give each rank consecutive samples, so that each of two ranks has half
    of the binary tree over their numbers. Global batches are those of `plan_step`. Raises PackingError if an optimizer
    step has fewer samples than there are ranks."""
    sizes = tuple(int(length) for length in lengths)
    _check(sizes, dp, optimizer_steps, None)
    cost, batches = CostModel(), []
    for samples in _cut(len(sizes), optimizer_steps):
        shares = [[samples[i] for i in share] for share in _cut(len(samples), dp)]
        most = max(map(len, shares))
        batches.append(
            BatchPlan(
                tuple(tuple((i,) for i in share) + ((),) * (most - len(share)) for share in shares),
                tuple(tuple(sizes[i] for i in share) + (0,) * (most - len(share)) for share in shares),
                tuple(sum(cost(sizes[i]) for i in share) for share in shares),
            )
        )
    return StepPlan(sizes, tuple(batches))


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


def _plan_batch(trees: Sequence[Tree], dp: int, fill: BinMaker) -> BatchPlan:
    costs = [tree.cost for tree in trees]
    order = sorted(range(len(trees)), key=lambda tree: (-costs[tree], tree))
    plan = _bins_of_ranks(spread(order, costs, dp), trees, fill)
    if all(bin for bins in plan.ranks for bin in bins):
        return plan
    # A rank has fewer samples than another one needs bins. With equal shares that happens only if it is unavoidable.
    return _bins_of_ranks(_equal_shares(order, costs, dp), trees, fill)


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


def _bins_of_ranks(shares: list[list[int]], trees: Sequence[Tree], fill: BinMaker) -> BatchPlan:
    shares = [sorted(members) for members in shares]
    lengths = [[trees[i].tokens for i in members] for members in shares]
    packed = [fill(rank_lengths, 1) for rank_lengths in lengths]
    count = max(len(bins) for bins in packed)
    ranks, tokens = [], []
    for members, rank_lengths, bins in zip(shares, lengths, packed, strict=True):
        if len(bins) < count:
            bins = fill(rank_lengths, min(count, len(members)))
        sized_bins = [
            (sum(rank_lengths[i] for i in bin), tuple(sorted(s for i in bin for s in trees[members[i]].samples)))
            for bin in bins
        ]
        sized_bins.sort(key=lambda bin: (-bin[0], bin[1]))
        ranks.append(tuple(bin for _, bin in sized_bins) + ((),) * (count - len(sized_bins)))
        tokens.append(tuple(size for size, _ in sized_bins) + (0,) * (count - len(sized_bins)))
    costs = tuple(sum(trees[i].cost for i in members) for members in shares)
    return BatchPlan(tuple(ranks), tuple(tokens), costs)


def branch_runs(branches: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Cut the branches of a sample, given by their tokens, into runs (first, end) of at most `room` tokens, or of one
    branch. Branches that follow each other, and so may share a prefix, stay together where they fit."""
    runs: list[tuple[int, int]] = []
    left = 0
    for number, tokens in enumerate(branches):
        if tokens > left:
            runs.append((number, number))
            left = room
        runs[-1] = (runs[-1][0], number + 1)
        left -= tokens
    return runs


def _cut(total: int, parts: int, owners: Sequence[int] | None = None) -> list[range]:
    """Cut range(total) into `parts` ranges whose lengths differ by at most one; with owners, whose numbers of owners
    do."""
    if owners is not None:
        first = [bisect_left(owners, owner) for owner in range(owners[-1] + 1)] + [total]
        return [range(first[cut.start], first[cut.stop]) for cut in _cut(len(first) - 1, parts)]
    return [range(total * part // parts, total * (part + 1) // parts) for part in range(parts)]
