"""`grpo-mcore config`: the reference of keys, and output whose reader goes away."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.recipe.loading.reference import reference
from grpo_mcore.recipe.schema.keys import known_keys, section_of

ROOT = Path(__file__).resolve().parents[3]


def test_the_reference_needs_no_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["config", "--reference"])
    assert end.value.code == 0 and capsys.readouterr().out == reference()


def test_the_doc_is_the_reference() -> None:
    assert (ROOT / "docs" / "recipe.md").read_text() == reference(), (
        "docs/recipe.md is out of date; write it again: grpo-mcore config --reference > docs/recipe.md"
    )


def test_the_reference_has_every_key() -> None:
    section, found = "", set()
    for line in reference().splitlines():
        if line.startswith("## "):
            section = "" if line == "## Top level" else line.split("`")[1] + "."
        elif row := re.match(r"\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", line):
            assert all(cell.strip() for cell in row.groups())
            found.add(section + row[1])
    keys = {key for key, field in known_keys().items() if section_of(field.annotation)[0] is None}
    assert found == {key for key in keys if not key.startswith("data.validation.")}, "data.validation.* refers to train"


@pytest.mark.parametrize("words", [["config", "grpo_math_1B"], ["config", "--reference"]])
def test_a_reader_that_goes_away_ends_the_command_quietly(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `| head -1` has done by the time of the next write
    command = [sys.executable, "-m", "grpo_mcore.cli.main", *words]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
