"""Fixtures for recipes in temporary files. The working directory is the temporary folder, so that sources are short."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_mcore.recipe import Recipe, RecipeError, load_recipe

MINIMAL = """\
policy:
  model_name: models/tiny
data:
  train:
    data_path: train.jsonl
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """write(text, name="r.yaml") -> path of the file, in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "r.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def load(write: Callable[..., Path]) -> Callable[..., Recipe]:
    """load(text, *overrides) -> the recipe of a text."""
    return lambda text, *overrides: load_recipe(write(text), overrides)


@pytest.fixture
def problems(load: Callable[..., Recipe]) -> Callable[..., list[str]]:
    """problems(text, *overrides) -> one line for each problem of a text."""

    def problems(text: str, *overrides: str) -> list[str]:
        with pytest.raises(RecipeError) as error:
            load(text, *overrides)
        lines = str(error.value).splitlines()
        assert len(lines) == len(error.value.problems) + 1, "one line each, below a headline"
        return [line.strip() for line in lines[1:]]

    return problems
