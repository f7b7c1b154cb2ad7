"""Processes that go through the buckets of a refit by themselves: order, errors, deaths and deadlines."""

import multiprocessing
import random
import threading
import time
import uuid
from typing import Any

import pytest

from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.transport.board import Board, Seat, next_bucket


class Crew:
    """Boards of `writers` + `readers` seats of one refit. The first makes the memory."""

    def __init__(self, writers: int, readers: int, timeout_s: float = 20.0) -> None:
        self.boards = [Board.create(f"test.{uuid.uuid4().hex[:8]}")]
        self.boards += [Board.attach(self.boards[0].description) for _ in range(writers + readers - 1)]
        self.size, self.timeout_s = (writers, readers), timeout_s

    def sit(self, session: int, seats: Any = None) -> None:
        for number in range(len(self.boards)) if seats is None else seats:
            kind = "writer" if number < self.size[0] else "reader"
            self.boards[number].sit(Seat(session, number, *self.size, self.timeout_s), f"{kind} {number}")

    def close(self) -> None:
        for board in reversed(self.boards):
            board.close()


def test_the_next_bucket_with_something_to_do() -> None:
    assert next_bucket([False, True, False, False, True, False]) == [1, 1, 4, 4, 4, 6, 6]
    assert next_bucket([]) == [0]


@pytest.mark.parametrize("seed", range(6))
def test_no_half_is_overwritten_and_none_is_read_early(seed: int) -> None:
    """Writers and readers with pauses and gaps at random, over two refits on one board."""
    draw = random.Random(seed)
    writers, readers, buckets = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 9)
    crew = Crew(writers, readers)
    halves: list[list[Any]] = [[None] * writers, [None] * writers]
    wrong: list[str] = []
    busiest = 0

    def write(number: int, session: int, busy: list[bool]) -> None:
        board, following = crew.boards[number], next_bucket(busy)
        index = following[0]
        board.finished(index)
        while index < buckets:
            board.wait(board.readers, index - 1, "read")
            time.sleep(draw.random() * 2e-3)
            halves[index % 2][number] = (session, index)
            index = following[index + 1]
            board.finished(index)

    def read(number: int, session: int, busy: list[bool], written: list[list[bool]]) -> None:
        nonlocal busiest
        board, following = crew.boards[number], next_bucket(busy)
        index = following[0]
        board.finished(index)
        while index < buckets:
            board.wait(board.writers, index + 1, "write")
            for moment in range(2):
                for writer in range(writers):
                    if written[writer][index] and halves[index % 2][writer] != (session, index):
                        wrong.append(f"{number}: {halves[index % 2][writer]} instead of {index}")
                    latest = halves[(index + 1) % 2][writer]
                    busiest += moment and latest == (session, index + 1)
                time.sleep(draw.random() * 4e-3)
            index = following[index + 1]
            board.finished(index)

    for session in (11, 12):
        crew.sit(session)
        written = [[draw.random() < 0.7 for _ in range(buckets)] for _ in range(writers)]
        threads = [
            threading.Thread(target=write, args=(number, session, written[number])) for number in range(writers)
        ] + [
            threading.Thread(
                target=read, args=(writers + at, session, [draw.random() < 0.8 for _ in range(buckets)], written)
            )
            for at in range(readers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert not wrong
    if buckets > 6:
        assert busiest, "while one bucket is read the next is filled"
    crew.close()


def test_who_fails_takes_all_others_along_with_the_cause() -> None:
    crew = Crew(2, 1)
    crew.sit(1)
    crew.boards[1].fail("out of memory")
    for board in (crew.boards[0], crew.boards[2]):
        with pytest.raises(RefitError, match="writer 1 left the refit: out of memory"):
            board.wait(board.writers, 1, "fill bucket 0")
    crew.sit(2, [0, 2])  # the next refit: what is left of the last one does not count
    crew.boards[0].finished(3)
    crew.boards[2].wait([0], 3, "fill bucket 2")
    crew.close()


def test_a_wait_has_a_deadline_and_says_for_whom() -> None:
    crew = Crew(2, 1, timeout_s=0.2)
    crew.sit(1, [0, 2])
    with pytest.raises(RefitError, match=r"waited 0.2 s for writer 0, seat 1 \(not taken\) to fill bucket 0"):
        crew.boards[2].wait(crew.boards[2].writers, 1, "fill bucket 0")
    crew.close()


def test_an_abort_ends_the_waiting() -> None:
    crew = Crew(1, 1)
    crew.sit(1)
    threading.Timer(0.1, crew.boards[1].fail, ["it was aborted"]).start()
    with pytest.raises(RefitError, match="reader 1 left the refit: it was aborted"):
        crew.boards[1].wait([0], 1, "fill bucket 0")
    crew.sit(2)
    crew.boards[0].finished(1)
    crew.boards[1].wait([0], 1, "fill bucket 0")
    crew.close()


def hold_a_seat(description: dict[str, Any], seated: Any) -> None:
    board = Board.attach(description)
    board.sit(Seat(1, 0, 1, 1, 60.0), "policy rank 0")
    seated.set()
    time.sleep(600)


def test_a_process_that_dies_is_noticed_at_once() -> None:
    crew = Crew(1, 1, timeout_s=60.0)
    crew.sit(1, [1])
    context = multiprocessing.get_context("spawn")
    seated = context.Event()
    other = context.Process(target=hold_a_seat, args=(crew.boards[0].description, seated), daemon=True)
    other.start()
    assert seated.wait(60)
    other.kill()
    began = time.monotonic()
    with pytest.raises(RefitError, match="policy rank 0 has died; it was to fill bucket 0"):
        crew.boards[1].wait([0], 1, "fill bucket 0")
    assert time.monotonic() - began < 40
    other.join()
    crew.close()


def test_more_than_there_are_seats() -> None:
    crew = Crew(1, 1)
    with pytest.raises(RefitError, match="1,?025 processes|at most 1024"):
        crew.boards[0].sit(Seat(1, 0, 1, 1024, 1.0), "writer")
    crew.close()
