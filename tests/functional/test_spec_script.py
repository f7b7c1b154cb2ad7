"""A script written against the documented API: a plain dict, and environments in its own process."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.algorithms import grpo
from grpo_mcore.data import build_task_data, load_tokenizer
from grpo_mcore.environments import create_env
from grpo_mcore.recipe import MasterConfig
from tests.functional.runs import Task, grpo_recipe

SAVE_STATE = {"consumed_samples", "current_step", "current_epoch", "total_steps", "total_valid_tokens"}


def test_a_script_written_against_the_documented_api(
    tmp_path: Path, task: Task, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    master_config: dict[str, Any] = grpo_recipe(task, model)
    master_config["grpo"]["max_num_steps"] = 2
    # The flat layout of `data` in the first documents.
    master_config["data"] = {
        "dataset_name": "ResponseDataset",
        "train_data_path": str(task.train),
        "val_data_path": str(task.val),
        "input_key": "input",
        "output_key": "output",
    }
    config = MasterConfig.model_validate(master_config)
    tokenizer = load_tokenizer(str(model))
    data = build_task_data(config.data.train, config.data.validation, tokenizer, 16)

    parts = grpo.setup(master_config, tokenizer, data.train, data.validation)
    policy, generation, clusters, dataloader, val_dataloader, loss_fn, logger, checkpointer, state, config = parts
    environment = create_env(env_name="math", env_config=config["env"]["math"])
    try:
        assert len(clusters) == 2 and set(state) == SAVE_STATE and not any(state.values())
        assert config["grpo"]["num_prompts_per_step"] == 4 and "policy" in config
        task_to_env = {name: environment for name in data.env_names}
        val_task_to_env = {name: environment for name in data.val_env_names}

        for size in (None, 0.001):  # it may be called again
            grpo.refit_policy_generation(
                policy, generation, colocated_inference=True, _refit_buffer_size_gb=size, timer=None
            )
        metrics, timing = grpo.validate(generation, val_dataloader, tokenizer, val_task_to_env, 0, config)
        assert metrics["num_samples"] == 8 and 0 <= metrics["accuracy"] <= 1 and timing["total"] > 0
        again, _ = grpo.validate(generation, val_dataloader, tokenizer, val_task_to_env, 0, master_config=config)
        assert again == metrics  # the same weights give the same samples

        grpo.grpo_train(
            policy, generation, dataloader, val_dataloader, tokenizer, loss_fn,
            task_to_env, val_task_to_env, logger, checkpointer, state, config,
        )  # fmt: skip
        with pytest.raises(ValueError, match="nothing to validate on"):
            grpo.validate(generation, None, tokenizer, None, 0, config)
    finally:
        clusters[0].shutdown()
        environment.shutdown()
        logger.close()
    lines = map(json.loads, Path("logs/exp_001/metrics.jsonl").read_text().splitlines())
    trained = [line for line in lines if line["prefix"] == "train"]
    assert [line["step"] for line in trained] == [1, 2]
    assert all(line["num_failed_samples"] == 0 for line in trained)
    assert 0 < sum(line["accuracy"] for line in trained) < 2
    assert checkpointer.latest() == Path("results/grpo/step_2")
    assert "all 2 steps are done" in capsys.readouterr().out
