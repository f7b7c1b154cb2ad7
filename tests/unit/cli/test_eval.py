"""The words of `grpo-mcore eval`."""

from __future__ import annotations

import pytest

from grpo_mcore.cli.eval import parse
from grpo_mcore.cli.main import main


def test_models_recipe_and_overrides_in_any_order() -> None:
    words = ["a/model", "eval.seed=3", "--config", "my.yaml", "results/step_4", "+env.x.y=1"]
    args = parse(words)
    assert (args.models, args.overrides, args.config) == (
        ["a/model", "results/step_4"], ["eval.seed=3", "+env.x.y=1"], "my.yaml",
    )  # fmt: skip
    args = parse(["my.yaml", "a/model"])
    assert (args.models, args.config) == (["a/model"], "my.yaml")


def test_two_recipes_and_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["a.yaml", "b.yaml"], "one recipe at a time"),
        (["--model", "m"], "unknown option: --model"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["eval", *words])
        assert message in capsys.readouterr().err
