"""Small runs of the real driver in virtual time, with faults: the laws hold, and each planted fault breaks one.

`python -m tests.simulation.simulation 0 10000` simulates more seeds.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from grpo_mcore.base.processes import rare_collections
from grpo_mcore.base.stopping import StopRequest
from grpo_mcore.cluster import NodeLost, virtual_cluster
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.driver.engines.engine_group import EngineGroup
from grpo_mcore.driver.policy.policy_group import PolicyGroup
from grpo_mcore.driver.policy.teachers import Teachers
from grpo_mcore.driver.record import run_record
from grpo_mcore.driver.record.run_record import RunRecord
from grpo_mcore.driver.rollouts.engine_queues import EngineQueues
from grpo_mcore.driver.rollouts.prompt_stream import PromptStream
from grpo_mcore.driver.rollouts.rollouts import Rollouts
from grpo_mcore.driver.rollouts.scoring import EnvQueue
from grpo_mcore.driver.run import loop_parts
from grpo_mcore.observe.ledger.ledger import Ledger
from grpo_mcore.refit.refit import Refit
from grpo_mcore.step.step_groups import StepGroups
from grpo_mcore.tools.rehearse.faults import Fault
from tests.simulation import simulation
from tests.simulation.simulation import Case, drawn, shortest, simulate

pytestmark = pytest.mark.slow  # some hundred runs

SEEDS, SHARDS = 2000, 10
"""Seeds that are simulated, and the tests among which they are spread. `make test` runs one of these: in as many seeds
every planted fault is found."""
MOST_SEEDS = 200
"""Seeds within which a planted fault must be found."""


@pytest.fixture(scope="module", autouse=True)
def _rare_collections() -> Iterator[None]:
    """Once for all runs: each would look through all that is imported."""
    with rare_collections():
        yield


@pytest.mark.parametrize(
    "shard",
    [0, *(pytest.param(shard, marks=pytest.mark.every_state) for shard in range(1, SHARDS))],
    ids=lambda shard: f"shard-{shard}",
)
def test_the_laws_hold(shard: int) -> None:
    for seed in range(shard, SEEDS, SHARDS):
        case = drawn(seed)
        assert not (flaws := simulate(case).flaws), f"{case}\n  breaks: {'; '.join(flaws)}"


def test_a_seed_is_one_run() -> None:
    case = drawn(23)
    first, second = simulate(case), simulate(case)
    assert (first.seconds, first.code, first.errors) == (second.seconds, second.code, second.errors)
    assert first.happened == second.happened


FOUND = {
    "calls to an engine that a refit has replaced meanwhile were taken for failures of its successor": Case(
        81, prompts=4, generations=2, steps=3, engines=3, tensor=2, data=2, age=2, in_flight=True, apart=True,
        enough=2, dynamic=True, turns=3, reward_failures=0.05,
        faults=(Fault("hang", "engine-1", 0.2569644702611379, "train", 3),),
    ),
    "an engine that had missed its deadline in a refit got two more, and kept the run waiting for three minutes": Case(
        465, engines=3, faults=(Fault("hang", "engine-2", 0.0, "refit", 4),),
    ),
    "a run that SIGTERM stopped waited for room on its disk until no time was left to write": Case(
        3053, data=2, age=1, apart=True, save_period=2, background_saves=True, max_running=2, teacher=True,
        faults=(
            Fault("slow", "policy-1", 0.32129209887481563, "reward", 2), Fault("SIGTERM", "", 0.0, "logprobs", 2),
            Fault("full disk", "", 14.928070618429851, for_s=13.925747736876895),
        ),
    ),
}  # fmt: skip
"""What simulation has found in the product."""


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_stays_mended(what: str) -> None:
    assert not simulate(FOUND[what]).flaws


class Plant:
    """Replaces parts of the product by wrong ones, for one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def __call__(self, where: Any, name: str, wrong: Callable[..., Any]) -> None:
        """Replace `where.name` by a function that gets the right one first."""
        right = getattr(where, name)
        self._patch.setattr(where, name, lambda *args, **how: wrong(right, *args, **how))


def a_refit_skips_an_engine(plant: Plant) -> None:
    plant(EngineGroup, "subset", lambda right, self, numbers: right(self, numbers[1:] or numbers))


def a_dead_engine_is_never_readmitted(plant: Plant) -> None:
    plant(EngineGroup, "mark_refitted", lambda right, self, numbers: None)


