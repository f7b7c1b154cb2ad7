from __future__ import annotations

import gc
import multiprocessing
import time
import weakref
from concurrent.futures import ProcessPoolExecutor

import pytest

from grpo_mcore.base import garbage
from grpo_mcore.base.garbage import COLLECT_AFTER_WITHOUT_TENSORS, rare_collections


def garbage_is_collected_rarely() -> None:
    before = gc.get_threshold()

    class Cycle:
        def __init__(self) -> None:
            self.me = self

    there = Cycle()
    with pytest.raises(KeyError), rare_collections():
        assert gc.get_threshold()[0] == COLLECT_AFTER_WITHOUT_TENSORS
        assert all(known is not there for known in gc.get_objects()), "nobody looks at what was there before"
        gone = weakref.ref(Cycle())
        _objects = [Cycle() for _ in range(COLLECT_AFTER_WITHOUT_TENSORS // 4)]
        assert gone() is not None  # by default it were collected by now
        gc.collect()
        assert gone() is None
        raise KeyError
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
    garbage.COLLECT_EVERY_S = 0.01
    with rare_collections():
        gone, deadline = weakref.ref(Cycle()), time.monotonic() + 60
        while gone() is not None:
            assert time.monotonic() < deadline, "it is collected now and then all the same"
            time.sleep(0.01)


def test_garbage_is_collected_rarely_and_as_before_afterwards() -> None:
    """In a process of its own: what other tests have imported has settings of its own for the collection."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(garbage_is_collected_rarely).result(timeout=100)
