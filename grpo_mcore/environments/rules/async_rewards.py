"""Asynchronous reward functions, such as models behind HTTP: the calls for all samples wait together, in the event loop
of one process, each function with its own limits.

    run, several threads -- jobs (pickle), one a sample --> this program: a task for each job, in one event loop
                        <-- results (JSON), as they come --

The program is a host like that of `verifier_pool.py`, with the same environment variables and the same ends. A call
that blocks the event loop is interrupted after its time limit, and costs its own sample. Where the program dies, the
run starts another one, and asks again about the samples that were under way.
"""

import asyncio
import contextlib
import hashlib
import json
import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from grpo_mcore.environments.http_retries import RetryPolicy, failure_of
from grpo_mcore.environments.registry import import_by_path
from grpo_mcore.environments.rules.reward_functions import Sample, failed_rule, number_of, reward_arguments
from grpo_mcore.environments.verifier_pool import VerifierPool, WorkerSpec, described, limit_memory, result_text

THREADS = 64
"""Number of threads for functions that use asyncio.to_thread."""
MOST_CACHED = 100_000
"""Maximum number of remembered calls of one function."""
_TICK_S = 0.25


class AsyncPool(VerifierPool):
    """One process with an event loop. `spec.loader` returns an asynchronous function, which gets each job's arguments;
    `spec.timeout_s`: seconds for which it may block the loop. Several threads may use a pool at a time."""

    program = __name__


class AsyncReward:
    """One asynchronous reward function with its limits, inside the event loop.

    `concurrency`: maximum concurrent calls. `timeout_s`: limit of one attempt. `requests_per_second`: maximum attempts
    started in a second; None: no limit. `cache`: whether calls with the same arguments are made once. A server's
    Retry-After holds back all calls.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Awaitable[Any]],
        *,
        as_messages: bool,
        concurrency: int,
        timeout_s: float,
        retries: RetryPolicy,
        requests_per_second: float | None,
        cache: bool,
    ) -> None:
        self.name, self._function, self._timeout_s, self._retries = name, function, timeout_s, retries
        self._arguments, self._is_trl = reward_arguments(function, as_messages=as_messages)
        self._room = asyncio.Semaphore(concurrency)
        self._period_s = 1.0 / requests_per_second if requests_per_second else 0.0
        self._next_at = 0.0  # monotonic time before which no attempt starts
        self._cached: dict[bytes, asyncio.Task[Any]] | None = {} if cache else None

    async def __call__(self, sample: Sample, failures: list[str]) -> float | None:
        """Return the function's value. Raises what the last attempt raised. `failures` gets a reason for each attempt
        that failed."""
        if self._cached is None:
            return await self._value(sample, failures)
        positional, keywords = self._arguments(sample)
        plain = {name: value for name, value in keywords.items() if not callable(value)}
        key = hashlib.blake2b(pickle.dumps((positional, plain)), digest_size=16).digest()
        if key not in self._cached:
            if len(self._cached) == MOST_CACHED:
                del self._cached[next(iter(self._cached))]
            self._cached[key] = asyncio.create_task(self._value(sample, failures))
        try:
            return await self._cached[key]
        except BaseException:
            self._cached.pop(key, None)
            raise

    async def _value(self, sample: Sample, failures: list[str]) -> float | None:
        async def attempt() -> Any:
            positional, keywords = self._arguments(sample)
            async with self._room:
                await self._wait_for_start()
                try:
                    async with asyncio.timeout(self._timeout_s):
                        return await self._function(*positional, **keywords)
                except (SystemExit, KeyboardInterrupt) as error:  # in a task they would end the program
                    raise RuntimeError(f"it raised {type(error).__name__}") from error

        async def noted_attempt() -> Any:
            try:
                return await attempt()
            except Exception as error:
                status, wait_s = failure_of(error)
                kind = type(error).__name__ if status is None else f"HTTP {status}"
                failures.append(f"{self.name}: {kind}")
                self._next_at = max(self._next_at, time.monotonic() + wait_s)
                raise

        return number_of(await self._retries.run(noted_attempt), self._is_trl)

    async def _wait_for_start(self) -> None:
        start = max(self._next_at, time.monotonic())
        self._next_at = start + self._period_s
        await asyncio.sleep(max(start - time.monotonic(), 0.0))


def gathered(rewards: Sequence[AsyncReward]) -> Callable[[Sample], Awaitable[dict[str, Any]]]:
    """Return a function of a sample that returns what `rules.make_rules` describes, with the "failures" of the
    attempts. It calls all reward functions at the same time; if several fail, the first one counts."""

    async def apply(sample: Sample) -> dict[str, Any]:
        failures: list[str] = []
        answers = await asyncio.gather(*(reward(sample, failures) for reward in rewards), return_exceptions=True)
        values = {}
        for reward, answer in zip(rewards, answers, strict=True):
            if isinstance(answer, Exception):
                return failed_rule(reward.name, answer) | {"failures": failures}
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None and not math.isfinite(answer):
                return {"failed": reward.name, "error": f"its value is {answer}", "failures": failures}
            if answer is not None:
                values[reward.name] = answer
        return {"values": values, "notes": sample.notes, "failures": failures}

    return apply


# From here on: in the program.


class _Blocked(BaseException):
    """A call has blocked the event loop for its time limit. No Exception, which a function might catch."""


def serve(descriptor: int) -> None:
    """Run the program: a task for each job of the connection, answered by [number, result]."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    connection = Connection(descriptor)
    spec, parent = connection.recv()
    try:
        signal.setitimer(signal.ITIMER_REAL, spec.start_s)  # SIGALRM ends the process
        try:
            function = import_by_path(spec.loader, what="function")(*spec.arguments)
            state = ("ready", "")
        except Exception as error:
            state = ("not loaded", described(error))
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        connection.send_bytes(json.dumps(state).encode())
        if state[0] == "ready":
            limit_memory(spec.memory_gb)
            asyncio.run(_answer_jobs(connection, function, spec, parent))
    except (EOFError, OSError):
        pass  # the run has ended
    finally:
        sys.stdout.flush()
        os._exit(0)  # threads of a function may still be waiting


