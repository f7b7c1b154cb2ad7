"""Rollouts on engines and environments without models: what is sent to whom and when, and what comes back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from grpo_mcore.cluster.local_cluster import LocalStream
from grpo_mcore.data import DataError
from grpo_mcore.driver.rollouts.rollouts import RolloutHooks, Rollouts
from grpo_mcore.rollout.life import TurnLimits
from grpo_mcore.rollout.trajectory import Outcome, Sampling, Score, Trajectory, sample_seed
from tests.unit.driver.rollouts.fake_rollouts import (
    END,
    SAMPLING,
    CharacterTokenizer,
    World,
    play,
    prompt,
    turns_of,
    wanted,
)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_every_sample_gets_its_turns_in_any_order_of_events(engines: int, seed: int, together: bool) -> None:
    world = World(engines=engines, seed=seed, together=together)
    groups = world.run(range(5))
    assert sorted(groups) == [f"p{number}" for number in range(5)]
    assert len(world.finished) == 15
    for uid, group in groups.items():
        for index, (sample, score) in enumerate(zip(group.samples, group.scores, strict=True)):
            turns = wanted(uid, index)
            trajectory = world.trajectory(group, index)
            assert (trajectory.uid, trajectory.generation_index, turns_of(trajectory)) == (uid, index, turns)
            assert (sample.turns, sample.length, sample.truncated) == (turns, trajectory.length, False)
            assert score == Score(
                float(turns), str(turns), "", 0.5 * turns, {"turns": float(turns)}, True, step_rewards=(1.0,) * turns
            )
            between = [turn for turn in trajectory.turns[1:] if not turn.loss_mask]
            assert [turn.text for turn in between] == [f"$(u:turn {turn})(a:" for turn in range(1, turns)]
            assert all(END not in turn.token_ids for turn in between)  # the policy generated it
            assert sample.environment_tokens == sum(map(len, between))


@pytest.mark.parametrize("seed", range(4))
def test_what_each_worker_is_asked_and_when(seed: int) -> None:
    """Turns are taken together: each group is scored once a turn, for its samples that are not over. An engine gets all
    its next turns in one call, with references to the trajectories so far and the seeds of the turn; a sample stays
    with its engine."""
    world = World(engines=2, seed=seed, together=True)
    world.run(range(5))
    assert sorted(world.environment.calls) == sorted(
        [(uid, index, turn) for index in range(3) if wanted(uid, index) >= turn]
        for uid in (f"p{number}" for number in range(5))
        for turn in range(1, 5)
        if any(wanted(uid, index) >= turn for index in range(3))
    )
    for worker in world.engines.workers:
        calls = [requests for requests, sampling in worker.target.calls if sampling == SAMPLING]
        assert len(calls) == len(worker.target.calls) == 4  # one for each turn
        first = {(request.uid, request.generation_index) for request in calls[0]}
        for turn, requests in enumerate(calls):
            expected = {key for key in first if wanted(*key) > turn}
            assert {(request.uid, request.generation_index) for request in requests} == expected
            for request in requests:
                seed_of_turn = sample_seed(5, 1, request.uid, request.generation_index, turn)
                assert request.seed == seed_of_turn and len(request.prompt) == 1
                assert isinstance(request.continues, int) == (turn > 0)


def test_samples_do_not_depend_on_the_order_of_events() -> None:
    found = []
    for seed, engines in ((0, 1), (1, 1), (2, 2), (3, 4), (4, 4)):
        world = World(engines=engines, seed=seed, together=seed == 4)
        groups = world.run(range(4))
        found.append({(uid, i): world.trajectory(group, i) for uid, group in groups.items() for i in range(3)})
    assert all(trajectories == found[0] for trajectories in found[1:])


def test_each_sample_has_its_own_state() -> None:
    """This holds even if an environment changes the metadata in place."""
    seen: dict[tuple[str, int], list[Any]] = {}

    def decide(trajectory: Trajectory, metadata: dict[str, Any]) -> Outcome:
        outcome = play(trajectory, metadata)
        seen[trajectory.uid, trajectory.generation_index] = list(metadata["seen"])
        return outcome

    prompts = World(decide).run(range(4))
    for (uid, index), entries in seen.items():
        assert entries == [(index, turn) for turn in range(1, wanted(uid, index) + 1)]
    assert all(group.prompt["extra_env_info"]["seen"] == [] for group in prompts.values())


def test_with_one_turn_taken_together_each_group_is_scored_in_one_call() -> None:
    """No chat template that can hold several turns is needed then."""
    world = World(max_turns=1, engines=2, together=True)
    groups = world.run(range(4))
    assert len(world.environment.calls) == 4 and all(len(call) == 3 for call in world.environment.calls)
    assert [len(worker.target.calls) for worker in world.engines.workers] == [1, 1]
    for uid, group in groups.items():
        assert [sample.turns for sample in group.samples] == [1] * 3
        assert [score.terminated for score in group.scores] == [wanted(uid, index) == 1 for index in range(3)]
    Rollouts(world.engines, {}, None, TurnLimits(1, 10), seed=0)
    tokenizer = CharacterTokenizer()
    tokenizer.apply_chat_template = lambda *_args, **_how: "no conversation"  # type: ignore[method-assign]
    with pytest.raises(DataError, match="shows an earlier answer 0 times"):
        Rollouts(world.engines, {}, tokenizer, TurnLimits(2, 10), seed=0)


def test_a_row_s_variables_of_the_template_shape_the_text_between_turns() -> None:
    world = World(max_turns=2, engines=1)
    bare, template = CharacterTokenizer(), CharacterTokenizer().apply_chat_template
    bare.apply_chat_template = lambda *args, mark="", **how: mark + template(*args, **how) + mark  # type: ignore[method-assign]
    world.rollouts = Rollouts(world.engines, world.rollouts.environments, bare, TurnLimits(2, 1000), seed=5)
    for variables, marks in ((None, 0), ({"mark": "~"}, 1)):
        info = {"number": 1, "seen": [], **({"chat_template_kwargs": variables} if variables else {})}
        (group,) = world.run(range(1, 2), generations=1, extra_env_info=info).values()
        assert [turn.text.count("~") for turn in world.trajectory(group, 0).turns] == [0, 0, marks, 0]


def test_turns_end_at_their_limit() -> None:
    world = World(max_turns=2)
    groups = world.run(range(4))
    for uid, group in groups.items():
        assert [sample.turns for sample in group.samples] == [min(wanted(uid, index), 2) for index in range(3)]
        assert [score.terminated for score in group.scores] == [wanted(uid, index) <= 2 for index in range(3)]
        assert not any(sample.truncated for sample in group.samples)
    assert len(world.finished) == 12


def test_the_context_ends_a_sample_that_has_no_room_left() -> None:
    """A prompt of 3 tokens, 4 a turn, 13 of the environment ("(u:turn 1)(a:"): the second answer ends at 24, and the
    third would begin at 37."""
    for room, turns in ((20, 1), (21, 2), (37, 2), (38, 3)):
        world = World(lambda *what: play_on(*what), max_model_len=room, length=lambda _: 4)
        (group,) = world.run(range(1), generations=2).values()
        for sample, score in zip(group.samples, group.scores, strict=True):
            assert (sample.turns, sample.truncated) == (turns, turns < 3)
            assert sample.finish_reason == ("length" if turns < 3 else "stop")
            assert (score.reward, score.terminated) == (turns, turns == 3)
        assert len(world.finished) == 2


def play_on(trajectory: Trajectory, metadata: dict[str, Any]) -> Outcome:
    turn = turns_of(trajectory)
    return Outcome(1.0, None, "", 0.0, terminated=turn == 3, observation=f"turn {turn}")


def test_a_sample_that_fails_does_not_affect_the_others() -> None:
    """One is aborted by the engine in turn 2, one truncated in turn 1, one failed by the environment in turn 3."""

    def decide(trajectory: Trajectory, metadata: dict[str, Any]) -> Outcome:
        turn = turns_of(trajectory)
        failed = trajectory.generation_index == 2 and turn == 3
        return Outcome(None if failed else 1.0, None, "went wrong", 0.0, terminated=turn == 4, observation="on")

    ends = {("p0", 0, 2): "abort", ("p0", 1, 1): "length"}
    world = World(decide, ends=ends, together=True)
    (group,) = world.run(range(1), generations=4).values()
    assert [sample.turns for sample in group.samples] == [2, 1, 3, 4]
    assert [score.reward for score in group.scores] == [None, 1.0, None, 4.0]
    assert [score.reason for score in group.scores[::2]] == ["the engine aborted the sample", "went wrong"]
    assert [sample.truncated for sample in group.samples] == [False, True, False, False]
    assert len(world.finished) == 4
    assert [[key[1] for key in call] for call in world.environment.calls] == [[0, 1, 2, 3], [0, 2, 3], [2, 3], [3]]


def test_stop_strings_change_by_turn() -> None:
    def decide(trajectory: Trajectory, metadata: dict[str, Any]) -> Outcome:
        turn = turns_of(trajectory)
        stops = {1: None, 2: ("b", "c"), 3: ()}.get(turn)
        return Outcome(0.0, None, "", 0.0, terminated=turn == 4, observation="on", stop_strings=stops)

    world = World(decide, together=True)
    world.run(range(1), stop_strings=["a"])
    assert [requests[0].stop_strings for requests, _ in world.calls()] == [("a",), ("a",), ("b", "c"), ()]


def test_the_end_marker_is_added_to_a_turn_that_did_not_end_with_it() -> None:
    """A stop string ended the turn, so there is no stop token."""

    def decide(trajectory: Trajectory, metadata: dict[str, Any]) -> Outcome:
        return Outcome(0.0, None, "", 0.0, terminated=turns_of(trajectory) == 2, observation="on")

    world = World(decide)
    engine = world.engines.workers[0].target
    generate = engine._generate
    engine._generate = lambda request: replace(generate(request), stop_token=None)
    (group,) = world.run(range(1), generations=1).values()
    between = world.trajectory(group, 0).turns[2]
    assert between.token_ids[0] == END and between.text == "$(u:on)(a:"


def test_prompts_of_a_later_step_while_turns_are_under_way() -> None:
    """Their samples wait for their engine, and have the seeds of their own step."""
    world = World(engines=2, seed=3)
    world.rollouts.dispatch([prompt(n) for n in range(3)], SAMPLING, generations=3, step=1)
    first = world.rollouts.next_group()
    hotter = Sampling(max_new_tokens=8, temperature=2.0)
    world.rollouts.dispatch([prompt(n) for n in range(3, 6)], hotter, generations=3, step=2)
    groups = {group.uid: group for group in [first, *(world.rollouts.next_group() for _ in range(5))]}
    assert len(groups) == 6 and not world.rollouts.generating
    for requests, sampling in world.calls():
        for request in requests:
            step = 1 if request.uid in ("p0", "p1", "p2") else 2
            assert sampling == (SAMPLING if step == 1 else hotter)
            turns = 0 if request.continues is None else turns_of(world.cluster.store.fetch(request.continues))
            assert request.seed == sample_seed(5, step, request.uid, request.generation_index, turns)


def test_what_an_environment_raises_costs_its_sample() -> None:
    """Each sample whose second turn cannot be scored has no reward, with the reason; the others go on."""

    def broken(trajectory: Trajectory, metadata: dict[str, Any]) -> Outcome:
        if turns_of(trajectory) == 2 and trajectory.generation_index == 1:
            raise KeyError("state")
        return play(trajectory, metadata)

    groups, calm = World(broken).run(range(3)), World().run(range(3))
    for uid, group in groups.items():
        for index, (score, expected) in enumerate(zip(group.scores, calm[uid].scores, strict=True)):
            if index == 1 and wanted(uid, index) > 1:
                assert (score.reward, score.reason) == (None, "the environment raised KeyError: 'state'")
            else:
                assert score == expected


def test_the_driver_shows_the_traceback_of_a_reward(caplog: pytest.LogCaptureFixture) -> None:
    """It was in the log of the environment's worker only."""

    def raising(trajectory: Trajectory, metadata: dict[str, Any]) -> Outcome:
        first = (trajectory.uid, trajectory.generation_index) == ("p0", 0)
        return Outcome(None, None, "it crashed", 0.0, traceback="Traceback of the reward" if first else None)

    World(raising).run(range(2))
    assert caplog.messages == ["it crashed: no reward for a sample of p0\nTraceback of the reward"]


