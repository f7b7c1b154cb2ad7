"""What is a loss, which another try may not meet, and what is somebody's mistake."""

from __future__ import annotations

import pytest
from ray.exceptions import ObjectLostError

from grpo_mcore.cluster import DeadlineExceeded, ObjectLost, WorkerDied, WorkerFailed, is_fault
from grpo_mcore.refit import RefitError


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


DIED = WorkerDied("policy-1", "train", "its process ended")
LOSSES = [
    DIED,
    caused(RefitError("fill_bucket failed on policy-1"), DIED),
    DeadlineExceeded("training", "policy-0", 60.0),
    caused(WorkerFailed("policy-0", "receive", "..."), ObjectLost("the object store", "fetch", "ObjectLostError")),
    ConnectionError("no Ray answers"),
    ObjectLostError("0" * 56, None, ""),
]
MISTAKES = [
    ValueError("a wrong recipe"),
    WorkerFailed("policy-0", "train", "NonFiniteLoss: sample 4"),
    caused(RefitError("the checksums differ"), ValueError()),
    KeyError("uid"),
]


@pytest.mark.parametrize("error", LOSSES, ids=lambda error: type(error).__name__)
def test_losses(error: Exception) -> None:
    assert is_fault(error)


@pytest.mark.parametrize("error", MISTAKES, ids=lambda error: type(error).__name__)
def test_mistakes(error: Exception) -> None:
    assert not is_fault(error)
