"""Objects that a recipe names by import path: datasets, processors, environments, functions. For every room; standard
library only."""

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

NOT_INSTALLED = "not installed"


def import_by_path(path: str, kind: str, error: type[Exception]) -> Any:
    """Return the object at "package.module:name" or "package.module.name". The working directory is searched last.

    Raises `error`, whose message calls the object `kind`, such as "logger".
    """
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not {"", os.getcwd()} & set(sys.path):  # `python -m` searches it, an installed command does not
        sys.path.append(os.getcwd())
    failed = f"cannot import the {kind} {path!r}"
    if not module_name or not attribute:
        raise error(f"{failed}: write it as 'package.module:name'")
    if "/" in module_name or module_name.endswith(".py"):
        raise error(f"{failed}: it names a module, not a file; {module_of_file(path)}")
    try:
        module = importlib.import_module(module_name)
    except SystemExit as cause:
        reason = f"the module ends the process when it is imported{place_of(cause)}"
        raise error(f"{failed}: {reason}; put what runs as a program under `if __name__ == '__main__':`") from cause
    except Exception as cause:
        if isinstance(cause, ModuleNotFoundError) and f"{module_name}.".startswith(f"{cause.name}."):
            hint = f"modules are looked for among the installed packages, then in {os.getcwd()}"
            if path.startswith("examples."):
                hint = "examples/ is not part of the installed package; run this in the root of a checkout"
            raise error(f"{failed}: {cause}; {hint}") from cause
        raise error(f"{failed}: {type(cause).__name__}: {cause}{place_of(cause)}") from cause
    value = getattr(module, attribute, module)  # the module itself: it has no such name
    if value is not module and not isinstance(value, ModuleType):
        return value
    if _is_module(f"{module_name}.{attribute}"):
        raise error(f"{failed}: it is a module; write '{module_name}.{attribute}:name'")
    near = difflib.get_close_matches(attribute, vars(module), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f" ({getattr(module, '__file__', None) or 'no file'})"
    raise error(f"{failed}: module {module_name!r} has no attribute {attribute!r}{hint}")


def _is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ImportError:  # what holds it is no package
        return False


def why_not_imported(module: str) -> str | None:
    """Import an optional module. Return None, or why it cannot be: "not installed", or the error of a package that is
    installed and broken, such as one whose compiled part is missing or belongs to another torch."""
    try:
        importlib.import_module(module)
    except Exception as cause:
        if isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(f"{cause.name}."):
            return NOT_INSTALLED
        return f"{type(cause).__name__}: {cause}"
    return None


def module_of_file(path: str) -> str:
    """Return how to write the path of a file, as other trainers name custom code, as an import path."""
    file, _, name = path.partition(":")
    module = file.strip("./").removesuffix(".py").rpartition("/")[2]
    return f"for the file {file} write '{module}:{name or 'name'}', and start the run in its folder"


@contextmanager
def no_exit(code: str) -> Iterator[None]:
    """Turn an exit of the process that custom code asks for into an error, which calls it `code`."""
    try:
        yield
    except SystemExit as error:
        raise exited(code, error) from error


def exited(code: str, error: SystemExit) -> RuntimeError:
    """Return the error for an exit that custom code, called `code`, asked for."""
    return RuntimeError(f"{code} called sys.exit({error.code!r}){place_of(error)}")


def place_of(cause: BaseException) -> str:
    """Return " (FILE:LINE)" of where custom code failed, which is not where it was called or where Python imports a
    module. A SyntaxError has it in its message."""
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__)[1:] if "importlib" not in frame.filename]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames and not isinstance(cause, SyntaxError) else ""