def test_a_prompt_without_an_environment_is_named() -> None:
    with pytest.raises(ValueError, match="p0: no environment for task 'other'. .* known are 'game'"):
        World().run(range(1), task_name="other")


def test_rollouts_go_on_while_the_driver_waits_for_something_else() -> None:
    """All turns of all samples finish without a call of `next_group`, which then returns the groups."""
    world = World(engines=2, seed=1)
    world.rollouts.dispatch([prompt(number) for number in range(4)], SAMPLING, generations=3, step=1)
    while awaited := world.rollouts.awaited():
        world.rollouts.take(world.cluster.ready(awaited, 1.0, "work")[:1])
    assert len(world.finished) == 12 and not world.rollouts.generating
    calls = len(world.calls())
    groups = [world.rollouts.next_group() for _ in range(4)]
    assert sorted(group.uid for group in groups) == ["p0", "p1", "p2", "p3"] and len(world.calls()) == calls


@pytest.mark.parametrize("seed", range(5))
def test_time_without_generation_is_not_called_generation(seed: int) -> None:
    """Each wait is in the phase "reward" exactly when no stream of an engine is among what is waited for."""
    phases: list[str] = []
    open_phases: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append(name)
        open_phases.append(name)
        yield
        open_phases.pop()

    world = World(seed=seed)
    world.rollouts._hooks = RolloutHooks(phase=phase)
    ready = world.cluster.ready

    def watched(things: Any, *args: Any) -> Any:
        generating = any(isinstance(thing, LocalStream) for thing in things)
        assert open_phases == ["generate" if generating else "reward"]
        return ready(things, *args)

    world.cluster.ready = watched  # type: ignore[method-assign]
    world.run(range(4))
    assert set(phases) == {"generate", "reward"}


