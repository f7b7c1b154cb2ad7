"""The loops that train and evaluate, and the parts that they are made of.

Scripts may still import `prepare`, `started` and `validate_only` from `lifecycle.grpo_run`, where they were before
`run.py`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _FormerModule(ModuleType):
    """A module that has moved to `run.py`, which is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module("grpo_mcore.algorithms.run"), "open_run" if name == "started" else name)


sys.modules |= {name: _FormerModule(name) for name in (f"{__name__}.lifecycle", f"{__name__}.lifecycle.grpo_run")}
