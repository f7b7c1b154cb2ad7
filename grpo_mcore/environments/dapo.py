r"""Math answers compared as strings, for data whose answers are short (DAPO, arXiv 2503.14476, section 3.4): the
answer is in a last line "Answer: ...", and the reward is 1 where it is the truth, -1 elsewhere (equation 7).

Truth and answer are normalised before they are compared: no units and no dollar signs, \frac{1}{2} for \dfrac12, 1000
for 1,000.
"""

from __future__ import annotations

import re

_TAIL = 300  # characters of the response in which the answer is looked for
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

_SPACING = re.compile(r"\\[,;:!> ]|\\q?quad(?![a-zA-Z])|~|\s+")
_DECORATION = re.compile(
    r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\displaystyle|\^\{?\\circ\}?|\\degree|\\?[%$]|\*\*|°"
)
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox|fbox|boxed)\{([^{}]*)\}")
_BOX = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")  # two levels of braces inside
_FRACTION = re.compile(r"\\[dt]frac(?![a-zA-Z])")
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)(?!\d)")
_SHORT_ROOT = re.compile(r"\\sqrt(\w)")
_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_UNITS = (
    "dollars cents inches feet miles centimeters meters kilometers cm km mph hours minutes seconds days weeks years "
    "degrees units square cubic points percent people students ways integers numbers pages"
)
_UNIT = re.compile(rf"(?<=[\d}})])(?:\s*\\?(?:{'|'.join(_UNITS.split())})\b(?:\s*\^?\d)?)+")


def dapo_math_verify(response: str, truth: str) -> tuple[float, str | None]:
    """Return (1 or -1, the answer as compared)."""
    answer = find_answer(response)
    if answer is None:
        return -1.0, None
    answer = normalized(answer)
    return (1.0 if answer == normalized(truth) else -1.0), answer


def find_answer(response: str) -> str | None:
    """Return the text after the last "Answer:" of the last 300 characters, to the end of its line."""
    found = _ANSWER.findall(response[-_TAIL:])
    return found[-1].strip() if found else None


def normalized(answer: str) -> str:
    r"""Return the normal form of an answer; of an equation the right side: "x = 5" is "5"."""
    box = _BOX.findall(answer)
    text = box[-1] if box else answer
    text = text.rpartition("=")[2].strip().strip("*").rstrip(".").strip()
    text = _DECORATION.sub("", text)
    while (plain := _TEXT.sub(r"\1", text)) != text:
        text = plain
    text = _UNIT.sub("", text)
    text = _SPACING.sub("", text)
    text = _FRACTION.sub(r"\\frac", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    return _COMMA.sub("", text).rstrip(".")
