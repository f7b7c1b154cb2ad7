"""The values of a recipe that differ from a checkpoint's."""

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
    "rm.seed",
    "sft.seed",
}


def config(**sections: Any) -> MasterConfig:
    base: dict[str, Any] = {"policy": {"model_name": "m"}, "data": {"train": {"data_path": "x.jsonl"}}}
    return MasterConfig.model_validate(base | sections)


def test_the_keys_that_a_resumed_run_keeps() -> None:
    assert {key for key in known_keys() if fixed_on_resume(key)} == FIXED


def test_a_resumed_run_keeps_of_a_critic_what_it_keeps_of_the_policy() -> None:
    critics = [config(ppo={}, value={"megatron_cfg": {"peft": {"enabled": True, "dim": dim}}}) for dim in (4, 8)]
    key = "value.megatron_cfg.peft.dim"
    assert changes(critics[0].model_dump(mode="json"), critics[1]) == [Change(key, "4", "8", fixed=True)]


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


def test_keys_that_follow_from_a_changed_one_are_left_out() -> None:
    before, after = (config(policy={"model_name": "m", "max_total_sequence_length": size}) for size in (512, 1024))
    assert [change.key for change in changes(before.model_dump(mode="json"), after)] == [
        "policy.max_total_sequence_length"
    ]
    written = {"model_name": "m", "max_grad_norm": 0.5}
    before = config(policy=written)
    after = config(policy=written | {"max_grad_norm": 0.25})
    assert [change.key for change in changes(before.model_dump(mode="json"), after)] == ["policy.max_grad_norm"]
    decays = [{"model_name": "m", "megatron_cfg": {"optimizer": {"weight_decay": decay}}} for decay in (0.0, 0.1)]
    before, after = (config(policy=written | decay, ppo={}) for decay in decays)
    keys = [change.key for change in changes(before.model_dump(mode="json"), after)]
    assert keys == ["policy.megatron_cfg.optimizer.weight_decay"], "a critic's follows"
    open_end = {"scheduler": {"lr_decay_iters": None}}
    rates = [{"model_name": "m", "megatron_cfg": open_end | {"optimizer": {"lr": lr}}} for lr in (1e-5, 5e-6)]
    before, after = (config(policy=rate, grpo={"max_num_steps": end}) for rate, end in zip(rates, (7, 9), strict=True))
    keys = [change.key for change in changes(before.model_dump(mode="json"), after)]
    assert keys == ["policy.megatron_cfg.optimizer.lr", "grpo.max_num_steps"]
    assert after.policy.megatron_cfg.scheduler.lr_warmup_init == after.policy.megatron_cfg.optimizer.min_lr == 5e-7
    critics = [{"megatron_cfg": {"optimizer": {"lr": lr}}} for lr in (1e-5, 5e-6)]
    before, after = (config(policy=rates[0], ppo={}, value=critic) for critic in critics)
    keys = [change.key for change in changes(before.model_dump(mode="json"), after)]
    assert keys == ["value.megatron_cfg.optimizer.lr"], "what follows from a critic's own value"


@pytest.mark.parametrize("side", ["saved", "now"])
def test_keys_of_another_version_of_the_schema_are_left_out(side: str) -> None:
    saved = config().model_dump(mode="json")
    if side == "saved":
        saved["grpo"]["a_key_that_was_removed"] = 3
    else:
        del saved["grpo"]["max_num_steps"]
    assert changes(saved, config()) == []
