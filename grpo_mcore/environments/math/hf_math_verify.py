r"""math-verify as a verifier, behind a reader of the final statement (`statement.py`), with rules for what math-verify
calls equal and is not. Importing this module takes seconds, because it also loads what sympy would load with the first
polynomial, the first matrix and so on: the workers' fork server does that once, ahead of all time limits."""

import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from grpo_mcore.environments.math.spellings import normalized, plain_characters
from grpo_mcore.environments.math.statement import (
    ORDINAL,
    Statement,
    alternatives,
    is_doubtful,
    last_statement,
    repeated_result,
    says,
    stated_formula,
)
from grpo_mcore.environments.math.units import ratio, split_unit

_EXAMPLES = (
    ("x^2 + 3x + 2", "(x+1)(x+2)"), (r"\sqrt{2}+1", r"1+\sqrt{2}"), (r"\frac{\pi}{4}", "0.785"), ("x=3 m", "3 km"),
    ("(3,4)", "(4,3)"), (r"\{1,2\}", r"\{2,1\}"), (r"(0,1)\cup[2,3)", r"[2,3)\cup(0,1)"), (r"x\in[0,1]", "x<3"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"), (r"e^{i\pi}", "-1"),
    (r"\sin^2 x+\cos^2 x", "1"), (r"\log_2 8", r"\binom{5}{2}"), (r"\int_0^1 x dx", r"\sum_{k=1}^{3} k"),
)  # fmt: skip
# Units are read here: math-verify would take the h of "5h" for one.
_AS_LATEX = replace(LatexExtractionConfig().normalization_config, units=False)
_FORMULA = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_AS_LATEX)]
_DECIMALS, _DIGITS = 6, 15  # places to which math-verify rounds a float, and digits of its precision
_SMALL, _VERY_SMALL = -3, -5  # decimal exponents below which more places are compared
_MOST_PLACES = 10_000
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_EQUALS = re.compile(r"(?<![\\<>!:])=(?![=>])")
_OPTION = re.compile(
    r"(?:\(\s*([A-J])\s*\)|([A-J])(?=$|[).:]))[).:]?(?:[~:\s]|\\[ ,;:]|\\q?quad(?![a-zA-Z]))*(.*)", re.DOTALL
)
_LETTERS = re.compile(r"(?:\\\{)?\s*([A-J](?:(?:\s*,\s*(?:and\s)?|\s+and\s+|\s+)[A-J])+)\s*(?:\\\})?")
_WORDS = re.compile(r"(?=.*(?:[a-zA-Z]{2}|[^\x00-\x7f]))[^\W\d_]+(?:(?:, (?:and )?|[ -])[^\W\d_]+)*")
_PRIMED = re.compile(r"(?:(?<![a-zA-Z\\])[a-zA-Z]|\d)'+(?![a-zA-Z])")
_CLOCK = re.compile(r"\d{1,2}:\d\d")
_BOUND = re.compile(r"^[a-zA-Z]\s*\(([a-z])\)\s*=|([a-z])\s*(?:\\in|∈)\s*(?:\\mathbb\s*)?\{?[Zℤ]")
_BASED = re.compile(r"\(?\s*([0-9A-F]+)\s*\)?\s*_\{(\d+)\}")
_RESIDUE = re.compile(r"(?:.*\\equiv\s*)?([^\\=]+?)\s*(?:\\[,;: ]|\\q?quad|~|\s)*\\mod (\d+)")
_LABEL_OR_WORD = re.compile(r"(?=.*[a-zA-Z].*[a-zA-Z])[a-zA-Z0-9]+")
_PRODUCT = re.compile(r"\d*(?:[a-z]{1,2}|[^\W\d_aeiouA-Z]{3}|[abchkmnpqruvwxyz]{3}|[A-Z][a-z]|[a-z][A-Z])")
_TUPLE_EQUATION = re.compile(r"\(([a-zA-Z,\s]+)\)\s*=\s*\(([^()=]+)\)")
_ASSIGNMENT = re.compile(r"([a-zA-Z])\s*=\s*([^=()\[\]<>]+)")
_NEXT = re.compile(r"(?:[,;\s]|\\[ ,;:]|\\q?quad(?![a-zA-Z])|\band\b)+(?=[a-zA-Z]\s*=)")
_IN_ONE_UNKNOWN = re.compile(r"(?=.*\d|-)[\d\s+*/^{}().-]*([a-z])(?:[\d\s+*/^{}().-]|\1)*")
_NAME = re.compile(
    r"\s*(?:m?\s*\\angle\s*)?\\?[a-zA-Z]\w*'*\s*(?:_\s*\{?\w+\}?)?\s*(?:\([^()]*\))?\s*(?:\\c[au]p\s*[A-Z]\s*)?$|\\(?:sum|prod|int|lim)(?![a-z])"
)


