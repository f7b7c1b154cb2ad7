"""How many failures are tolerated, and how long each retry waits."""

import pytest

from grpo_mcore.base.stopping import StopNow
from grpo_mcore.driver.engines.retries import Retries
from tests.clocks import StandingClock


def test_each_wait_is_twice_the_last_up_to_a_minute() -> None:
    clock = StandingClock()
    retries = Retries(9, 1.0, clock)
    for _ in range(9):
        retries.failed(RuntimeError())
    assert clock.slept == [1, 2, 4, 8, 16, 32, 60, 60, 60] and retries.exhausted
    with pytest.raises(RuntimeError, match="the tenth"):
        retries.failed(RuntimeError("the tenth"))


def test_a_success_resets_the_count() -> None:
    clock = StandingClock()
    retries = Retries(1, 3.0, clock)
    for _ in range(4):
        retries.failed(RuntimeError())
        retries.reset()
    assert clock.slept == [3, 3, 3, 3]


def test_a_wait_can_be_ended() -> None:
    clock = StandingClock()

    def watch() -> None:
        if clock.at >= 3:
            raise StopNow

    with pytest.raises(StopNow):
        Retries(9, 60.0, clock, watch).failed(RuntimeError())
    assert 3 <= clock.at < 4
    Retries(9, 1.7, clock := StandingClock(), lambda: None).failed(RuntimeError())
    assert clock.at == pytest.approx(1.7)


def test_with_a_limit_of_0_the_first_failure_is_raised() -> None:
    clock = StandingClock()
    with pytest.raises(RuntimeError, match="at once"):
        Retries(0, 1.0, clock).failed(RuntimeError("at once"))
    assert not clock.slept
