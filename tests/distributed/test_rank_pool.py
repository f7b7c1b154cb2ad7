"""A call of the rank pool that does not get all its answers costs itself alone, and says where its ranks are."""

import os
import signal
import time
from collections.abc import Iterator
from threading import Timer
from types import FrameType

import pytest

from grpo_mcore.parallel.mesh import Address
from grpo_mcore.tools.parity.rank_pool import RankFailed, RankPool

HERE = "tests.distributed.test_rank_pool"


def number(address: Address, value: int) -> tuple[int, int]:
    return address.rank, value


def rank_1_sleeps(address: Address) -> str:
    if address.rank == 1:
        a_long_sleep()
    return "a late answer"


def a_long_sleep() -> None:
    time.sleep(3)


def rank_1_ends(address: Address) -> int:
    if address.rank == 1:
        os._exit(7)
    time.sleep(60)
    return address.rank


def rank_1_raises(address: Address) -> int:
    if address.rank == 1:
        raise ValueError("a wrong shape")
    return address.rank


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    assert pool.run(2, f"{HERE}:number", 0) == [(0, 0), (1, 0)]
    yield pool
    pool.close()


def test_a_rank_that_does_not_answer_is_named_with_its_place(pool: RankPool) -> None:
    with pytest.raises(
        RankFailed, match=r"rank 1 of .* did not answer \(limit 1 s\): it is at(.|\n)*a_long_sleep"
    ) as caught:
        pool.run(2, f"{HERE}:rank_1_sleeps", timeout_s=1)
    assert "rank 0" not in str(caught.value)
    assert pool.run(2, f"{HERE}:number", 1) == [(0, 1), (1, 1)], "no late answer"


def test_a_rank_that_ends_is_named_at_once(pool: RankPool) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of .*: its process has ended: exit code 7"):
        pool.run(2, f"{HERE}:rank_1_ends")
    assert time.monotonic() - began < 50
    assert pool.run(2, f"{HERE}:number", 2) == [(0, 2), (1, 2)]


def test_a_rank_that_raises_goes_on(pool: RankPool) -> None:
    pool.run(2, f"{HERE}:number", 2)  # starts what is not there
    before = [rank.process.pid for rank in pool._ranks if rank]
    with pytest.raises(RankFailed, match=r"rank 1 of (.|\n)*ValueError: a wrong shape"):
        pool.run(2, f"{HERE}:rank_1_raises")
    assert pool.run(2, f"{HERE}:number", 3) == [(0, 3), (1, 3)]
    assert [rank.process.pid for rank in pool._ranks if rank] == before


def test_an_interrupted_call_leaves_no_answer_behind(pool: RankPool) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("a time limit of the tests")

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        with pytest.raises(TimeoutError, match="a time limit of the tests"):
            pool.run(2, f"{HERE}:rank_1_sleeps")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert pool.run(2, f"{HERE}:number", 4) == [(0, 4), (1, 4)]
