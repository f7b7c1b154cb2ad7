from __future__ import annotations

import copy
from typing import Any

import pytest

from grpo_mcore.recipe import MasterConfig, RecipeError

RECIPE: dict[str, Any] = {
    "policy": {"model_name": "m", "generation": {"vllm_cfg": {"expose_http_server": True}}},
    "data": {"train": {"dataset_name": "NemoGymDataset", "data_path": "tasks.jsonl"}},
    "env": {"math": {}, "nemo_gym": {"head_server_url": "http://10.0.0.1:11000"}, "should_use_nemo_gym": True},
    "grpo": {"val_period": 0},
}


def recipe(**changes: Any) -> dict[str, Any]:
    """Return the recipe with dotted keys (`__` for a dot) set."""
    found = copy.deepcopy(RECIPE)
    for key, value in changes.items():
        *sections, name = key.split("__")
        at = found
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    return found


def test_the_switch_assigns_datasets_to_the_gym() -> None:
    config = MasterConfig.model_validate(recipe())
    assert [entry.env_name for entry in config.data.train] == ["nemo_gym"]
    assert sorted(config.env) == ["math", "nemo_gym"]
    own = [{"data_path": "a.jsonl", "env_name": "math"}, {"data_path": "b.jsonl"}]
    config = MasterConfig.model_validate(recipe(data__train=own, env__should_log_nemo_gym_responses=True))
    assert [entry.env_name for entry in config.data.train] == ["math", "nemo_gym"]
    again = MasterConfig.model_validate(config.model_dump())
    assert again == config


def test_reward_penalties_become_keys_of_the_gym() -> None:
    penalties = {"penalize_empty_final_answer": True}
    config = MasterConfig.model_validate(recipe(reward_penalties=penalties, grpo__invalid_tool_call_advantage=-5.0))
    assert config.env["nemo_gym"]["reward_penalties"] == penalties
    assert config.grpo.invalid_tool_call_advantage == -5.0 and config.grpo.malformed_thinking_advantage is None
    assert MasterConfig.model_validate(config.model_dump()) == config
    off = MasterConfig.model_validate(recipe(reward_penalties=None))
    assert "reward_penalties" not in off.env["nemo_gym"]
    with pytest.raises(RecipeError, match="only rollouts of a NeMo Gym are penalised"):
        MasterConfig.model_validate(recipe(reward_penalties=penalties, env={"math": {}}))


def test_the_switch_removes_the_gym() -> None:
    config = MasterConfig.model_validate(recipe(env__should_use_nemo_gym=False))
    assert list(config.env) == ["math"] and config.data.train[0].env_name == "math"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"env": {"should_use_nemo_gym": True}}, "there is no section env.nemo_gym"),
        ({"env__should_use_nemo_gym": "yes"}, "env.should_use_nemo_gym: expected true or false"),
        ({"env__should_mask_flagged_samples": False}, "samples that NeMo Gym flags"),
        ({"policy__generation__vllm_cfg__expose_http_server": False}, "expose_http_server: .* set it to true"),
        ({"policy__generation__stop_strings": ["x"]}, "cannot be requested through NeMo Gym"),
        ({"policy__generation__vllm_cfg__http_server_host": "0.0.0.0"}, "the endpoint listens on one interface"),
        (
            {"policy__generation__vllm_cfg__http_server_serving_chat_kwargs": {"tool_parser": "hermes"}},
            "enable_auto_tools: true and a tool_parser",
        ),
    ],
)
def test_rejected_combinations(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        MasterConfig.model_validate(recipe(**changes))
