import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mcore.recipe import MasterConfig, RecipeError, load_recipe

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


def test_the_older_name_of_the_gym_is_read() -> None:
    env = {"penguin": {"head_server_url": "http://10.0.0.1:1"}, "should_use_penguin": True}
    config = MasterConfig.model_validate(recipe(env={**env, "should_log_penguin_responses": False}))
    assert list(config.env) == ["nemo_gym"] and config.data.train[0].env_name == "nemo_gym"


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


def test_files_of_older_gym_recipes_are_datasets(tmp_path: Path) -> None:
    base, child, renamed = (tmp_path / f"{name}.yaml" for name in ("base", "child", "renamed"))
    files = {"train_jsonl_fpath": "${folder}/train.jsonl", "validation_jsonl_fpath": "b.jsonl", "agent_name": "x"}
    plain = recipe(data=files, grpo__val_period=1, folder="data")
    base.write_text(yaml.safe_dump(plain))
    child.write_text("defaults: base\ndata: {train: {data_path: c.jsonl}}\n")
    renamed.write_text("defaults: base\ndata: {train_jsonl_fpath: d.jsonl}\n")
    for file, path in ((base, "data/train.jsonl"), (child, "c.jsonl"), (renamed, "d.jsonl")):
        found = load_recipe(file)
        (train,), (validation,) = found.config.data.train, found.config.data.validation
        assert (train.data_path, train.dataset_name, train.env_name) == (path, "NemoGymDataset", "nemo_gym")
        assert (validation.data_path, validation.dataset_name) == ("b.jsonl", "NemoGymDataset")
        assert sorted(problem.key for problem in found.imported) == ["data.agent_name", "folder"]
    base.write_text(yaml.safe_dump(recipe(folder="data")))
    with pytest.raises(RecipeError, match="folder: unknown key"):
        load_recipe(base)


def test_what_older_gym_recipes_say_twice_is_used_once(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    serving = {"enable_auto_tools": True, "tool_parser": "hermes", "chat_template": "{{ messages }}"}
    engine = {
        "http_server_serving_chat_kwargs": serving | {"default_chat_template_kwargs": {"long": False, "thinks": True}},
        "expose_http_server": True,
        "enable_thinking": True,
    }
    grpo = {
        "val_period": 0,
        "invalid_tool_call_strategy": "mask",
        "penalize_invalid_tool_call": True,
        "invalid_tool_call_advantage": -5.0,
        "penalize_malformed_thinking": True,
        "malformed_thinking_advantage": -1.0,
        "use_best_at_k": False,
        "best_at_k_k": 8,
    }
    plain = recipe(
        policy__generation={"vllm_cfg": engine}, policy__tokenizer={"chat_template_kwargs": {"thinks": True}}
    )
    file.write_text(yaml.safe_dump(plain | {"grpo": grpo}))
    config = load_recipe(file).config
    assert config.policy.tokenizer.chat_template == "{{ messages }}"
    assert config.policy.tokenizer.chat_template_kwargs == {"long": False, "thinks": True, "enable_thinking": True}
    assert (config.grpo.invalid_tool_call_advantage, config.grpo.malformed_thinking_advantage) == (-5.0, -1.0)
    del grpo["invalid_tool_call_advantage"]
    plain["policy"]["tokenizer"]["chat_template_kwargs"]["thinks"] = False
    file.write_text(yaml.safe_dump(plain | {"grpo": grpo | {"use_best_at_k": True}}))
    with pytest.raises(RecipeError) as refused:
        load_recipe(file)
    for said in ("use grpo.invalid_tool_call_advantage", "best of k samples", "contradicts policy.tokenizer"):
        assert said in str(refused.value)


def test_the_switch_removes_the_gym() -> None:
    config = MasterConfig.model_validate(recipe(env__should_use_nemo_gym=False))
    assert list(config.env) == ["math"] and config.data.train[0].env_name == "math"
