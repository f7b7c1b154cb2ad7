"""The user's code behind a reward function or a verifier: what it imports while it runs, and where it raised.

Imports stay light here: verifier processes import this module.
"""

import dis
import functools
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType
from typing import Any

_PACKAGE = str(Path(__file__).resolve().parents[1])


def imported_when_called(function: Any) -> list[str]:
    """Return the modules that a function, and the user's functions that it uses, import while they run. They are
    imported before samples are scored: no sample's time limit pays for them."""
    modules: dict[str, None] = {}
    waiting, seen = [function], set[CodeType]()
    while waiting:
        part = inspect.unwrap(waiting.pop())
        if isinstance(part, functools.partial):
            waiting.append(part.func)
        elif isinstance(part, type):
            waiting += [value for value in vars(part).values() if callable(value)]
        elif not hasattr(part, "__code__"):
            if not isinstance(part, BuiltinFunctionType) and _is_users(type(part)):
                waiting.append(type(part).__call__)
        elif part.__code__ not in seen:
            seen.add(part.__code__)
            names = list(_imports_and_names(part.__code__, part.__globals__.get("__package__") or ""))
            modules |= dict.fromkeys(name for kind, name in names if kind == "import")
            used = (part.__globals__.get(name) for kind, name in names if kind == "name")
            waiting += [value for value in used if callable(value) and _is_users(value)]
    return list(modules)


def _imports_and_names(code: CodeType, package: str) -> Iterator[tuple[str, str]]:
    """Yield ("import", module) and ("name", global) of a function's code and of the functions in it."""
    before = [0, None]  # the arguments of the last two instructions: an import's level and what it imports from it
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            level = before[0] if isinstance(before[0], int) else 0
            yield "import", importlib.util.resolve_name("." * level + instruction.argval, package)
        elif instruction.opname == "LOAD_GLOBAL":
            yield "name", instruction.argval
        before = [before[1], instruction.argval]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imports_and_names(constant, package)


def _is_users(value: Any) -> bool:
    """Return whether a function or a class is the user's: neither of Python, nor installed, nor of this package."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    file = getattr(module, "__file__", None) or ""
    return bool(file) and not any(part in file for part in ("site-packages", "/lib/python", _PACKAGE + os.sep))


def where_raised(error: BaseException) -> str:
    """Return " (file:line)" of the user's code that raised, or "" if this package's code did."""
    frames = [part for part in traceback.extract_tb(error.__traceback__) if not part.filename.startswith(_PACKAGE)]
    users = [frame for frame in frames if "/lib/python" not in frame.filename] or frames
    return f" ({users[-1].filename}:{users[-1].lineno})" if users else ""
