r"""math-verify as a verifier, behind a reader of the final statement (`math_text.py`) and with a stricter look at what
it calls equal. Importing this module takes seconds, because it also loads what sympy would load with the first
polynomial, the first matrix and so on: the workers' fork server does that once, ahead of all time limits."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from grpo_mcore.environments.math.math_text import (
    Statement,
    alternatives,
    as_formula,
    as_interval,
    as_residue,
    choice_letters,
    in_base,
    is_negated,
    is_pure,
    is_unsure,
    last_statement,
    normalized,
    without_boxes,
    without_correction,
)
from grpo_mcore.environments.math.math_units import numbers_apart, split_unit, without_degrees

_EXAMPLES = (
    ("x^2 + 3x + 2", "(x+1)(x+2)"),
    (r"\sqrt{2}+1", r"1+\sqrt{2}"),
    (r"\frac{\pi}{4}", "0.785"),
    ("x=3", "3"),
    ("(3,4)", "(4,3)"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"(0,1)\cup[2,3)", r"[2,3)\cup(0,1)"),
    (r"x\in[0,1]", "x<3"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"e^{i\pi}", "-1"),
    (r"\log_2 8", r"\binom{5}{2}"),
    (r"\int_0^1 x dx", r"\sum_{k=1}^{3} k"),
)
_BOXED = [LatexExtractionConfig(boxed_match_priority=0)]
_ANYWHERE = [ExprExtractionConfig(), LatexExtractionConfig()]
_DECIMALS, _DIGITS = 6, 15  # places to which math-verify rounds a float, and digits of its precision
_SMALL, _VERY_SMALL = -3, -5  # decimal exponents below which more places are compared
_MOST_PLACES = 10_000
_EQUALS = re.compile(r"(?<![\\<>!:])=(?![=>])")
_LABEL = re.compile(
    r"^(?:\\text\s*\{[^{}]*(?::|\b(?:is|are|equals)|=)\s*\}|\\approx(?![a-zA-Z])|\\sim(?:eq)?(?![a-zA-Z])|approximately|about)\s*"
)
_CHOICE = re.compile(r"^(?:\\text\s*\{\s*)?\(\s*([A-E])\s*\)\s*\}?(?:\\[ ,;:]|\\q?quad(?![a-zA-Z])|[~:\s])+(?=\S)")
_ONLY_CHOICE = re.compile(r"(?:\\text\s*\{\s*)?(?:([A-E])|\(\s*([A-E])\s*\))\s*\}?")
_REMARK = re.compile(r"(?<=[\d}])\s+\((?!base|in base|mod)(?=[^()]*[a-z]{4})[a-zA-Z ,]+\)$")  # 5 (apples)
_MARGIN = re.compile(r"^(?:\\[ ,;:!]|~|\s)+|(?:(?<!\\)\\(?:[ ,;:!]|$)|~|\s)+$")
_QUESTION = re.compile(r"[^.!?\n]*\?(?=\s|$)")
_HALF_OF_DAY = re.compile(r"\\text\{ [ap]m\}")
_NUMBERS = re.compile(r"[-+]?[\d.]+(?:(?:\s*[,;]\s+|\s*;\s*|\s*,?\s+and\s+|\s+)[-+]?[\d.]+)+\.?")
_MONEY = re.compile(r"\\\$(?=\d)")
_PRIMED = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]'+(?![a-zA-Z])")
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{([^{}]*)\}")
_LABEL_OR_WORD = re.compile(r"(?=.*[a-zA-Z].*[a-zA-Z])[a-zA-Z0-9]+")
_PRODUCT = re.compile(r"\d*(?:[a-z]{1,2}|[^\W\d_aeiouA-Z]{3}|[abchkmnpqruvwxyz]{3}|[A-Z][a-z]|[a-z][A-Z])")
_TUPLE_EQUATION = re.compile(r"\(([a-zA-Z,\s]+)\)\s*=\s*\(([^()=]+)\)")
_ASSIGNMENT = re.compile(r"([a-zA-Z])\s*=\s*([^=()\[\]<>]+)")
_NEXT = re.compile(r"(?:[,;\s]|\\[ ,;:]|\\q?quad(?![a-zA-Z])|\\text\s*\{\s*,?\s*and\s*\}|\band\b)+(?=[a-zA-Z]\s*=)")
_NAME = re.compile(r"\s*\\?[a-zA-Z]\w*'*\s*(?:_\s*\{?\w+\}?)?\s*(?:\([^()]*\))?\s*")


def hf_math_verify(response: str, truth: str) -> tuple[bool, str | None]:
    """Return (correct, extracted answer). math-verify's own time limits are off: the pool has a harder one."""
    stated = last_statement(normalized(truth))  # a whole solution, as MATH has them
    gold_written = stated.text if stated is not None and stated.text else truth
    gold_text = _bare(gold_written)
    gold = _parse_formula(gold_text)
    if not gold:
        raise ValueError(f"the ground truth {truth!r} is not a mathematical expression")
    text = normalized(response)
    statement = last_statement(text)
    if statement is None:
        text = numbers_apart(_MONEY.sub("", _QUESTION.sub("", text)))
        statement = _last_line(text)
        several = _NUMBERS.fullmatch(statement.text) and not _has_several(gold_text)
        if several or is_unsure(statement.text) and not is_unsure(gold_text):
            return False, statement.text
        answers = _parsed(text, _ANYWHERE)
    elif not statement.text:
        return False, None
    elif (
        statement.is_boxed or is_pure(statement.text) or _words(_bare(statement.text)) == _words(gold_text) is not None
    ):
        answers = _parse_formula(_bare(statement.text))
    else:
        answers = _parsed(f"Answer: {numbers_apart(without_correction(statement.text))}", _ANYWHERE)
    if not answers:
        return False, None
    # The last entry is the answer as written; an expression could take for ever to print.
    answer = answers[-1] if isinstance(answers[-1], str) else None
    if statement.is_boxed:
        answer = statement.text
    choice, gold_choice = _choice(statement.text), _choice(gold_written)
    if choice and gold_choice and (choice.is_alone or gold_choice.is_alone):
        return choice.letter == gold_choice.letter, answer
    return _is_right(gold, gold_text, answers, statement), answer