async def _answer_jobs(connection: Connection, function: Callable[..., Any], spec: WorkerSpec, parent: int) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    tasks: set[asyncio.Task[None]] = set()
    ended = asyncio.Event()

    async def answer(number: int, payload: bytes) -> None:
        start = time.perf_counter()
        try:
            text = result_text(await function(*pickle.loads(payload)), seconds=time.perf_counter() - start)
        except _Blocked:
            text = result_text(failure=f"timed out after {spec.timeout_s:g} s", seconds=spec.timeout_s, timed_out=True)
        except BaseException as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                return  # the program ends because of another job: the run asks again
            text = result_text(failure=f"crashed: {described(error)}", seconds=time.perf_counter() - start)
        connection.send_bytes(f"[{number}, {text}]".encode())

    def receive() -> None:
        try:
            while connection.poll():
                task = loop.create_task(answer(*connection.recv()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except (EOFError, OSError):
            ended.set()

    loop.add_reader(connection.fileno(), receive)
    _interrupt_what_blocks(loop, spec.timeout_s)
    while not ended.is_set() and os.getppid() == parent:  # a fork of the run may keep the connection open
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 2 * _TICK_S)


def _interrupt_what_blocks(loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
    """Raise _Blocked from now on in a task that keeps the event loop from going round for `limit_s`."""
    since = time.monotonic()
    seen: asyncio.Task[Any] | None = None

    def note() -> None:
        nonlocal seen
        seen = None
        loop.call_later(_TICK_S, note)

    def look(*_: object) -> None:
        nonlocal seen, since
        task, now = asyncio.current_task(loop), time.monotonic()
        if task is None or task is not seen:
            seen, since = task, now
        elif now - since > limit_s:
            seen = None
            raise _Blocked

    note()
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