def hf_math_verify(response: str, ground_truth: str) -> tuple[bool, str | None]:
    """Return (correct, extracted answer). math-verify's own time limits are off: the pool has a harder one."""
    ground_truth = plain_characters(ground_truth)
    gold_statement = last_statement(ground_truth)  # of a whole solution, as MATH has them
    if gold_statement.kind == "text":
        gold_statement = Statement(ground_truth, "box")
    gold = stated_formula(gold_statement) or normalized(gold_statement.text)
    if not gold:
        raise ValueError(f"the ground truth {ground_truth!r} is not a mathematical expression")
    response = plain_characters(response)
    statement = last_statement(response, 1 if re.search(r"[()\[\]{]", gold) else gold.count(",") + 1)
    answer = stated_formula(statement)
    if answer is None and statement.kind == "text" and statement.text:
        answer = repeated_result(response)
    is_same_text = _compact(normalized(statement.text)) == _compact(gold)
    if is_same_text and not (ORDINAL.search(statement.text) and statement.kind != "box"):
        answer = gold  # "at least 5" is right where it is the ground truth
    elif _WORDS.fullmatch(gold) and says(response if statement.kind == "text" else statement.text, gold):
        answer = gold
    elif statement.kind == "text" and not re.search(r"[\d\\+*^=]", answer or ""):
        answer = None
    answer = answer and _with_bound_name(answer, statement.text, gold_statement.text)
    shown = statement.text if statement.kind == "box" else answer
    return answer is not None and is_right(answer, gold), shown


def _with_bound_name(answer: str, *texts: str) -> str:
    """Return an answer with the second text's name for the x of f(x) = ... or for what both say is an integer."""
    names = [match[1] or match[2] for text in texts if (match := _BOUND.search(text))]
    if len(names) < 2 or names[1] in re.sub(r"\\[a-zA-Z]+", "", answer):
        return answer
    return re.sub(rf"(\\[a-zA-Z]+)|{names[0]}", lambda match: match[1] or names[1], answer)


# Each rule returns whether the answer is right, or None where it says nothing.


def _options(answer: str, gold: str) -> bool | None:
    """Compare options by their letters where one has no text, "C" and "(C) 5", and by their texts otherwise."""
    options = [_OPTION.fullmatch(text) for text in (answer, gold)]
    if options[0] and options[1]:
        letters = [option[1] or option[2] for option in options if option]
        if letters[0] != letters[1] or not (options[0][3] and options[1][3]):
            return letters[0] == letters[1]
    texts = [option[3] if option and option[3] else text for option, text in zip(options, (answer, gold), strict=True)]
    return None if texts == [answer, gold] else is_right(*texts)


def _negation_and_unit(answer: str, gold: str) -> bool | None:
    """Refuse an answer that is negated where the ground truth is not; compare amounts that have different units."""
    if is_doubtful(answer) and not is_doubtful(gold):
        return False
    (number, unit), (gold_number, gold_unit) = split_unit(answer), split_unit(gold)
    is_an_angle = {unit, gold_unit} == {"degree", None} and "\\pi" in answer + gold and "=" not in answer
    if unit == gold_unit or None in (unit, gold_unit) and not is_an_angle:
        return None
    factor, value = ratio(unit or "", gold_unit or ""), _value(re.sub(r"^\\?[a-zA-Z]\w*\s*=", "", number))
    return None not in (factor, value) and _equal(_parsed(gold_number), [factor * value])