def _is_right(gold: list[Any], gold_text: str, answers: list[Any], statement: Statement) -> bool:
    said = without_correction(_bare(statement.text))
    interval, gold_interval = as_interval(said), as_interval(gold_text)
    if interval is not None and gold_interval is not None and interval[0] != gold_interval[0]:
        return False
    if interval is not None or gold_interval is not None:
        sets = [one[1] if one is not None else text for one, text in ((gold_interval, gold_text), (interval, said))]
        if _equal(*(_parse_formula(one) for one in sets)):
            return True
    if _contradicts(said, gold_text, statement.after):
        return False
    if (wanted_values := _assignments(gold_text)) is not None:
        values = _assignments(said)
        if values is None and "=" not in said and "\\{" not in said:  # in the order of the names
            listed = re.sub(r"^\((.*)\)$", r"\1", said).split(",")
            values = dict(zip(wanted_values, listed, strict=True)) if len(listed) == len(wanted_values) else None
        if values is not None and values.keys() == wanted_values.keys():
            return all(_equal(_parse_formula(wanted_values[name]), _parse_formula(values[name])) for name in values)
    offered = alternatives(said)
    if len(offered) > 1 and not _has_several(gold_text):
        return all(_equal(gold, _parse_formula(one)) and not _contradicts(one, gold_text) for one in offered)
    if max(len(offered), len(wanted := alternatives(gold_text))) > 1:
        return _equal(_parse_formula(", ".join(wanted)), _parse_formula(", ".join(offered)))
    gold_base, said_base = in_base(gold_text), in_base(said)
    if gold_base and said_base:
        return gold_base == said_base
    if said_base:
        digits, base = said_base
        return base == 10 and _equal(gold, [sympy.Integer(int(digits))])
    if gold_base and statement.is_boxed:
        return said.lstrip("0") == gold_base[0]
    residue, gold_residue = as_residue(said), as_residue(gold_text)
    if residue and gold_residue:
        numbers = [_value(value) for value, _ in (residue, gold_residue)]
        if residue[1] != gold_residue[1] or not all(isinstance(number, sympy.Integer) for number in numbers):
            return residue == gold_residue
        return (numbers[0] - numbers[1]) % residue[1] == 0
    if residue and gold_text.isdecimal() and int(gold_text) < residue[1]:  # the remainder, with its modulus
        return _equal(gold, _parse_formula(residue[0]))
    if set(_PRIMED.findall(_EQUALS.split(said)[-1])) != set(_PRIMED.findall(_EQUALS.split(gold_text)[-1])):
        return False  # math-verify does not look at f'
    if re.sub(r"\s", "", said) == re.sub(r"\s", "", gold_text):
        return _sides_agree(said)
    if _HALF_OF_DAY.search(said) and _HALF_OF_DAY.search(gold_text):  # math-verify does not look at it
        return False
    if choice_letters(said) is not None and choice_letters(said) == choice_letters(gold_text):
        return True
    if _words(said) is not None and _words(said) == _words(gold_text):
        return True
    if _is_an_anagram(_EQUALS.split(said)[-1], gold_text):
        return False
    if _equal(gold, answers):
        return _sides_agree(said)
    said_number, gold_number = _without_percent(said), _without_percent(gold_text)
    if (said_number is None) != (gold_number is None):  # a question that asks for a percentage has truths of both forms
        return _equal(_parse_formula(gold_number or gold_text), _parse_formula(said_number or said))
    sides = _EQUALS.split(said)
    if len(sides) > 1 and _NAME.fullmatch(sides[-1]) and not _NAME.fullmatch(gold_text):  # 5 = n
        sides = sides[::-1]
    if len(sides) > 1 and len(_EQUALS.split(gold_text)) == 1 and "," not in said and _sides_agree(said):
        if all(_NAME.fullmatch(side) or _value(side) is not None for side in sides[:-1]):
            return _equal(gold, _parse_formula(sides[-1]))
    return False


