"""Rates over answer_cases.yaml: right answers that are recognised, and wrong answers that are paid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from grpo_mcore.environments.math.verifiers import make_verifier

FAMILIES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "answer_cases.yaml").read_text())


def test_rates() -> None:
    """At most 0.5 % of the wrong answers are paid, and at least 95 % of the right ones are recognised."""
    right, missed, wrong, paid = 0, [], 0, []
    for family in FAMILIES:
        verify = make_verifier(family["verifier"])
        for case in family["cases"]:
            ground_truth = case["ground_truth"]
            right, wrong = right + len(case["right"]), wrong + len(case["wrong"])
            missed += [(ground_truth, answer) for answer in case["right"] if verify(answer, ground_truth)[0] < 1]
            paid += [(ground_truth, answer) for answer in case["wrong"] if verify(answer, ground_truth)[0] > 0]
    print(f"{right - len(missed)} of {right} right answers are recognised, {len(paid)} of {wrong} wrong ones are paid")
    assert right + wrong >= 900 and wrong >= right
    assert len(paid) <= 0.005 * wrong, paid
    assert len(missed) <= 0.05 * right, missed
