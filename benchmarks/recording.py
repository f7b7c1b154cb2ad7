"""Measures what it costs to record every sample: of each four steps in one run, two are recorded and two are not. What
is compared is the second of each two, because a step's samples are written during the next one.

    python benchmarks/recording.py RECIPE [key=value ...]

Prints the median difference of the pairs' step times, the driver's seconds in the calls that record, and the seconds of
processor time of the thread that writes; and what the ledger costs, from which `train --follow` repeats a run: entries,
the driver's processor time for them, and bytes beside those of the samples. The demo's recipe needs `grpo-mcore demo`
first; use one with many steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from grpo_mcore.algorithms import grpo
from grpo_mcore.cli.train.train import train
from grpo_mcore.driver.record.run_report import RunReport
from grpo_mcore.driver.record.sample_writer import SampleWriter
from grpo_mcore.observe.ledger.ledger import LEDGER_FILE, Ledger
from grpo_mcore.observe.samples import SampleFiles
from grpo_mcore.recipe import load_recipe

WARM = 4
"""Steps at the start that are left out."""


def main(words: list[str]) -> None:
    config = load_recipe(words[0], [*words[1:], "checkpointing.enabled=false"]).config
    totals: dict[int, float] = {}
    calls: dict[int, float] = {}
    writer: dict[int, float] = {}
    train_on_groups, step, write, trained = grpo.train_on_groups, RunReport.step, SampleFiles._do, SampleWriter.trained

    def two_of_four(policy: Any, *args: Any) -> Any:
        record = args[-1] if (policy.updates + 1) % 4 in (1, 2) else None
        return train_on_groups(policy, *args[:-1], record)

    def timed_step(self: RunReport, number: int, groups: Any, metrics: Any, clock: Any) -> dict[str, float]:
        totals[number] = clock.seconds()["total"]
        return step(self, number, groups, metrics, clock)

    def timed_write(self: SampleFiles, kind: str, number: int, *args: Any) -> None:
        began = time.thread_time()
        write(self, kind, number, *args)  # type: ignore[arg-type]
        writer[number] = time.thread_time() - began

    def timed_trained(self: SampleWriter, number: int, *args: Any) -> None:
        began = time.perf_counter()
        trained(self, number, *args)
        calls[number] = time.perf_counter() - began

    entries: list[float] = []
    write_entry, written_before = Ledger.write, set(Path(config.logger.log_dir).glob("exp_*"))

    def timed_entry(self: Ledger, event: str, **fields: Any) -> None:
        began = time.thread_time()
        write_entry(self, event, **fields)
        entries.append(time.thread_time() - began)

    Ledger.write = timed_entry  # type: ignore[method-assign]
    grpo.train_on_groups, RunReport.step = two_of_four, timed_step  # type: ignore[assignment, method-assign]
    SampleFiles._do, SampleWriter.trained = timed_write, timed_trained  # type: ignore[method-assign]
    train(config)
    pairs = [(totals[n], totals[n + 2]) for n in range(WARM + 2, max(totals) - 1, 4)]
    middle = statistics.median(without for _, without in pairs)
    difference = statistics.median(recorded - without for recorded, without in pairs)
    spent, written = (statistics.median(times[n] for n in calls if n > WARM) for times in (calls, writer))
    print(f"{len(pairs)} pairs, median step {middle:.3f} s")
    print(f"recorded - not recorded: {1000 * difference:+.1f} ms, {difference / middle:+.2%} of a step")
    print(
        f"driver's calls: {1000 * spent:.2f} ms, {spent / middle:.3%}; writer's processor time: {1000 * written:.1f} ms"
    )
    folder, steps = max(set(Path(config.logger.log_dir).glob("exp_*")) - written_before), len(totals)
    each, ledger = statistics.mean(entries), (folder / LEDGER_FILE).stat().st_size
    print(
        f"ledger: {len(entries) / steps:.0f} entries a step of {1e6 * each:.0f} us, "
        f"{sum(entries) / sum(totals.values()):.2%} of the steps' time"
    )
    sampled = statistics.mean(file.stat().st_size for file in (folder / "samples/train").glob("*.parquet"))
    print(f"ledger: {ledger / steps:.0f} B a step, {ledger / steps / sampled:.1%} of the samples' bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
