"""Recipes in NeMo RL's keys that name its DTensor policy (peer_recipes.yaml)."""

from pathlib import Path
from typing import Any

from grpo_mcore.recipe.yaml_tree import parse_file

_TABLE: dict[str, Any] = parse_file(Path(__file__).with_name("peer_recipes.yaml"), "peer_recipes.yaml").plain()
_POLICY = Path(__file__).with_name("peer_policy.yaml").read_text()
BASES: dict[str, str] = {name: _POLICY + text for name, text in _TABLE["bases"].items()}
GRPO = BASES["grpo"]
RECIPES = {name: (row["base"], row["differs"], row["megatron"]) for name, row in _TABLE["recipes"].items()}
"""By name: the base, the values in which a recipe differs, and what `policy.megatron_cfg` must hold."""
