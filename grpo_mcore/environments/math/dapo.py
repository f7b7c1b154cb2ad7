r"""Math answers compared as strings, for data whose answers are short (DAPO, arXiv 2503.14476, section 3.4): the
answer is in a last line "Answer: ...", and the reward is 1 where it is the ground truth, -1 elsewhere (equation 7).

Both are normalised before they are compared: no dollar signs, 1/2 for \dfrac12, 1000 for 1,000, 25 for 025 (as AIME
writes its ground truths), and no unit, unless both have one: then it must be the same.
"""

import re

from grpo_mcore.environments.math import spellings
from grpo_mcore.environments.math.statement import boxes, without_boxes
from grpo_mcore.environments.math.units import split_unit

_TAIL = 300  # characters of the response in which the answer is looked for
_ANSWER = re.compile(r"answer[\s*_]*:\s*(?:(?:\$\$|\\\[)\s*)?([^\n]+)", re.IGNORECASE)

_SPACING = re.compile(r"(?:\\[,;:> ]|\\q?quad(?![a-zA-Z])|~|\s)+")
_DECORATION = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\\?[%$]|\\[()\[\]]")
_WHOLE_FRACTION = re.compile(r"(?<![\d.)}])\\frac\{(-?\d+)\}\{(\d+)\}(?![\d^!])")
_QUOTED = re.compile(r"""^(?:"(.*)"|'(.*)'|<([^<>]*)>|“(.*)”)$""")
_REMARK = re.compile(r"\s+\((?=[^()]*[a-z]{4})[a-zA-Z ,]+\)$")
_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_LEADING = re.compile(r"(?<![\w.])(-?)(?=\.\d)")
_ZEROS = re.compile(r"^(-?)0+(?=\d+$)")
_UNITS = (
    "dollars cents inches feet miles centimeters meters kilometers cm km mph hours minutes seconds days weeks years "
    "degrees units square cubic points percent people students ways integers numbers pages"
)
_UNIT = re.compile(rf"(?<=[\d}})])(?:\s*\\?(?:{'|'.join(_UNITS.split())})\b(?:\s*\^?\d)?)+")


def dapo_math_verify(response: str, ground_truth: str) -> tuple[float, str | None]:
    """Return (1 or -1, the answer as compared)."""
    stated = find_answer(response)
    if stated is None:
        return -1.0, None
    answer = normalized(stated)
    unit, gold_unit = _unit(stated), _unit(ground_truth)
    is_same_unit = unit is None or gold_unit is None or unit == gold_unit
    return (1.0 if answer and answer == normalized(ground_truth) and is_same_unit else -1.0), answer


def find_answer(response: str) -> str | None:
    """Return the text after the last "Answer:" of the last 300 characters, to the end of its line."""
    answers = _ANSWER.findall(response[-_TAIL:])
    return answers[-1].strip() if answers else None


def normalized(answer: str) -> str:
    r"""Return the normal form of an answer; of an equation the right side: "x = 5" is "5". An equation of two numbers,
    "3 = 4", stays whole."""
    text = _REMARK.sub("", _content(answer).strip().strip("*_`").rstrip(".").strip("*_` "))
    text = _QUOTED.sub(lambda match: next(inner for inner in match.groups() if inner is not None), text)
    left, equals, right = text.rpartition("=")
    if equals and (re.search(r"[a-zA-Z]", left) or _plain(left) == _plain(right)):
        text = right
    text = _plain(text)
    text = _WHOLE_FRACTION.sub(r"\1/\2", _LEADING.sub(r"\g<1>0", text))
    return _ZEROS.sub(r"\1", text.rstrip(".").removeprefix("+"))


def _plain(text: str) -> str:
    text = spellings.normalized(_SPACING.sub(" ", text.strip().strip("*").rstrip(".").strip()))
    text = split_unit(_UNIT.sub("", _DECORATION.sub("", text)))[0]
    return _COMMA.sub("", re.sub(r"\s+", _space_between_numbers, text.strip()))


def _space_between_numbers(spacing: re.Match[str]) -> str:
    """Keep a space between two digits: 5 5 is not 55."""
    text = spacing.string
    between = text[: spacing.start()][-1:].isdigit() and text[spacing.end() :][:1].isdigit()
    return " " if between else ""


def _content(answer: str) -> str:
    text = spellings.plain_characters(answer)
    boxed = boxes(text)
    return without_boxes(boxed[-1].content or "") if boxed else text


def _unit(answer: str) -> str | None:
    return split_unit(_content(answer).strip().strip("*$").replace(r"\(", "").replace(r"\)", ""))[1]
