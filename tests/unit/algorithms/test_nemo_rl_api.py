"""The entry points that scripts for NeMo RL use."""

import inspect
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mcore.algorithms import grpo, nemo_rl_api
from grpo_mcore.algorithms.nemo_rl_api import check_processor
from grpo_mcore.driver.run.run import Run
from grpo_mcore.families import read_hf_config, shape_of
from grpo_mcore.tools.demo.tiny_models import make_tiny_model

DOCUMENTED = {
    "setup": ["master_config", "tokenizer", "dataset", "val_dataset", "processor"],
    "dynamic_sampling":
        ["repeated_batch", "std", "baseline", "dynamic_sampling_num_gen_batches", "master_config", "timer",
         "batch_cache"],
    "scale_rewards": ["repeated_batch", "reward_scaling_cfg"],
    "_should_use_async_rollouts": ["master_config"],
    "refit_policy_generation": ["policy", "policy_generation", "colocated_inference", "_refit_buffer_size_gb", "timer"],
    "grpo_train":
        ["policy", "policy_generation", "dataloader", "val_dataloader", "tokenizer", "loss_fn", "task_to_env",
         "val_task_to_env", "logger", "checkpointer", "grpo_save_state", "master_config", "processor"],
    "validate": ["policy_generation", "val_dataloader", "tokenizer", "val_task_to_env", "step", "master_config"],
    "async_grpo_train":
        ["policy", "policy_generation", "dataloader", "val_dataloader", "tokenizer", "loss_fn", "task_to_env",
         "val_task_to_env", "logger", "checkpointer", "grpo_save_state", "master_config", "max_trajectory_age_steps"],
    "_default_grpo_save_state": [],
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_documented_arguments_come_first_and_in_order(name: str) -> None:
    parameters = inspect.signature(getattr(grpo, name)).parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    assert positional == DOCUMENTED[name]


def test_a_run_has_the_arguments_of_the_loop() -> None:
    assert [field.name for field in fields(Run)] == DOCUMENTED["grpo_train"][:-1]


def test_a_processor_must_be_the_one_of_the_models_folder(tmp_path: Path) -> None:
    """NeMo RL's scripts for images hand it to setup, grpo_train and validate."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = str(make_tiny_model("qwen3_vl", tmp_path, words=True))
    shape = shape_of(read_hf_config(folder))
    processor = SimpleNamespace(image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder))
    check_processor(processor, shape, folder)
    other = SimpleNamespace(image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder, image_std=[0.1] * 3))
    for wrong, of_shape, message in (
        (other, shape, "it makes other pixels than policy and engines do: std"),
        (object(), shape, "object has no image processor"),
        (processor, replace(shape, vision=None), "this run has no images"),
    ):
        with pytest.raises(ValueError, match=f"^processor: {message}"):
            check_processor(wrong, of_shape, folder)
    arguments: list[Any] = [SimpleNamespace(shape=shape, model_folder=folder), *[None] * 11]
    with pytest.raises(ValueError, match="other pixels"):
        grpo.grpo_train(*arguments, processor=other)


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
