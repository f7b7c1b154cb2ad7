"""Text from outside: what is no Unicode, and what a terminal would obey. For every room; the standard library only."""

import math
import re
from collections.abc import Mapping
from typing import Any

SURROGATE = re.compile("[\ud800-\udfff]")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys or hides: control characters except tab and newline, among them the escape that
begins a colour or moves the cursor; line and paragraph separators; marks that turn the direction of writing; and halves
of surrogate pairs, which cannot be printed."""


def not_unicode(text: str) -> str | None:
    """Return what keeps `text` from being Unicode, in words; None if nothing does. JSON and Python allow half of a
    surrogate pair ("\\ud83d"), which no tokenizer, file or terminal takes."""
    half = SURROGATE.search(text)
    return None if half is None else f"half a surrogate pair, \\u{ord(half[0]):04x}, at character {half.start()}"


def has_surrogates(value: Any) -> bool:
    """Return whether any text in plain values (of JSON) is no Unicode, keys of mappings included."""
    if isinstance(value, str):
        return SURROGATE.search(value) is not None
    if isinstance(value, dict):
        return any(has_surrogates(key) or has_surrogates(inner) for key, inner in value.items())
    return isinstance(value, list | tuple) and any(map(has_surrogates, value))


def finite(value: Any) -> Any:
    """Return plain values (of JSON) with null in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def as_written(value: Any) -> str:
    """Return a value as text; a whole number that a table holds as a float, 5.0, without its point."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def shorten(text: str, length: int = 200) -> str:
    """Return the beginning of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[:length] + " ..."


def replaced(text: str) -> str:
    """Return Unicode: halves of surrogate pairs become U+FFFD."""
    return SURROGATE.sub("\ufffd", text)


def escaped(text: str) -> str:
    """Return text that a terminal prints as it is and obeys in nothing: such characters become \\x1b, \\u2028, ..."""
    return CONTROL.sub(_code, text)


def _code(half: re.Match[str]) -> str:
    number = ord(half[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
