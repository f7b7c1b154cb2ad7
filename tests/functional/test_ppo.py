"""Whole runs with a critic in one process: it learns before the policy, is saved, resumed with it, and exported."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_mcore.cli.main import main
from grpo_mcore.observe import audit, read_ledger
from grpo_mcore.observe.band import settings_of
from grpo_mcore.tools.diagnose import DiagnosedRun, of_loss, of_settings
from grpo_mcore.tools.replay.replay import recorded_step
from grpo_mcore.tools.report.run_files import recorded_run
from tests.functional.runs import Run, Task, assert_one_message, finished, grpo_recipe, make_base_config, run_here

CRITIC = ("loss", "grad_norm", "lr", "values_mean", "values_min", "values_max", "returns_mean", "value_clip_fraction")


@pytest.fixture(scope="module")
def recipe(task: Task, model: Path) -> dict[str, Any]:
    """Return a recipe of groups of 1, two optimizer steps of the policy and four of the critic, whose first step trains
    the critic alone. All rewards are KL-penalised."""
    recipe = grpo_recipe(task, model)
    recipe["ppo"] = recipe.pop("grpo") | {"num_prompts_per_step": 16, "num_generations_per_prompt": 1}
    recipe["ppo"] |= {"ppo_epochs": 2, "critic_epochs": 4, "policy_training_start_step": 1, "max_num_epochs": 20}
    recipe["value"] = {"megatron_cfg": {"optimizer": {"lr": 2.0e-3, "min_lr": 2.0e-3}}}
    recipe["loss_fn"] = {"reference_policy_kl_penalty": 0.01, "use_kl_in_reward": True}
    recipe["checkpointing"] = {"save_period": 1, "metric_name": None}
    return recipe


@pytest.fixture(scope="module")
def whole(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run all 4 steps."""
    return finished("train", tmp_path_factory.mktemp("whole"), recipe)


def test_the_critic_learns_before_the_policy_and_from_zero(whole: Run) -> None:
    first, second, *later = whole.outcome()
    assert {f"critic/{name}" for name in CRITIC} <= first.keys()
    assert first["critic/values_min"] == first["critic/values_max"] == 0.0  # a language model's head is 0
    assert first["critic/explained_var"] == pytest.approx(0.0, abs=1e-9)
    assert "policy_loss" not in first and "policy_loss" in second
    assert second["critic/values_max"] > second["critic/values_min"]
    assert later[-1]["critic/lr"] == 2.0e-3 and later[-1]["lr"] == 1.0e-3
    assert later[-1]["kl_in_reward"] > 0  # the policy has moved
    assert whole.metrics()[0]["timing/train/critic"] > 0


def test_explained_variance_rises_where_some_prompts_cannot_be_solved(
    recipe: dict[str, Any], task: Task, tmp_path: Path
) -> None:
    """As in the demo, where a quarter are products: the model says 0 or 1, which is right here for every remainder."""
    numbers = range(300, 364)
    rows = [{"input": f"{number}%2=", "output": ["0", "1"]} for number in numbers]
    rows += [{"input": f"{number}*2=", "output": [str(2 * number)]} for number in numbers]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (f"data.train.data_path={tmp_path / 'mixed.jsonl'}", "ppo.max_num_steps=10", "checkpointing.enabled=false")
    words += ("loss_fn.reference_policy_kl_penalty=0", "loss_fn.use_kl_in_reward=false", "value_loss_fn.cliprange=null")
    found = [line["critic/explained_var"] for line in finished("train", tmp_path, recipe, *words).outcome()]
    assert abs(found[0]) < 1e-9 and sum(found[-4:]) / 4 > 0.4


def test_a_resumed_run_equals_an_uninterrupted_one(recipe: dict[str, Any], whole: Run, tmp_path: Path) -> None:
    finished("train", tmp_path, recipe, "ppo.max_num_steps=2")
    resumed = finished("train", tmp_path, recipe, "--resume")
    assert resumed.outcome() == whole.outcome()
    assert not audit(read_ledger(resumed.checkpoints / "ledger.jsonl")).flaws


