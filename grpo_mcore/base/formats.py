"""The formats of recipes, and of what a run leaves for later versions: checkpoints, ledgers, samples.

A number rises when older code would misread the files. What bears no number was written before there were any, and is
of format 1. docs/install.md has the promise.
"""

from __future__ import annotations

from typing import Any, Literal

Kind = Literal["checkpoint", "ledger", "recipe", "samples"]

FORMATS: dict[Kind, int] = {"checkpoint": 1, "ledger": 2, "recipe": 1, "samples": 1}
"""The format that this version writes, and the newest that it reads."""


def newer_format(kind: Kind, written: Any) -> str | None:
    """Return why files of the format `written` cannot be read, None if they can. `written` None: of format 1."""
    known = FORMATS[kind]
    if written is None or isinstance(written, int) and written <= known:
        return None
    return (
        f"written by a newer version of grpo_mcore, in format {written} of its {kind}; this version reads up to "
        f"{known}: upgrade grpo_mcore"
    )