def _assignments(text: str) -> dict[str, str] | None:
    """Return the values of several variables: {"p": "2", "q": "3"} of "p=2, q=3" and "(p,q)=(2,3)". None for any other
    text, such as the roots x=2, x=3."""
    if (match := _TUPLE_EQUATION.fullmatch(text.strip())) is not None:
        pairs = list(zip(match[1].split(","), match[2].split(","), strict=False))
        pairs = pairs if len(pairs) == match[1].count(",") + 1 == match[2].count(",") + 1 else []
    else:
        parts = [_ASSIGNMENT.fullmatch(part.strip()) for part in _NEXT.split(text)]
        pairs = [(part[1], part[2]) for part in parts if part is not None and "," not in part[2]]
        pairs = pairs if len(pairs) == len(parts) else []
    values = {name.strip(): value.strip() for name, value in pairs}
    return values if 1 < len(values) == len(pairs) else None


class _Choice(NamedTuple):
    """The letter of an option. `is_alone`: its text does not follow."""

    letter: str
    is_alone: bool


def _choice(text: str) -> _Choice | None:
    """Return the option that a text names, as "C", "(C)" or "(C) 5"."""
    if (label := _CHOICE.match(normalized(text))) is not None:
        return _Choice(label[1], is_alone=False)
    alone = _ONLY_CHOICE.fullmatch(_bare(text))
    return None if alone is None else _Choice(alone[1] or alone[2], is_alone=True)


def _bare(text: str) -> str:
    """Return a normalised formula without its box, its dollar signs and the full stop behind it."""
    text = _CHOICE.sub("", " ".join(without_boxes(normalized(text)).split()))
    text = _MARGIN.sub("", _LABEL.sub("", text)).removesuffix("\\\\").strip()
    text = _REMARK.sub("", text)
    text = re.sub(r"^(?:\*\*|__|`)(.*)(?:\*\*|__|`)$", r"\1", text, flags=re.DOTALL).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = text.rstrip(".").rstrip()
        if inner.startswith(opening) and inner.endswith(closing) and len(inner) > len(opening) + len(closing):
            inside = inner[len(opening) : -len(closing)]
            if opening not in inside:
                text = inside.strip()
    text = text if text.endswith("..") else text.rstrip(".,;\\").strip()
    worded = _TEXT.fullmatch(text)
    if worded is not None and re.search(r"\d", worded[1]) and is_pure(worded[1]):
        text = worded[1].strip()
    return as_formula(text)


def _parse_formula(text: str) -> list[Any]:
    number, unit = split_unit(text)
    if unit is not None and unit != "%":
        text = without_degrees(number) if unit == "degree" else number
    return _parsed(f"\\boxed{{{text}}}", _BOXED) if text else []


def _parsed(text: str, targets: Sequence[Any]) -> list[Any]:
    """Return what math-verify reads, nothing where it fails: then the text is no formula."""
    try:
        return [_with_imaginary_unit(one) for one in parse(text, targets, parsing_timeout=None, raise_on_error=True)]
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return []


def _with_imaginary_unit(expression: Any) -> Any:
    """Return an expression with sympy's imaginary unit for i, which math-verify reads as one of two variables: the i of
    "4 i" is not that of "4i", and no power of e has a value. An interval with i in its bounds stays as it is."""
    units = {one for one in getattr(expression, "free_symbols", ()) if one.name == "i"}
    try:
        return expression.subs(dict.fromkeys(units, sympy.I)) if units else expression
    except (TypeError, ValueError):
        return expression


