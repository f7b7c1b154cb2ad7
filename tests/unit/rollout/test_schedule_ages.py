"""Look-ahead, over every interleaving of small cases with failures, lost engines and a crash anywhere: each prompt
trains exactly once, none too old, nothing is waited for in vain. With dynamic sampling and bounds in bytes too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

import pytest

from grpo_mcore.rollout import schedule as s
from grpo_mcore.rollout.schedule import choose

pytestmark = pytest.mark.slow  # exhaustive

ENGINES = 2


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the next prompts, with those under way before them, and what had its end."""

    step: int
    data: tuple[str, ...]
    ends: tuple[str, ...]


@dataclass
class World:
    """A schedule, the data before it and the engines behind it. `ends`: uids in the order of their one end. `dull`:
    groups that may yet be not informative."""

    schedule: s.Schedule
    data: tuple[str, ...]
    saved: Saved
    accidents: int
    crashes: int
    dull: int = 0
    running: dict[str, int] = field(default_factory=dict)  # uid -> version that began it
    ends: tuple[str, ...] = ()
    trained: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, config: s.ScheduleConfig, prompts: int, accidents: int = 1, crashes: int = 1, dull: int = 0) -> World:
        data = tuple(f"{i:02d}" for i in range(prompts))
        return cls(s.Schedule(config), data, Saved(0, data, ()), accidents, crashes, dull)

    def copy(self) -> World:
        mine = self.schedule
        schedule = replace(
            mine,
            in_flight=dict(mine.in_flight),
            finished=dict(mine.finished),
            filtered=set(mine.filtered),
            failed=dict(mine.failed),
        )
        schedule.validated_step, schedule.saved_step = mine.validated_step, mine.saved_step
        return replace(self, schedule=schedule, running=dict(self.running))

    @property
    def key(self) -> tuple[Any, ...]:
        mine = self.schedule
        return (
            mine.step, mine.engine_version, mine.data_ended, tuple(mine.in_flight.items()), frozenset(mine.finished),
            mine.largest, frozenset(mine.filtered), self.dull, len(mine.failed), mine.validated_step,
            mine.saved_step, self.data, self.saved, self.accidents, self.crashes,
            frozenset(self.ends),
        )  # fmt: skip

    def crashed(self) -> World:
        """Somebody starts the run again, from its last checkpoint."""
        saved = self.saved
        return World(
            s.Schedule(self.schedule.config, step=saved.step), saved.data, saved, self.accidents, self.crashes - 1,
            self.dull, ends=saved.ends,
        )  # fmt: skip

    def carry_out(self, command: s.Command) -> None:
        schedule, config = self.schedule, self.schedule.config
        match command:
            case s.Refit(version):
                assert config.refit_in_flight or not self.running, "a refit while engines generate"
                schedule.record(s.Refitted(version))
            case s.Validate(step):
                assert not self.running and schedule.engine_version == schedule.policy_version
                schedule.record(s.Validated(step))
            case s.Checkpoint(step):
                self.saved = Saved(step, (*schedule.in_flight, *self.data), self.ends)
                schedule.record(s.Checkpointed(step))
            case s.Dispatch(count):
                taken, self.data = self.data[:count], self.data[count:]
                self.running |= dict.fromkeys(taken, schedule.engine_version)
                assert len(schedule.in_flight) + len(taken) <= limit(config)
                if config.max_bytes_in_flight and len(schedule.in_flight) + len(taken) > config.num_prompts:
                    held = sum(nbytes(uid) for uid in schedule.finished) + len(self.running) * schedule.largest
                    assert held <= config.max_bytes_in_flight or not taken
                schedule.record(s.Dispatched(taken, data_ended=len(taken) < count))
            case s.Train(step, uids, surplus):
                assert 0 < len(uids) <= config.num_prompts
                assert len(uids) == config.num_prompts or (schedule.data_ended and len(schedule.in_flight) == len(uids))
                for uid in uids:
                    assert uid not in self.running
                    assert step - schedule.in_flight[uid] <= config.max_trajectory_age, "older than the limit"
                kept = set(schedule.in_flight) - set(uids) - set(surplus)
                assert all(step - schedule.in_flight[uid] >= config.max_trajectory_age for uid in surplus)
                assert all(step - schedule.in_flight[uid] < config.max_trajectory_age for uid in kept)
                assert not surplus or config.prompts_per_dispatch
                for uid in surplus:
                    self.running.pop(uid, None)
                self.data = surplus + self.data
                self.trained += (uids,)
                self.end(*uids)
                schedule.record(s.Trained(step))

    def fail(self, *uids: str) -> None:
        self.accidents -= 1
        for uid in uids:
            del self.running[uid]
            self.end(uid)
            self.schedule.record(s.GroupFailed(uid, "lost"))

    def finish(self, uid: str, informative: bool) -> None:
        del self.running[uid]
        if not informative:
            self.dull -= 1
            self.end(uid)
        self.schedule.record(s.GroupFinished(uid, informative, nbytes(uid)))

    def end(self, *uids: str) -> None:
        assert not set(uids) & set(self.ends), "a prompt has two ends"
        self.ends += uids


