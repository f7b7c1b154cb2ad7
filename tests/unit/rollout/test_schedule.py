"""The schedule's laws, over every interleaving of small cases: each prompt trains once, none too old, no deadlock."""

import copy
from dataclasses import dataclass, field

import pytest

from grpo_mcore.rollout import schedule as s


def run_in_order(config: s.ScheduleConfig, data: int = 10**9) -> list[s.Command]:
    """Every command of a run in which groups finish in dispatch order and nothing fails."""
    schedule, commands, next_uid = s.Schedule(config), [], 0
    waiting: list[str] = []
    while not commands or not isinstance(commands[-1], s.Finish):
        command = schedule.next()
        commands.append(command)
        match command:
            case s.Refit(version):
                schedule.record(s.Refitted(version))
            case s.Validate(step):
                schedule.record(s.Validated(step))
            case s.Dispatch(count):
                taken = [str(next_uid + i) for i in range(min(count, data - next_uid))]
                next_uid += len(taken)
                waiting += taken
                schedule.record(s.Dispatched(tuple(taken), data_ended=len(taken) < count))
            case s.Await():
                schedule.record(s.GroupFinished(waiting.pop(0)))
            case s.Train(step, _):
                schedule.record(s.Trained(step))
            case s.Checkpoint(step):
                schedule.record(s.Checkpointed(step))
    return commands


def test_a_synchronous_run_is_refit_dispatch_await_train() -> None:
    commands = run_in_order(s.ScheduleConfig(num_prompts=2, max_steps=2))
    assert commands == [
        s.Refit(1), s.Dispatch(2), s.Await(), s.Await(), s.Train(1, ("0", "1")),
        s.Refit(2), s.Dispatch(2), s.Await(), s.Await(), s.Train(2, ("2", "3")),
        s.Finish("all 2 steps are done"),
    ]  # fmt: skip


def test_validation_and_checkpoints_come_at_their_periods_with_fresh_engines() -> None:
    config = s.ScheduleConfig(
        num_prompts=1, max_steps=3, val_period=2, val_at_start=True, val_at_end=True, save_period=2
    )
    kinds = [c for c in run_in_order(config) if not isinstance(c, s.Dispatch | s.Await)]
    assert kinds == [
        s.Refit(1), s.Validate(0), s.Train(1, ("0",)),
        s.Refit(2), s.Train(2, ("1",)),
        s.Refit(3), s.Validate(2), s.Checkpoint(2), s.Train(3, ("2",)),
        s.Refit(4), s.Validate(3), s.Checkpoint(3), s.Finish("all 3 steps are done"),
    ]  # fmt: skip


def test_periodic_validation_starts_where_it_is_told_to() -> None:
    config = s.ScheduleConfig(num_prompts=1, max_steps=4, val_period=1, val_start_at=3)
    assert [c for c in run_in_order(config) if isinstance(c, s.Validate)] == [s.Validate(3), s.Validate(4)]


def test_checkpoints_for_recovery_come_between_the_others() -> None:
    config = s.ScheduleConfig(num_prompts=1, max_steps=5, save_period=4, ft_save_period=2)
    assert [c for c in run_in_order(config) if isinstance(c, s.Checkpoint)] == [
        s.Checkpoint(2), s.Checkpoint(4), s.Checkpoint(5),
    ]  # fmt: skip


def test_a_validation_can_end_the_run() -> None:
    """With a checkpoint if any is ever due, and without a second validation at the end."""
    config = s.ScheduleConfig(num_prompts=1, max_steps=9, val_period=1, val_at_end=True, save_period=5)
    schedule = s.Schedule(config, step=1)
    schedule.validated_step = schedule.saved_step = 0
    schedule.record(s.Refitted(2))
    assert schedule.next() == s.Validate(1)
    schedule.record(s.Validated(1, stop="accuracy 0.9 has reached 0.8"))
    assert schedule.next() == s.Checkpoint(1)
    schedule.record(s.Checkpointed(1))
    assert schedule.next() == s.Finish("accuracy 0.9 has reached 0.8")