def _conditions(answer: str, gold: str) -> bool | None:
    """Compare conditions, as "x < 1 or x > 3", by their variable and the set of its values; either may be a set."""
    if not re.search(r"[<>]|\\[lgn]e(?![a-zA-Z])", answer + gold):
        return None
    condition, gold_condition = _set_of(answer), _set_of(gold)
    if condition is None or gold_condition is None:
        return None
    if isinstance(condition[1], sympy.FiniteSet) != isinstance(gold_condition[1], sympy.FiniteSet):
        return False
    names = {condition[0], gold_condition[0]} - {None}
    return len(names) < 2 and _equal([gold_condition[1]], [condition[1]])


def _assignments(answer: str, gold: str) -> bool | None:
    """Compare the values of several variables one by one: "p=2, q=3" and "(p,q)=(2,3)", or "(2,3)" in their order."""
    gold_values, values = _values_by_name(gold), _values_by_name(answer)
    if gold_values is None:
        return None
    if values is None and "=" not in answer and "\\{" not in answer:
        in_order = re.sub(r"^\((.*)\)$", r"\1", answer).split(",")
        values = dict(zip(gold_values, in_order, strict=False)) if len(in_order) == len(gold_values) else None
    if values is None or values.keys() != gold_values.keys():
        return None
    return all(_equal(_parsed(gold_values[name]), _parsed(values[name])) for name in values)


def _alternatives(answer: str, gold: str) -> bool | None:
    """Compare lists with "or" as sets; where the ground truth is one answer, each of those offered must equal it."""
    offered, gold_parts = alternatives(answer), alternatives(gold)
    are_words = any(map(_WORDS.fullmatch, offered))
    if len(offered) > 1 and len(gold_parts) == 1 and (are_words or not re.search(r",|;|\\pm|\\cup|\\\{", gold)):
        return all(is_right(part, gold) for part in offered)
    if len(offered) > 1 and re.fullmatch(r"[(\[].*[)\]]", gold):  # neither point nor interval
        return False
    if len(offered) > 1 or len(gold_parts) > 1:
        return _equal(_parsed(", ".join(gold_parts)), _parsed(", ".join(offered)))
    return None


def _bases(answer: str, gold: str) -> bool | None:
    """Compare the digits and the base of a number such as 101_2; a name such as F_{10} is none."""
    based, gold_based = _in_base(answer), _in_base(gold)
    if gold_based:
        return based == gold_based if based else answer.lstrip("0") == gold_based[0]
    if based:
        return based[1] == "10" and is_right(based[0], gold)
    return False if re.fullmatch(r"[\d\s]+_\{\d+\}", answer) else None


def _residues(answer: str, gold: str) -> bool | None:
    r"""Compare 10 \mod 7 with 3 \mod 7, or with the remainder 3 alone."""
    residue, gold_residue = _RESIDUE.fullmatch(answer), _RESIDUE.fullmatch(gold)
    if residue and gold_residue:
        values = [_value(match[1]) for match in (residue, gold_residue)]
        if residue[2] != gold_residue[2] or not all(isinstance(value, sympy.Integer) for value in values):
            return residue.groups() == gold_residue.groups()
        return (values[0] - values[1]) % int(residue[2]) == 0
    if residue and gold.isdecimal() and int(gold) < int(residue[2]):  # the remainder, with its modulus
        return _equal(_parsed(gold), _parsed(residue[1]))
    return None


def _texts(answer: str, gold: str) -> bool | None:
    """Compare what math-verify does not look at, or reads as a product: words, labels, f', a.m., ratios of several."""
    if _compact(answer) == _compact(gold):
        return _sides_agree(answer)
    if _letters(answer) is not None and _letters(answer) == _letters(gold):
        return True
    last, gold_last = _EQUALS.split(answer)[-1].strip(), _EQUALS.split(gold)[-1].strip()
    if re.fullmatch(r"\([^()]*\)", gold_last) and last.startswith("\\{"):  # no set is a point
        return False
    if set(_PRIMED.findall(last)) != set(_PRIMED.findall(gold_last)) or answer.count(":") != gold.count(":"):
        return False
    if _CLOCK.fullmatch(gold) or re.search(r"\d", gold) and _compact(answer).casefold() == _compact(gold).casefold():
        return False
    plain = [re.sub(r"[ -]", "", text) for text in (last, gold_last)]
    is_anagram = sorted(plain[0].casefold()) == sorted(plain[1].casefold())
    are_labels = all(map(_LABEL_OR_WORD.fullmatch, plain)) and not all(map(_PRODUCT.fullmatch, plain))
    return False if plain[0] != plain[1] and is_anagram and are_labels else None


