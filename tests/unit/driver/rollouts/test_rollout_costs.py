"""What rollouts cost in virtual time, and what a save reads. benchmarks/driver.py measures the driver's own time."""

import pytest

from benchmarks.driver import checkpoint_bytes_read
from benchmarks.rollouts import CASES, World, bound_seconds


@pytest.mark.parametrize(("name", "gain"), [("math_1_turn", 0.99), ("tool_4_turns_1s", 1.15)])
def test_no_sample_waits_for_another(name: str, gain: float) -> None:
    """With tools, turns taken together take much longer: each waits for the slowest sample."""
    case = CASES[name]
    seconds, together = (World(case, 3, together=together).run(128, 0, 1) for together in (False, True))
    assert seconds <= 1.10 * bound_seconds(case, 3, 128, 0, 1)
    assert together >= gain * seconds


def test_the_driver_reads_nothing_of_what_the_ranks_have_saved() -> None:
    few, many = checkpoint_bytes_read(1000), checkpoint_bytes_read(10**7)
    assert few < 5000 and abs(many - few) < 100  # its own files; the table of digests has the size in digits
