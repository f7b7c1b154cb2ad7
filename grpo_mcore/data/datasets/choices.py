"""Multiple-choice rows: the choices as lines `A) ...` under the question, and the right one's letter as the truth.

Published data have the choices in a field of their own, in many forms: a list, letters with their texts, lists of
labels and texts, or a column for each. An answer names the right one by its index (from 0), its label or its text.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mcore.base.text import as_written
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.rollout.datum import field_of

LETTERS = "ABCDEFGHIJ"
CHOICE_FIELDS = ("choices", "options", "endings")
"""Fields under which published data have their choices: the first that a row has is meant."""
NO_CHOICES = "none"
"""The choices_key of rows whose choices are not to be shown."""

_COLUMN = re.compile(r"((?:op|option|choice|sol|ending|ans|answer)[ _]?)?([a-j]|\d)", re.IGNORECASE)
_IN_TEXT = re.compile(r"(?:^|[\s,;])\(?([A-Ja-j])\s*[).:]\s*")
_WRONG = re.compile(r"(?:incorrect[ _]?answer|distractor)[ _]?\d", re.IGNORECASE)
_OWN_LABEL = re.compile(r"\s*\(?([A-Ja-j])\s*[).:]\s*(?=\S)")
_BARE_LABEL = re.compile(r"[\s(]*([A-Za-z]|\d{1,2})[\s).:]*")


@dataclass(frozen=True)
class Choices:
    """The choices of a row in their order, with the labels that its answer may name."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    numbers: bool = False
    """Whether they are numbers and not texts."""

    def shown_in(self, question: str) -> bool:
        """Return whether the question has them already, one after the other, each behind a label or on a line."""
        at = 0
        for text in self.texts:
            words = r"\s+".join(map(re.escape, text.split()))
            found = re.compile(rf"(?:^|[\n,;(]|[-*•]|(?<!\w)(?:[A-Ja-j]|\d)[).:])\s*{words}(?!\w)").search(question, at)
            if found is None:
                return False
            at = found.end()
        return True

    def under(self, question: str) -> str:
        """Return the question with the choices below it."""
        return lettered(question, self.texts)

    def letter(self, answer: Any) -> str | None:
        """Return the letter of the choice that the answer names, None for a text that names none. Raises DataError for
        an index or a label that no choice has, and for an answer that could be two of them."""
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            return None
        said = as_written(answer).strip()
        is_text, label = isinstance(answer, str), _BARE_LABEL.fullmatch(said)
        places: set[int] = set()
        if is_text or self.numbers:
            places |= {place for place, text in enumerate(self.texts) if text == said}
        if is_text and label:
            places |= {place for place, name in enumerate(self.labels) if name == label[1].upper()}
        if said.isdecimal() and int(said) < len(self.texts) and not (is_text and self.labels[0].isdecimal()):
            places.add(int(said))
        if not places and (own := _OWN_LABEL.match(said)) and own[1].upper() in self.labels:
            place = self.labels.index(own[1].upper())
            places = {place} if self.texts[place] == said[own.end() :] else places
        if len(places) == 1:
            return LETTERS[places.pop()]
        if places or label or not is_text:
            which = "could be several" if places else "is none"
            raise DataError(
                f"the answer {answer!r} {which} of its {len(self.texts)} choices ({', '.join(self.labels)})"
            )
        return None


def lettered(question: str, choices: Sequence[str]) -> str:
    """Return a question with its choices below it, a letter before each. Raises DataError for more than there are
    letters."""
    if not 1 <= len(choices) <= len(LETTERS):
        raise DataError(f"{len(choices)} choices; there can be 1 to {len(LETTERS)}")
    lines = [f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question, "", *lines])