def test_it_is_followed_bit_for_bit(recipe: dict[str, Any], whole: Run, tmp_path: Path) -> None:
    run = finished("train", tmp_path, recipe, "--follow", str(whole.logs))
    assert run.outcome() == whole.outcome() and run.outcome("validation") == whole.outcome("validation")
    saved = [sorted((of.checkpoints / "step_4" / "policy").rglob("*.distcp")) for of in (run, whole)]
    assert len(saved[0]) == len(saved[1]) > 1 and any("critic" in path.parts for path in saved[0])
    assert all(own.read_bytes() == recorded.read_bytes() for own, recorded in zip(*saved, strict=True))
    followed = json.loads((run.logs / "summary.json").read_text())["followed"]
    assert followed["steps"] == 4 and followed["differs_first"] is None and followed["worst_logprob"] == 0


def test_a_critic_that_was_otherwise_is_named(whole: Run, tmp_path: Path) -> None:
    folder, config = recorded_run(whole.logs)
    settings = settings_of(config.model_dump(mode="json"))
    case = DiagnosedRun(folder, config, 3, *recorded_step(folder, 3), whole.metrics(), settings, tmp_path)
    assert list(of_loss(case)) == []
    metrics = case.recorded.metrics | {"critic/loss": 1 + case.recorded.metrics["critic/loss"], "loss": 9.0}
    (found,) = of_loss(dataclasses.replace(case, recorded=dataclasses.replace(case.recorded, metrics=metrics)))
    assert found.part == "critic" and found.evidence.startswith("the critic's loss, though all log-probs agree: ")
    key, elsewhere = "value.megatron_cfg.optimizer.lr", {"value.model_name": "a", "value.tokenizer.name": "a"}
    (found,) = of_settings(case.config, settings | elsewhere | {key: 1.0})
    assert (found.part, found.evidence) == (key, "0.002 in the run, 1.0 in the recipe")


def test_a_saved_critic_is_exported_as_a_classifier(whole: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    output = tmp_path / "critic"
    assert main(["export", str(whole.checkpoints), "--critic", "--output", str(output)]) == 0
    weights = load_file(output / "model.safetensors")
    assert weights["score.weight"].any() and "lm_head.weight" not in weights
    tokens = torch.tensor([[5, 9, 7, 3]])
    classifier, info = AutoModelForSequenceClassification.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and classifier.config.num_labels == 1
    by_token = AutoModelForTokenClassification.from_pretrained(output)
    with torch.no_grad():
        states = classifier.base_model(tokens).last_hidden_state
        expected = states[0] @ weights["score.weight"][0].to(states.dtype)
        assert torch.allclose(by_token(tokens).logits[0, :, 0], expected, atol=1e-5)
        assert torch.allclose(classifier(tokens).logits[0, 0], expected[-1], atol=1e-5)


def test_sao_goes_on_from_an_exported_critic(recipe: dict[str, Any], whole: Run, tmp_path: Path) -> None:
    """Its ratio is to the engine, so there is no pass before the update: only its first optimizer step has the weights
    that generated, and says whether policy and engine agree."""
    output = tmp_path / "critic"
    assert main(["export", str(whole.checkpoints), "--critic", "--output", str(output)]) == 0
    words = ("ppo.policy_training_start_step=0", "ppo.max_num_steps=1", "checkpointing.enabled=false")
    words += ("--preset", "sao", "ppo.ppo_epochs=2", "ppo.adv_estimator.length_adaptive_alpha=5")
    (line,) = finished("train", tmp_path / "run", recipe, *words, f"value.model_name={output}").outcome()
    assert line["critic/values_max"] > line["critic/values_min"]
    assert line["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
    assert line["probs_ratio_max"] > 1.01, "the second pass has moved"


def test_a_critic_of_another_vocabulary_is_refused(recipe: dict[str, Any], task: Task, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
    make_base_config(tmp_path / "other", task.folder / "tokenizer", **sizes, head_dim=32, max_positions=64)
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": ', '"vocab_size": 1'))
    run = run_here("train", tmp_path / "run", recipe, f"value.model_name={tmp_path / 'other'}")
    assert_one_message(run, 1, "value.model_name", "a critic reads the policy's tokens")
