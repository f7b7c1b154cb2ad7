"""Which teacher scores a sample, how its samples reach its ranks, and what happens when it is lost."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.cluster import LocalCluster, WorkerDied, WorkerFailed
from grpo_mcore.cluster.local_cluster import LocalStore, LocalWorker
from grpo_mcore.driver.engines.engine_group import EngineGroup, EngineSlot
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.policy.teacher_engines import TeacherEngines, TeacherEngineWorker
from grpo_mcore.driver.policy.teachers import Teacher, TeacherError, Teachers, check_aliases, teacher_steps
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.recipe import MasterConfig, OnPolicyDistillationConfig
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Trajectory, TrajectoryRef, Turn
from grpo_mcore.step.advantages import TargetsError, compute_targets
from grpo_mcore.step.step_batch import build_step_batch
from tests.recipes import small_recipe
from tests.unit.step.step_cases import config, group

TEACHERS = {"enabled": True, "teacher_model_by_agent_name": {"math": "a", "code": "b"}, "default_teacher_alias": "code"}


def of_task(uid: str, task: str, agent: str | None = None, rewards: list[float | None] | None = None) -> Group:
    info = {} if agent is None else {"agent_ref": {"type": "responses_api_agents", "name": agent}}
    prompt: Any = {"uid": uid, "task_name": task, "extra_env_info": info}
    return replace(group(uid, rewards or [1, 0, 0, 0]), prompt=prompt)


class Ranks:
    """A teacher's ranks that name what they score; the first `losses` calls are lost."""

    def __init__(self, data: int = 1, losses: int = 0) -> None:
        self.layout, self.shares_prefixes = PolicyLayout(1, 1, data), False
        self.calls: list[Any] = []
        self.losses = losses
        self.cluster = SimpleNamespace(stop=lambda workers: self.calls.append("stop"))
        self.workers: list[Any] = []

    def run_alongside(self, background: Any) -> Any:
        return nullcontext()

    def onload(self) -> None:
        self.calls.append("onload")

    def offload(self) -> None:
        self.calls.append("offload")

    def score(self, steps: Any, hidden: bool) -> dict[int, str]:
        if self.losses:
            self.losses -= 1
            raise WorkerDied("teacher-0", "score", "its process ended")
        self.calls.append([step.batches for step in steps])
        return {index: f"scored {ref}" for step in steps for index, ref in step.trajectories.items()}


def teachers(ranks: dict[str, Ranks], recipe: MasterConfig, **changed: Any) -> Teachers:
    kept = {alias: Teacher(alias, recipe, lambda: None, its) for alias, its in ranks.items()}  # type: ignore[arg-type, return-value]
    return Teachers(OnPolicyDistillationConfig.model_validate(TEACHERS | changed), kept)


def test_agents_and_tasks_choose_the_teacher() -> None:
    both = teachers({"math": Ranks(), "code": Ranks()}, config())
    names = [both.alias_of(of_task("u", task, agent).prompt) for task, agent in (
        ("math", None), ("code", "math"), ("other", "else"), ("math", "else"))]  # fmt: skip
    assert names == ["math", "math", "code", "math"]
    strict = teachers({"math": Ranks(), "code": Ranks()}, config(), strict_agent_name_match=True)
    with pytest.raises(TeacherError, match="prompt u:7: 'else' and 'other' is no alias of a teacher"):
        strict.alias_of(of_task("u:7", "other", "else").prompt)
    only = teachers({"code": Ranks()}, config(), teacher_model_by_agent_name={"code": "b"}, default_teacher_alias=None)
    assert only.alias_of(of_task("u", "other").prompt) == "code"


def test_a_teacher_that_no_prompt_has_is_named_before_the_start(caplog: pytest.LogCaptureFixture) -> None:
    both = OnPolicyDistillationConfig.model_validate(TEACHERS)
    check_aliases(both, [of_task("a", "math").prompt, of_task("b", "other").prompt])
    assert not caplog.records
    check_aliases(both, [of_task("a", "maths").prompt, of_task("b", "other", "judge").prompt])
    assert (
        "none of the first 2 prompts has the teacher math; their agents and tasks are maths, judge, other"
        in caplog.text
    )
    with pytest.raises(TeacherError, match="prompt a: 'maths' is no alias of a teacher"):
        check_aliases(both.model_copy(update={"strict_agent_name_match": True}), [of_task("a", "maths").prompt])