def _formulas(answer: str, gold: str) -> bool | None:
    """Compare decimals exactly, and what is left as math-verify does; of an equation the last side counts, too."""
    (number, unit), (gold_number, gold_unit) = split_unit(answer), split_unit(gold)
    has_both_forms = (unit == "%") != (gold_unit == "%")
    if _DECIMAL.fullmatch(number) and _DECIMAL.fullmatch(gold_number) and not has_both_forms:
        return Decimal(number) == Decimal(gold_number)
    sides = [side.strip() for side in _EQUALS.split(answer)]
    if len(sides) > 1 and not _EQUALS.search(gold):
        unknown = [side for side in sides[:-1] if _IN_ONE_UNKNOWN.fullmatch(side) and not _NAME.fullmatch(side)]
        if not all(_equal(_parsed(side), _parsed(sides[-1])) for side in unknown):
            return False  # 2x = 36 does not state 36
    if _equal(_parsed(gold), _parsed(answer)):
        return _sides_agree(answer)
    if has_both_forms and not (unit and gold.startswith("0.")):  # a percentage is written in both forms, 0.08 as 8%
        return _equal(_parsed(gold_number), _parsed(number))
    if len(sides) > 1 and _NAME.fullmatch(sides[-1]) and not _NAME.fullmatch(gold):  # 5 = n
        sides = sides[::-1]
    if (
        len(sides) == 1
        or _EQUALS.search(gold)
        or "," in re.sub(r"\([^()]*\)|\{[^{}]*\}", "", answer)
        or not _sides_agree(answer)
    ):
        return False
    last = _parsed(sides[-1])
    are_equal = all(_NAME.match(side) or _value(side) is not None or _equal(last, _parsed(side)) for side in sides[:-1])
    return are_equal and is_right(sides[-1], gold)


_RULES: list[Callable[[str, str], bool | None]] = [
    _options, _conditions, _negation_and_unit, _assignments, _alternatives, _bases, _residues, _texts, _formulas,
]  # fmt: skip


def is_right(answer: str, gold: str) -> bool:
    """Return the result of the first rule that has one."""
    return next((result for rule in _RULES if (result := rule(answer, gold)) is not None), False)


def _values_by_name(text: str) -> dict[str, str] | None:
    """Return {"p": "2", "q": "3"} of "p=2, q=3" and "(p,q)=(2,3)"; None for any other text, such as x=2, x=3."""
    if (match := _TUPLE_EQUATION.fullmatch(text)) is not None:
        names, values = match[1].split(","), match[2].split(",")
        pairs = list(zip(names, values, strict=True)) if len(names) == len(values) else []
    else:
        parts = [_ASSIGNMENT.fullmatch(part.strip()) for part in _NEXT.split(text)]
        pairs = [(part[1], part[2]) for part in parts if part is not None and "," not in part[2]]
        pairs = pairs if len(pairs) == len(parts) else []
    by_name = {name.strip(): value.strip() for name, value in pairs}
    return by_name if 1 < len(by_name) == len(pairs) else None


def _set_of(text: str) -> tuple[str | None, Any] | None:
    """Return the variable and the set of a condition, or of a set without a variable; None of any other text."""
    names, union = set(), sympy.S.EmptySet
    for part in alternatives(text):
        parsed = _parsed(part)
        expression = parsed[0] if parsed else None
        if isinstance(expression, sympy.logic.boolalg.Boolean):
            names |= {symbol.name for symbol in expression.free_symbols}
            try:
                expression = expression.as_set()
            except (NotImplementedError, ValueError, TypeError, AttributeError):  # sympy has no set for it
                return None
        if not isinstance(expression, sympy.Set):
            return None
        union = sympy.Union(union, expression)
    return (names.pop() if names else None, union) if len(names) < 2 else None


