"""Objects that a recipe names by import path: datasets, processors, environments, functions. For every room; standard
library only."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any


def import_by_path(path: str, what: str, error: type[Exception]) -> Any:
    """Return the object at "package.module:name" or "package.module.name". The working directory is searched last.

    Raises `error`, whose message calls the object `what`.
    """
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not {"", os.getcwd()} & set(sys.path):  # `python -m` searches it, an installed command does not
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as cause:
        hint = "write it as 'package.module:name'"
        if ":" in path and isinstance(cause, ModuleNotFoundError):
            hint = f"modules are looked for among the installed packages, then in {os.getcwd()}"
        if path.startswith("examples.") and isinstance(cause, ModuleNotFoundError):
            hint = "examples/ is not part of the installed package; run this in the root of a checkout of the project"
        raise error(f"cannot import the {what} {path!r}: {cause}; {hint}") from cause
    except Exception as cause:  # the module's own code failed
        where = traceback.extract_tb(cause.__traceback__)[-1]
        raise error(
            f"cannot import the {what} {path!r}: {type(cause).__name__}: {cause} ({where.filename}:{where.lineno})"
        ) from cause
