r"""Answers that are plain numbers, compared without sympy: microseconds instead of milliseconds.

Only where math-verify would take the same number from the text (the tests compare the two): a response that
is nothing but a number, or that ends with its only \boxed{number}. Everything else is left to math-verify.
"""

from __future__ import annotations

import re
from decimal import Decimal

# Within 15 digits before the point and 6 after it, decimals are equal exactly when math-verify, which rounds
# to 6 places, calls them equal.
_NUMBER = r"-?\d{1,15}(?:\.\d{1,6})?"
_PLAIN = re.compile(rf"\s*({_NUMBER})\s*")
_BOX = rf"\\boxed{{(?P<number>{_NUMBER})}}"
_ENVIRONMENTS = {"": "", r"\$": r"\$", r"\$\$": r"\$\$", r"\\\[\s?": r"\s?\\\]", r"\\\(\s?": r"\s?\\\)"}
_BOX_AT_THE_END = [
    re.compile(rf"{opening}{_BOX}{closing}(?:\*\*)?\.?\s*\Z") for opening, closing in _ENVIRONMENTS.items()
]
_TAIL = 100  # characters: more than the longest box with its environment


def compare_plain_numbers(response: str, truth: str) -> tuple[bool, str] | None:
    """(correct, answer), or None where either side is more than a plain number."""
    gold = _PLAIN.fullmatch(truth)
    if gold is None:
        return None
    answer = plain_answer(response)
    if answer is None:
        return None
    return Decimal(answer) == Decimal(gold[1]), answer


def plain_answer(response: str) -> str | None:
    """The number that a response gives in one of the two plain ways, as written, else None."""
    match = _PLAIN.fullmatch(response)
    if match is not None:
        return match[1]
    if response.count("\\boxed") != 1 or "hope" in response:  # "final answer is 5. I hope" outranks a box
        return None
    tail = response[-_TAIL:]
    for pattern in _BOX_AT_THE_END:
        match = pattern.search(tail)
        if match is not None:
            return match["number"]
    return None
