"""Seconds by phase, on a clock that the test moves."""

import pytest

from grpo_mcore.observe.timeline import Timeline, shares


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def spend(clock: Clock, timeline: Timeline, name: str, seconds: float) -> None:
    with timeline.phase(name):
        clock.now += seconds


def test_phases_add_up_and_the_rest_is_everything_else(clock):
    timeline = Timeline(clock)
    spend(clock, timeline, "generate", 3.0)
    clock.now += 1.0
    spend(clock, timeline, "train", 2.0)
    spend(clock, timeline, "generate", 4.0)
    seconds = timeline.seconds()
    assert seconds == {"generate": 7.0, "train": 2.0, "everything_else": 1.0, "total": 10.0}
    assert shares(seconds) == {"generate": 0.7, "train": 0.2, "everything_else": 0.1}


def test_nested_phases_are_part_of_the_outer_one(clock):
    timeline = Timeline(clock)
    with timeline.phase("refit"):
        clock.now += 1.0
        spend(clock, timeline, "commit", 2.0)
    assert timeline.seconds() == {"refit/commit": 2.0, "refit": 3.0, "everything_else": 0.0, "total": 3.0}


def test_a_pause_belongs_to_no_step_nor_phase(clock):
    timeline = Timeline(clock)
    with timeline.phase("train"):
        clock.now += 1.0
        with timeline.pause("validation"):
            clock.now += 50.0
            with timeline.pause("checkpoint"):
                clock.now += 5.0
        clock.now += 2.0
    assert timeline.seconds() == {"train": 3.0, "everything_else": 0.0, "total": 3.0}


def test_take_starts_the_next_step_where_this_one_ends(clock):
    timeline = Timeline(clock)
    spend(clock, timeline, "train", 1.0)
    assert timeline.take()["total"] == 1.0
    clock.now += 2.0
    assert timeline.take() == {"everything_else": 2.0, "total": 2.0}


def test_a_phase_ends_with_its_error_and_cannot_be_reset_away(clock):
    timeline = Timeline(clock)
    with pytest.raises(KeyError), timeline.phase("train"):
        clock.now += 1.0
        raise KeyError
    assert timeline.seconds()["train"] == 1.0
    with timeline.phase("generate"), pytest.raises(RuntimeError, match="'generate' is not over"):
        timeline.reset()


def test_shares_of_no_time_at_all(clock):
    assert shares(Timeline(clock).seconds()) == {"everything_else": 0.0}


def test_a_phase_under_the_name_of_nemo_rl(clock):
    timeline = Timeline(clock)
    with timeline.time("refit"):
        clock.now += 2.0
        with timeline.time("refit/commit"):
            clock.now += 1.0
    assert timeline.seconds() == {"refit/commit": 1.0, "refit": 3.0, "everything_else": 0.0, "total": 3.0}
