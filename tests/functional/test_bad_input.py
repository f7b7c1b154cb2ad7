"""Runs in which something breaks: what can be left out is left out; otherwise one message says why, and the last
checkpoint stays. Errors that show before anything starts are in tests/unit/cli/test_bad_input.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.functional.runs import Task, assert_one_message, finished, grpo_recipe, run_here


@pytest.fixture
def recipe(task: Task, model: Path) -> dict[str, Any]:
    recipe = grpo_recipe(task, model)
    recipe["checkpointing"] = {"save_period": 1, "metric_name": None}
    return recipe


def test_samples_and_prompts_without_a_reward(tmp_path: Path, task: Task, recipe: dict[str, Any]) -> None:
    """A sample without a reward is left out and counted. A prompt without any reward is replaced by the next one."""
    path = tmp_path / "train.jsonl"
    lines = task.train.read_text().splitlines(keepends=True)[:12]
    path.write_text("".join(lines))
    infinite, down = (json.loads(lines[row])["input"] for row in (5, 6))
    recipe["data"] = {"train": {"data_path": str(path)}, "shuffle": False}
    recipe["env"] = {"tests.functional.worlds:Faulty": {"infinite": infinite, "down": down}}
    run = finished("train", tmp_path, recipe, "grpo.max_num_steps=2")
    uid = f"{tmp_path.name}-train"
    assert (
        f"samples without a reward, left out: 1; the first, {uid}:6#0: Faulty returned "
        "rewards with inf, which is not a finite number" in run.out
    )
    assert f"prompt {uid}:7 failed and is replaced: the server is down" in run.out
    second = run.metrics()[1]
    assert (second["num_samples"], second["num_failed_samples"], second["num_trained_samples"]) == (16, 1, 15)
    assert second["reward"] <= 1


def test_a_model_with_broken_weights(tmp_path: Path, model: Path, recipe: dict[str, Any]) -> None:
    """The embedding of one token is NaN: the error names the tensor, and nothing is trained."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.detach().clone())
    network.config.tie_word_embeddings = False
    with torch.no_grad():
        network.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids("7")] = float("nan")
    folder = tmp_path / "model"
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    recipe["policy"] |= {"model_name": str(folder)}
    run = run_here("train", tmp_path, recipe)
    print(run.out, run.err)
    assert_one_message(run, 1, "model.embed_tokens.weight holds NaN or infinite values")
    assert not list(run.checkpoints.glob("step_*")) and not run.metrics()


def test_a_learning_rate_that_breaks_the_weights(tmp_path: Path, recipe: dict[str, Any]) -> None:
    # The decay multiplies the weights by 1 - lr * weight_decay, also where all rewards are equal.
    recipe["policy"]["megatron_cfg"]["optimizer"] |= {"lr": 1.0e5, "min_lr": 1.0e5, "weight_decay": 1.0e30}
    recipe["policy"]["megatron_cfg"]["scheduler"]["lr_warmup_init"] = 1.0e5
    run = run_here("train", tmp_path, recipe)
    done = len(run.metrics())
    assert 1 <= done < 4
    newest = run.checkpoints / f"step_{done}"
    assert_one_message(run, 1, "not finite", f"the last checkpoint is {newest}; `--resume` goes on from there")
    assert sorted(path.name for path in run.checkpoints.glob("step_*"))[-1] == newest.name
