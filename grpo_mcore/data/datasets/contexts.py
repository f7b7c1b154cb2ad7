"""The texts that a question is about: a passage, or several with their titles, in the layouts of published data."""

from collections.abc import Iterator
from typing import Any

from grpo_mcore.data.datasets.mapped import Row
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.rollout.datum import field_of

CONTEXTS = (
    *("context", "contexts", "passage", "passages", "article", "premise", "paragraph", "paragraphs", "story"),
    *("document", "documents", "Body", "body"),
)
"""Fields under which published data have them: the first that a row has is meant. They are shown where `context_key`
names them."""
_TEXTS = ("text", "paragraph_text", "passage_text", "contents", "content")
"""Fields of a passage that hold its text."""


def context_of(row: Row, key: str) -> str:
    """Return the passages in a field of a row, with empty lines between them; "" without any. Raises DataError."""
    try:
        return "\n\n".join(_passages(field_of(row, key)))
    except ValueError:
        raise DataError(
            f"{key!r} (context_key) must be text, a list of texts or passages with titles and texts, got "
            f"{field_of(row, key)!r:.100}"
        ) from None


def context_field(row: Row) -> str | None:
    """Return the field of a row that holds passages; None if there is none."""
    return next((key for key in CONTEXTS if _has_passages(row.get(key))), None)


def unseen_context(row: Row, context_key: str | None, question: str) -> str | None:
    """Return what to say of a row with a text that its question may be about and that is not shown; None without."""
    name = context_field(row)
    if name is None or context_key is not None or question == name:
        return None
    return f"{name!r} is not shown to the model; context_key: {name} puts it above the question"


def _has_passages(value: Any) -> bool:
    try:
        return any(_passages(value))
    except ValueError:
        return False


def _passages(value: Any) -> Iterator[str]:
    """Yield the passages of a value. Raises ValueError for another layout."""
    match value:
        case None:
            pass
        case str():
            if value.strip():
                yield value.strip()
        case {"contexts": list(texts)}:  # PubMedQA
            yield from _passages(texts)
        case {"title": list(titles), "sentences": list(texts)}:  # HotpotQA
            yield from map(_titled, titles, texts)
        case [str(title), list(sentences)]:  # its first form
            yield _titled(title, sentences)
        case {"role": _} | {"from": _}:  # a message of a conversation
            raise ValueError
        case dict():
            text = next((value[key] for key in _TEXTS if value.get(key)), None)
            if isinstance(text, list):  # MS MARCO
                yield from _passages(text)
            else:  # MuSiQue
                yield _titled(value.get("title"), text)
        case list():
            for part in value:
                yield from _passages(part)
        case _:
            raise ValueError


def _titled(title: Any, text: Any) -> str:
    """Return a passage under its title. Its text may be a list of sentences."""
    if isinstance(text, list) and all(isinstance(sentence, str) for sentence in text):
        text = " ".join(sentence.strip() for sentence in text)
    if not isinstance(text, str):
        raise ValueError
    return f"{title}\n{text.strip()}" if isinstance(title, str) and title.strip() else text.strip()
