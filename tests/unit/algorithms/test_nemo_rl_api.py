"""The entry points that scripts for NeMo RL use."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from grpo_mcore.algorithms import grpo, nemo_rl_api
from grpo_mcore.driver.run.run import Run

DOCUMENTED = {
    "setup": ["master_config", "tokenizer", "dataset", "val_dataset", "processor"],
    "dynamic_sampling": [
        "repeated_batch", "std", "baseline", "dynamic_sampling_num_gen_batches", "master_config", "timer",
        "batch_cache",
    ],
    "scale_rewards": ["repeated_batch", "reward_scaling_cfg"],
    "_should_use_async_rollouts": ["master_config"],
    "refit_policy_generation": [
        "policy", "policy_generation", "colocated_inference", "_refit_buffer_size_gb", "timer",
    ],
    "grpo_train": [
        "policy", "policy_generation", "dataloader", "val_dataloader", "tokenizer", "loss_fn", "task_to_env",
        "val_task_to_env", "logger", "checkpointer", "grpo_save_state", "master_config", "processor",
    ],
    "validate": ["policy_generation", "val_dataloader", "tokenizer", "val_task_to_env", "step", "master_config"],
    "async_grpo_train": [
        "policy", "policy_generation", "dataloader", "val_dataloader", "tokenizer", "loss_fn", "task_to_env",
        "val_task_to_env", "logger", "checkpointer", "grpo_save_state", "master_config", "max_trajectory_age_steps",
    ],
    "_default_grpo_save_state": [],
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_documented_arguments_come_first_and_in_order(name: str) -> None:
    parameters = inspect.signature(getattr(grpo, name)).parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    assert positional == DOCUMENTED[name]


def test_a_run_has_the_arguments_of_the_loop() -> None:
    assert [field.name for field in fields(Run)] == DOCUMENTED["grpo_train"][:-1]


@pytest.mark.parametrize("start", ["setup", "grpo_train"])
def test_a_processor_is_refused(start: str) -> None:
    arguments: list[Any] = [None] * (len(DOCUMENTED[start]) - 1)
    with pytest.raises(ValueError, match="^processor: models with images or audio are not supported"):
        getattr(grpo, start)(*arguments, processor=object())


def test_the_save_state_of_a_new_run() -> None:
    state = grpo._default_grpo_save_state()
    assert state == {
        "consumed_samples": 0, "current_step": 0, "current_epoch": 0, "total_steps": 0, "total_valid_tokens": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "answer"), [({}, True), ({"async_engine": True}, True), ({"async_engine": False}, False)]
)
def test_rollouts_are_asynchronous(asked: dict[str, bool], answer: bool) -> None:
    config = {"policy": {"generation": {"backend": "vllm", "vllm_cfg": asked}}}
    assert nemo_rl_api._should_use_async_rollouts(config) is answer
