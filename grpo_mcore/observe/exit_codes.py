"""The exit codes by which a run tells whoever started it how it ended."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping

STOPPED_EARLY = 75
"""Exit code of a run that saved and stopped on request; the same command with --resume goes on (EX_TEMPFAIL)."""

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a run that saved and ended on SIGTERM."""

UNSAVED = 73
"""Exit code of a run that ended in order, but could not write its last checkpoint (EX_CANTCREAT)."""

LOST = 69
"""Exit code of a run that lost a process, a machine, a device or a connection, and that may reach its end when resumed
(EX_UNAVAILABLE)."""

logger = logging.getLogger(__name__)


def exit_code(summary: Mapping[str, object]) -> int:
    """Return the exit code of a run that came to its end. `summary`: the summary that its loop returned."""
    if (step := summary.get("unsaved")) is not None:
        logger.error("grpo-mcore train: step %s is trained but not saved, see above; exit code %d", step, UNSAVED)
        return UNSAVED
    return TERMINATED if summary["terminated"] else STOPPED_EARLY if summary["stopped_early"] else 0