def _last_line(text: str) -> Statement:
    lines = [line for line in text.splitlines() if line.strip()]
    return Statement(lines[-1].strip() if lines else "", is_boxed=False)


def _equal(gold: list[Any], answers: list[Any]) -> bool:
    """Compare as math-verify does, but small numbers by their digits instead of by their size. What cannot be compared
    with the truth is not the truth."""
    places = _DECIMALS
    smallest = min((exponent for one in (*gold, *answers) for exponent in _exponents(one)), default=0)
    if smallest < _SMALL:  # as many digits as 0.001 is compared to, and one more for the very small ones
        places += _SMALL - smallest + (smallest < _VERY_SMALL)
    places = min(places, _MOST_PLACES)
    precision = _DIGITS + places - _DECIMALS
    try:
        return bool(verify(gold, answers, places, precision, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return False


def _exponents(expression: Any) -> Iterator[int]:
    """Return the decimal exponents of the numbers that an expression is, or has as its elements."""
    if isinstance(expression, sympy.MatrixBase):
        parts = list(expression)
    elif isinstance(expression, sympy.Expr):
        parts = [expression]
    else:
        parts = list(expression.args) if isinstance(expression, sympy.Basic) else []
    for part in parts:
        if isinstance(part, sympy.Expr) and part.is_number:
            size = sympy.Abs(part).evalf(6)
            if isinstance(size, sympy.Float) and size.is_finite and size > 0:
                yield math.floor(float(sympy.log(size, 10).evalf(6)))
        elif part is not expression:
            yield from _exponents(part)


def _contradicts(said: str, gold: str, after: str = "") -> bool:
    """Return whether a statement is negated where the truth is not, or has another unit."""
    if is_negated(said) and not is_negated(gold):
        return True
    said_unit, gold_unit = split_unit(said)[1], split_unit(gold)[1]
    if said_unit is None and after and gold_unit is not None:
        said_unit = split_unit("1 " + after.strip(" $\\)]").lstrip())[1]
    return said_unit is not None and gold_unit is not None and said_unit != gold_unit


def _is_an_anagram(said: str, gold: str) -> bool:
    """Return whether two answers are words or labels with the same letters in another order, which sympy takes for
    equal products. Products they are where both have up to three small letters: any two, or three that make no common
    word (no vowel, or only letters that are often variables). "New York" is "NewYork"."""
    plain = [re.sub(r"[ -]", "", _TEXT.sub(r"\1", one).strip()) for one in (said, gold)]
    same = sorted(plain[0].casefold()) == sorted(plain[1].casefold()) and plain[0].casefold() != plain[1].casefold()
    return same and all(map(_LABEL_OR_WORD.fullmatch, plain)) and not all(map(_PRODUCT.fullmatch, plain))


def _words(text: str) -> str | None:
    """Return the words of an answer that is nothing but words, in one case; None for any other."""
    plain = _TEXT.sub(r"\1", text).strip()
    return (
        plain.casefold()
        if re.fullmatch(r"(?=.*(?:[a-zA-Z]{2}|[^\x00-\x7f]))[^\W\d_]+(?:(?:, |[ -])[^\W\d_]+)*", plain)
        else None
    )


def _without_percent(text: str) -> str | None:
    """Return the number before a percent sign; None for a text that does not end with one."""
    number, unit = split_unit(text)
    return number if unit == "%" else None


def _has_several(gold: str) -> bool:
    return len(alternatives(gold)) > 1 or re.search(r",|;|\\pm|\\cup|\\\{", gold) is not None


def _value(text: str) -> Any:
    """Return the value of a side of an equation that is a number, else None."""
    if not text.strip() or len(text) > 200:
        return None
    parsed = _parse_formula(text.strip())
    number = parsed[0] if parsed else None
    return number if isinstance(number, sympy.Expr) and number.is_number else None


def _sides_agree(said: str) -> bool:
    """Return whether all sides of an "=" chain that are numbers are the same number."""
    sides = _EQUALS.split(said)
    if len(sides) < 2 or "," in said or ";" in said:
        return True
    values = [value for side in sides if (value := _value(side)) is not None]
    return all(_equal([values[0]], [value]) for value in values[1:])


logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs each answer that it cannot read
for _answer, _truth in _EXAMPLES:
    hf_math_verify(f"so ${_answer}$", _truth)
