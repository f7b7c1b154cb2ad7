"""Dynamic sampling's laws over every order and outcome of small cases: exact size, each prompt once, no deadlock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from grpo_mcore.rollout import schedule as s

GOOD, DULL, LOST = "informative", "not informative", "failed"


def config(prompts: int = 2, dispatch: int = 2, batches: int = 3, steps: int = 2, **more: int) -> s.ScheduleConfig:
    return s.ScheduleConfig(
        num_prompts=prompts, max_steps=steps, prompts_per_dispatch=dispatch, max_gen_batches=batches, **more
    )


@dataclass
class Run:
    """A schedule with the data before it and the engines behind it. `fates`: what came of each generation of a prompt,
    by (uid, how many times it was dispatched before)."""

    schedule: s.Schedule
    data: deque[str]
    running: dict[str, int] = field(default_factory=dict)  # uid -> how many times it was dispatched before
    dispatched: dict[str, int] = field(default_factory=dict)
    fates: dict[tuple[str, int], str] = field(default_factory=dict)
    trained: list[s.Train] = field(default_factory=list)

    @classmethod
    def of(cls, config: s.ScheduleConfig, prompts: int) -> Run:
        return cls(s.Schedule(config), deque(map(str, range(prompts))))

    def copy(self) -> Run:
        schedule = replace(
            self.schedule,
            in_flight=dict(self.schedule.in_flight),
            finished=dict(self.schedule.finished),
            filtered=set(self.schedule.filtered),
            failed=dict(self.schedule.failed),
            validated_step=self.schedule.validated_step,
        )
        schedule.validated_step, schedule.saved_step = self.schedule.validated_step, self.schedule.saved_step
        copies = (dict(self.running), dict(self.dispatched), dict(self.fates), list(self.trained))
        return Run(schedule, deque(self.data), *copies)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal where two runs differ only in the order in which groups came in."""
        state = self.schedule
        return (
            state.step, state.engine_version, state.data_ended, tuple(state.in_flight), tuple(self.data),
            frozenset(state.finished), frozenset(state.filtered), frozenset(state.failed),
            tuple(sorted(self.fates.items())), tuple(self.trained),
        )  # fmt: skip

    def carry_out(self, command: s.Command) -> None:
        """Does what a command other than Await and Finish asks for."""
        match command:
            case s.Refit(version):
                self.schedule.record(s.Refitted(version))
            case s.Dispatch(count):
                taken = [self.data.popleft() for _ in range(min(count, len(self.data)))]
                for uid in taken:
                    self.running[uid] = self.dispatched.get(uid, 0)
                    self.dispatched[uid] = self.running[uid] + 1
                self.schedule.record(s.Dispatched(tuple(taken), data_ended=len(taken) < count))
            case s.Train(step, _, surplus):
                self.trained.append(command)
                self.data.extendleft(reversed(surplus))
                self.schedule.record(s.Trained(step))

    def finish(self, uid: str, fate: str) -> None:
        self.fates[uid, self.running.pop(uid)] = fate
        failed = s.GroupFailed(uid, "lost")
        self.schedule.record(failed if fate == LOST else s.GroupFinished(uid, informative=fate == GOOD))


def run_in_order(run: Run, fates: str) -> list[s.Command]:
    """Every command of a run whose groups come in as they were dispatched: + informative, - not, x failed."""
    outcome, commands = iter(fates), []
    while not commands or not isinstance(commands[-1], s.Finish):
        command = run.schedule.next()
        commands.append(command)
        if isinstance(command, s.Await):
            run.finish(next(iter(run.running)), {"+": GOOD, "-": DULL, "x": LOST}[next(outcome)])
        else:
            run.carry_out(command)
    assert next(outcome, None) is None, "every fate was asked for"
    return commands


# One by one.