def nobody_asks_for_the_health_of_engines(plant: Plant) -> None:
    plant(EngineGroup, "replace_dead", lambda right, *args, **how: [])


def a_hanging_engine_is_waited_for(plant: Plant) -> None:
    plant(EngineQueues, "take_late", lambda right, self, detail: False)


def a_prompt_in_flight_is_no_part_of_a_checkpoint(plant: Plant) -> None:
    def forgetful(right: Any, self: PromptStream) -> dict[str, Any]:
        return right(self) | {"waiting": list(self._waiting)}

    plant(PromptStream, "state_dict", forgetful)


def a_finished_group_is_dropped_at_resume(plant: Plant) -> None:
    class Forgetful:
        def __init__(self, groups: StepGroups) -> None:
            self.add = lambda group: None if group.uid.endswith(("0", "2", "4", "6", "8")) else groups.add(group)

    def drop(right: Any, position: Any, record: Any, groups: StepGroups, *others: Any, **how: Any) -> None:
        right(position, record, Forgetful(groups), *others, **how)

    plant(loop_parts, "resume_in_flight", drop)


def a_prompt_that_is_done_comes_again(plant: Plant) -> None:
    plant(PromptStream, "mark_done", lambda right, self, uids: right(self, list(uids)[1:]))


def an_abort_hits_a_prompt_that_was_dispatched_again(plant: Plant) -> None:
    def late(right: Any, self: Rollouts, uids: Collection[str]) -> None:
        right(self, uids)
        self.late = {*getattr(self, "late", ()), *uids}  # type: ignore[attr-defined]

    def dispatch(right: Any, self: Rollouts, prompts: Sequence[Any], *args: Any, **how: Any) -> None:
        right(self, prompts, *args, **how)
        again = [prompt["uid"] for prompt in prompts if prompt["uid"] in getattr(self, "late", ())]
        for engine in self.engines.serving() if again else ():
            self._engine_queues._abort(engine, again)

    plant(Rollouts, "drop", late)
    plant(Rollouts, "dispatch", dispatch)


def a_failed_call_is_repeated_but_for_one_sample(plant: Plant) -> None:
    plant(EngineQueues, "_repeat", lambda right, self, samples, *others: right(self, samples[1:], *others))


def samples_of_a_lost_environment_are_forgotten(plant: Plant) -> None:
    def forgetful(right: Any, self: EnvQueue, answer: Any, *others: Any) -> None:
        del self._running[answer]
        self._environment.restart()

    plant(EnvQueue, "_recover", forgetful)


def groups_grow_one_step_too_old(plant: Plant) -> None:
    def older(right: Any, config: Any, *, validates: bool) -> Any:
        settings = right(config, validates=validates)
        age = settings.max_trajectory_age
        return replace(settings, max_trajectory_age=age + 1) if age else settings

    plant(run_record, "schedule_config", older)


def a_group_is_trained_on_twice(plant: Plant) -> None:
    def twice(right: Any, self: StepGroups, *args: Any) -> Any:
        groups, *rest = right(self, *args)
        return [*groups[:-1], groups[0]], *rest

    plant(StepGroups, "take", twice)


def a_checkpoint_does_not_wait_for_the_ranks(plant: Plant) -> None:
    plant(PolicyGroup, "is_saved", lambda right, self, wait: True)


def a_checkpoint_that_is_not_written_passes_for_saved(plant: Plant) -> None:
    def careless(right: Any, self: CheckpointManager, step: int, written: Any = {}) -> Any:  # noqa: B006
        return right(self, step, written) if step % 2 else self.folder / f"step_{step}"

    plant(CheckpointManager, "publish", careless)


def an_early_end_passes_for_the_end(plant: Plant) -> None:
    plant(RunRecord, "ended", lambda right, *args, **how: right(*args, **how) | {"exit_code": 0})


def the_returned_prompts_are_not_in_the_ledger(plant: Plant) -> None:
    def quiet(right: Any, self: Ledger, event: str, **fields: Any) -> None:
        if event != "returned":
            right(self, event, **fields)

    plant(Ledger, "write", quiet)


def a_version_is_counted_twice(plant: Plant) -> None:
    def twice(right: Any, self: PolicyGroup, *args: Any) -> Any:
        metrics = right(self, *args)
        self.updates += self.updates % 2
        return metrics

    plant(PolicyGroup, "train", twice)


