"""Packing of a step's samples: `balanced` against the four classic algorithms distributed round-robin.

Two long-tailed sets of 4,096 lengths (log-normal, median 800, cap 8,192 tokens): independent ones, and 256 prompts x 16
generations whose lengths are correlated within a group. For each number of data-parallel ranks:

useful/padded   tokens of samples over tokens of rows. Classic rows are padded to the longest row of the step, as
                static shapes in a pipeline require; ours only to a multiple of 16 tokens
busiest/mean    predicted cost of the busiest rank over the mean (linear + quadratic in the lengths of the samples)
plan            seconds to plan 4,096 samples; once for 100,000 samples below the table

    python benchmarks/packing.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_mcore.batching import pack, plan_step
from grpo_mcore.batching.packing import PACKING_ALGORITHMS, round_up
from grpo_mcore.batching.plan import CostModel

MEDIAN, SIGMA, CAP, CAPACITY, MULTIPLE = 800.0, 0.9, 8192, 16384, 16
RANKS = (2, 4, 8, 16, 32, 64)
COST = CostModel()


def independent(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [_length(MEDIAN * draw.lognormvariate(0.0, SIGMA)) for _ in range(count)]


def by_group(prompts: int, generations: int, seed: int = 0) -> list[int]:
    """Draw lengths of which half the variance is between prompts, half between the samples of a prompt."""
    draw, share = random.Random(seed), SIGMA / 2**0.5
    return [
        _length(median * draw.lognormvariate(0.0, share))
        for median in (MEDIAN * draw.lognormvariate(0.0, share) for _ in range(prompts))
        for _ in range(generations)
    ]


def _length(value: float) -> int:
    return min(CAP, max(1, round(value)))


def ours(lengths: Sequence[int], dp: int) -> list[list[list[int]]]:
    """Plan with `balanced`: bins of sample indices by rank."""
    plan = plan_step(lengths, dp=dp, capacity=CAPACITY, algorithm="balanced", multiple=MULTIPLE)
    return [[list(bin) for bin in bins] for bins in plan.batches[0].ranks]


def classic(algorithm: str) -> Callable[[Sequence[int], int], list[list[list[int]]]]:
    """Return a planner that packs all samples and distributes the bins round-robin, equally many per rank."""

    def plan(lengths: Sequence[int], dp: int) -> list[list[list[int]]]:
        bins = pack(lengths, CAPACITY, algorithm, MULTIPLE, min_bins=dp)
        bins = pack(lengths, CAPACITY, algorithm, MULTIPLE, min_bins=round_up(len(bins), dp))
        return [bins[rank::dp] for rank in range(dp)]

    return plan


def measure(
    plan: Callable[..., list[list[list[int]]]], lengths: Sequence[int], dp: int, to_longest: bool
) -> dict[str, Any]:
    began = time.perf_counter()
    ranks = plan(lengths, dp)
    seconds = time.perf_counter() - began
    rows = [sum(lengths[i] for i in bin) for bins in ranks for bin in bins]
    padded = len(rows) * round_up(max(rows), MULTIPLE) if to_longest else sum(round_up(row, MULTIPLE) for row in rows)
    costs = [sum(COST(lengths[i]) for bin in bins for i in bin) for bins in ranks]
    assert sorted(i for bins in ranks for bin in bins for i in bin) == list(range(len(lengths)))
    return {
        "useful_over_padded": sum(lengths) / padded,
        "busiest_over_mean": max(costs) * len(costs) / sum(costs),
        "rows_per_rank": max(map(len, ranks)),
        "plan_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", nargs="?", const=Path("/dev/stdout"), type=Path, help="print the figures, or to FILE")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for lengths_name, lengths in (("independent", independent(4096)), ("256 x 16", by_group(256, 16))):
        print(f"\n{lengths_name}: {len(lengths)} samples, {sum(lengths) / 1e6:.2f} M tokens, rows of {CAPACITY}")
        print(f"{'algorithm':32} {'DP':>3} {'useful/padded':>14} {'busiest/mean':>13} {'rows a rank':>12} {'plan':>9}")
        for dp in RANKS:
            for algorithm in PACKING_ALGORITHMS:
                balanced = algorithm == "balanced"
                found = measure(ours if balanced else classic(algorithm), lengths, dp, to_longest=not balanced)
                rows.append({"lengths": lengths_name, "algorithm": algorithm, "dp": dp} | found)
                print(
                    f"{algorithm:32} {dp:3} {found['useful_over_padded']:14.2%} {found['busiest_over_mean']:13.4f} "
                    f"{found['rows_per_rank']:12} {found['plan_seconds']:8.3f}s"
                )
    began = time.perf_counter()
    ours(independent(100_000), 64)
    large = time.perf_counter() - began
    print(f"\n100,000 samples for DP 64, balanced: planned in {large:.2f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "plan_seconds_100k": large}, indent=1))


if __name__ == "__main__":
    main()
