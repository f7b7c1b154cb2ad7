"""Jobs in worker processes: one that hangs, crashes or takes too much memory costs itself and no other."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_mcore.base import processes
from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.environments.verifier_pool import VerifierPool, WorkerSpec, WorkerStartError
from tests.waiting import wait_until

pytestmark = pytest.mark.slow  # processes that are started and killed

JOBS = "tests.unit.environments.pool_jobs"


def spec(loader: str = "make", *arguments: Any, **limits: Any) -> WorkerSpec:
    preload = (JOBS, "no_such_module")  # one that the function may never reach
    settings = {"num_workers": 2, "timeout_s": 2.0, "memory_gb": 0.25, "preload": preload} | limits
    return WorkerSpec("these jobs", f"{JOBS}:{loader}", arguments, **settings)


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "of the run")
        pool = VerifierPool(spec())
        yield pool
        pool.close()


def pool_processes(pool: VerifierPool) -> tuple[psutil.Process, list[psutil.Process]]:
    """The host and the workers."""
    host = psutil.Process(pool._host._process.pid)
    return host, host.children()


def test_values_come_in_order_and_to_several_threads(pool: VerifierPool) -> None:
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda first: pool.run([("square", first + n) for n in range(20)]), range(8)))
    assert [[r.value for r in results] for results in found] == [[(f + n) ** 2 for n in range(20)] for f in range(8)]
    assert all(result.failure is None and result.seconds >= 0 for results in found for result in results)
    assert pool.run([]) == []


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ("sleep", "timed out after 2 s"),
        ("spin", "timed out after 2 s"),
        ("compute", "timed out after 2 s"),  # in C code, where no Python signal handler runs
        ("stop", "timed out after 2 s"),
        ("leave", "crashed: the worker process ended: exit code 3"),
        ("leave_politely", "crashed: SystemExit: 5"),
        ("die", "crashed: the worker process ended: killed by SIGKILL"),
        ("fail", "crashed: RuntimeError: not today"),
        ("allocate", "out of memory: more than 0.25 GiB"),
        ("hoard", "out of memory: more than 0.25 GiB"),
        ("recurse", "crashed: RecursionError: maximum recursion depth exceeded"),
        ("give_a_set", "crashed: TypeError: Object of type set is not JSON serializable"),
        ("no_such_job", "crashed: KeyError: 'no_such_job'"),
    ],
)
def test_a_fault_costs_its_own_job_and_is_named(pool: VerifierPool, job: str, reason: str) -> None:
    results = pool.run([("square", 3), (job,), *[("square", n) for n in range(5)]])
    assert [result.value for result in results] == [9, None, 0, 1, 4, 9, 16]
    assert results[1].failure == reason
    assert [result.failure for result in results].count(None) == 6


def test_a_worker_sees_no_secrets_and_one_thread(pool: VerifierPool) -> None:
    [result] = pool.run([("environment",)])
    assert "HF_TOKEN" not in result.value and result.value["OMP_NUM_THREADS"] == "1"


def test_a_new_worker_does_not_import_the_verifier_again(pool: VerifierPool) -> None:
    found = []
    for _ in range(2):
        [result] = pool.run([("processes",)])
        found.append(result.value)
        pool.run([("die",), ("die",)])
    (first, imported_in), (second, imported_again) = found
    assert imported_in == imported_again
    assert len({first, second, imported_in}) == 3


def test_time_to_load_is_not_time_of_the_first_job() -> None:
    with closing(VerifierPool(spec("make", 1.0, timeout_s=0.5))) as pool:
        assert [result.value for result in pool.run([("square", n) for n in range(4)])] == [0, 1, 4, 9]


@pytest.mark.parametrize("victim", ["host", "idle workers"])
def test_processes_that_were_killed_are_replaced(victim: str) -> None:
    with closing(VerifierPool(spec())) as pool:
        host, workers = pool_processes(pool)
        for process in {"host": [host], "idle workers": workers}[victim]:
            process.kill()
        assert len(workers) == 2 and not processes.wait(workers, 10.0)
        for _ in range(2):
            assert [result.value for result in pool.run([("square", n) for n in range(4)])] == [0, 1, 4, 9]


def test_a_job_whose_host_was_killed_is_done_by_the_next() -> None:
    with closing(VerifierPool(spec(timeout_s=60.0))) as pool, ThreadPoolExecutor(1) as caller:
        first = pool._host
        waiting = caller.submit(pool.run, [("square", 2), ("sleep", 2.0)])
        wait_until(lambda: len(first._futures) == 1)  # the sleeping one
        first._process.kill()
        square, slept = waiting.result()
        assert (square.value, slept.failure) == (4, None)
        assert pool._host is not first


def test_a_function_that_does_not_load() -> None:
    before = processes.descendants()
    with pytest.raises(EnvironmentConfigError, match="these jobs does not load: OSError: no disk"):
        VerifierPool(spec("make_nothing"))
    with pytest.raises(EnvironmentConfigError, match=f"cannot import the function '{JOBS}:missing'"):
        VerifierPool(spec("missing"))
    with pytest.raises(WorkerStartError, match="these jobs: the worker processes do not start: one ended before"):
        VerifierPool(spec("die_at_once"))
    with pytest.raises(WorkerStartError, match="these jobs: the worker processes do not start"):
        VerifierPool(spec("make", 60.0, start_s=0.5))
    assert not processes.wait(set(processes.descendants()) - set(before), 10.0)


def test_close_ends_the_workers_whatever_they_do() -> None:
    pool = VerifierPool(spec(timeout_s=60.0))
    host, workers = pool_processes(pool)
    with ThreadPoolExecutor(1) as caller:
        waiting = caller.submit(pool.run, [("compute",), ("stop",), ("square", 2)])
        wait_until(lambda: any(worker.status() == psutil.STATUS_STOPPED for worker in workers))
        pool.close()
        pool.close()
        assert {result.failure for result in waiting.result()} == {"not done: the verifier pool was closed"}
    assert not processes.wait([host, *workers], 10.0)
    assert pool.run([("square", 2)])[0].failure == "not done: the verifier pool was closed"


def test_what_a_job_has_started_ends_with_its_worker(tmp_path: Path) -> None:
    """Those of a job that is out of time at once, while others go on; those of the others when the pool closes."""
    late, early = tmp_path / "late", tmp_path / "early"
    with closing(VerifierPool(spec(timeout_s=1.0, num_workers=1))) as pool:
        results = pool.run([("start_process", str(late), 60.0), ("start_process", str(early), 0.0), ("square", 2)])
        assert [result.failure for result in results] == ["timed out after 1 s", None, None]
        wait_until(lambda: not psutil.pid_exists(int(late.read_text())), 10.0)
        assert psutil.pid_exists(int(early.read_text())) and pool.run([("square", 3)])[0].value == 9
    wait_until(lambda: not psutil.pid_exists(int(early.read_text())), 10.0)


@pytest.mark.parametrize("first", ["driver", "host"])
def test_nothing_outlives_a_driver_that_was_killed(first: str) -> None:
    """The driver's script has no `if __name__ == "__main__"`: workers must not run it again."""
    script = f"""
        import threading, time
        from grpo_mcore.environments.verifier_pool import VerifierPool, WorkerSpec

        pool = VerifierPool(WorkerSpec("these jobs", "{JOBS}:make", (), num_workers=3, timeout_s=60.0))
        threading.Thread(target=pool.run, args=([("compute",), ("stop",)],)).start()
        time.sleep(0.5)
        print(pool._host._process.pid, flush=True)
        time.sleep(600)
    """
    driver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    host = psutil.Process(int(driver.stdout.readline()))
    family = [host, *host.children(recursive=True)]
    assert len(family) == 4  # with three workers
    if first == "host":
        driver.send_signal(signal.SIGSTOP)  # it must not start another one
        host.kill()
    driver.kill()
    driver.communicate()
    assert not processes.wait(family, 20.0)
