"""The schedule counts groups as they come and go: it decides what a look at all of them after each event decides."""

import random
from typing import Any

import pytest

from grpo_mcore.rollout import schedule as s


class LooksAtAll(s.Schedule):
    """Counts anew whenever it is asked, and asks every group before it waits."""

    def next(self) -> s.Command:
        self._count_all()
        return super().next()

    def _can_choose(self, count: int) -> bool:
        return True


class Counts(s.Schedule):
    """Counts every look at all groups."""

    looks = 0

    def _count_all(self) -> None:
        self.looks += 1
        super()._count_all()


def next_of(schedule: s.Schedule) -> s.Command | str:
    try:
        return schedule.next()
    except s.ScheduleError as error:
        return str(error)


def event_after(command: s.Command, draw: random.Random, schedule: s.Schedule, uids: Any) -> s.Event:
    """Draw what happens next. A failed or surplus prompt may be dispatched again."""
    config, dynamic = schedule.config, schedule.config.prompts_per_dispatch is not None
    match command:
        case s.Refit(version):
            return s.Refitted(version)
        case s.Dispatch(prompts):
            ended = draw.random() < 0.02
            again = [uid for uid in (*schedule.failed, *uids["surplus"]) if draw.random() < 0.5]
            again = [uid for uid in dict.fromkeys(again) if not {uid} & (schedule.in_flight.keys() | schedule.filtered)]
            count = draw.randrange(prompts + 1) if ended else prompts
            taken = (again + [f"{next(uids['new'])}" for _ in range(count)])[:count]
            uids["surplus"] = []
            versions = tuple(
                max(1, schedule.engine_version - draw.randrange(1 + config.max_trajectory_age)) for _ in taken
            )
            return s.Dispatched(tuple(taken), ended, versions if schedule.step == 0 and draw.random() < 0.2 else None)
        case s.Await():
            uid = draw.choice([uid for uid in schedule.in_flight if uid not in schedule.finished])
            if draw.random() < 0.06 and len(schedule.failed) < config.max_failed_groups:
                return s.GroupFailed(uid, "why not")
            return s.GroupFinished(uid, not dynamic or draw.random() < 0.7, draw.randrange(9))
        case s.Train(step, _, surplus):
            uids["surplus"] = list(surplus)
            return s.Trained(step)
        case other:
            raise AssertionError(f"{other}: neither validation nor checkpoint is configured")


def configs(draw: random.Random) -> s.ScheduleConfig:
    prompts = draw.randrange(1, 6)
    return s.ScheduleConfig(
        prompts,
        max_steps=30,
        max_trajectory_age=draw.choice([0, 1, 2, 4]),
        group_order=draw.choice(["in_order", "oldest_first", "freshest_first"]),
        max_groups_in_flight=draw.choice([None, None, 2 * prompts]),
        max_bytes_in_flight=draw.choice([None, 8 * prompts]),
        refit_in_flight=draw.random() < 0.5,
        prompts_per_dispatch=draw.choice([None, 2 * prompts]),
        max_gen_batches=3,
    )


def test_counts_decide_what_a_look_at_all_groups_decides() -> None:
    trained = waited = repeated = 0
    for seed in range(100):
        draw = random.Random(seed)
        config = configs(draw)
        counting, looking = s.Schedule(config), LooksAtAll(config)
        uids: dict[str, Any] = {"new": iter(range(10**6)), "surplus": []}
        for _ in range(400):
            command = next_of(counting)
            assert command == next_of(looking) == next_of(counting), seed
            if isinstance(command, str | s.Finish):
                break
            event = event_after(command, draw, counting, uids)
            repeated += isinstance(event, s.Dispatched) and not counting.failed.keys().isdisjoint(event.uids)
            trained += isinstance(command, s.Train)
            waited += isinstance(command, s.Await) and len(counting.finished) >= config.num_prompts
            for schedule in (counting, looking):
                schedule.record(event)
            assert counting.in_flight == looking.in_flight and counting.finished == looking.finished
    assert trained > 300 and waited > 300 and repeated > 30


@pytest.mark.parametrize("order", ["in_order", "oldest_first", "freshest_first"])
@pytest.mark.parametrize("age", [0, 1, 4])
def test_all_groups_are_looked_at_once_a_step(monkeypatch: Any, order: Any, age: int) -> None:
    """However they finish: the one that a step needs may be the last one, when many others are there."""
    choices: list[bool] = []
    choose = s.choose

    def counted(*args: Any, **kwargs: Any) -> tuple[str, ...]:
        choices.append(bool(chosen := choose(*args, **kwargs)))
        return chosen

    monkeypatch.setattr(s, "choose", counted)
    schedule = Counts(s.ScheduleConfig(20, 50, age, order, refit_in_flight=True))
    draw, waiting, number = random.Random(age), list[str](), 0
    while not isinstance(command := schedule.next(), s.Finish):
        event: s.Event
        match command:
            case s.Refit(version):
                event = s.Refitted(version)
            case s.Dispatch(prompts):
                event = s.Dispatched(tuple(str(number + place) for place in range(prompts)))
                number += prompts
                waiting += event.uids
            case s.Await():
                event = s.GroupFinished(waiting.pop(draw.randrange(len(waiting)) if draw.random() < 0.7 else -1))
            case _:
                event = s.Trained(schedule.step + 1)
        schedule.record(event)
    assert choices == [True] * 100  # to say that a step is next, and when it has trained
    assert schedule.looks == 1 + 50


def test_a_failed_prompt_that_is_dispatched_again_is_the_last_in_order() -> None:
    schedule = s.Schedule(s.ScheduleConfig(2, 9, max_trajectory_age=1))
    events = [s.Refitted(1), s.Dispatched(("a", "b", "c", "d")), s.GroupFailed("b", "why not"), s.Dispatched(("b",))]
    for event in (*events, s.GroupFinished("a"), s.GroupFinished("c")):
        schedule.record(event)
    assert schedule.next() == s.Train(1, ("a", "c"))
