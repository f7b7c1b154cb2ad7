"""Asynchronous reward functions, such as judges behind HTTP: the calls for all samples wait together, in the event loop
of one process, each function with its own limits.

    run, several threads -- jobs (pickle), one a sample --> this program: a task for each job, in one event loop
                        <-- results (JSON), as they come --

The program is a host like that of `verifier_pool.py`, with the same environment variables and the same ends. A call
that blocks the event loop is interrupted after its time limit, and costs its own sample. Where the program dies, the
run starts another one and finds the sample that killed it by halving.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from grpo_mcore.environments.http_retries import RetryPolicy, failure_of
from grpo_mcore.environments.registry import import_by_path
from grpo_mcore.environments.rules.reward_functions import Sample, failed_rule, number_of, reward_arguments
from grpo_mcore.environments.verifier_pool import Result, VerifierPool, WorkerSpec, described, limit_memory, result_text

THREADS = 64
"""Threads for functions that use asyncio.to_thread."""
MOST_CACHED = 100_000
"""Maximum number of calls of one function that are remembered."""
_TICK_S = 0.25


class AsyncPool(VerifierPool):
    """One process with an event loop. `spec.loader` returns an asynchronous function, which gets each job's arguments;
    `spec.timeout_s`: seconds for which it may block the loop. Several threads may use a pool at a time."""

    program = __name__

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._turns = threading.Condition()
        self._asking = 0  # calls of `run` under way, without those that look for the sample that ended the program
        self._looking = 0  # those
        self._one_looks = threading.Lock()

    def run(self, jobs: Sequence[Sequence[Any]]) -> list[Result]:
        """Apply the function to each job's arguments. Return the results in order, when the last is there."""
        payloads = [pickle.dumps(tuple(arguments)) for arguments in jobs]
        with self._turns:
            self._turns.wait_for(lambda: not self._looking)
            self._asking += 1
        try:
            results = self._ask(payloads)
        finally:
            with self._turns:
                self._asking -= 1
                self._turns.notify_all()
        if None in results:
            with self._turns:
                self._looking += 1
                self._turns.wait_for(lambda: not self._asking)
            try:
                with self._one_looks:
                    results = self._again(payloads, results)
            finally:
                with self._turns:
                    self._looking -= 1
                    self._turns.notify_all()
        return [result or Result(None, "not done: the verifier pool was closed", 0.0) for result in results]

    def _ask(self, payloads: Sequence[bytes]) -> list[Result | None]:
        """Return the results; None where the program ended before."""
        if self._closed:
            return [None] * len(payloads)
        host = self._running_host()
        futures = [host.submit([payload]) for payload in payloads]
        return [None if (results := future.result()) is None else results[0] for future in futures]

    def _again(self, payloads: Sequence[bytes], results: list[Result | None]) -> list[Result | None]:
        """Ask for the missing results half by half, nothing else beside them: a job that ends the program alone is the
        one that ends it."""
        missing = [place for place, result in enumerate(results) if result is None]
        for half in (missing[: len(missing) // 2], missing[len(missing) // 2 :]):
            if not half or self._closed:
                continue
            several = [payloads[place] for place in half]
            answers = self._ask(several)
            if None in answers and len(half) == 1 and not self._closed:
                answers = [Result(None, "crashed: it ended its process", 0.0)]
            elif None in answers:
                answers = self._again(several, answers)
            for place, answer in zip(half, answers, strict=True):
                results[place] = answer
        return results


class AsyncReward:
    """One asynchronous reward function with its limits, inside the event loop.

    `concurrency`: maximum calls at a time; `timeout_s`: of one attempt; `requests_per_second`: attempts started, None:
    no limit; `cache`: calls with the same arguments are made once. A server's Retry-After holds back all calls.
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
            return await self._ask(sample, failures)
        positional, named = self._arguments(sample)
        asked = {name: value for name, value in named.items() if not callable(value)}
        key = hashlib.blake2b(pickle.dumps((positional, asked)), digest_size=16).digest()
        if key not in self._cached:
            if len(self._cached) == MOST_CACHED:
                del self._cached[next(iter(self._cached))]
            self._cached[key] = asyncio.create_task(self._ask(sample, failures))
        try:
            return await self._cached[key]
        except BaseException:
            self._cached.pop(key, None)
            raise

    async def _ask(self, sample: Sample, failures: list[str]) -> float | None:
        async def attempt() -> Any:
            positional, named = self._arguments(sample)
            async with self._room:
                await self._wait_for_start()
                try:
                    async with asyncio.timeout(self._timeout_s):
                        return await self._function(*positional, **named)
                except (SystemExit, KeyboardInterrupt) as error:  # in a task they would end the program
                    raise RuntimeError(f"it raised {type(error).__name__}") from error

        def failed(error: Exception) -> None:
            failures.append(f"{self.name}: {kind_of_failure(error)}")
            self._next_at = max(self._next_at, time.monotonic() + failure_of(error)[1])

        return number_of(await self._retries.run(attempt, on_failure=failed), self._is_trl)

    async def _wait_for_start(self) -> None:
        start = max(self._next_at, time.monotonic())
        self._next_at = start + self._period_s
        await asyncio.sleep(max(start - time.monotonic(), 0.0))


def kind_of_failure(error: BaseException) -> str:
    """Return "HTTP 503", or the type of an exception that has no status."""
    status = failure_of(error)[0]
    return type(error).__name__ if status is None else f"HTTP {status}"


def make_async_rules(rewards: Sequence[AsyncReward]) -> Callable[[Sample], Awaitable[dict[str, Any]]]:
    """Return sample -> what `rules.make_rules` returns, with "failures" of the attempts. All functions are asked at the
    same time; where several fail, the first one counts."""

    async def apply(sample: Sample) -> dict[str, Any]:
        failures: list[str] = []
        answers = await asyncio.gather(*(one(sample, failures) for one in rewards), return_exceptions=True)
        values = {}
        for one, answer in zip(rewards, answers, strict=True):
            if isinstance(answer, Exception):
                return failed_rule(one.name, answer) | {"failures": failures}
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None and not math.isfinite(answer):
                return {"failed": one.name, "why": f"its value is {answer}", "failures": failures}
            if answer is not None:
                values[one.name] = answer
        return {"values": values, "notes": sample.notes, "failures": failures}

    return apply


# From here on: in the program.


class _Blocked(BaseException):
    """A call has blocked the event loop for its time limit. No Exception, which a function might catch."""


def serve(descriptor: int) -> None:
    """Run the program: a task for each job of the connection, answered by [number, [result]]."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    connection = Connection(descriptor)
    spec, parent = connection.recv()
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, spec.start_s)  # SIGALRM ends the process
            function = import_by_path(spec.loader, what="function")(*spec.arguments)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            limit_memory(spec.memory_gb)
        except Exception as error:
            connection.send_bytes(_json(["not loaded", described(error)]))
            return
        connection.send_bytes(_json(["ready", ""]))
        asyncio.run(_answer_jobs(connection, function, spec, parent))
    except (EOFError, OSError):
        pass  # the run has ended
    finally:
        sys.stdout.flush()
        os._exit(0)  # threads of a function may still be waiting


async def _answer_jobs(connection: Connection, function: Callable[..., Any], spec: WorkerSpec, parent: int) -> None:
    """Answer jobs until the run ends."""
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
        connection.send_bytes(f"[{number}, [{text}]]".encode())

    def receive() -> None:
        try:
            while connection.poll():
                number, (payload,) = connection.recv()
                task = loop.create_task(answer(number, payload))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except (EOFError, OSError):
            ended.set()

    loop.add_reader(connection.fileno(), receive)
    with _interrupting_what_blocks(loop, spec.timeout_s):
        while not ended.is_set() and os.getppid() == parent:  # a fork of the run may keep the connection open
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 2 * _TICK_S)


@contextlib.contextmanager
def _interrupting_what_blocks(loop: asyncio.AbstractEventLoop, limit_s: float) -> Iterator[None]:
    """Raise _Blocked in a task that keeps the event loop from going round for `limit_s`, inside the block."""
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
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
