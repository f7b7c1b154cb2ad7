"""When an output is the expected one."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_mcore.environments.code_compare import same_text, same_value


@pytest.mark.parametrize(
    ("said", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 \n2\t\n\n\n", "1\n2\n", True),
        ("1\r\n2\r\n", "1\n2", True),
        ("", "\n", True),
        (" 1", "1", False),  # the beginning of a line counts
        ("1\n\n2", "1\n2", False),
        ("1 2", "1  2", False),
        ("1", "1.0", False),
        ("YES", "yes", False),
    ],
)
def test_text(said: str, expected: str, same: bool) -> None:
    assert same_text(said, expected) is same


@pytest.mark.parametrize(
    ("said", "expected", "same"),
    [
        ("0.3333331 x\n1", "0.333333 x\n1", True),
        ("0.34 x", "0.333333 x", False),
        ("1e-9", "0.0", True),
        ("1000000.5", "1000000.0", True),  # relative
        ("1", "1.0", True),
        ("1.0", "1", False),  # an integer is expected to the digit
        ("1 2.0", "1 2.0 3.0", False),
        ("2.0\n2.0", "2.0", False),
        ("nan", "1.0", False),
        ("inf", "1.0", False),
        ("1_0.0", "10.0", False),  # what Python alone takes for a number
        ("a", "1.0", False),
        ("1e400", "1e400", True),
    ],
)
def test_text_with_a_tolerance(said: str, expected: str, same: bool) -> None:
    assert same_text(said, expected, 1e-5) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (True, 1, False),
        (0, False, False),
        (None, None, True),
        (None, 0, False),
        ("a", "a", True),
        ([1, [2.0]], [1, [2]], True),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        ([], {}, False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"b": 1}, False),
        ({"a": True}, {"a": 1}, False),
        (0.1 + 0.2, 0.3, False),
    ],
)
def test_values(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected) is same


def test_values_with_a_tolerance() -> None:
    assert same_value([{"x": 0.1 + 0.2}], [{"x": 0.3}], 1e-9)
    assert not same_value(4, 3, 0.5), "whole numbers are expected to the digit"
    assert same_value(3, 3.00001, 1e-4)