def ranks_train_without_what_the_teacher_said(plant: Plant) -> None:
    def forgetful(right: Any, *args: Any, **how: Any) -> Any:
        return tuple(replace(step, teacher={}) for step in right(*args, **how))

    plant(Teachers, "score_ranks", forgetful)


def a_late_engine_is_asked_as_patiently_as_others(plant: Plant) -> None:
    plant(Refit, "_note_late", lambda right, self, call, error: None)


def groups_that_were_trained_on_are_kept(plant: Plant) -> None:
    def keep(right: Any, self: StepGroups, *args: Any) -> Any:
        taken = right(self, *args)
        self.old = [*getattr(self, "old", ()), *taken[0]]  # type: ignore[attr-defined]
        return taken

    plant(StepGroups, "take", keep)


def a_signal_is_not_heard(plant: Plant) -> None:
    plant(StopRequest, "ask", lambda right, self, *args, **how: None)


def a_lost_machine_passes_for_a_mistake_of_the_recipe(plant: Plant) -> None:
    plant(simulation, "is_fault", lambda right, error: right(error) and not isinstance(error, NodeLost))


PLANTED: dict[Callable[[Plant], None], tuple[int, str]] = {
    a_refit_skips_an_engine: (0, "older than the limit|at age|holds weights of no version"),
    a_dead_engine_is_never_readmitted: (1, "nothing to wait for|round in circles|was lost"),
    nobody_asks_for_the_health_of_engines: (1, "was lost, and no rank was"),
    a_hanging_engine_is_waited_for: (28, "round in circles|was lost|virtual seconds"),
    a_prompt_in_flight_is_no_part_of_a_checkpoint: (80, "lost: it went back|KeyError"),
    a_finished_group_is_dropped_at_resume: (130, "exit code 1: KeyError"),
    a_prompt_that_is_done_comes_again: (57, "KeyError|twice|2 times"),
    an_abort_hits_a_prompt_that_was_dispatched_again: (50, "its stream ended without"),
    a_failed_call_is_repeated_but_for_one_sample: (4, "nothing to wait for|virtual seconds"),
    samples_of_a_lost_environment_are_forgotten: (
        32,
        "nothing to wait for|virtual seconds|owed the answer|no rank was: KeyError",
    ),
    groups_grow_one_step_too_old: (9, "older than the limit"),
    a_group_is_trained_on_twice: (0, "trained on .* 2 times"),
    a_checkpoint_does_not_wait_for_the_ranks: (0, "complete before the ranks had written"),
    a_checkpoint_that_is_not_written_passes_for_saved: (0, "is not saved"),
    an_early_end_passes_for_the_end: (11, "exit code 0 after"),
    the_returned_prompts_are_not_in_the_ledger: (4, "ledger: .* dispatched at step"),
    a_version_is_counted_twice: (0, "weights"),
    ranks_train_without_what_the_teacher_said: (1, "trained on samples that no teacher had scored"),
    a_late_engine_is_asked_as_patiently_as_others: (55, "owed the answer to"),
    groups_that_were_trained_on_are_kept: (2, "samples are kept of at most"),
    a_signal_is_not_heard: (12, "further steps after SIG"),
    a_lost_machine_passes_for_a_mistake_of_the_recipe: (26, "exit code 1: NodeLost"),
}
"""Each planted fault: the first seed that found it, which is tried before all others, and the flaws by which it is
found."""


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Callable[[Plant], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_cluster, "CIRCLES", 20_000)
    fault(Plant(monkeypatch))
    found_by, wanted = PLANTED[fault]
    for seed in (found_by, *range(MOST_SEEDS)):
        if flaws := simulate(drawn(seed)).flaws:
            assert re.search(wanted, "; ".join(flaws)), f"seed {seed} breaks another law: {flaws}"
            assert seed < MOST_SEEDS
            return
    pytest.fail(f"no seed below {MOST_SEEDS} finds it")


def test_the_shortest_trace_of_a_flaw_has_only_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    a_checkpoint_does_not_wait_for_the_ranks(Plant(monkeypatch))
    case = replace(drawn(0), faults=(Fault("slow", "engine-0", 1.0), Fault("slow", "policy-0", 2.0)))
    assert simulate(case).flaws and shortest(case) == Case(case.seed)
    assert str(shortest(case)) == f"seed={case.seed}"