def test_each_sample_goes_to_its_teacher_and_comes_back_to_its_rank() -> None:
    recipe = config()
    ranks = {"math": Ranks(data=1), "code": Ranks(data=8)}
    groups = [of_task("a", "math"), of_task("b", "code", rewards=[1, None, 0, 1])]
    batch = teachers(ranks, recipe).score(build_step_batch(groups, recipe, PolicyLayout(1, 1, 2)))
    assert batch.teachers == ("math",) * 4 + ("code",) * 4
    for rank in batch.ranks:
        assert rank.teacher == {index: f"scored {ref}" for index, ref in rank.trajectories.items()}
    assert sorted(index for rank in batch.ranks for index in rank.teacher) == [0, 1, 2, 3, 4, 6, 7]
    for its in ranks.values():
        assert (its.calls[0], its.calls[-1]) == ("onload", "offload")
    scored = sorted(index for of_rank in ranks["code"].calls[1] for bins in of_rank for bin in bins for index in bin)
    assert scored == [4, 6, 7, 8, 9, 10, 11, 12], "copies fill eight ranks"


def test_aliases_of_one_model_are_scored_together() -> None:
    recipe, ranks = config(), Ranks()
    shared = Teacher("math", recipe, lambda: None, ranks)  # type: ignore[arg-type, return-value]
    both = Teachers(OnPolicyDistillationConfig.model_validate(TEACHERS), {"math": shared, "code": shared})
    both.score(build_step_batch([of_task("a", "math"), of_task("b", "code")], recipe, PolicyLayout(1, 1, 1)))
    assert len(ranks.calls) == 3, "onload, score, offload"


def test_a_lost_teacher_starts_again_and_scores_the_same_samples() -> None:
    recipe, lost, fresh = config(), Ranks(losses=1), Ranks()
    teacher = Teacher("math", recipe, lambda: fresh, lost, Retries(1, 0.0))  # type: ignore[arg-type, return-value]
    only = Teachers(OnPolicyDistillationConfig.model_validate(TEACHERS), {"math": teacher})
    batch = only.score(build_step_batch([of_task("a", "math"), of_task("b", "math")], recipe, PolicyLayout(1, 1, 1)))
    assert lost.calls == ["onload", "stop"] and teacher.ranks is fresh
    assert len(batch.ranks[0].teacher) == 8
    fresh.losses = 9
    with pytest.raises(WorkerDied):
        only.score(build_step_batch([of_task("a", "math")], recipe, PolicyLayout(1, 1, 1)))


def test_an_error_of_the_teacher_is_no_loss() -> None:
    recipe, ranks = config(), Ranks()
    ranks.score = lambda steps, hidden: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    teacher = Teacher("math", recipe, lambda: pytest.fail("it must not start again"), ranks, Retries(9, 0.0))  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        teacher.score({0: of_task("a", "math").samples[0]})


@pytest.mark.parametrize(
    ("estimator", "section", "weight", "advantages"),
    [
        ({"name": "opd"}, {}, 1.0, [0.0] * 4),
        ({"name": "opd"}, {"use_orm_advantage": True, "orm_advantage_weight": 2.0}, 1.0, [4.0, *[-4 / 3] * 3]),
        ({"name": "rloo", "opd_weight": 0.25}, {}, 0.25, [1.0, *[-1 / 3] * 3]),
    ],
)
def test_advantages_of_teachers_and_rewards(
    estimator: dict[str, Any], section: dict[str, Any], weight: float, advantages: list[float]
) -> None:
    policy = {"train_global_batch_size": 4, "max_total_sequence_length": 64}
    grpo, own = {"adv_estimator": estimator}, TEACHERS | section
    recipe = small_recipe(policy=policy, grpo=grpo, on_policy_distillation=own)
    groups = [of_task("a", "math"), of_task("b", "code")]
    both = teachers({"math": Ranks(), "code": Ranks()}, recipe)
    batch = both.score(build_step_batch(groups, recipe, PolicyLayout(1, 1, 1)))
    tokens = batch.trained_tokens.double()
    stats = {"gap_sum": -tokens * torch.tensor([1.0] * 4 + [3.0] * 4), "gap_square": torch.zeros(8).double()}
    targets, metrics = compute_targets(batch, stats, recipe)
    assert targets.teacher_weight == weight
    assert targets.advantages is not None and targets.advantages[:4].tolist() == pytest.approx(advantages, rel=1e-5)
    mean = (tokens[:4].sum() + 3 * tokens[4:].sum()) / tokens.sum()
    assert metrics["on_policy_distillation/teacher_student_logprob_gap_mean"] == pytest.approx(-mean.item())
    assert metrics["on_policy_distillation/kl/math"] == 1 and metrics["on_policy_distillation/kl/code"] == 3
    per_sample = targets.sample_advantages()
    assert per_sample is not None and per_sample[0].item() == pytest.approx(advantages[0] - weight, rel=1e-5)
    assert metrics["advantage_max"] == per_sample.max().item()


