"""Right and wrong answers of every kind that public reports name, in math_cases.yaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml


def hf_math_verify(response: str, ground_truth: str) -> tuple[bool, str | None]:
    """Import the verifier with its first use: it verifies as it is imported."""
    from grpo_mcore.environments.math import hf_math_verify as module

    return module.hf_math_verify(response, ground_truth)


KINDS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "math_cases.yaml").read_text())


@pytest.mark.parametrize("kind", KINDS, ids=[kind["kind"] for kind in KINDS])
def test_no_wrong_answer_is_right(kind: dict[str, Any]) -> None:
    assert [case for case in kind["wrong"] if hf_math_verify(*case)[0]] == []


@pytest.mark.parametrize("kind", KINDS, ids=[kind["kind"] for kind in KINDS])
def test_right_answers_are_right(kind: dict[str, Any]) -> None:
    assert [case for case in kind["right"] if not hf_math_verify(*case)[0]] == []


def test_every_truth_is_accepted_by_itself() -> None:
    truths = {
        truth
        for kind in KINDS
        for _, truth in kind["right"] + kind["wrong"]
        if not {"answer", "boxed"} & {*re.findall("[a-z]+", truth)}
    }
    assert [truth for truth in truths if not hf_math_verify(f"\\boxed{{{truth}}}", truth)[0]] == []


def test_there_are_enough_cases() -> None:
    assert sum(len(kind["right"]) + len(kind["wrong"]) for kind in KINDS) >= 350
    assert all(kind["source"] for kind in KINDS)


def test_an_answer_that_cannot_be_compared_is_wrong() -> None:
    assert hf_math_verify(r"\boxed{\frac{1}{0}}", "12") == (False, r"\frac{1}{0}")
    with pytest.raises(ValueError, match="is not a mathematical expression"):
        hf_math_verify("5", "")


def test_a_run_of_spaces_takes_no_time_of_its_own() -> None:
    """Without the run collapsed first, one answer takes minutes."""
    assert hf_math_verify("\\boxed{5" + 3000 * " " + "x}", "5x")[0]