def test_new_prompts_go_to_the_engine_with_the_lowest_load() -> None:
    world = World(engines=2)
    world.rollouts.dispatch([prompt(0, length=900), prompt(1)], SAMPLING, generations=1, step=1)
    world.rollouts.dispatch([prompt(2), prompt(3)], SAMPLING, generations=1, step=2)
    for _ in range(4):
        world.rollouts.next_group()
    served = [
        [request.uid for requests, _ in worker.target.calls for request in requests if request.continues is None]
        for worker in world.engines.workers
    ]
    assert served == [["p0"], ["p1", "p2", "p3"]]


def test_a_later_step_does_not_hold_up_the_turns_of_an_earlier_one() -> None:
    """Samples of step 2 that are being generated do not delay the next turn of those of step 1."""
    world = World(seed=2, together=True)
    world.rollouts.dispatch([prompt(1)], SAMPLING, generations=2, step=1)  # 2 and 3 turns
    first = world.rollouts.awaited()[0]
    world.rollouts.dispatch([prompt(2)], SAMPLING, generations=2, step=2)
    for _ in range(2):
        world.rollouts.take([first])
    (reward,) = [thing for thing in world.rollouts.awaited() if not isinstance(thing, LocalStream)]
    world.rollouts.take([reward])
    assert len(world.rollouts.awaited()) == 2  # the engine generates step 2 and the second turn of step 1


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("taken", [1, 3])
def test_given_up_prompts_do_not_come_back_and_may_be_dispatched_again(engines: int, seed: int, taken: int) -> None:
    """They may be generated, scored, finished or waiting for their next turn; the others are not affected."""
    world = World(engines=engines, seed=seed)
    world.rollouts.dispatch([prompt(number) for number in range(6)], SAMPLING, generations=3, step=1)
    groups = {group.uid: group for group in (world.rollouts.next_group() for _ in range(taken))}
    unwanted = [uid for uid in ("p1", "p2", "p5") if uid not in groups]
    world.rollouts.drop(unwanted)
    world.rollouts.dispatch([prompt(int(uid[1:])) for uid in unwanted], SAMPLING, generations=3, step=2)
    groups |= {group.uid: group for group in (world.rollouts.next_group() for _ in range(6 - taken))}
    assert len(groups) == 6
    while awaited := world.rollouts.awaited():  # streams whose last samples were given up
        world.rollouts.take(world.cluster.ready(awaited, 1.0, "ends")[:1])
    assert not world.rollouts.generating
    undisturbed = World(engines=engines, seed=seed)
    first, anew = undisturbed.run(range(6)), undisturbed.run(range(6), step=2)
    for uid, group in groups.items():
        same = (anew if uid in unwanted else first)[uid]
        assert [undisturbed.trajectory(same, i) for i in range(3)] == [world.trajectory(group, i) for i in range(3)]
        assert group.scores == same.scores


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_a_group_may_be_complete_without_its_last_samples(engines: int, seed: int, together: bool) -> None:
    world = World(engines=engines, seed=seed, max_turns=1)
    limits = TurnLimits(1, 99, together=together)
    world.rollouts = Rollouts(world.engines, world.rollouts.environments, None, limits, seed=5, enough_samples=3)
    undisturbed = World(engines=engines, seed=seed, max_turns=1)
    for step in (1, 2):  # the same prompts again: no abort may arrive too late
        world.rollouts.dispatch([prompt(number) for number in range(4)], SAMPLING, generations=5, step=step)
        groups = [world.rollouts.next_group() for _ in range(4)]
        whole = undisturbed.run(range(4), generations=5, step=step)
        for group in groups:
            assert len(group.samples) == len(group.scores) == 3 and group.failure is None
            for sample in group.samples:
                trajectory = world.cluster.store.fetch(sample.ref)
                assert trajectory == undisturbed.trajectory(whole[group.uid], sample.generation_index)
    while awaited := world.rollouts.awaited():
        world.rollouts.take(world.cluster.ready(awaited, 1.0, "ends")[:1])
    assert sum(map(len, world.environment.calls)) == 2 * 4 * 3, "samples given up are not scored"


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_a_group_of_several_turns_may_be_complete_without_its_last_samples(engines: int, seed: int) -> None:
    """The samples that are dropped may be generated, scored or queued; those that stay are whole."""
    world, undisturbed = World(engines=engines, seed=seed), World(engines=engines, seed=seed)
    limits = TurnLimits(9, 1000)
    world.rollouts = Rollouts(
        world.engines, world.rollouts.environments, CharacterTokenizer(), limits, seed=5, enough_samples=3
    )
    for step in (1, 2):
        world.rollouts.dispatch([prompt(number) for number in range(4)], SAMPLING, generations=5, step=step)
        groups = [world.rollouts.next_group() for _ in range(4)]
        whole = undisturbed.run(range(4), generations=5, step=step)
        for group in groups:
            assert len(group.samples) == len(group.scores) == 3
            for sample, score in zip(group.samples, group.scores, strict=True):
                trajectory = world.cluster.store.fetch(sample.ref)
                assert trajectory == undisturbed.trajectory(whole[group.uid], sample.generation_index)
                assert score == whole[group.uid].scores[sample.generation_index] and score.terminated
    while awaited := world.rollouts.awaited():
        world.rollouts.take(world.cluster.ready(awaited, 1.0, "ends")[:1])
    assert not world.rollouts.generating


def test_a_sample_waits_for_no_other_sample() -> None:
    """The second turn of the first sample starts while the other one of its group is still in its first."""
    world = World()
    world.rollouts.dispatch([prompt(1)], SAMPLING, generations=2, step=1)
    (stream,) = world.rollouts.awaited()
    world.rollouts.take([stream])
    (score,) = [thing for thing in world.rollouts.awaited() if thing is not stream]
    world.rollouts.take([score])  # of the first sample, whichever it is
    (((_, index, turn),),) = world.environment.calls
    streams = [thing for thing in world.rollouts.awaited() if isinstance(thing, LocalStream)]
    assert turn == 1 and wanted("p1", index) > 1 and streams[0] is stream and len(streams) == 2