def limit(config: s.ScheduleConfig) -> int:
    batch = config.prompts_per_dispatch or config.num_prompts
    return config.max_groups_in_flight or batch * (1 + config.max_trajectory_age)


def nbytes(uid: str) -> int:
    return 1 + int(uid) % 3


def after_a_wait(world: World) -> Iterator[World]:
    """Any group finishes, informative or not, or fails, or an engine is lost with all its groups."""
    assert world.running, "it waits for something that nobody is producing"
    for uid, informative in product(world.running, (True, False) if world.dull else (True,)):
        after = world.copy()
        after.finish(uid, informative)
        yield after
    if not world.accidents:
        return
    engines = [[uid for uid in world.running if int(uid) % ENGINES == engine] for engine in range(ENGINES)]
    for lost in [[uid] for uid in world.running] + [uids for uids in engines if len(uids) > 1]:
        after = world.copy()
        after.fail(*lost)
        yield after


def explore(start: World, prompts: int) -> list[World]:
    """Every end of every run."""
    seen, stack, ends = set(), [start], []
    while stack:
        world = stack.pop()
        if world.key in seen:
            continue
        seen.add(world.key)
        command = world.schedule.next()
        assert world.schedule.next() == command, "asking twice must not change the answer"
        if world.crashes:
            stack.append(world.crashed())
        if isinstance(command, s.Finish):
            left = (*world.schedule.in_flight, *world.data)
            assert sorted(world.ends + left) == [f"{i:02d}" for i in range(prompts)], "lost or doubled"
            assert not left or world.schedule.step == world.schedule.config.max_steps
            ends.append(world)
        elif isinstance(command, s.Await):
            stack += after_a_wait(world)
        else:
            before = world.key
            world.carry_out(command)
            assert world.key != before, "a command that changes nothing would come for ever"
            stack.append(world)
    return ends


CASES = [
    # prompts a step, age, order, in flight, refit in flight
    (3, 0, "in_order", None, False),
    (3, 1, "in_order", None, False),
    (3, 1, "in_order", None, True),
    (3, 1, "freshest_first", 4, True),
    (3, 1, "oldest_first", 4, True),
    (3, 1, "freshest_first", 5, False),
    (2, 2, "freshest_first", 4, True),
    (2, 2, "oldest_first", 5, True),
    (1, 3, "freshest_first", 3, True),
]
QUICK = {CASES[0], CASES[-1]}


