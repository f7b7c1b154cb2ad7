"""How often a process looks for garbage. For every room; standard library only."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COLLECT_AFTER = 10_000
"""Number of new objects after which a process looks for garbage, once it has called `collect_rarely`; Python's default
is 700. Few enough for one with tensors: those that are part of a cycle stay until then."""

COLLECT_AFTER_WITHOUT_TENSORS = 1_000_000
"""The same within `rare_collections`: as many as 60,000 samples have that are in flight at one time."""

COLLECT_EVERY_S = 300.0
"""Seconds after which garbage is looked for all the same within `rare_collections`. Without a failure nothing of a
sample is part of a cycle; the traceback of one holds what its callers held, samples in the store among it."""


def collect_rarely() -> None:
    """Let this process look for garbage less often. torch and transformers bring 400,000 objects that live as long as
    it does: looking through them again and again is a sixth of the time of their import."""
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for garbage rarely, and not among what is there already. For a process that keeps books of very
    many objects, which live: looking through these again and again is a third of its time. Not for one that holds
    tensors, which would stay longer where they are part of a cycle. Inside another, it does nothing."""
    if gc.get_threshold()[0] == COLLECT_AFTER_WITHOUT_TENSORS:
        yield
        return
    before, over = gc.get_threshold(), threading.Event()
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_WITHOUT_TENSORS, *before[1:])
    threading.Thread(target=_collect_now_and_then, args=(over,), name="garbage", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        gc.set_threshold(*before)
        gc.unfreeze()


def _collect_now_and_then(over: threading.Event) -> None:
    while not over.wait(COLLECT_EVERY_S):
        gc.collect()
