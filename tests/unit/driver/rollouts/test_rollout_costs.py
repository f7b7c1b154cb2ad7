"""What rollouts and schedule cost: seconds of a step in virtual time, and the driver's own time for each event."""

from __future__ import annotations

import pytest

from benchmarks.driver import checkpoint_bytes_read, exponent, rollouts_us, schedule_us
from benchmarks.rollouts import CASES, World, bound_seconds
from grpo_mcore.base.garbage import rare_collections


@pytest.mark.parametrize(("name", "gain"), [("math_1_turn", 0.99), ("tool_4_turns_1s", 1.15)])
def test_no_sample_waits_for_another(name: str, gain: float) -> None:
    """With tools, turns taken together take much longer: each waits for the slowest sample."""
    case = CASES[name]
    seconds, together = (World(case, 3, together=together).run(128, 0, 1) for together in (False, True))
    assert seconds <= 1.10 * bound_seconds(case, 3, 128, 0, 1)
    assert together >= gain * seconds


@pytest.mark.parametrize("age", [0, 1])
def test_an_event_of_the_schedule_costs_the_same_with_many_groups(age: int) -> None:
    """It was ten times as much with 10,000 groups as with 256."""
    few, many = schedule_us(1000, age), schedule_us(10_000, age)
    assert many < 3 * few


def test_a_sample_costs_the_driver_the_same_in_a_larger_step() -> None:
    sizes = (512, 2048)
    with rare_collections():  # as in a run under Ray; the collector would look through all that other tests have left
        assert exponent(sizes, [rollouts_us(size, 8) for size in sizes]) < 1.8
    assert exponent((10, 100), (1.0, 1.0)) == pytest.approx(1.0)


def test_the_driver_reads_nothing_of_what_the_ranks_have_saved() -> None:
    few, many = checkpoint_bytes_read(1000), checkpoint_bytes_read(10**7)
    assert few < 5000 and abs(many - few) < 100  # its own files; the table of digests has the size in digits
