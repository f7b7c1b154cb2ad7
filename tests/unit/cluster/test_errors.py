"""Errors of workers can be pickled, and losses are distinguished from mistakes."""

from __future__ import annotations

import pickle

import pytest
from ray.exceptions import ObjectLostError

from grpo_mcore.cluster import (
    DeadlineExceeded,
    NodeLost,
    NotEnoughResources,
    ObjectLost,
    WorkerDied,
    WorkerFailed,
    is_fault,
)
from grpo_mcore.cluster.ray_actor import RemoteFailure
from grpo_mcore.refit.plan import RefitError


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("w", "a", 1.5, "detail"), WorkerFailed("a", "w", "cause", "detail")]
)
def test_errors_travel_between_processes(error):
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and vars(again) == vars(error)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_failure_carries_text_and_the_exception_itself():
    failure = pickle.loads(pickle.dumps(RemoteFailure.of(raised(ValueError("gone")))))
    assert failure.cause == "ValueError: gone" and failure.trace.endswith("ValueError: gone")
    assert isinstance(failure.original(), ValueError)


class TwoArguments(Exception):
    """Can be pickled but not unpickled, like many libraries' exceptions."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_a_failure_whose_exception_cannot_be_unpickled_is_text():
    failure = pickle.loads(pickle.dumps(RemoteFailure.of(raised(TwoArguments(1, 2)))))
    assert failure.cause == "TwoArguments: 1 and 2" and failure.original() is None


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
    NodeLost("engine-0: too few CPUs"),
    ObjectLostError("0" * 56, None, ""),
]
MISTAKES = [
    ValueError("a wrong recipe"),
    WorkerFailed("policy-0", "train", "NonFiniteLoss: sample 4"),
    caused(RefitError("the checksums differ"), ValueError()),
    KeyError("uid"),
    NotEnoughResources("engine-0: too few CPUs"),
]


@pytest.mark.parametrize("error", LOSSES, ids=lambda error: type(error).__name__)
def test_losses(error: Exception) -> None:
    assert is_fault(error)


@pytest.mark.parametrize("error", MISTAKES, ids=lambda error: type(error).__name__)
def test_mistakes(error: Exception) -> None:
    assert not is_fault(error)
