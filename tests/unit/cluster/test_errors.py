"""Errors of workers can be pickled, and losses are distinguished from mistakes."""

import ast
import errno
import inspect
import pickle

import pytest
import ray.exceptions
import torch.distributed
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
from grpo_mcore.refit.plan.plan import RefitError
from tests.checkout import PACKAGE, python_files


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


def while_handling(error: Exception, handled: Exception) -> Exception:
    error.__context__ = handled
    return error


def unrelated(error: Exception, handled: Exception) -> Exception:
    """Return an error raised `from None`."""
    error.__context__, error.__suppress_context__ = handled, True
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
    OSError(errno.ESTALE, "Stale file handle"),
    caused(
        WorkerFailed("policy-0", "train", "..."),
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"
        ),
    ),
    caused(WorkerFailed("policy-0", "train", "..."), torch.distributed.DistBackendError("NCCL error")),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    while_handling(RuntimeError("processes of this run could not be ended"), DIED),
    while_handling(NotEnoughResources("engine-0: too few CPUs"), DIED),
]
MISTAKES = [
    ValueError("a wrong recipe"),
    WorkerFailed("policy-0", "train", "NonFiniteLoss: sample 4"),
    caused(RefitError("the checksums differ"), ValueError()),
    KeyError("uid"),
    NotEnoughResources("engine-0: too few CPUs"),
    OSError(errno.ENOSPC, "No space left on device"),
    FileNotFoundError(errno.ENOENT, "No such file"),
    torch.OutOfMemoryError("CUDA out of memory"),
    unrelated(ValueError("a wrong recipe"), DIED),
    RuntimeError("CUDA error: device-side assert triggered"),
]


@pytest.mark.parametrize("error", LOSSES, ids=lambda error: type(error).__name__)
def test_losses(error: Exception) -> None:
    assert is_fault(error)


@pytest.mark.parametrize("error", MISTAKES, ids=lambda error: type(error).__name__)
def test_mistakes(error: Exception) -> None:
    assert not is_fault(error)


FAULTS = {
    **dict.fromkeys(("DeadlineExceeded", "NodeLost", "ObjectLost", "WorkerDied"), "grpo_mcore.rollout.workers"),
    "RendezvousError": "grpo_mcore.parallel.mesh",
    "RayUnreachable": "grpo_mcore.cluster.ray_session",
    "SegmentLost": "grpo_mcore.refit.transport.shared_memory",
}
"""Errors of this package after which a run restarts, with their modules."""

LOST = {kind.__name__ for kind in (DeadlineExceeded, NodeLost, ObjectLost, WorkerDied, ConnectionError)} | {
    kind.__name__ for kind in ConnectionError.__subclasses__()
}


def errors_that_are_losses() -> set[str]:
    """Return the names of the classes of the package that are losses, or derive from one."""
    classes = [
        node
        for file in python_files(PACKAGE.name)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    defined = {node.name for node in classes}
    names = LOST & defined
    while True:
        more = {node.name for node in classes if {getattr(base, "id", "") for base in node.bases} & (LOST | names)}
        if more <= names:
            return names
        names |= more


def test_which_errors_of_the_package_a_run_restarts_after_is_decided() -> None:
    """All others end it, unless a loss is their cause. A new class that is a loss belongs in FAULTS."""
    assert errors_that_are_losses() == set(FAULTS)
    for name, module in FAULTS.items():
        kind = getattr(__import__(module, fromlist=[name]), name)
        assert is_fault(kind.__new__(kind)), name


def test_every_error_of_ray_is_a_loss() -> None:
    """Those of a worker's method come as RayTaskError and are unwrapped before (see ray_worker._explain)."""
    kinds = [kind for kind in vars(ray.exceptions).values() if inspect.isclass(kind)
             and issubclass(kind, Exception) and kind.__module__.startswith("ray")]  # fmt: skip
    assert len(kinds) > 20
    for kind in kinds:
        assert is_fault(kind.__new__(kind)), kind