def test_a_resumed_run_that_had_ended_by_validation_ends_again() -> None:
    config = s.ScheduleConfig(num_prompts=1, max_steps=9, val_period=1, val_at_end=True, save_period=1)
    assert s.Schedule(config, step=3, stop="reached").next() == s.Finish("reached")


def test_the_end_of_the_data_trains_what_is_left() -> None:
    commands = run_in_order(s.ScheduleConfig(num_prompts=2, max_steps=9), data=3)
    assert [c for c in commands if isinstance(c, s.Train)] == [s.Train(1, ("0", "1")), s.Train(2, ("2",))]
    assert commands[-1] == s.Finish("the data has ended")


def test_a_failed_group_is_replaced_and_too_many_end_the_run() -> None:
    schedule = s.Schedule(s.ScheduleConfig(num_prompts=2, max_steps=1, max_failed_groups=1))
    schedule.record(s.Refitted(1))
    schedule.record(s.Dispatched(("a", "b")))
    schedule.record(s.GroupFailed("a", "verifier died"))
    assert schedule.next() == s.Dispatch(1)
    schedule.record(s.Dispatched(("c",)))
    with pytest.raises(s.ScheduleError, match="b: verifier died again"):
        schedule.record(s.GroupFailed("b", "verifier died again"))


@pytest.mark.parametrize(
    "event",
    [s.GroupFinished("x"), s.Trained(3), s.Refitted(7), s.Dispatched(("a",)), s.GroupFailed("x", "")],
    ids=lambda event: type(event).__name__,
)
def test_an_event_that_does_not_fit_is_refused(event: s.Event) -> None:
    schedule = s.Schedule(s.ScheduleConfig(num_prompts=1, max_steps=1))
    schedule.record(s.Refitted(1))
    schedule.record(s.Dispatched(("a",)))
    with pytest.raises(s.ScheduleError, match="does not fit"):
        schedule.record(event)