def test_a_policy_without_its_teachers_does_not_train_on_nothing() -> None:
    plain = config().model_dump() | {"on_policy_distillation": TEACHERS}
    plain["grpo"]["adv_estimator"] = {"name": "opd"}
    recipe = MasterConfig.model_validate(plain)
    with pytest.raises(TargetsError, match="the policy has no teachers"):
        compute_targets(build_step_batch([of_task("a", "math")], recipe, PolicyLayout(1, 1, 1)), {}, recipe)


class ScoringEngine:
    """An engine of a teacher whose log-prob of a token is minus its number; the first `losses` calls lose a rank."""

    def __init__(self, store: LocalStore, losses: int = 0) -> None:
        self._store, self._max_model_len, self.losses = store, 500, losses
        self.scored: list[list[int]] = []

    def score_tokens(self, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.losses:
            self.losses -= 1
            raise RuntimeError("a rank is gone")
        self.scored += [tokens.tolist() for tokens in sequences]
        return [-tokens.float() for tokens in sequences]

    def health(self) -> None:
        assert not self.losses

    def prepare(self, version: int) -> None:
        pass

    score = TeacherEngineWorker.score


def test_engines_of_a_teacher_share_samples_and_read_hints_and_branches() -> None:
    cluster, hint = LocalCluster(), torch.arange(300, 310)
    found = [ScoringEngine(LocalStore()) for _ in range(2)]
    slots = [EngineSlot(LocalWorker(f"teacher-a-{i}", engine)) for i, engine in enumerate(found)]
    engines = TeacherEngines(EngineGroup(cluster, slots, sleeps=False), Any, offloads=True)  # type: ignore[arg-type]
    said = Turn("assistant", torch.tensor([7, 8]), torch.zeros(2), loss_mask=True)
    plain = [
        Trajectory("u", i, (Turn("user", torch.arange(3 + i)), said), ((0, 0, 1),), "stop", False) for i in range(3)
    ]
    again = (Turn("user", torch.arange(4)), said)
    plain.append(Trajectory("u", 3, (*plain[0].turns, *again), ((0, 0, 1),), "stop", False, branches=(5, 6)))
    samples = {index: TrajectoryRef.of(trajectory, trajectory) for index, trajectory in enumerate(plain)}
    scored = engines.score(samples, {0: hint})
    assert {index: values.tolist() for index, values in scored.items()} == {
        0: [-7.0, -8.0], 1: [-7.0, -8.0], 2: [-7.0, -8.0], 3: [-7.0, -8.0] * 2,
    }  # fmt: skip
    assert sorted(len(engine.scored) for engine in found) == [2, 3], "the one with two branches counts twice"
    assert [*range(300, 310), 7, 8] in [*found[0].scored, *found[1].scored]
    long = Trajectory("u", 9, (Turn("user", torch.arange(498)), said), ((0, 0, 1),), "stop", False)
    with pytest.raises(WorkerFailed, match=r"u#9: the teacher reads 500 tokens, .*vllm_kwargs: {max_model_len: 501}"):
        engines.score({0: TrajectoryRef.of(long, long)}, {})
    found[0].losses = 9
    with pytest.raises(WorkerDied, match="teacher-a-0"):
        engines.score(samples, {})


def test_a_teacher_reads_a_hint_in_place_of_the_prompt() -> None:
    """Its rows are as long as what it reads, also where that is longer than a bin of the recipe; copies read it too."""
    recipe = config()
    hint, told = torch.arange(400), {**of_task("a", "math").prompt}
    told["teacher_prompt"] = hint
    groups = [replace(of_task("a", "math"), prompt=told), of_task("b", "math")]
    ranks = Ranks(data=2)
    steps: list[Any] = []
    ranks.score = lambda given, hidden: steps.extend(given) or {i: "" for it in given for i in it.trajectories}  # type: ignore[method-assign]
    batch = build_step_batch(groups, recipe, PolicyLayout(1, 1, 1))
    teachers({"math": ranks, "code": ranks}, recipe).score(batch)
    prompts = {index: prompt for step in steps for index, prompt in step.prompts.items()}
    assert sorted(prompts) == [0, 1, 2, 3] and all(prompt is hint for prompt in prompts.values())
    samples = {0: batch.samples[0]}
    first, second = teacher_steps(samples, recipe, ranks, {0: hint})  # type: ignore[arg-type]
    assert [list(step.prompts) for step in (first, second)] == [list(step.trajectories) for step in (first, second)]
