"""Multiple-choice rows: the choices as lines `A) ...` under the question, and the right one's letter as ground truth.

Published data have the choices in a field of their own, in many forms: a list, letters with their texts, lists of
labels and texts, or a column for each. An answer names the right one by its index (from 0), its label or its text.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mcore.base.text import as_written
from grpo_mcore.data.datasets.messages import parsed
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.rollout.datum import field_of
from grpo_mcore.rollout.messages import kind_of

LETTERS = "ABCDEFGHIJ"
_FROM_1, _FROM_0 = [str(number) for number in range(1, 11)], [str(number) for number in range(10)]
CHOICE_FIELDS = ("choices", "options", "endings")
"""Fields under which published data have their choices: the first that a row has is meant."""
NO_CHOICES = "none"
"""The choices_key of rows whose choices are not to be shown."""

_COLUMN = re.compile(r"((?:op|option|choice|sol|ending|ans|answer)[ _]?)?([a-j]|\d)", re.IGNORECASE)
_WRONG = re.compile(r"(?:incorrect[ _]?answer|distractor)[ _]?\d", re.IGNORECASE)
_IN_TEXT = re.compile(r"(?:^|[\s,;])\(?([A-Ja-j](?=\s*[).:])|\d{1,2}(?=[).:]\s))\s*[).:]\s*")
_LABEL_IN_FRONT = re.compile(r"\s*\(?([A-Ja-j](?=\s*[).:])|\d{1,2}(?=[).:]\s))\s*[).:]\s*(?=\S)")
_BARE_LABEL = re.compile(r"[\s(]*([A-Za-z]|\d{1,2})[\s).:]*")


@dataclass(frozen=True)
class Choices:
    """The choices of a row in their order, with the labels that its answer may name."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    numbers: bool = False
    """True if the choices are numbers and not texts."""
    counted: bool = False
    """True if the texts had numbers from 1 in front: then a number may be such a label, or an index."""

    def shown_in(self, question: str) -> tuple[str, ...] | None:
        """Return the labels behind which the question has them already, one after the other; None where it does not."""
        end, labels = 0, list[str]()
        for text in self.texts:
            words = r"\s+".join(map(re.escape, text.split()))
            choice = re.compile(rf"(?<!\w)([A-Ja-j]|\d{{1,2}})[).:]\s*{words}(?!\w)")
            if (match := choice.search(question, end)) is None:
                return None
            end = match.end()
            labels.append(match[1].upper())
        return tuple(labels)

    def as_shown(self, answer: Any, labels: tuple[str, ...]) -> str | None:
        """Return the label under which the question shows the choice that an index or a letter names; None of another
        answer."""
        is_letter = isinstance(answer, str) and re.fullmatch(r"\(?[A-Ja-j]\)?", answer.strip()) is not None
        if isinstance(answer, str) and (not is_letter or answer in self.texts or labels[0].isalpha()):
            return None
        letter = self.letter(answer)
        return None if letter is None else labels[LETTERS.index(letter)]

    def under(self, question: str) -> str:
        """Return the question with the choices below it."""
        return lettered(question, self.texts)

    def letter(self, answer: Any) -> str | None:
        """Return the letter of the choice that the answer names, None for a text that names none. Raises DataError for
        an index or a label that no choice has, and for an answer that could be two of them."""
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            return None
        text, is_text = as_written(answer).strip(), isinstance(answer, str)
        label = _BARE_LABEL.fullmatch(text)
        positions: set[int] = set()
        if is_text or self.numbers:
            positions |= {position for position, choice in enumerate(self.texts) if choice == text}
        if (is_text or self.counted) and label:
            positions |= {position for position, name in enumerate(self.labels) if name == label[1].upper()}
        if text.isdecimal() and int(text) < len(self.texts) and not (is_text and self.labels[0].isdecimal()):
            positions.add(int(text))
        if not positions and (labelled := _LABEL_IN_FRONT.match(text)) and labelled[1].upper() in self.labels:
            position = self.labels.index(labelled[1].upper())
            positions = {position} if self.texts[position] == text[labelled.end() :] else positions
        if len(positions) == 1:
            return LETTERS[positions.pop()]
        if positions or label or not is_text:
            problem = "could be several" if positions else "is none"
            raise DataError(
                f"the answer {answer!r} {problem} of its {len(self.texts)} choices ({', '.join(self.labels)})"
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
    record = question_key.rpartition(".")[0]  # ARC's question is a record with its choices
    keys = [*CHOICE_FIELDS, *(f"{record}.{name}" for name in CHOICE_FIELDS if record)]
    if isinstance(answer, int) and not isinstance(answer, bool):
        keys.append("answers")  # ReClor's; elsewhere these are right answers
    for name in keys if key is None else (key,):
        if choices := _choices(field_of(row, name)):
            return choices
    if key is not None:
        kind = kind_of(field_of(row, key))
        raise DataError(f"{key!r} (choices_key) has no choices: expected a list of texts or texts by label, got {kind}")
    wrong = [name for name in row if _WRONG.fullmatch(name) and row[name] not in (None, "")]
    if wrong and isinstance(answer, str):
        texts = [answer.strip(), *(row[name] for name in wrong)]
        random.Random(question).shuffle(texts)
        return _made(texts, None)
    choices = _columns(row)
    if choices is not None and isinstance(answer, str) and choices.letter(answer) is None:
        return None  # the columns are something else: the answer is none of them
    return choices


def _choices(value: Any) -> Choices | None:
    """Return the choices that a field holds, None where it holds something else."""
    match value := parsed(value):
        case {"text": texts, "label": labels}:
            return _made(texts, labels)
        case dict():
            is_lettered = [str(label).upper() for label in value] == [*LETTERS[: len(value)]]
            return _made(list(value.values()), list(value)) if is_lettered else None
        case [dict() as first, *_] if all(isinstance(choice, dict) for choice in value):
            text = next((name for name in ("text", "value", "content", "option") if name in first), None)
            label = next((name for name in ("label", "key", "id", "letter") if name in first), None)
            if text is None or not all(text in choice for choice in value):
                return None
            return _made([choice[text] for choice in value], [choice.get(label) for choice in value] if label else None)
        case str():
            return _made(_split(value), None)
    return _made(value, None)


def _split(text: str) -> list[str]:
    """Return the choices in a text such as `a) 38, b) 27, c) none`, or one a line; [] in another."""
    for labels in (LETTERS, _FROM_1, _FROM_0):
        starts: list[re.Match[str]] = []
        for match in _IN_TEXT.finditer(text):
            if len(starts) < len(labels) and match[1].upper() == labels[len(starts)]:
                starts.append(match)
        if len(starts) > 1:
            ends = [*(match.start() for match in starts[1:]), len(text)]
            return [text[match.start() : end].strip(" \n\t,;") for match, end in zip(starts, ends, strict=True)]
    return [line.strip() for line in text.splitlines() if line.strip()]


def _columns(row: dict[str, Any]) -> Choices | None:
    """Return choices that have a column each: of one stem, with labels that begin at A, 1 or 0."""
    stems: dict[str, dict[str, str]] = {}
    for name in row:
        if (match := _COLUMN.fullmatch(name)) and (match[1] or name in LETTERS):
            stems.setdefault((match[1] or "").lower(), {})[match[2].upper()] = name
    for columns in stems.values():
        labels = sorted(columns)
        if len(labels) > 1 and any(labels == [*first[: len(labels)]] for first in (LETTERS, _FROM_1, _FROM_0)):
            texts = [row[columns[label]] for label in labels if row[columns[label]] not in (None, "")]
            return _made(texts, labels[: len(texts)])
    return None


def _made(texts: Any, labels: list[Any] | None) -> Choices | None:
    """Return choices of texts or numbers, None of anything else. Labels in front of all texts are taken off."""
    if not isinstance(texts, list) or len(texts) < 2 or not all(isinstance(text, str | int | float) for text in texts):
        return None
    if len(texts) > len(LETTERS):
        raise DataError(
            f"{len(texts)} choices; there can be 2 to {len(LETTERS)} (choices_key: {NO_CHOICES} leaves them out)"
        )
    shown = [str(text).strip() for text in texts]
    counted = False
    in_front = [match for text in shown if (match := _LABEL_IN_FRONT.match(text))]
    found = [match[1].upper() for match in in_front]
    if labels is None and any(found == [*names[: len(shown)]] for names in (LETTERS, _FROM_1, _FROM_0)):
        shown = [text[match.end() :] for text, match in zip(shown, in_front, strict=True)]
        labels, counted = found, found[0] == "1"
    names = [str(label).strip().upper() for label in labels or LETTERS[: len(shown)]]
    if len(names) != len(shown):
        return None
    return Choices(
        tuple(shown), tuple(names), numbers=not any(isinstance(text, str) for text in texts), counted=counted
    )
