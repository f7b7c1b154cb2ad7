"""Whether a program's output is the expected one."""

from __future__ import annotations

import math
import re
from typing import Any

_FRACTION = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?")


def same_text(said: str, expected: str, tolerance: float = 0.0) -> bool:
    """Equal up to spaces at the ends of lines and empty lines at the end. With a `tolerance`, relative or absolute,
    numbers may differ by it where the expected one is written with a point or an exponent."""
    said_lines, expected_lines = _lines(said), _lines(expected)
    if said_lines == expected_lines or not tolerance:
        return said_lines == expected_lines
    if len(said_lines) != len(expected_lines):
        return False
    pairs = zip(said_lines, expected_lines, strict=True)
    return all(_same_words(line.split(), other.split(), tolerance) for line, other in pairs)


def same_value(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Of values as JSON has them. True is not 1; 1 is 1.0; floats may differ by `tolerance`, relative or absolute."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(
            same_value(one, other, tolerance) for one, other in zip(value, expected, strict=True)
        )
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(same_value(value[k], expected[k], tolerance) for k in expected)
    if isinstance(expected, float) and isinstance(value, int | float):
        return value == expected or _near(float(value), expected, tolerance)
    return bool(value == expected)


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n").split("\n")


def _same_words(said: list[str], expected: list[str], tolerance: float) -> bool:
    return len(said) == len(expected) and all(
        word == other or _is_fraction(other) and _is_number(word) and _near(float(word), float(other), tolerance)
        for word, other in zip(said, expected, strict=True)
    )


def _is_number(word: str) -> bool:
    return _FRACTION.fullmatch(word) is not None


def _is_fraction(word: str) -> bool:
    return _is_number(word) and not word.lstrip("+-").isdigit()


def _near(value: float, expected: float, tolerance: float) -> bool:
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
