"""Errors that another try may not meet: the loss of a process, of a machine or of Ray, and waits that were too long."""

from __future__ import annotations

from grpo_mcore.rollout.workers import DeadlineExceeded, ObjectLost, WorkerDied

LOSSES = (WorkerDied, ObjectLost, DeadlineExceeded, ConnectionError)


def is_fault(error: BaseException) -> bool:
    """Whether such a loss is behind `error`, and not the recipe, the data, the model or a mistake in a program."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, LOSSES) or type(link).__module__.partition(".")[0] == "ray":  # Ray itself is in trouble
            return True
        link = link.__cause__
    return False
