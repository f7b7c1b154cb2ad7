"""Objects by import path."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from grpo_mcore.data.interfaces import DataError


def import_by_path(path: str, what: str) -> Any:
    """The object at "package.module:name" or "package.module.name", also from the working directory; `what` names it
    in the error."""
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not {"", os.getcwd()} & set(sys.path):  # as with `python -m`, and unlike with an installed command
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"cannot import the {what} {path!r}: {error}; write it as 'package.module:name'") from error
