"""Every rule between keys, by the table in bad_recipes.yaml."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mcore.recipe.yaml_tree import parse_file

GROUPS = parse_file(Path(__file__).with_name("bad_recipes.yaml"), "bad_recipes.yaml").plain()
ROWS = [
    pytest.param(group["recipe"], change, messages, id=change)
    for group in GROUPS.values()
    for change, *messages in group["changes"]
]
NEXT_OVERRIDE = re.compile(r" (?=[+~]*[a-z][\w.]*=|~)")


@pytest.mark.parametrize(("recipe", "change", "messages"), ROWS)
def test_each_change_leads_to_its_messages(
    load, problems, recipe: dict[str, Any], change: str, messages: list[str]
) -> None:
    text, words = yaml.safe_dump(recipe, sort_keys=False), NEXT_OVERRIDE.split(change)
    if not messages:
        load(text, *words)
        return
    lines = problems(text, *words)
    assert len(lines) == len(messages), lines
    for line, message in zip(lines, messages, strict=True):
        assert message in line
        assert "hunter2" not in line, "a secret"
