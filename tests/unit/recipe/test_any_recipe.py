"""A recipe with any value at any place loads, or is refused with a RecipeError."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_mcore.recipe import RecipeError, load_recipe
from tests.fuzz import JSON, examples
from tests.unit.recipe.conftest import MINIMAL

KEYS = [
    "grpo.num_prompts_per_step", "grpo.seed", "grpo.reward_scaling", "policy.megatron_cfg.optimizer.lr", "loss_fn",
    "policy.model_name", "policy.generation.vllm_cfg", "data.train", "data.train.0", "checkpointing.metric_name",
    "cluster", "cluster.env_vars", "env", "env.math", "defaults", "logger", "grpo.async_grpo.max_age",
    "policy.tokenizer", "launch.env",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@pytest.mark.parametrize("name", ["9" * 5000, "~nobody-of-this-name/x", "a\0b", "\ud800"])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(RecipeError, match="no recipe"):
        load_recipe(name, [])


def refused_or_loaded(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    try:
        load_recipe(str(path), [])
    except RecipeError as error:
        assert str(error)


@examples(8)
@given(key=st.sampled_from(KEYS), value=JSON)
def test_any_value(folder: Path, key: str, value: Any) -> None:
    recipe: Any = yaml.safe_load(MINIMAL)
    *names, last = key.split(".")
    inner = recipe
    for name in names:
        if isinstance(inner, list):
            inner = inner[int(name)]
        else:
            if not isinstance(inner.get(name), dict | list):
                inner[name] = {}
            inner = inner[name]
    inner[int(last) if isinstance(inner, list) else last] = value
    refused_or_loaded(folder / "value.yaml", yaml.safe_dump(recipe, allow_unicode=False).encode())


@examples(10)
@given(
    at=st.integers(0, len(MINIMAL)),
    put=st.binary(max_size=6) | st.sampled_from([b"&a [*a]", b"${a.b}", b"\xff", b"\t"]),
)
def test_any_damage(folder: Path, at: int, put: bytes) -> None:
    text = MINIMAL.encode()
    refused_or_loaded(folder / "damaged.yaml", text[:at] + put + text[at:])
