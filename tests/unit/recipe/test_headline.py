"""The header of a run says what it trains, in words that follow the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mcore.recipe import load_recipe
from grpo_mcore.recipe.headline import headline, preset_of

PRESETS = sorted(file.stem for file in Path("recipes/presets").glob("*.yaml") if "loss_fn:" in file.read_text())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_named_by_its_values(preset: str) -> None:
    config = load_recipe("grpo-arithmetic-cpu", [f"defaults=presets/{preset}", "env.math.format_pattern=.*"]).config
    assert preset_of(config) == preset
    assert headline(config)["algorithm"].startswith(f"preset {preset}, advantages by ")


def test_the_header_of_the_demo() -> None:
    lines = headline(load_recipe("grpo-arithmetic-cpu").config, rows=[9500, 500])
    assert lines["loss"] == (
        "ratio of tokens clipped to 0.8 to 1.2, averaged over tokens; no KL penalty, no entropy bonus"
    )
    assert lines["rewards"] == "math" and lines["data"] == "9,500 rows to train, 500 rows to validate"
    assert "adapters" not in lines


@pytest.mark.parametrize(
    ("word", "name", "text"),
    [
        ("loss_fn.reference_policy_kl_penalty=0.02", "loss", "KL penalty 0.02 (k3)"),
        ("loss_fn.entropy_coeff=0.001", "loss", "entropy bonus 0.001"),
        ("loss_fn.use_cispo=true", "loss", "CISPO"),
        ("loss_fn.disable_ppo_ratio=true", "loss", "without a ratio"),
        ("grpo.use_dynamic_sampling=true", "algorithm", "dynamic sampling"),
    ],
)
def test_what_a_recipe_changes_is_in_the_header(word: str, name: str, text: str) -> None:
    assert text in headline(load_recipe("grpo-arithmetic-cpu", [word]).config)[name]


def test_adapters_components_and_other_algorithms() -> None:
    config = load_recipe("examples/custom_reward/recipe.yaml").config
    assert headline(config)["rewards"] == "digits: rules (share, length)"
    assert headline(load_recipe("grpo-qwen2.5-3B-1n1g-lora").config)["adapters"].startswith("LoRA of rank ")
    assert headline(load_recipe("sft-arithmetic-cpu").config, "sft", [100, None]) == {
        "loss": "negative log-likelihood of the answers' tokens", "data": "100 rows to train",
    }  # fmt: skip
    assert headline(load_recipe("dpo").config, "dpo")["loss"] == "dpo of pairs, beta 0.05"
