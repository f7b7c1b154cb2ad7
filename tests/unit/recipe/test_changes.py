"""The values of a recipe that differ from a checkpoint's."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_mcore.recipe import Change, MasterConfig, changes
from grpo_mcore.recipe.schema.keys import fixed_on_resume, known_keys

FIXED = {
    "data.shuffle",
    "data.use_multiple_dataloader",
    "dpo.seed",
    "grpo.seed",
    "policy.megatron_cfg.optimizer.optimizer",
    "policy.megatron_cfg.peft.alpha",
    "policy.megatron_cfg.peft.dim",
    "policy.megatron_cfg.peft.enabled",
    "policy.megatron_cfg.peft.exclude_modules",
    "policy.megatron_cfg.peft.target_modules",
    "policy.precision",
    "sft.seed",
}


def config(**sections: Any) -> MasterConfig:
    base: dict[str, Any] = {"policy": {"model_name": "m"}, "data": {"train": {"data_path": "x.jsonl"}}}
    return MasterConfig.model_validate(base | sections)


def test_the_keys_that_a_resumed_run_keeps() -> None:
    assert {key for key in known_keys() if fixed_on_resume(key)} == FIXED


def test_an_unchanged_recipe() -> None:
    assert changes(config().model_dump(mode="json"), config()) == []


def test_changed_values_in_the_order_of_the_schema() -> None:
    saved = config(env={"math": {"num_workers": 2}}).model_dump(mode="json")
    now = config(
        env={"math": {"num_workers": 2, "timeout": 5}},
        grpo={"seed": 7, "max_num_steps": 9},
        data={"train": [{"data_path": "x.jsonl"}, {"data_path": "y.jsonl"}]},
    )
    found = [change for change in changes(saved, now) if not change.key.startswith("data.train.1.")]
    assert found == [
        Change("grpo.max_num_steps", "1000000", "9", fixed=False),
        Change("grpo.seed", "42", "7", fixed=True),
        Change("env.math.timeout", "not set", "5", fixed=False),
    ]


@pytest.mark.parametrize("side", ["saved", "now"])
def test_keys_of_another_version_of_the_schema_are_left_out(side: str) -> None:
    saved = config().model_dump(mode="json")
    if side == "saved":
        saved["grpo"]["a_key_that_was_removed"] = 3
    else:
        del saved["grpo"]["max_num_steps"]
    assert changes(saved, config()) == []
