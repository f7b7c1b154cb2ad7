r"""Answers compared as strings: another notation of the truth is right, anything else is wrong."""

from __future__ import annotations

import pytest

from grpo_mcore.environments.math.dapo import dapo_math_verify, find_answer, normalized


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("It is so.\nAnswer: 34", "34", 1.0),
        ("Answer: 5\nNo.\nanswer :  34 ", "34", 1.0),
        ("Answer: $\\boxed{34}$.", "34", 1.0),
        ("**Answer: 34**", "34", 1.0),
        ("Answer: 25", "025", 1.0),
        ("Answer: 025", "25", 1.0),
        ("Answer: 0", "000", 1.0),
        ("Answer: 0.5", "5", -1.0),
        ("Answer: 250", "25", -1.0),
        ("Answer: 1,000,000", "1000000", 1.0),
        ("Answer: x = 5", "5", 1.0),
        (r"Answer: $\dfrac12$", r"\frac{1}{2}", 1.0),
        (r"Answer: \sqrt2 cm", r"\sqrt{2}", 1.0),
        (r"Answer: 90^\circ", "90", 1.0),
        (r"Answer: \text{blue}", "blue", 1.0),
        ("Answer: 12 dollars", "12", 1.0),
        (r"Answer: \left( 1, 2 \right)", "(1,2)", 1.0),
        (r"Answer: \(13\)", "13", 1.0),
        (r"Answer: \[13\]", "13", 1.0),
        ("Answer: 1{,}000", "1000", 1.0),
        (r"Answer: 1\,000", "1000", 1.0),
        (r"Answer: 1,\!000", "1000", 1.0),
        ("Answer: 1\u202f000", "1000", 1.0),
        ("Answer: \u221213", "-13", 1.0),
        ("Answer: -13", "\u221213", 1.0),
        ("Answer: \u200b13", "13", 1.0),
        ("Answer: \uff11\uff13", "13", 1.0),
        (r"Answer: \fbox{13}", "13", 1.0),
        (r"Answer: \boxed{\text{13}}", "13", 1.0),
        (r"Answer: \mathbf{13}", "13", 1.0),
        (r"Answer: .5", "0.5", 1.0),
        ("Answer: `12`", "12", 1.0),
        ("Answer: __12__", "12", 1.0),
        ("Answer: a_1", "1", -1.0),
        (r"Answer: $5$ cm", "5 cm", 1.0),
        ("Answer:\n$$\n13\n$$", "13", 1.0),
        ("Answer: \\[\n13\n\\]", "13", 1.0),
        ("Answer: 1 1/2", "11/2", -1.0),
        ("Answer: 5 5", "55", -1.0),
        (r"Answer: 2\,3", "23", -1.0),
        ("Answer: 5 cm", r"5 \text{ centimeters}", 1.0),
        ("Answer: 2 + 3 = 5", "5", -1.0),  # a number on the left side that is written in another way
        ("Answer: 3 = 4", "4", -1.0),
        ("Answer: 5 cm", "5 m", -1.0),
        ("Answer: 72 km/h", "72 mph", -1.0),
        ("Answer: 13 or 14", "14", -1.0),
        ("Answer: 13, 14", "14", -1.0),
        (r"Answer: \boxed{}", "", -1.0),
        ("Answer: \u221213", "13", -1.0),
        ("Answer: 1,00", "100", -1.0),
        ("Answer: 35", "34", -1.0),
        ("Answer: 34\nAnswer: 35", "34", -1.0),
        ("**Answer**: $13$", "13", 1.0),
        ("Answer: +13", "13", 1.0),
        ('Answer: "13"', "13", 1.0),
        ("Answer: <13>", "13", 1.0),
        ("Answer: 13 (by symmetry)", "13", 1.0),
        (r"Answer: \bold{13}", "13", 1.0),
        ("Answer: 3/4", r"\frac{3}{4}", 1.0),
        (r"Answer: \dfrac{-3}{4}", "-3/4", 1.0),
        (r"Answer: 1\frac{1}{2}", "11/2", -1.0),
        (r"Answer: \frac{1}{2}!", "1/2", -1.0),
        ("Answer: >13", "13", -1.0),
        ("Answer: 13 (mod 17)", "13", -1.0),
        ("Answer: 13 (14)", "13", -1.0),
        ("Answer: at least 13", "13", -1.0),
        ("Answer: 0.5", r"\frac{1}{2}", -1.0),  # strings, not numbers
        ("It is 34", "34", -1.0),
        ("", "34", -1.0),
    ],
)
def test_reward(response: str, truth: str, reward: float) -> None:
    assert dapo_math_verify(response, truth)[0] == reward


def test_the_answer_is_returned_as_it_was_compared() -> None:
    assert dapo_math_verify("Answer: $ 1,000 $", "7") == (-1.0, "1000")
    assert dapo_math_verify("34", "34") == (-1.0, None)


def test_an_answer_counts_only_at_the_end() -> None:
    assert find_answer("Answer: 5" + "x" * 291) == "5" + "x" * 291
    assert find_answer("Answer: 5" + "x" * 300) is None


@pytest.mark.parametrize(
    ("written", "same"),
    [
        (r"\tfrac{1}{2}", "1/2"),
        (r"\frac12", "1/2"),
        (r"\frac123", r"\frac123"),  # which of the two it is nobody knows
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{\sqrt{2}}{2}"),
        (r"10\%", "10"),
        (r"3\, 4\quad 5", "3,4,5"),
        ("1 1/2", "3/2"),
        (r"\frac 1 2", "1/2"),
        (r"12\ 345\,678", "12345678"),
        ("1,23", "1,23"),
        (r"\mathrm{\text{a}}", "a"),
        ("5 square feet", "5"),
        ("seconds", "seconds"),
    ],
)
def test_one_way_of_writing(written: str, same: str) -> None:
    assert normalized(written) == same
    assert normalized(normalized(written)) == same
