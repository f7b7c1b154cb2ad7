"""Standard output with `--json`: one value of JSON and nothing else, whatever else a command prints."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

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
    """Print a value as JSON. NaN and infinities, which JSON does not have, are null."""
    print(json.dumps(_finite(value), indent=1, allow_nan=False), file=_output)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
