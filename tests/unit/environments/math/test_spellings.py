"""Each row of the tables of spellings does what its example says."""

from __future__ import annotations

import pytest

from grpo_mcore.environments.math.spellings import CHARACTERS, FORMULAS, Spelling, normalized, plain_characters
from grpo_mcore.environments.math.units import split_unit


@pytest.mark.parametrize("spelling", CHARACTERS, ids=[example for *_, example, _ in CHARACTERS])
def test_characters(spelling: Spelling) -> None:
    *_, written, read = spelling
    assert plain_characters(written) == read


@pytest.mark.parametrize("spelling", FORMULAS, ids=[example for *_, example, _ in FORMULAS])
def test_formulas(spelling: Spelling) -> None:
    *_, written, read = spelling
    assert normalized(written) == read.strip()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("twenty-one", "21"),
        ("two hundred and five thousand three hundred", "205300"),
        ("a hundred and one", "101"),
        ("seven and eight", "7 and 8"),
        ("one hundredth", "1/100"),
        ("seven and a half", r"\frac{15}{2}"),
        ("nonzero", "nonzero"),
        ("threefold", "threefold"),
        ("1.5e-7", "0.00000015"),
        ("1e-2000", "1e-2000"),
        ("2/3 \\times 10^2", "2/3 \\times 10^2"),
        ("2.25 hundred", "225"),
        ("1.234 hundred", "123.4"),
        ("5 1/0", "5 1/0"),
        ("3万", "30000"),
    ],
)
def test_numbers(written: str, read: str) -> None:
    assert normalized(written) == read


@pytest.mark.parametrize(
    ("written", "number", "unit"),
    [
        ("5 cm", "5", "cm"),
        (r"5 \text{ cm}^2", "5", "cm^2"),
        ("5 cubic meters", "5", "m^3"),
        ("20 miles per hour", "20", "mi/h"),
        (r"5 m\,s^{-2}", "5", "m/s^2"),
        (r"5 J/(kg \cdot K)", "5", "J/K/kg"),
        ("9.8 m/s^2", "9.8", "m/s^2"),
        ("5m", "5m", None),  # m may be a variable
        (r"30^\circ, 60^\circ", "30, 60", "degree"),
        (r"20^\circ C", "20", "°C"),
        ("-$20", "-20", "$"),
        ("Rs. 50", "50", "₹"),
        ("12平方厘米", "12", "cm^2"),
        ("x", "x", None),
    ],
)
def test_units(written: str, number: str, unit: str | None) -> None:
    assert split_unit(written) == (number, unit)
