"""A whole run with dynamic sampling that a validation metric ends and that is then resumed."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.algorithms import grpo
from grpo_mcore.driver.rollouts.prompt_stream import PromptStream
from grpo_mcore.rollout.group import Group
from grpo_mcore.step.step_groups import is_informative
from tests.functional.runs import Run, Task, finished, grpo_recipe, run_here

STOP = ("grpo.stop_at_validation_metric=val:accuracy", "grpo.stop_at_validation_threshold=0")


@dataclass
class Inside:
    """Record of the loop: groups trained on by step, uids taken from the data and put back, in order."""

    trained: list[list[Group]] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    put_back: list[str] = field(default_factory=list)

    @property
    def trained_uids(self) -> list[str]:
        return [group.uid for groups in self.trained for group in groups]


@contextmanager
def looking_inside() -> Iterator[Inside]:
    inside, train_on_groups = Inside(), grpo.train_on_groups
    take, put_back = PromptStream.take, PromptStream.put_back

    def recorded_train(policy: Any, engines: Any, groups: Sequence[Group], *args: Any) -> Any:
        inside.trained.append(list(groups))
        return train_on_groups(policy, engines, groups, *args)

    def recorded_take(self: PromptStream, count: int) -> Any:
        prompts = take(self, count)
        inside.taken += [prompt["uid"] for prompt in prompts]
        return prompts

    def recorded_put_back(self: PromptStream, uids: Sequence[str]) -> None:
        inside.put_back += uids
        put_back(self, uids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "train_on_groups", recorded_train)
        patch.setattr(PromptStream, "take", recorded_take)
        patch.setattr(PromptStream, "put_back", recorded_put_back)
        yield inside


@pytest.fixture(scope="module")
def recipe(task: Task, model: Path) -> dict[str, Any]:
    """Return a recipe of 4 prompts a step from batches of 12: on any machine some are left over, and some filtered."""
    recipe = grpo_recipe(task, model)
    recipe["grpo"] |= {"use_dynamic_sampling": True, "batch_multiplier": 3, "val_at_end": True}
    recipe["grpo"] |= {"val_num_generations_per_prompt": 2, "val_period": 2}
    return recipe


@pytest.fixture(scope="module")
def stopped(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Inside]:
    """Run until its first validation ends it, after step 2 of 4."""
    with looking_inside() as inside:
        run = finished("train", tmp_path_factory.mktemp("dynamic"), recipe, *STOP)
    return run, inside


def test_every_group_that_is_trained_on_informs_and_the_size_is_exact(stopped: tuple[Run, Inside]) -> None:
    run, inside = stopped
    assert [len(groups) for groups in inside.trained] == [4, 4]
    assert all(is_informative(group) for groups in inside.trained for group in groups)
    for line in run.metrics():
        assert line["num_samples"] == line["num_trained_samples"] == 16
        assert line["zero_advantage_rate"] == 0 and line["grad_norm"] > 0
        prompts = 4 + line["num_surplus_prompts"] + line["num_filtered_prompts"]
        assert prompts == 12 * line["num_gen_batches"] and line["num_generated_samples"] == 4 * prompts
    rewards = [[score.reward for group in groups for score in group.scores] for groups in inside.trained]
    assert [line["filtered_reward"] for line in run.metrics()] == pytest.approx([sum(row) / 16 for row in rewards])
    assert any(line["num_filtered_prompts"] for line in run.metrics()), "this seed should show a filtered group"
    assert any(line["reward"] != line["filtered_reward"] for line in run.metrics())


def test_every_prompt_has_one_end(stopped: tuple[Run, Inside]) -> None:
    run, inside = stopped
    folder = run.checkpoints / "step_2"
    filtered = int(sum(line["num_filtered_prompts"] for line in run.metrics()))
    assert len(inside.trained_uids) == len(set(inside.trained_uids)) == 8
    assert json.loads((folder / "training_info.json").read_text())["save_state"]["consumed_samples"] == 8 + filtered
    waiting = [prompt["uid"] for prompt in torch.load(folder / "data.pt", weights_only=False)["waiting"]]
    last = int(run.metrics()[-1]["num_surplus_prompts"])
    assert last and waiting[:last] == inside.put_back[-last:], "this seed should hand prompts back after step 2"
    ends = len(set(inside.taken)) - len(set(inside.taken) & set(waiting))
    assert ends == 8 + filtered


def test_a_validation_metric_ends_the_run(stopped: tuple[Run, Inside]) -> None:
    run, _ = stopped
    (validation,) = run.metrics("validation")  # there is no second one at the end
    assert validation["step"] == 2 and 0 <= validation["pass@1"] <= validation["pass@2"] <= 1
    assert validation["pass@1"] == pytest.approx(validation["accuracy"])
    reason = f"validation accuracy {validation['accuracy']:.4g} has reached 0"
    assert json.loads((run.logs / "summary.json").read_text())["end"] == reason
    assert reason in " ".join(run.out.split())
    assert [path.name for path in run.checkpoints.glob("step_*")] == ["step_2"]  # save_period is 100


def test_resumed_it_ends_again_unless_the_threshold_is_higher(
    recipe: dict[str, Any], stopped: tuple[Run, Inside]
) -> None:
    run, inside = stopped
    with looking_inside() as again:
        assert run_here("train", run.folder, recipe, "--resume", *STOP).code == 0
    assert again == Inside() and len(run.metrics()) == 2
    words = (STOP[0], "grpo.stop_at_validation_threshold=2", "grpo.batch_multiplier=1")
    with looking_inside() as later:
        longer = finished("train", run.folder, recipe, "--resume", *words)
    assert [line["step"] for line in longer.metrics()] == [1, 2, 3, 4]
    assert [len(groups) for groups in later.trained] == [4, 4]
    assert max(line["num_gen_batches"] for line in longer.metrics()[2:]) > 1, "this seed should take several batches"
    last = int(run.metrics()[1]["num_surplus_prompts"])
    assert later.taken[:last] == inside.put_back[-last:]  # the prompts that were put back come first
    assert not set(later.trained_uids) & set(inside.trained_uids)
    assert [line["step"] for line in longer.metrics("validation")] == [2, 4]
