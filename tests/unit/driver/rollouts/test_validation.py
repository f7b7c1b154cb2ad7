"""Validation metrics from scored groups, and ending a run by one of them."""

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mcore.cluster import LocalCluster
from grpo_mcore.data import DataError
from grpo_mcore.driver.rollouts.scoring import as_workers
from grpo_mcore.driver.rollouts.validation import run_validation, stop_reason, validation_metrics
from grpo_mcore.recipe import VALIDATION_METRICS, RecipeError
from grpo_mcore.rollout.group import Group
from tests.unit.step.step_cases import config, group


def of_task(task: str, uid: str, rewards: list[float | None], **more: Any) -> Group:
    plain = group(uid, rewards, **more)
    return Group(plain.prompt | {"task_name": task}, plain.samples, plain.scores)


def test_failed_samples_are_excluded_and_counted() -> None:
    metrics = validation_metrics([of_task("t", "a", [1, None]), of_task("t", "b", [0, 0], truncated=True)])
    assert metrics == {
        "accuracy": pytest.approx(1 / 3),
        "reward": pytest.approx(1 / 3),
        "num_samples": 4.0,
        "num_failed_samples": 1.0,
        "generated_length": 6.5,
        "truncation_rate": 0.5,
        "pass@1": pytest.approx((1 + 0) / 2),
        "pass@2": 0.0,  # of b alone
    }


def test_pass_at_k_is_the_share_of_k_subsets_with_a_correct_sample() -> None:
    rewards: list[list[float | None]] = [[1, 0, 0, 0, 1.25, 0.5], [0] * 6, [1, 0, None, None, None, None]]
    metrics = validation_metrics([of_task("t", str(i), row, solved_at=1.0) for i, row in enumerate(rewards)])
    scored = [[reward >= 1 for reward in row if reward is not None] for row in rewards]
    for k in (1, 2, 4, 6):
        shares = []
        for row in scored:
            subsets = list(combinations(row, k))
            shares += [sum(map(any, subsets)) / len(subsets)] if subsets else []
        assert metrics[f"pass@{k}"] == pytest.approx(sum(shares) / len(shares), rel=1e-12)
    assert [name for name in metrics if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@4", "pass@6"]


def test_graded_rewards_have_a_mean_with_parts_and_an_accuracy_only_by_solved_at() -> None:
    rewards, parts = [0.5, 1.0, None], [{"right": 0.0, "form": 1.0}, {"right": 0.5, "form": 1.0}, {"right": 9.0}]
    graded = validation_metrics([of_task("t", "a", rewards, parts=parts)])
    assert graded["accuracy"] is None and graded["pass@1"] is None
    assert (graded["reward"], graded["reward/right"], graded["reward/form"]) == (0.75, 0.25, 1.0)
    assert validation_metrics([of_task("t", "a", rewards, parts=parts, solved_at=0.5)])["accuracy"] == 1.0
    assert validation_metrics([of_task("t", "a", rewards, parts=parts, solved_at=0.6)])["pass@1"] == 0.5


def test_one_sample_a_prompt_has_no_pass_at_k() -> None:
    assert not [name for name in validation_metrics([of_task("t", "a", [1])]) if name.startswith("pass@")]


def test_several_validation_sets_have_their_own_metrics() -> None:
    groups = [of_task("sums", "a", [1, 1]), of_task("sums", "b", [1, 0]), of_task("primes", "c", [None, None])]
    metrics = validation_metrics(groups)
    assert metrics["accuracy"] == 0.75 and metrics["num_samples"] == 6 and metrics["num_failed_samples"] == 2
    assert metrics["sums/accuracy"] == 0.75 and metrics["sums/pass@1"] == 0.75 and metrics["sums/pass@2"] == 1.0
    assert metrics["sums/num_samples"] == 4 and metrics["sums/num_failed_samples"] == 0
    assert metrics["primes/accuracy"] is None and metrics["primes/pass@2"] is None and metrics["primes/reward"] is None
    assert metrics["primes/num_failed_samples"] == 2
    assert not [name for name in validation_metrics(groups[:2]) if "/" in name]


def test_no_prompt_at_all_is_an_error() -> None:
    cluster, tokenizer = LocalCluster(), SimpleNamespace(eos_token_id=0)
    engines = SimpleNamespace(cluster=cluster, workers=[])
    environment = as_workers({"math": object()}, cluster)["math"]
    with pytest.raises(DataError, match="no validation prompt: check data.validation, or set grpo.val_period to 0"):
        run_validation(engines, [], {"math": environment}, config(), tokenizer=tokenizer)  # type: ignore[arg-type]


# The end of a run.


def grpo(metric: str | None, threshold: float | None) -> Any:
    return SimpleNamespace(stop_at_validation_metric=metric, stop_at_validation_threshold=threshold)


METRICS = {"accuracy": 0.75, "reward": 0.5, "sums/pass@2": 0.9, "primes/accuracy": None}


@pytest.mark.parametrize(
    ("metric", "threshold", "reason"),
    [
        (None, None, None),
        ("accuracy", 0.76, None),
        ("accuracy", 0.75, "validation accuracy 0.75 has reached 0.75"),
        ("val:sums/pass@2", 0.5, "validation sums/pass@2 0.9 has reached 0.5"),
        ("primes/accuracy", 0.0, None),  # nothing was scored
    ],
)
def test_the_run_ends_at_the_threshold(metric: str | None, threshold: float | None, reason: str | None) -> None:
    assert stop_reason(METRICS, grpo(metric, threshold)) == reason


def test_an_unknown_metric_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError) as error:
        stop_reason(METRICS, grpo("val:acuracy", 0.5))
    assert str(error.value).splitlines()[1].strip() == (
        "grpo.stop_at_validation_metric: there is no validation metric 'acuracy'; "
        "known: accuracy, reward, sums/pass@2, primes/accuracy"
    )


def test_the_recipe_knows_the_metrics_that_may_end_a_run() -> None:
    assert set(validation_metrics([of_task("a", "a:1", [1.0])])) == set(VALIDATION_METRICS)
