"""Standard output with `--json`: one value of JSON and nothing else, whatever else a command prints."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from grpo_mcore.base.text import finite

_output: TextIO | None = None


@contextmanager
def only_json() -> Iterator[None]:
    """Send what is printed in the context to standard error, except by `print_json`."""
    global _output
    _output = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _output = None


def print_json(value: Any) -> None:
    """Print a value as JSON, NaN and infinities as null."""
    print(json.dumps(finite(value), indent=1, allow_nan=False), file=_output)
