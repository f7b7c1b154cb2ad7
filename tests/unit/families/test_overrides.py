"""policy.hf_config_overrides: values that replace those of a model's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.families import FamilyError, read_hf_config, shape_of
from grpo_mcore.families.known import known_configs
from grpo_mcore.parallel.hf_folder import HfFolderWriter
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.tools.plan.plan import plan_shape

QWEN = known_configs()["Qwen2.5-0.5B"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"text_config": {"a": 1, "b": 2}}))
    return tmp_path


def test_values_are_replaced_and_mappings_merged(folder: Path) -> None:
    config = read_hf_config(folder, {"num_hidden_layers": 3, "rope_theta": 5e5, "text_config": {"b": 7}})
    assert (config["num_hidden_layers"], config["rope_theta"]) == (3, 5e5)
    assert config["text_config"] == {"a": 1, "b": 7} and config["hidden_size"] == QWEN["hidden_size"]
    assert shape_of(config).num_layers == 3


def test_a_key_that_the_model_does_not_have_is_one_message(folder: Path) -> None:
    with pytest.raises(FamilyError, match=r"hf_config_overrides\.hiden_size: .* no such key; nearest: hidden_size"):
        read_hf_config(folder, {"hiden_size": 3})


@pytest.mark.parametrize("name", ["folder", "Qwen2.5-0.5B"])
def test_plan_sees_them(folder: Path, name: str) -> None:
    policy: dict[str, Any] = {"model_name": str(folder) if name == "folder" else name}
    policy["hf_config_overrides"] = {"num_hidden_layers": 3}
    config = MasterConfig.model_validate({"policy": policy, "data": {"train": {"data_path": "x"}}})
    assert plan_shape(config).num_layers == 3


def test_an_exported_model_has_them(folder: Path, tmp_path: Path) -> None:
    import torch

    shape = shape_of(read_hf_config(folder, {"num_hidden_layers": 1, "vocab_size": 64}))
    writer = HfFolderWriter(tmp_path / "out", shape, torch.bfloat16)
    writer.files = {}
    writer.create(folder, overrides={"max_position_embeddings": 77})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 77