@pytest.mark.parametrize(
    ("settings", "data", "fates", "commands"),
    [
        pytest.param(config(prompts=3, dispatch=3, steps=1), 99, "+--" + "-++",
                     [s.Dispatch(3), s.Dispatch(3), s.Train(1, ("0", "4", "5"), (), 3)],
                     id="groups are kept over generation batches until the step is full"),
        pytest.param(config(prompts=2, dispatch=4), 99, "-+++" + "+-++",
                     [s.Dispatch(4), s.Train(1, ("1", "2"), ("3",), 1),
                      s.Dispatch(4), s.Train(2, ("3", "5"), ("6",), 1)],
                     id="surplus goes back and is the next to be generated"),
        pytest.param(config(batches=1, steps=1), 99, "x++",
                     [s.Dispatch(2), s.Dispatch(1), s.Train(1, ("1", "2"), (), 0)],
                     id="a failed group is replaced within its generation batch"),
        pytest.param(config(prompts=1, dispatch=1, batches=2), 99, "-+-+",
                     [s.Dispatch(1), s.Dispatch(1), s.Train(1, ("1",), (), 1),
                      s.Dispatch(1), s.Dispatch(1), s.Train(2, ("3",), (), 1)],
                     id="every step has its own generation batches"),
        pytest.param(config(prompts=2, dispatch=3, steps=9), 5, "+++" + "-+-",
                     [s.Dispatch(3), s.Train(1, ("0", "1"), ("2",), 0), s.Dispatch(3), s.Dispatch(3),
                      s.Train(2, ("3",), (), 2)],
                     id="the end of the data trains what is informative"),
        pytest.param(config(prompts=1, dispatch=4, steps=9), 3, "+++" + "++" + "-",
                     [s.Dispatch(4), s.Train(1, ("0",), ("1", "2"), 0), s.Dispatch(4), s.Train(2, ("1",), ("2",), 0),
                      s.Dispatch(4)],
                     id="surplus of the last data is not lost"),
    ],
)  # fmt: skip
def test_what_is_trained_and_asked_for(
    settings: s.ScheduleConfig, data: int, fates: str, commands: list[s.Command]
) -> None:
    *done, end = (it for it in run_in_order(Run.of(settings, data), fates) if not isinstance(it, s.Await | s.Refit))
    assert done == commands
    assert end == s.Finish("the data has ended" if data < 99 else f"all {settings.max_steps} steps are done")


def test_quick_groups_are_not_favoured() -> None:
    run = Run.of(config(prompts=1, dispatch=2, steps=1), 99)
    run.carry_out(run.schedule.next())
    run.carry_out(run.schedule.next())
    run.finish("1", GOOD)
    assert run.schedule.next() == s.Await()
    run.finish("0", GOOD)
    assert run.schedule.next() == s.Train(1, ("0",), ("1",), 0)


def test_data_that_teach_nothing_end_the_run_with_a_checkpoint() -> None:
    run = Run.of(config(prompts=1, dispatch=1, batches=9, steps=9, save_period=5), 3)
    run.schedule.step, run.schedule.saved_step = 1, 0
    for fate in (DULL, DULL, DULL):
        while not isinstance(command := run.schedule.next(), s.Await):
            run.carry_out(command)
        run.finish(next(iter(run.running)), fate)
    run.carry_out(run.schedule.next())  # asks for more, and finds that there is none
    assert run.schedule.next() == s.Checkpoint(1)
    run.schedule.record(s.Checkpointed(1))
    assert run.schedule.next() == s.Finish("the data has ended")


def test_too_many_generation_batches_say_what_to_change() -> None:
    run = Run.of(config(prompts=2, dispatch=3, batches=2), 99)
    with pytest.raises(s.ScheduleError) as error:
        run_in_order(run, "--+" + "---")
    assert str(error.value) == (
        "step 1: 2 generation batches gave too little to train on: 6 prompts were generated, 1 of them informative "
        "(their rewards differ), 2 are needed; raise grpo.dynamic_sampling_max_gen_batches or grpo.batch_multiplier, "
        "or train on easier or harder data"
    )


def test_without_dynamic_sampling_every_group_trains() -> None:
    schedule = s.Schedule(s.ScheduleConfig(num_prompts=1, max_steps=1))
    schedule.record(s.Refitted(1))
    schedule.record(s.Dispatched(("a",)))
    with pytest.raises(s.ScheduleError, match="does not fit"):
        schedule.record(s.GroupFinished("a", informative=False))


