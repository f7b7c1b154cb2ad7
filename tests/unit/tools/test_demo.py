"""The end of the demo: the most likely answers of a model, asked from its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mcore.data.arithmetic import make_arithmetic_task, make_base_config
from grpo_mcore.tools.demo import Answers, ask, learned


def test_a_problem_that_only_the_later_model_solves_is_shown() -> None:
    problems = ["01+01=", "07+05=", "09+09="]
    before = Answers(problems, ["002", "002", "008"], [True, False, False])
    after = Answers(problems, ["002", "012", "018"], [True, True, True])
    assert learned(before, after) == ("07+05=", "002", "012")
    assert learned(after, before) is None
    assert (before.accuracy, after.accuracy) == (pytest.approx(1 / 3), 1.0)


def test_an_untrained_model_answers_every_problem(tmp_path: Path) -> None:
    task = make_arithmetic_task(tmp_path / "task", num_val=20)
    make_base_config(tmp_path / "model", task.tokenizer, num_layers=1)
    found = ask(tmp_path / "model", task.val)
    assert len(found.problems) == len(found.answers) == len(found.right) == 20
    assert found.accuracy < 0.3
