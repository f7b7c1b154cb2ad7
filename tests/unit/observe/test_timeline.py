"""Seconds by phase, on a clock that the test moves."""

import pytest

from grpo_mcore.observe.timeline import Timeline, shares
from tests.clocks import StandingClock


@pytest.fixture
def clock() -> StandingClock:
    return StandingClock(100.0)


def spend(clock: StandingClock, timeline: Timeline, name: str, seconds: float) -> None:
    with timeline.phase(name):
        clock.at += seconds


def test_phases_add_up_and_the_rest_is_everything_else(clock):
    timeline = Timeline(clock.now)
    spend(clock, timeline, "generate", 3.0)
    clock.at += 1.0
    spend(clock, timeline, "train", 2.0)
    spend(clock, timeline, "generate", 4.0)
    seconds = timeline.seconds()
    assert seconds == {"generate": 7.0, "train": 2.0, "everything_else": 1.0, "total": 10.0}
    assert shares(seconds) == {"generate": 0.7, "train": 0.2, "everything_else": 0.1}


@pytest.mark.parametrize("way", ["phase", "time"])  # the latter under NeMo RL's name, which has the whole path
def test_nested_phases_are_part_of_the_outer_one(clock, way):
    timeline = Timeline(clock.now)
    measured = getattr(timeline, way)
    with measured("refit"):
        clock.at += 1.0
        with measured("commit" if way == "phase" else "refit/commit"):
            clock.at += 2.0
    assert timeline.seconds() == {"refit/commit": 2.0, "refit": 3.0, "everything_else": 0.0, "total": 3.0}


def test_a_pause_belongs_to_no_step_nor_phase(clock):
    timeline = Timeline(clock.now)
    with timeline.phase("train"):
        clock.at += 1.0
        with timeline.pause("validation"):
            clock.at += 50.0
            with timeline.pause("checkpoint"):
                clock.at += 5.0
        clock.at += 2.0
    assert timeline.seconds() == {"train": 3.0, "everything_else": 0.0, "total": 3.0}


def test_take_starts_the_next_step_where_this_one_ends(clock):
    timeline = Timeline(clock.now)
    spend(clock, timeline, "train", 1.0)
    assert timeline.take()["total"] == 1.0
    clock.at += 2.0
    assert timeline.take() == {"everything_else": 2.0, "total": 2.0}


def test_a_phase_ends_with_its_error_and_cannot_be_reset_away(clock):
    timeline = Timeline(clock.now)
    with pytest.raises(KeyError), timeline.phase("train"):
        clock.at += 1.0
        raise KeyError
    assert timeline.seconds()["train"] == 1.0
    with timeline.phase("generate"), pytest.raises(RuntimeError, match="'generate' is not over"):
        timeline.reset()


def test_shares_of_no_time_at_all(clock):
    assert shares(Timeline(clock.now).seconds()) == {"everything_else": 0.0}
