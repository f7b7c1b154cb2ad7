"""How a run ended: the exit code by which it tells whoever started it, and what its summary.json says of it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

STOPPED_EARLY = 75
"""Exit code of a run that saved and stopped on request; the same command with --resume goes on (EX_TEMPFAIL)."""

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a run that saved and ended on SIGTERM."""

UNSAVED = 73
"""Exit code of a run that ended in order, but whose last steps are not saved (EX_CANTCREAT)."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a run that Ctrl-C ended at once."""

LOST = 69
"""Exit code of a run that lost a process, a machine, a device or a connection, and that may reach its end when resumed
(EX_UNAVAILABLE)."""

EndKind = Literal["finished", "stopped", "terminated", "failed"]
CODES: dict[EndKind, int] = {"finished": 0, "stopped": STOPPED_EARLY, "terminated": TERMINATED, "failed": 1}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunEnd:
    """How a run ended. `reason` says it in words. `unsaved` is the number of trained steps that are lost, since they
    could not be saved, or since the run was stopped and saves nothing."""

    kind: EndKind
    reason: str
    exit_code: int
    unsaved: int = 0

    @classmethod
    def in_order(cls, reason: str, *, early: bool, at_once: bool, unsaved: int) -> RunEnd:
        """Return the end of a run whose loop came to its end. `early`: it was asked to stop, `at_once`: urgently."""
        kind: EndKind = "finished" if not early else "terminated" if at_once else "stopped"
        return cls(kind, reason, UNSAVED if unsaved else CODES[kind], unsaved)

    @classmethod
    def by(cls, error: BaseException, unsaved: int) -> RunEnd:
        """Return the end of a run that an error ended, or Ctrl-C, or a signal during its start."""
        from grpo_mcore.rollout.workers import is_fault

        if isinstance(error, KeyboardInterrupt | SystemExit):  # SystemExit: by Ray's handler of SIGTERM
            code = TERMINATED if isinstance(error, SystemExit) else getattr(error, "exit_code", INTERRUPTED)
            return cls("terminated", "interrupted", code, unsaved)
        reason = f"failed: {str(error).partition(chr(10))[0] or type(error).__name__}"
        return cls("failed", reason, LOST if is_fault(error) else CODES["failed"], unsaved)

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> RunEnd:
        """Return what a summary says. Those of 0.2 have no `end_kind`; their `unsaved` is the last step's number."""
        kind: EndKind | None = next((kind for kind in CODES if kind == summary.get("end_kind")), None)
        if kind is not None:
            unsaved, code = summary.get("unsaved"), summary.get("exit_code")
            count = unsaved if type(unsaved) is int else 0
            return cls(kind, str(summary.get("end")), code if type(code) is int else CODES[kind], count)
        early, at_once = bool(summary.get("stopped_early")), summary.get("terminated") is True
        lost = 1 if summary.get("unsaved") is not None else 0
        return cls.in_order(str(summary.get("end")), early=early, at_once=at_once, unsaved=lost)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do: the run came to its end, and all of it is saved."""
        return self.kind == "finished" and not self.unsaved

    def plain(self) -> dict[str, Any]:
        """Return the entries of summary.json."""
        return {
            "end": self.reason,
            "end_kind": self.kind,
            "exit_code": self.exit_code,
            "unsaved": self.unsaved,
            "stopped_early": self.kind in ("stopped", "terminated"),
            "terminated": self.kind == "terminated",
        }

    def __str__(self) -> str:
        steps = "step is" if self.unsaved == 1 else "steps are"
        return f"{self.reason}; {self.unsaved} trained {steps} not saved" if self.unsaved else self.reason


def exit_code(summary: Mapping[str, Any]) -> int:
    """Return the exit code of a run that came to its end. `summary`: what its loop returned."""
    end = RunEnd.of(summary)
    if end.exit_code == UNSAVED:
        logger.error("grpo-mcore train: %s; exit code %d", end, UNSAVED)
    return end.exit_code
