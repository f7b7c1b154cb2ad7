from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.recipe import MasterConfig, Recipe, load_recipe, resolved_yaml, without_secrets
from grpo_mcore.recipe.yaml_tree import parse_text
from tests.unit.recipe.conftest import MINIMAL

GRPO = MINIMAL + (
    "env: {math: {num_workers: 2, stop_strings: ['a: b', '#c']}}\n"
    "checkpointing: {checkpoint_dir: '1e5', metric_name: null}\nloss_fn: {ratio_clip_c: 3}\n"
    f"logger: {{log_dir: {'a-long-folder/' * 8}}}\n"  # wider than the column of the comments
)
SFT = "policy: {model_name: m, train_global_batch_size: 48}\ndata: {train: {data_path: x}}\nsft: {seed: 3}\n"


@pytest.mark.parametrize("text", [GRPO, SFT])
def test_printed_recipes_load_to_the_same_configuration(load, write, text: str) -> None:
    first = load(text, "policy.megatron_cfg.optimizer.lr=1e-6")
    again = load_recipe(write(resolved_yaml(first), "again.yaml"))
    assert again.config == first.config


def test_every_value_has_its_source(load) -> None:
    lines = resolved_yaml(load(GRPO, "grpo.seed=3")).splitlines()
    assert lines[0] == "# r.yaml grpo.seed=3"
    found = {tuple(part.strip() for part in line.split(" # ", 1)) for line in lines if " # " in line}
    assert ("model_name: models/tiny", "r.yaml:2") in found
    assert ("seed: 3", "command line") in found
    assert ("num_prompts_per_step: 32", "default") in found
    assert ("- dataset_name: ResponseDataset", "default") in found
    assert ("name: models/tiny", "default = ${policy.model_name}") in found
    assert ("ratio_clip_c: 3.0", "r.yaml:8") in found
    values = [line for line in lines[1:] if not line.rstrip().endswith(":")]
    assert all(" # " in line for line in values)


def test_sections_of_the_other_algorithm_are_left_out(load) -> None:
    def sections(text: str) -> set[str]:
        return {line[:-1] for line in resolved_yaml(load(text)).splitlines() if line.endswith(":") and line[0] != " "}

    assert "sft" not in sections(GRPO) and "grpo" in sections(GRPO)
    assert "sft" in sections(SFT) and not sections(SFT) & {"grpo", "loss_fn"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_any_value_is_read_back_unchanged(value: object) -> None:
    plain = {"policy": {"model_name": "m"}, "data": {"train": {"data_path": "x"}}, "env": {"any": {"k": value}}}
    recipe = Recipe(MasterConfig.model_validate(plain), {}, Path("r.yaml"), (), ())
    others = frozenset(MasterConfig.model_fields) - {"env"}
    assert parse_text(resolved_yaml(recipe, without=others), "", "").plain() == {"env": {"any": {"k": value}}}


def test_what_is_shown_to_others_has_no_secrets() -> None:
    plain = {
        "logger": {
            "mlflow": {"tracking_uri": "https://me:hunter2@mlflow.example.com/?token=abc&x=1"},
            "alarms": {"webhook": "https://hooks.example.com/T0/B0/xyz", "stop_after": 3},
        },
        "launch": {"env": {"HF_TOKEN": "hf_abc", "HF_HOME": "/cache", "DB_PASSWORD": "x", "WANDB_API_KEY": "k"}},
        "policy": {"http_server_api_key_env_var": "MY_KEY", "stop_token_ids": [1, 2], "tokenizer": {"name": "a/b"}},
        "urls": ["s3://bucket/a@b", "git://user@host/x"],
        "nothing": None,
    }
    shown = without_secrets(plain)
    assert shown["logger"] == {
        "mlflow": {"tracking_uri": "https://(hidden)@mlflow.example.com/?token=(hidden)&x=1"},
        "alarms": {"webhook": "(hidden)", "stop_after": 3},
    }
    hidden = {"HF_TOKEN": "(hidden)", "HF_HOME": "/cache", "DB_PASSWORD": "(hidden)", "WANDB_API_KEY": "(hidden)"}
    assert shown["launch"]["env"] == hidden
    assert shown["policy"] == plain["policy"] and shown["nothing"] is None
    assert shown["urls"] == ["s3://bucket/a@b", "git://(hidden)@host/x"]