def test_a_filtered_group_does_not_come_again_in_its_step() -> None:
    run = Run.of(config(), 99)
    run.carry_out(run.schedule.next())
    run.carry_out(run.schedule.next())
    run.finish("0", DULL)
    for event in (s.Dispatched(("0",)), s.GroupFinished("0"), s.GroupFailed("0", "")):
        with pytest.raises(s.ScheduleError, match="does not fit"):
            run.schedule.record(event)


# All of them.


@pytest.mark.parametrize(
    ("prompts", "dispatch", "data", "losses"),
    [(2, 2, 5, 2), (2, 3, 6, 1), (2, 3, 99, 0), (2, 2, 99, 1), (3, 3, 6, 1), (1, 3, 4, 2), (3, 2, 5, 1)],
)
def test_every_order_and_outcome_keeps_the_laws(prompts: int, dispatch: int, data: int, losses: int) -> None:
    limits = config(prompts, dispatch, batches=2, max_failed_groups=losses)
    chosen: dict[tuple[object, ...], s.Command] = {}
    seen: set[tuple[object, ...]] = set()
    endings: set[str] = set()
    stack = [Run.of(limits, data)]
    while stack:
        run = stack.pop()
        if run.key in seen:
            continue
        seen.add(run.key)
        try:
            command = run.schedule.next()
        except s.ScheduleError as error:
            assert "2 generation batches" in str(error)
            assert len(run.schedule.filtered) + len(run.schedule.in_flight) == 2 * dispatch and not run.running
            assert len(run.schedule.in_flight) < prompts
            endings.add("too many generation batches")
            continue
        assert run.schedule.next() == command, "asking twice must not change the answer"
        if isinstance(command, s.Finish):
            assert_each_prompt_has_one_end(run, data)
            assert command.reason != "the data has ended" or not run.data
            endings.add(command.reason)
        elif isinstance(command, s.Await):
            assert run.running, "it waits for something that nobody is producing"
            stack += after_each_event(run, losses)
        else:
            if isinstance(command, s.Train):
                assert_exact_size(run, command, limits)
                # The choice depends on what came of each prompt, not on when.
                happened = tuple(sorted(run.fates.items()))
                assert chosen.setdefault(happened, command) == command
            run.carry_out(command)
            stack.append(run)
    assert "all 2 steps are done" in endings
    assert ("the data has ended" in endings) == (data < 99)
    assert len(chosen) > 20


def after_each_event(run: Run, losses: int) -> Iterator[Run]:
    may_fail = sum(fate == LOST for fate in run.fates.values()) < losses
    for uid in run.running:
        for fate in (GOOD, DULL, LOST) if may_fail else (GOOD, DULL):
            after = run.copy()
            after.finish(uid, fate)
            yield after


def assert_exact_size(run: Run, command: s.Train, limits: s.ScheduleConfig) -> None:
    assert not run.running
    assert len(command.groups) == limits.num_prompts or (run.schedule.data_ended and not command.surplus)
    assert 0 < len(command.groups) <= limits.num_prompts
    for uid in command.groups + command.surplus:
        assert run.fates[uid, run.dispatched[uid] - 1] == GOOD


def assert_each_prompt_has_one_end(run: Run, data: int) -> None:
    """Trained, filtered or failed: once. Handed back: it waits in the data, or came to one of these ends later."""
    trained = [uid for command in run.trained for uid in command.groups]
    handed_back = [uid for command in run.trained for uid in command.surplus]
    consumed = [uid for (uid, _), fate in run.fates.items() if fate != GOOD]
    ends = trained + consumed + list(run.data)
    assert sorted(ends, key=int) == [str(i) for i in range(data)]
    assert sum(fate == GOOD for fate in run.fates.values()) == len(trained) + len(handed_back)
    assert sum(command.filtered for command in run.trained) + len(run.schedule.filtered) == sum(
        fate == DULL for fate in run.fates.values()
    )