@pytest.mark.parametrize(
    ("prompts", "age", "order", "in_flight", "refit_in_flight"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
@pytest.mark.parametrize("ends_early", [True, False])
def test_every_interleaving_keeps_the_laws(
    prompts: int, age: int, order: Any, in_flight: int | None, refit_in_flight: bool, ends_early: bool
) -> None:
    config = s.ScheduleConfig(
        num_prompts=prompts,
        max_steps=3,
        max_trajectory_age=age,
        group_order=order,
        max_groups_in_flight=in_flight,
        refit_in_flight=refit_in_flight,
        val_period=2,
        save_period=1,
    )
    total = 3 * prompts - 1 if ends_early else 20  # more than three steps and their accidents can take
    ends = explore(World.of(config, total), total)
    assert {world.crashes for world in ends} == {0, 1} and {world.accidents for world in ends} == {0, 1}
    assert {world.schedule.step for world in ends} >= {-(-total // prompts) if ends_early else 3}
    assert ends_early or {world.schedule.step for world in ends} == {3}
    if order == "in_order":
        calm = [world for world in ends if world.accidents and world.crashes]
        assert all(list(sum(world.trained, ())) == sorted(sum(world.trained, ())) for world in calm)
    elif in_flight is not None:
        assert len({world.trained for world in ends}) > 1, "the order should depend on what finishes first"


@pytest.mark.parametrize(
    ("prompts", "batch", "age", "order", "total", "dull"),
    [
        (2, 2, 1, "in_order", 7, 2),
        (1, 2, 1, "in_order", 20, 2),
        (1, 2, 1, "freshest_first", 5, 2),
        (1, 2, 2, "oldest_first", 5, 1),
    ],
)
def test_dynamic_sampling_ahead_keeps_the_laws(
    prompts: int, batch: int, age: int, order: Any, total: int, dull: int
) -> None:
    """Up to two groups are not informative; what would get too old goes back to the data, from engines too."""
    config = s.ScheduleConfig(
        num_prompts=prompts,
        max_steps=3,
        max_trajectory_age=age,
        group_order=order,
        refit_in_flight=True,
        prompts_per_dispatch=batch,
        save_period=1,
    )
    ends = explore(World.of(config, total, accidents=0, dull=dull), total)
    assert {world.dull for world in ends} == set(range(dull + 1)) and {world.crashes for world in ends} == {0, 1}
    if order == "in_order":
        for world in ends:
            if world.crashes and world.dull == dull and batch == prompts:
                assert list(sum(world.trained, ())) == sorted(sum(world.trained, ()))


@pytest.mark.parametrize("bound", [1, 5, 7])
def test_a_bound_in_bytes_holds_dispatch_back_and_nothing_else(bound: int) -> None:
    config = s.ScheduleConfig(
        num_prompts=2, max_steps=3, max_trajectory_age=2, refit_in_flight=True, max_bytes_in_flight=bound
    )
    ends = explore(World.of(config, 20), 20)
    assert {world.schedule.step for world in ends} == {3}


# One by one.


def test_engines_generate_for_the_next_step_while_this_one_trains() -> None:
    config = s.ScheduleConfig(num_prompts=2, max_steps=3, max_trajectory_age=1)
    world, seen = World.of(config, 99, 0, 0), []
    while not isinstance(command := world.schedule.next(), s.Finish):
        seen.append(command)
        if isinstance(command, s.Await):
            world = next(after_a_wait(world))
        else:
            world.carry_out(command)
    wait = s.Await()
    assert seen == [
        s.Refit(1), s.Dispatch(4), wait, wait, s.Train(1, ("00", "01")),
        wait, wait, s.Refit(2), s.Dispatch(2), s.Train(2, ("02", "03")),
        wait, wait, s.Train(3, ("04", "05")),
    ]  # fmt: skip


def test_what_would_get_too_old_goes_back_from_the_engines_too() -> None:
    config = s.ScheduleConfig(
        num_prompts=1, max_steps=9, max_trajectory_age=1, refit_in_flight=True, prompts_per_dispatch=2
    )
    world = World.of(config, 99, 0, 0, dull=1)
    for command in (s.Refit(1), s.Dispatch(4)):
        assert world.schedule.next() == command
        world.carry_out(command)
    world.finish("01", True)
    assert world.schedule.next() == s.Await()  # in order: the first one is awaited
    world.finish("00", False)
    assert world.schedule.next() == s.Dispatch(1)  # what is filtered is replaced at once
    world.carry_out(s.Dispatch(1))
    assert world.schedule.next() == s.Train(1, ("01",), (), 1)
    world.carry_out(s.Train(1, ("01",), (), 1))
    for command in (s.Refit(2), s.Dispatch(1)):
        assert world.schedule.next() == command
        world.carry_out(command)
    world.finish("02", True)
    assert world.schedule.next() == s.Train(2, ("02",), ("03", "04"), 0)
    assert set(world.running) == {"03", "04", "05"}


def test_too_many_groups_that_teach_nothing_end_the_run_when_all_are_there() -> None:
    config = s.ScheduleConfig(
        num_prompts=2, max_steps=9, max_trajectory_age=1, prompts_per_dispatch=2, max_gen_batches=1
    )
    world = World.of(config, 99, 0, 0, dull=9)
    for command in (s.Refit(1), s.Dispatch(4)):
        world.carry_out(command)
    for uid in ("00", "01"):
        world.finish(uid, False)
    assert world.schedule.next() == s.Await()
    world.finish("02", True)
    world.finish("03", False)
    with pytest.raises(s.ScheduleError, match="4 prompts were generated, 1 of them informative"):
        world.schedule.next()


def test_a_bound_in_bytes_counts_what_is_under_way_as_large_as_the_largest() -> None:
    config = s.ScheduleConfig(num_prompts=2, max_steps=9, max_trajectory_age=4, max_bytes_in_flight=40)
    schedule = s.Schedule(config)
    schedule.record(s.Refitted(1))
    assert schedule.next() == s.Dispatch(10)  # nothing is known of sizes yet
    schedule.record(s.Dispatched(tuple(map(str, range(10)))))
    for uid, size in (("0", 10), ("1", 20)):
        schedule.record(s.GroupFinished(uid, nbytes=size))
    assert schedule.next() == s.Train(1, ("0", "1"))
    schedule.record(s.Trained(1))
    for uid in map(str, range(2, 10)):
        schedule.record(s.GroupFinished(uid, nbytes=1))
    schedule.record(s.Refitted(2))
    assert schedule.next() == s.Dispatch(1)  # 8 bytes are held: 32 // 20 more


def test_a_validation_waits_until_nothing_is_generated() -> None:
    config = s.ScheduleConfig(num_prompts=1, max_steps=3, max_trajectory_age=1, val_period=1, refit_in_flight=True)
    world = World.of(config, 99, 0, 0)
    while not isinstance(command := world.schedule.next(), s.Train):
        world = next(after_a_wait(world)) if isinstance(command, s.Await) else (world.carry_out(command), world)[1]
    world.carry_out(command)
    assert world.running and world.schedule.next() == s.Await()
    (world,) = after_a_wait(world)
    assert world.schedule.next() == s.Refit(2)
    world.carry_out(s.Refit(2))
    assert world.schedule.next() == s.Validate(1)


def test_the_bound_on_groups_in_flight_is_at_least_a_step() -> None:
    with pytest.raises(ValueError, match="2 groups in flight are less than a step of 3"):
        s.ScheduleConfig(num_prompts=3, max_steps=1, max_trajectory_age=1, max_groups_in_flight=2)


# The choice, against trying all of them.


def can_be_kept(in_flight: dict[str, int], chosen: set[str], count: int, version: int, max_age: int) -> bool:
    """Whether the groups that are left can all train in time, `count` a step from the next one on."""
    left = sorted(number for uid, number in in_flight.items() if uid not in chosen)
    return all(version + 1 + place // count <= number + max_age for place, number in enumerate(left))


@pytest.mark.parametrize("order", ["in_order", "oldest_first", "freshest_first"])
def test_the_best_of_all_choices_that_keep_the_limit(order: Any) -> None:
    count, max_age, version = 2, 2, 3
    sizes = [(a, b, c) for a in range(3) for b in range(4) for c in range(5) if a + b <= 4 and 2 <= a + b + c <= 6]
    waited = 0
    for old, middle, fresh in sizes:
        in_flight = {f"{i}": number for i, number in enumerate([1] * old + [2] * middle + [3] * fresh)}
        for size in range(len(in_flight) + 1):
            for finished in combinations(in_flight, size):
                got = choose(in_flight, finished, count, version=version, max_age=max_age, order=order)
                possible = [
                    pair
                    for pair in combinations(finished, count)
                    if can_be_kept(in_flight, set(pair), count, version, max_age)
                ]
                if order == "in_order":
                    first = tuple(in_flight)[:count]
                    assert got == (first if set(first) <= set(finished) else ())
                    continue
                assert bool(got) == bool(possible)
                waited += not got and size >= count
                if got:
                    ages = [sum(in_flight[uid] for uid in pair) for pair in possible]
                    assert sum(in_flight[uid] for uid in got) == (min if order == "oldest_first" else max)(ages)
    assert waited or order == "in_order"
