"""Verification that hangs, dies or misbehaves: the others go on, and nothing of it is scored 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.environments.verify_pool import VerifyPool

BROKEN = "tests.unit.environments.broken_verifiers:by_response"
HANGS = ["9**9**9**9", r"\boxed{10!!!}"]


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifyPool]:
    with_math_verify = VerifyPool(num_workers=2, timeout_s=1.0)
    yield with_math_verify
    with_math_verify.close()


@pytest.fixture(scope="module")
def broken() -> Iterator[VerifyPool]:
    os.environ["A_SECRET"] = "of the driver"
    pool = VerifyPool(num_workers=2, timeout_s=0.5, memory_gb=1.0, verifier=BROKEN)
    yield pool
    pool.close()
    del os.environ["A_SECRET"]


@pytest.mark.parametrize(
    ("response", "truth", "reward", "answer", "reason"),
    [
        ("082", "82", 1.0, "082", "correct"),
        ("81", "82", 0.0, "81", "wrong: 81 != 82"),
        (r"It is $\frac{1}{2}$", "0.5", 1.0, r"\frac{1}{2}", "correct"),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0, "x^2+2x+1", "correct"),
        (r"\boxed{x^2+1}", r"\boxed{(x+1)^2}", 0.0, "x^2+1", r"wrong: x^2+1 != \boxed{(x+1)^2}"),
        ("I do not know", "82", 0.0, None, "no answer found"),
        ("", "82", 0.0, None, "no answer found"),
    ],
)
def test_answer_reward_and_reason(pool, response, truth, reward, answer, reason):
    [verdict] = pool.verify([response], [truth])
    assert (verdict.reward, verdict.answer, verdict.reason) == (reward, answer, reason)
    assert verdict.seconds >= 0


def test_verifications_that_hang_cost_no_other_its_verdict(pool):
    with ThreadPoolExecutor(1) as caller:
        waiting = caller.submit(pool.verify, HANGS, ["7"] * len(HANGS))
        others = pool.verify(["1/2"] * 40, ["0.5"] * 40)
        verdicts = waiting.result(timeout=60)
    for verdict in verdicts:
        assert (verdict.reward, verdict.reason) == (None, "timed out after 1 s")
        assert verdict.seconds > 0.9
    assert [other.reward for other in others] == [1.0] * 40


def test_plain_numbers_do_not_go_to_the_workers(pool, monkeypatch):
    asked = []
    monkeypatch.setattr(pool._pool, "run", lambda jobs: asked.extend(jobs) or [])
    verdicts = pool.verify(["082", "81"] * 128, ["82"] * 256)
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0] * 128
    assert asked == []


def test_workers_killed_while_idle_come_back(pool):
    before = pool.worker_pids()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    _until_gone(before)
    verdicts = pool.verify(["1/2"] * 6, ["0.5"] * 6)
    assert [verdict.reward for verdict in verdicts] == [1.0] * 6
    assert not set(before) & set(pool.worker_pids())


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("sleep", "timed out after 0.5 s"),
        ("exit", "crashed: the worker process ended with exit code 3"),
        ("kill", "crashed: the worker process was ended by SIGKILL"),
        ("raise", "crashed: RuntimeError: no verdict today"),
        ("allocate", "crashed: MemoryError"),
    ],
)
def test_what_a_verifier_can_do_wrong_gives_no_reward_and_a_reason(broken, response, reason):
    bad, good, wrong = broken.verify([response, "a", "b"], ["a", "a", "a"])
    assert (bad.reward, bad.answer, bad.reason) == (None, None, reason)
    assert (good.reward, good.reason) == (1.0, "correct")
    assert (wrong.reward, wrong.reason) == (0.0, "wrong: b != a")


def test_a_verifier_may_give_a_number_and_sees_no_secrets(broken):
    half, secret = broken.verify(["half", "secret"], ["a", "a"])
    assert (half.reward, half.answer, half.reason) == (0.5, None, "partly correct: 0.5")
    assert secret.answer == "nothing"


@pytest.mark.parametrize("verifier", ["no.such.module:fn", "tests.unit.environments.broken_verifiers:missing"])
def test_a_verifier_that_does_not_load_is_an_error_at_the_start(verifier):
    with pytest.raises(EnvironmentConfigError, match=f"math verifier '{verifier}' does not load"):
        VerifyPool(num_workers=1, verifier=verifier)


def test_close_ends_workers_that_hang_and_their_callers():
    pool = VerifyPool(num_workers=1, timeout_s=60.0, verifier=BROKEN)
    pids = pool.worker_pids()
    with ThreadPoolExecutor(1) as caller:
        waiting = caller.submit(pool.verify, ["sleep", "a"], ["a", "a"])
        while not any(worker.job for worker in pool._pool._workers):
            time.sleep(0.01)
        pool.close()
        verdicts = waiting.result(timeout=60)
    assert [verdict.reward for verdict in verdicts] == [None, None]
    assert [verdict.reason for verdict in verdicts] == ["not done: the worker pool was closed"] * 2
    _until_gone(pids)


@pytest.mark.slow
def test_workers_do_not_outlive_a_driver_that_was_killed():
    """Neither idle ones nor one in the middle of an endless computation."""
    program = (
        "import threading\n"
        "from grpo_mcore.environments.verify_pool import VerifyPool\n"
        "pool = VerifyPool(num_workers=1, timeout_s=1.0)\n"
        "threading.Thread(target=pool.verify, args=(['9**9**9**9'], ['7']), daemon=True).start()\n"
        "while [worker.state for worker in pool._pool._workers].count('idle') < 1 or not any(\n"
        "    worker.job for worker in pool._pool._workers\n"
        "):\n"
        "    threading.Event().wait(0.01)\n"
        "print(*pool.worker_pids(), flush=True)\n"
        "threading.Event().wait(60)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert len(pids) >= 2
    _until_gone(pids)


def _until_gone(pids: list[int], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if _runs(pid)]}"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
