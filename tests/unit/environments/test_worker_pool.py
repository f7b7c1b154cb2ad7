"""Jobs in worker processes: those that hang, crash or take too much cost themselves, and nobody else."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_mcore.environments.pool_worker import hold_in_huge_pages
from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.environments.worker_pool import WorkerPool
from grpo_mcore.environments.worker_process import (
    Forks,
    Launcher,
    Programs,
    Times,
    Work,
    WorkerProcess,
    WorkerStartError,
)
from grpo_mcore.environments.worker_turns import Job, Turns, Worker

JOBS = "tests.unit.environments.pool_jobs"


def work(maker: str = "make", *arguments: Any, **how: Any) -> Work:
    return Work("these jobs", f"{JOBS}:{maker}", arguments, **({"hard_s": 60.0, "memory_gb": 1.0} | how))


@pytest.fixture(scope="module", params=[Forks, Programs])
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    os.environ["A_SECRET"] = "of the driver"
    pool = WorkerPool(request.param(work()), 2, 1.0, spare=1)
    yield pool
    pool.close()
    del os.environ["A_SECRET"]


def wait_until(what: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_values_come_in_order_from_several_processes_and_to_several_threads(pool: WorkerPool) -> None:
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda first: pool.run([("square", first + n) for n in range(20)]), range(8)))
    assert [[r.value for r in results] for results in found] == [[(f + n) ** 2 for n in range(20)] for f in range(8)]
    assert all(result.failure is None and result.seconds >= 0 for results in found for result in results)
    assert pool.run([]) == []


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ("sleep", "timed out after 1 s"),
        ("spin", "timed out after 1 s"),
        ("compute", "timed out after 1 s"),
        ("stop", "timed out after 1 s"),
        ("leave", "crashed: the worker process ended with exit code 3"),
        ("die", "crashed: the worker process was ended by SIGKILL"),
        ("fail", "crashed: RuntimeError: not today"),
        ("allocate", "crashed: MemoryError"),
        ("recurse", "crashed: RecursionError: maximum recursion depth exceeded"),
        ("give_a_set", "crashed: TypeError: Object of type set is not JSON serializable"),
        ("no_such_job", "crashed: KeyError: 'no_such_job'"),
    ],
)
def test_what_a_job_can_do_wrong(pool: WorkerPool, job: str, reason: str) -> None:
    results = pool.run([("square", 3), (job,), *[("square", n) for n in range(5)]])
    assert [result.value for result in results] == [9, None, 0, 1, 4, 9, 16]
    assert results[1].failure == reason
    assert [result.failure for result in results].count(None) == 6


def test_a_job_that_ends_its_process_politely(pool: WorkerPool) -> None:
    """A forked worker must not go on as a second template."""
    [result] = pool.run([("leave_politely",)])
    assert result.failure is not None and result.failure.startswith("crashed: the worker process ended with exit code")
    assert pool.run([("square", 2)])[0].value == 4


def test_the_workers_come_back(pool: WorkerPool) -> None:
    pool.run([("die",), ("sleep",), ("leave",), ("spin",)] * 2)
    wait_until(lambda: len(pool._workers) >= 3 and {worker.state for worker in pool._workers} == {"idle"})
    before = set(pool.worker_pids())
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not before & set(pool.worker_pids()))
    assert [result.value for result in pool.run([("square", 2)] * 10)] == [4] * 10
    wait_until(lambda: len(set(pool.worker_pids()) - before) >= 3)
    assert not before & set(pool.worker_pids())


def test_a_worker_sees_no_secrets_and_one_thread(pool: WorkerPool) -> None:
    [result] = pool.run([("environment",)])
    assert "A_SECRET" not in result.value and result.value["OMP_NUM_THREADS"] == "1"


def test_a_slow_job_makes_room(tmp_path: Path) -> None:
    """It waits for a file that is there only when the job behind it is done: with one place for both."""
    pool = WorkerPool(Forks(work("make", "hello, ")), 1, 60.0, spare=1)
    assert pool.run([("say", "you")])[0].value == "hello, you"
    with ThreadPoolExecutor(1) as caller, closing(pool):
        waiting = caller.submit(pool.run, [("wait_for", str(tmp_path / "done"))])
        wait_until(lambda: any(worker.job for worker in pool._workers))
        [slow] = [worker.process.pid for worker in pool._workers if worker.job]
        assert pool.run([("square", 2)])[0].value == 4
        (tmp_path / "done").touch()
        assert waiting.result()[0].value == "seen"
        wait_until(lambda: {worker.state for worker in pool._workers} == {"idle"})
        assert slow in pool.worker_pids(), "it is taken back"


def test_where_processors_are_short_those_that_hang_stand_still_and_the_others_end() -> None:
    """One place, and one processor: a job of a third of a second ends, though others hang before and beside it."""
    with ThreadPoolExecutor(4) as caller, closing(WorkerPool(Forks(work()), 1, 10.0, spare=1)) as pool:
        pool._turns = Turns(1)
        hanging = [caller.submit(pool.run, [("spin",)]) for _ in range(2)]
        wait_until(lambda: [worker.state for worker in pool._workers].count("slow") == 2)
        long = caller.submit(pool.run, [("busy_for", 0.3)])
        wait_until(lambda: [worker.state for worker in pool._workers].count("slow") == 3)
        assert all(result.value == n * n for n, result in enumerate(pool.run([("square", n) for n in range(200)])))
        wait_until(lambda: any(worker.paused_at and worker.process._state() == "T" for worker in list(pool._workers)))
        assert long.result()[0].value == "done"
        pool.close()
        assert {pending.result()[0].failure for pending in hanging} == {"not done: the worker pool was closed"}


def test_a_program_that_stands_still_ends_with_its_pool_s_process() -> None:
    """Its connection closes, but it cannot see that."""
    script = f"""
        import time
        from grpo_mcore.environments.worker_pool import WorkerPool
        from grpo_mcore.environments.worker_process import Programs, Work

        pool = WorkerPool(Programs(Work("these jobs", "{JOBS}:make", (), hard_s=60.0)), 1, 60.0)
        pool._workers[0].process.pause()
        print(pool.worker_pids()[0], flush=True)
        time.sleep(600)
    """
    driver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    [worker] = [psutil.Process(int(driver.stdout.readline()))]
    wait_until(lambda: worker.status() == psutil.STATUS_STOPPED)
    driver.kill()
    driver.communicate()
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 10.0)


def test_what_the_first_workers_found_out_later_ones_know() -> None:
    with closing(WorkerPool(Forks(work("make_learning")), 1, 60.0)) as pool:
        assert [result.value for result in pool.run([("a",), ("b",), ("die",)])][:2] == [[], ["a"]]
        assert pool.run([("c",)])[0].value == ["a", "b"], "a worker that was forked after the lessons"
    with closing(WorkerPool(Forks(work("make_learning", False)), 1, 60.0)) as pool:
        pool.run([("a",), ("b",), ("die",)])
        assert pool.run([("c",)])[0].value == [], "one that may not be run in the template"


@pytest.mark.parametrize("launcher", [Forks, Programs])
def test_garbage_is_searched_for_between_jobs(launcher: type[Launcher]) -> None:
    with closing(WorkerPool(launcher(work()), 1, 60.0)) as pool:
        assert [result.value for result in pool.run([("keep", 20_000)] * 40)] == [0] * 40


def test_a_worker_that_gives_its_memory_back_goes_on() -> None:
    with closing(WorkerPool(Forks(work(memory_gb=0.25)), 1, 60.0)) as pool:
        before, given_back, same, kept, other = pool.run([("pid",), ("allocate",), ("pid",), ("hoard",), ("pid",)])
    assert given_back.failure == kept.failure == "crashed: MemoryError"
    assert before.value == same.value != other.value


def test_without_room_for_slow_ones_a_job_waits_for_its_place() -> None:
    pool = WorkerPool(Programs(work()), 1, 0.5, slow_aside=False)
    results = pool.run([("sleep",), ("pid",), ("pid",)])
    assert results[0].failure == "timed out after 0.5 s"
    assert results[1].value == results[2].value not in (None, os.getpid())
    pool.close()


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1)
    or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="needs a kernel that makes huge pages when it is asked: Linux 6.1",
)
def test_a_template_s_memory_is_in_huge_pages() -> None:
    bytes_of_it = 8 * 2**20
    with mmap.mmap(-1, bytes_of_it, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(text := os.urandom(bytes_of_it))
        first = ctypes.addressof(here := ctypes.c_char.from_buffer(memory))
        before = huge_bytes()
        hold_in_huge_pages(first + 4096, first + bytes_of_it)  # from the middle of one
        gained = huge_bytes() - before
        assert memory[:] == text
        del here
    assert bytes_of_it - 2 * 2 * 2**20 <= gained <= bytes_of_it


def huge_bytes() -> int:
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(row.split()[1]) for row in rows if row.startswith("AnonHugePages:"))


def test_the_template_is_started_anew() -> None:
    """With it go the workers that it had forked, and the job that one of them was at is done again."""
    launcher = Forks(work())
    pool = WorkerPool(launcher, 2, 60.0)
    with ThreadPoolExecutor(1) as caller, closing(pool):
        first = launcher._template._process.pid
        waiting = caller.submit(pool.run, [("wait_for", "/proc/1/no/such")])
        wait_until(lambda: any(worker.job for worker in pool._workers))
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: launcher._template._process.pid != first)
        assert pool.run([("square", 2)])[0].value == 4
        pool.close()
        assert waiting.result()[0].failure == "not done: the worker pool was closed"


def test_a_worker_ends_by_itself_where_nobody_ends_it() -> None:
    pool = WorkerPool(Forks(work(hard_s=0.3)), 1, 60.0)
    [result] = pool.run([("sleep",)])
    assert result.failure == "crashed: the worker process was ended by SIGALRM"
    pool.close()


@pytest.mark.parametrize("launcher", [Forks, Programs])
class TestStart:
    def test_a_function_that_does_not_load(self, launcher: type[Launcher]) -> None:
        with pytest.raises(EnvironmentConfigError, match="these jobs does not load: OSError: no disk"):
            WorkerPool(launcher(work("make_nothing")), 1, 1.0)

    def test_a_function_that_is_not_there(self, launcher: type[Launcher]) -> None:
        with pytest.raises(EnvironmentConfigError, match=f"cannot import the function '{JOBS}:missing'"):
            WorkerPool(launcher(work("missing")), 1, 1.0)

    def test_a_process_that_dies_before_it_is_ready(self, launcher: type[Launcher]) -> None:
        with pytest.raises(WorkerStartError, match="these jobs: .* exit code 4.* 3 times in a row"):
            WorkerPool(launcher(work("die_at_once")), 1, 1.0)

    def test_close_ends_the_workers_whatever_they_do(self, launcher: type[Launcher]) -> None:
        pool = WorkerPool(launcher(work()), 2, 60.0)
        with ThreadPoolExecutor(1) as caller, closing(pool):
            waiting = caller.submit(pool.run, [("spin",), ("sleep",), ("square", 2)])
            wait_until(lambda: sum(worker.job is not None for worker in pool._workers) == 2)
            processes = [psutil.Process(pid) for pid in pool.worker_pids()]
            pool.close()
            pool.close()
            assert {result.failure for result in waiting.result()[:2]} == {"not done: the worker pool was closed"}
        assert not psutil.wait_procs(processes, timeout=60)[1]
        with pytest.raises(RuntimeError, match="the worker pool is closed"):
            pool.run([("square", 2)])


class Scripted(WorkerProcess):
    """A process of which the kernel says what it is told here."""

    def __init__(self, state: str, ran_s: float, waited_s: float) -> None:
        self._now, self._is = Times(ran_s, waited_s), state

    def times(self) -> Times:
        return self._now

    def _state(self) -> str:
        return self._is

    def _signal(self, number: signal.Signals) -> None:
        pass

    def exit_code(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("state", "ran_s", "waited_s", "own_s"),
    [
        ("R", 2.0, 1.0, 1.5),  # a wait that is not over is not counted yet: all but what it ran may be one
        ("S", 2.0, 5.0, 6.0),  # 10 s, of which it waited 4
        ("S", 0.0, 0.0, 10.0),  # the kernel does not count
    ],
)
def test_what_a_job_waits_for_a_processor_is_not_its_own(
    state: str, ran_s: float, waited_s: float, own_s: float
) -> None:
    assert Scripted(state, ran_s, waited_s).own_s(10.0, Times(0.5, 1.0)) == own_s


@pytest.mark.parametrize(("ran_s", "given_up"), [([0.1, 0.1], []), ([0.1, 3.0], [1]), ([3.0, 2.5], [0])])
def test_whose_place_is_taken_where_all_slow_ones_are_late(ran_s: list[float], given_up: list[int]) -> None:
    """The one that ran longest, and none that has only waited for a processor."""
    pool = object.__new__(WorkerPool)
    pool.timeout_s, pool._max_slow, pool._lost_s = 10.0, 2, 0.0
    workers = [Worker(Scripted("R", ran, 0.0), since=0.0, state="slow", job=Job(())) for ran in ran_s]
    jobs = [worker.job for worker in workers]
    pool._workers = workers
    assert pool._room_for_slow(9.9) is False, "none is late"
    assert pool._room_for_slow(15.0) is bool(given_up)
    assert [number for number, job in enumerate(jobs) if job is not None and job.future.done()] == given_up
    assert [worker.state for worker in workers].count("dying") == len(given_up)


def slow_worker(ran_s: float, state: str = "R", paused_at: float | None = None) -> Worker:
    return Worker(Scripted(state, ran_s, 0.0), since=0.0, state="slow", paused_at=paused_at)


@pytest.mark.parametrize(
    ("others", "ran_s", "running"),
    [
        (0, [0.3, 0.1, 0.2], [1, 2]),  # two processors, for those that have had least
        (1, [0.3, 0.1, 0.2], [1]),
        (8, [0.3, 0.02, 0.2], [1]),  # nobody can spare one, but this one has had little
        (8, [0.3, 0.1, 0.2], []),
    ],
)
def test_whose_turn_it_is(others: int, ran_s: list[float], running: list[int]) -> None:
    workers = [slow_worker(ran, paused_at=1.0 if number else None) for number, ran in enumerate(ran_s)]
    sleeping = slow_worker(0.0, "S")
    turns = Turns(2)
    turns._credit_s = -1.0
    turns.deal([sleeping, *workers], others, 0.05, now=2.0)
    assert [number for number, worker in enumerate(workers) if worker.paused_at is None] == running
    assert sleeping.paused_at is None, "it needs no processor"


def test_without_a_spare_processor_they_have_one_on_credit() -> None:
    """A two-hundredth of two processors: after a turn of 10 ms it takes a second until the next."""
    worker, turns = slow_worker(0.1), Turns(2)
    ran, now = 0.1, 0.0
    turns.deal([worker], 2, 0.05, now)
    for _ in range(3000):
        now += 0.01
        ran += 0.01 if worker.paused_at is None else 0.0
        worker.process._now = Times(ran, 0.0)  # type: ignore[attr-defined]
        turns.deal([worker], 2, 0.05, now)
    assert ran - 0.1 == pytest.approx(0.005 * 2 * 30.0, rel=0.1)


def test_time_in_which_it_was_paused_is_not_its_own() -> None:
    worker = slow_worker(1.0, "T")
    worker.pause(2.0)
    assert worker.own_s(9.0) == 2.0
    worker.resume(10.0)
    assert worker.own_s(10.5) == 2.5
    worker.resume(11.0)
    assert worker.own_s(10.5) == 2.5, "it was not paused"