@dataclass
class World:
    """A schedule with what is really under way, for exploring every order of events."""

    schedule: s.Schedule
    data_left: int
    failures_left: int
    dispatched: int = 0
    running: dict[str, int] = field(default_factory=dict)  # uid -> version that generates it
    done: dict[str, int] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@pytest.mark.parametrize("age", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("data", [5, 100])
def test_every_interleaving_keeps_the_laws(age: int, data: int) -> None:
    config = s.ScheduleConfig(num_prompts=2, max_steps=3, max_trajectory_age=age, val_period=2, save_period=1)
    seen: set[str] = set()
    finished = 0
    stack = [World(s.Schedule(config), data, failures_left=1)]
    while stack:
        world = stack.pop()
        key = repr(world)
        if key in seen:
            continue
        seen.add(key)
        command = world.schedule.next()
        assert world.schedule.next() == command, "asking twice must not change the answer"
        if isinstance(command, s.Finish):
            finished += 1
            taken = data - world.data_left
            assert len(world.trained) == len(set(world.trained))
            left = set(world.schedule.in_flight)
            assert set(world.trained) | set(world.failed) | left == {str(i) for i in range(taken)}
            assert not left or world.schedule.step == config.max_steps
            continue
        stack += list(_outcomes(world, command, config))
    assert finished


def _outcomes(world: World, command: s.Command, config: s.ScheduleConfig) -> list[World]:
    if isinstance(command, s.Await):
        assert world.running, "it waits for something that nobody is producing"
        results = []
        for uid in world.running:
            after = copy.deepcopy(world)
            after.done[uid] = after.running.pop(uid)
            after.schedule.record(s.GroupFinished(uid))
            results.append(after)
            if world.failures_left:
                after = copy.deepcopy(world)
                del after.running[uid]
                after.failures_left -= 1
                after.failed.append(uid)
                after.schedule.record(s.GroupFailed(uid, "lost"))
                results.append(after)
        return results
    after = copy.deepcopy(world)
    match command:
        case s.Refit(version):
            after.schedule.record(s.Refitted(version))
        case s.Validate(step):
            assert after.schedule.engine_version == after.schedule.policy_version
            after.schedule.record(s.Validated(step))
        case s.Checkpoint(step):
            after.schedule.record(s.Checkpointed(step))
        case s.Dispatch(count):
            taken = [str(after.dispatched + i) for i in range(min(count, after.data_left))]
            after.dispatched += len(taken)
            after.data_left -= len(taken)
            after.running |= dict.fromkeys(taken, after.schedule.engine_version)
            after.schedule.record(s.Dispatched(tuple(taken), data_ended=len(taken) < count))
        case s.Train(step, uids):
            for uid in uids:
                assert step - after.done.pop(uid) <= config.max_trajectory_age, "older than the limit"
                assert uid not in after.trained
                after.trained.append(uid)
            after.schedule.record(s.Trained(step))
    return [after]


def _until(schedule: s.Schedule, kind: type[s.Command]) -> s.Command:
    """Carries out commands until one of this kind is next. Prompts are named by step and place."""
    while not isinstance(command := schedule.next(), kind):
        match command:
            case s.Refit(version):
                schedule.record(s.Refitted(version))
            case s.Dispatch(count):
                first = schedule.step * 100 + len(schedule.in_flight)
                schedule.record(s.Dispatched(tuple(str(first + i) for i in range(count))))
            case s.Await():
                waiting = [uid for uid in schedule.in_flight if uid not in schedule.finished]
                schedule.record(s.GroupFinished(waiting[0]))
            case s.Train(step):
                schedule.record(s.Trained(step))
            case s.Validate(step):
                schedule.record(s.Validated(step))
            case s.Checkpoint(step):
                schedule.record(s.Checkpointed(step))
            case s.Finish():
                return command
    return command


ASKED = s.ScheduleConfig(num_prompts=2, max_steps=9, val_period=1, val_at_end=True, save_period=5)


def test_a_run_asked_to_stop_ends_its_step_saves_and_does_not_validate() -> None:
    schedule = s.Schedule(ASKED)
    _until(schedule, s.Await)
    schedule.record(s.StopAsked("time is up"))
    assert _until(schedule, s.Train) == s.Train(1, ("0", "1"))
    schedule.record(s.Trained(1))
    assert schedule.next() == s.Checkpoint(1)
    schedule.record(s.Checkpointed(1))
    assert schedule.next() == s.Finish("time is up")


def test_a_failed_prompt_of_the_last_step_is_still_replaced() -> None:
    schedule = s.Schedule(ASKED)
    _until(schedule, s.Await)
    schedule.record(s.StopAsked("time is up"))
    for uid in ("0", "1"):
        schedule.record(s.GroupFailed(uid, "down"))
    assert schedule.next() == s.Dispatch(2)


def test_between_steps_a_stop_begins_no_new_one() -> None:
    schedule = s.Schedule(ASKED)
    _until(schedule, s.Train)
    schedule.record(s.Trained(1))
    schedule.record(s.StopAsked("time is up"))
    assert schedule.next() == s.Checkpoint(1)
    first = s.Schedule(ASKED)
    first.record(s.StopAsked("time is up"))
    assert first.next() == s.Finish("time is up")


def test_with_an_age_limit_nothing_is_dispatched_for_steps_that_will_not_be() -> None:
    schedule = s.Schedule(s.ScheduleConfig(num_prompts=2, max_steps=9, max_trajectory_age=1))
    _until(schedule, s.Train)
    schedule.record(s.StopAsked("time is up"))
    schedule.record(s.Trained(1))
    assert schedule.next() == s.Finish("time is up")
