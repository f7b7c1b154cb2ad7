"""Colours in a terminal. Text stays plain in files and pipes, and where NO_COLOR is set (https://no-color.org)."""

import os
from typing import TextIO

STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}


def painted(text: str, style: str, stream: TextIO) -> str:
    """Return the text as it is to be written to `stream`. `style`: a key of STYLES."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"