def _in_base(text: str) -> tuple[str, str] | None:
    match = _BASED.fullmatch(text)
    if match is None or int(match[2]) > 16 or not all(int(digit, 16) < int(match[2]) for digit in match[1]):
        return None
    return match[1].lstrip("0") or "0", match[2]


def _letters(text: str) -> str | None:
    """Return "AC" of "A, C", "C and A" and "AC"; None of any other text, such as the label CA."""
    if (match := _LETTERS.fullmatch(text)) is not None:
        return "".join(sorted(re.sub(r"\W|and", "", match[1])))
    return text if re.fullmatch("[A-J]{2,}", text) and list(text) == sorted(set(text)) else None


def _compact(text: str) -> str:
    """Return a text without spaces; words in one case, too, and without the comma before "and"."""
    text = text.casefold().replace(", and ", ", ") if _WORDS.fullmatch(text) else text
    return re.sub(r"\s|(?<=\d),(?=\d{3}(?!\d))", "", text)


def _parsed(text: str) -> list[Any]:
    """Return what math-verify reads, nothing where it fails: then the text is no formula."""
    number, unit = split_unit(text)
    text = text if unit == "%" else number
    try:
        read = parse(f"\\boxed{{{text}}}", _FORMULA, parsing_timeout=None, raise_on_error=True) if text else []
        return [_with_imaginary_unit(expression) for expression in read]
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return []


def _with_imaginary_unit(expression: Any) -> Any:
    """Return an expression with sympy's imaginary unit for i, which math-verify reads as one of two variables: the i of
    "4 i" is not that of "4i", and no power of e has a value. An interval with i in its bounds stays as it is."""
    units = {symbol for symbol in getattr(expression, "free_symbols", ()) if symbol.name == "i"}
    try:
        return expression.subs(dict.fromkeys(units, sympy.I)) if units else expression
    except (TypeError, ValueError):
        return expression


def _equal(gold: list[Any], answers: list[Any]) -> bool:
    """Compare as math-verify does, but small numbers by their digits instead of by their size. What cannot be compared
    with the ground truth is not equal to it."""
    places = _DECIMALS
    smallest = min((exponent for expression in (*gold, *answers) for exponent in _exponents(expression)), default=0)
    if smallest < _SMALL:  # as many digits as 0.001 is compared to, and one more for the very small ones
        places = min(places + _SMALL - smallest + (smallest < _VERY_SMALL), _MOST_PLACES)
    precision = _DIGITS + places - _DECIMALS
    try:
        return bool(verify(gold, answers, places, precision, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return False


def _exponents(expression: Any) -> Iterator[int]:
    """Return the decimal exponents of the numbers that an expression is, or has as its elements."""
    if isinstance(expression, sympy.Expr) and expression.is_number:
        size = sympy.Abs(expression).evalf(6)
        if isinstance(size, sympy.Float) and size.is_finite and size > 0:
            yield math.floor(float(sympy.log(size, 10).evalf(6)))
    elif isinstance(expression, sympy.MatrixBase | sympy.Set | sympy.Tuple):
        for part in expression if isinstance(expression, sympy.MatrixBase) else expression.args:
            yield from _exponents(part)


def _value(text: str) -> Any:
    """Return the value of a side of an equation that is a number, else None."""
    parsed = _parsed(text.strip()) if len(text) <= 200 else []
    number = parsed[0] if parsed else None
    return number if isinstance(number, sympy.Expr) and number.is_number else None


def _sides_agree(text: str) -> bool:
    """Return whether all sides of an "=" chain that are numbers are the same number."""
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"\\cdot\\frac{\\pi}{180}", text) if "\\pi" in text else text
    sides = _EQUALS.split(text)
    if len(sides) < 2 or "," in text or ";" in text:
        return True
    values = [value for side in sides if (value := _value(side)) is not None]
    return all(_equal([values[0]], [value]) for value in values[1:])


logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs each answer that it cannot read
for _answer, _ground_truth in _EXAMPLES:
    hf_math_verify(f"so ${_answer}$", _ground_truth)
