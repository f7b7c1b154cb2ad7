"""Functions of a disk that fails."""

import os
from collections.abc import Callable
from typing import Any


def failing(number: int, function: Callable[..., Any] | None = None, part: str = "") -> Callable[..., Any]:
    """Return `function`, which raises the OSError of this number where its first argument, a path, has `part` in it."""

    def may_fail(*args: Any, **options: Any) -> Any:
        path = str(args[0]) if args else ""
        if function is None or part in path:
            raise OSError(number, os.strerror(number), path)
        return function(*args, **options)

    return may_fail
