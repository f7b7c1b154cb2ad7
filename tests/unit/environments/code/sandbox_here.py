"""Whether sandboxes work on this machine. A sandbox that leaks is no reason to skip: its test fails."""

from __future__ import annotations

import pytest

from grpo_mcore.environments.code.sandbox.sandboxes import BUBBLEWRAP, Limits, SandboxError, Sandboxes


def _why_not() -> tuple[str, bool]:
    try:
        maker = Sandboxes(BUBBLEWRAP, Limits())
    except SandboxError as error:
        return str(error).partition("\n")[0], False
    return "", maker.proc


WHY_NOT, HAS_PROC = _why_not()
"""Why sandboxes do not work here, or ""; and whether they may have a /proc of their own."""
LEAKS = WHY_NOT.startswith("the sandbox leaks")

needs_sandbox = pytest.mark.skipif(bool(WHY_NOT) and not LEAKS, reason=WHY_NOT)
