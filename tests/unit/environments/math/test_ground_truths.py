"""A truth that its own verifier does not accept is named; what people write as truths is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_mcore.environments import create_env_class
from grpo_mcore.environments.math.ground_truths import ground_truth_problems
from grpo_mcore.environments.math.verifiers import ground_truths

pytestmark = pytest.mark.slow  # processes of verifiers


def problems(verifier: str, *truths: Any) -> list[str | None]:
    return ground_truth_problems(verifier, [{"ground_truth": truth} for truth in truths], "math")


def test_what_people_write_as_truths() -> None:
    truths = ["72", 72, 72.5, "it is 72\n#### 72", "72 km/h", r"\frac{1}{2}", r"\boxed{5}", "$5$", r"50\%", "x=3"]
    assert problems("hf_math_verify", *truths, "(1,2)", ["5", "6"], "yes") == [None] * 13
    assert problems("dapo_math_verify", "72", "72 km/h", "1,000", r"\frac{1}{2}", "-5") == [None] * 5
    assert problems("multilingual_multichoice", "A", "(B)", "c") == [None] * 3


@pytest.mark.parametrize(
    ("verifier", "truth", "why"),
    [
        ("hf_math_verify", {"ground_truth": "5"}, "is a dict, which no answer can match"),
        ("hf_math_verify", None, "needs 'ground_truth' in extra_env_info"),
        ("hf_math_verify", r"3=4", "hf_math_verify does not accept the ground truth '3=4' as an answer to itself"),
        ("dapo_math_verify", [], "is an empty list"),
        ("english_multichoice", "72", "a letter from A to J"),
        ("english_multichoice", ["A", "Z"], "a letter from A to J"),
        ("a.module:verifier", {"x": 1}, "is a dict"),
        ("hf_math_verify", '{"ground_truth": "5"}', "is a dict that became a text"),
        ("hf_math_verify", "{'ground_truth': '5'}", "is a dict that became a text"),
        ("dapo_math_verify", '["5", "6"]', "is a list that became a text"),
        ("hf_math_verify", float("nan"), "is blank"),
        ("hf_math_verify", "so 5\n####", "is blank"),
        ("hf_math_verify", "None", "'None' is a missing value that became a text"),
        ("dapo_math_verify", ["5", "nan"], "'nan' is a missing value that became a text"),
        ("hf_math_verify", b"5", "is a bytes"),
    ],
)
def test_a_truth_that_no_answer_reaches(verifier: str, truth: Any, why: str) -> None:
    [problem] = ground_truth_problems(verifier, [{"ground_truth": truth}], "math", timeout_s=0.5)
    assert problem is not None and why in problem


def test_a_truth_in_json_of_a_list() -> None:
    assert ground_truths({"ground_truth": '["36"]'}, "math") == ["36"]  # Skywork-OR1
    assert ground_truths({"ground_truth": [5.0, 0.5, "5.0"]}, "math") == ["5", "0.5", "5.0"]  # floats of a table
    for other in ('["36", "37"]', '["36"', '["]'):
        assert ground_truths({"ground_truth": other}, "math") == [other]


def test_a_verifier_of_ones_own_is_not_asked() -> None:
    assert problems("a.module:verifier", "5", '{"numbers": [1, 2]}') == [None] * 2


def test_letters_of_choices_ask_for_their_own_verifier(package_log: pytest.LogCaptureFixture) -> None:
    math = create_env_class("math")[0]
    assert math.check_truths({}, [{"ground_truth": "A"}, {"ground_truth": "C"}]) == [None] * 2
    assert "set verifier_type: english_multichoice" in package_log.text
    package_log.clear()
    math.check_truths({"verifier_type": "english_multichoice"}, [{"ground_truth": "A"}])
    math.check_truths({}, [{"ground_truth": "A"}, {"ground_truth": "5"}])
    assert not package_log.messages


def test_each_environment_knows_its_truths() -> None:
    rules = {"components": {"a": {"type": "verifier", "verifier": "english_multichoice"}}}
    rows = [{"ground_truth": "A"}, {"ground_truth": "5"}]
    good, bad = create_env_class("rules")[0].check_truths(rules, rows)
    assert good is None and bad is not None
    code = create_env_class("code")[0].check_truths({}, [{"tests": []}, {"tests": [{"assert": "assert 1"}]}])
    assert code == ["there is no test in 'tests'", None]
    assert create_env_class("sliding_puzzle")[0].check_truths({}, [{}]) == [None]