def choices_of(row: dict[str, Any], key: str | None, question_key: str, question: str, answer: Any) -> Choices | None:
    """Return a row's choices: those under `key`. Without a key: those under one of CHOICE_FIELDS; else those in columns
    such as `A` to `D`, `opa` to `opd`, or `option1`, ...; else the right answer and the wrong ones of `distractor1`,
    ..., in an order that depends on the question alone. None if there are none. Raises DataError for a key that leads
    to none."""
    if key == NO_CHOICES:
        return None
    beside = question_key.rpartition(".")[0]  # ARC's question is a record with its choices
    usual = [*CHOICE_FIELDS, *(f"{beside}.{name}" for name in CHOICE_FIELDS if beside)]
    if isinstance(answer, int) and not isinstance(answer, bool):
        usual.append("answers")  # ReClor's; elsewhere these are right answers
    for name in usual if key is None else (key,):
        if found := _choices(field_of(row, name)):
            return found
    if key is not None:
        what = type(field_of(row, key)).__name__
        raise DataError(f"{key!r} (choices_key) has no choices: expected a list of texts or texts by label, got {what}")
    wrong = [name for name in row if _WRONG.fullmatch(name) and row[name] not in (None, "")]
    if wrong and isinstance(answer, str):
        texts = [answer.strip(), *(row[name] for name in wrong)]
        random.Random(question).shuffle(texts)
        return _made(texts, None)
    found = _columns(row)
    if found is not None and isinstance(answer, str) and found.letter(answer) is None:
        return None  # the columns are something else: the answer is none of them
    return found


def _choices(value: Any) -> Choices | None:
    """Return the choices that a field holds, None where it holds something else."""
    value = _parsed(value)
    if isinstance(value, dict) and {"text", "label"} <= set(value):
        texts, labels = value["text"], value["label"]
    elif isinstance(value, dict):
        texts, labels = list(value.values()), list(value)
        if [str(label).upper() for label in labels] != [*LETTERS[: len(labels)]]:
            return None
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        label, text = (
            next((part for part in parts if all(part in one for one in value)), None)
            for parts in (("label", "key", "id", "letter"), ("text", "value", "content", "option"))
        )
        if text is None:
            return None
        texts = [one[text] for one in value]
        labels = [one[label] for one in value] if label else [*LETTERS[: len(texts)]]
    elif isinstance(value, str):
        texts, labels = _split(value), None
    else:
        texts, labels = value, None
    return _made(texts, labels)


def _split(text: str) -> list[str]:
    """Return the choices in a text such as `a) 38, b) 27, c) none`, or one a line; [] in another."""
    begins, wanted = [], 0
    for match in _IN_TEXT.finditer(text):
        if match[1].upper() == LETTERS[wanted % len(LETTERS)]:
            begins.append(match)
            wanted += 1
    if len(begins) > 1:
        ends = [*(match.start() for match in begins[1:]), len(text)]
        return [text[match.end() : end].strip(" \n\t,;") for match, end in zip(begins, ends, strict=True)]
    return [line.strip() for line in text.splitlines() if line.strip()]


def _columns(row: dict[str, Any]) -> Choices | None:
    """Return choices that have a column each: of one stem, with labels that begin at A, 1 or 0."""
    stems: dict[str, dict[str, str]] = {}
    for name in row:
        if (match := _COLUMN.fullmatch(name)) and (match[1] or name in LETTERS):
            stems.setdefault((match[1] or "").lower(), {})[match[2].upper()] = name
    for columns in stems.values():
        for first in (LETTERS, "123456789", "0123456789"):
            labels = sorted(columns)
            if len(labels) > 1 and labels == [*first[: len(labels)]]:
                names = [columns[label] for label in labels if row[columns[label]] not in (None, "")]
                return _made([row[name] for name in names], labels[: len(names)])
    return None


def _made(texts: Any, labels: list[Any] | None) -> Choices | None:
    if not isinstance(texts, list) or len(texts) < 2:
        return None
    if not all(isinstance(text, str | int | float) for text in texts):
        return None
    shown = [str(text).strip() for text in texts]
    own = [_OWN_LABEL.match(text) for text in shown]
    if labels is None and all(one and one[1].upper() == LETTERS[i] for i, one in enumerate(own[: len(LETTERS)])):
        shown = [text[one.end() :] for text, one in zip(shown, own, strict=True) if one]
    if len(shown) > len(LETTERS):
        raise DataError(
            f"{len(shown)} choices; there can be 2 to {len(LETTERS)} (choices_key: {NO_CHOICES} leaves them out)"
        )
    named = [str(label).strip().upper() for label in labels] if labels else [*LETTERS[: len(shown)]]
    if len(named) != len(shown):
        return None
    return Choices(tuple(shown), tuple(named), numbers=not any(isinstance(text, str) for text in texts))


def _parsed(value: Any) -> Any:
    """Return a list or mapping that a table holds as text, in JSON or as Python writes it."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            return read(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return value
