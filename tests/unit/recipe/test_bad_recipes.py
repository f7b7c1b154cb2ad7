"""Every rule between keys, by bad_recipes.yaml, and what keys of others are read as, by read_recipes.yaml."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mcore.recipe.schema.master import value_at
from grpo_mcore.recipe.yaml_tree import parse_file
from tests.unit.recipe.peer_recipes import GRPO

WHOLE = {
    "peer_grpo": GRPO,
    "nemo_rl_distillation": Path(__file__).with_name("nemo_rl_distillation.yaml").read_text(),
}
NEXT_OVERRIDE = re.compile(r" (?=[+~]*[a-z][\w.]*=|~)")


def rows(name: str) -> list[Any]:
    """Return the rows of a table: the text of a recipe, the change, and what it leads to."""
    groups = parse_file(Path(__file__).with_name(name), name).plain()
    return [
        pytest.param(WHOLE.get(str(group["recipe"])) or yaml.safe_dump(group["recipe"]), change, outcome, id=change)
        for group in groups.values()
        for change, *outcome in group["changes"]
    ]


@pytest.mark.parametrize(("text", "change", "messages"), rows("bad_recipes.yaml"))
def test_each_change_leads_to_its_messages(load, problems, text: str, change: str, messages: list[str]) -> None:
    words = NEXT_OVERRIDE.split(change)
    if not messages:
        load(text, *words)
        return
    lines = problems(text, *words)
    assert len(lines) == len(messages), lines
    for line, message in zip(lines, messages, strict=True):
        assert message in line
        assert "hunter2" not in line, "a secret"


@pytest.mark.parametrize(("text", "change", "outcome"), rows("read_recipes.yaml"))
def test_each_change_is_read_as_its_values(load, text: str, change: str, outcome: list[Any]) -> None:
    recipe = load(text, *NEXT_OVERRIDE.split(change))
    notes = "\n".join(map(str, recipe.imported))
    for part in outcome:
        if isinstance(part, str):
            assert part in notes
            continue
        for key, value in part.items():
            assert value_at(recipe.config, key) == value, key
