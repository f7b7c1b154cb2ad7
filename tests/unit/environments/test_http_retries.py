"""Which failures pass, and how long to wait; exceptions of the usual clients, and a Gym's client against a server."""

from __future__ import annotations

import asyncio
import email.utils
import io
import threading
import time
import urllib.error
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import pytest

from grpo_mcore.environments.agents.samples import AgentFailure
from grpo_mcore.environments.gym.gym_client import GymClient
from grpo_mcore.environments.http_retries import RetryPolicy, failure_of, is_transient, repetition_wait_s, retry_after_s


def test_which_failures_pass() -> None:
    passing = [status for status in range(400, 600) if is_transient(status)]
    assert passing == [408, 425, 429, *range(500, 600)]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({"Retry-After": "3"}, 3.0), ({"retry-after": "0.5"}, 0.5), ({}, 0.0), (None, 0.0), ({"Retry-After": "soon"}, 0.0)]
    + [({"Retry-After": value}, 0.0) for value in ("-1", "nan", "inf", "Wed, 21 Oct 2015 07:28:00 GMT")]
    + [({"Retry-After": None}, 0.0), ([("Retry-After", "3")], 3.0), (["Retry-After"], 0.0), (7, 0.0)]
    + [({"Retry-After": "9999"}, 60.0), ({"Retry-After": email.utils.formatdate(4e9, usegmt=True)}, 60.0)],
)
def test_retry_after(headers: Any, seconds: float) -> None:
    assert retry_after_s(headers) == seconds


@pytest.mark.parametrize(("asked_s", "least"), [(0.0, [0.05, 0.1]), (0.07, [0.07, 0.1])])
def test_the_wait_doubles_and_is_no_shorter_than_asked(asked_s: float, least: list[float]) -> None:
    starts = []

    async def attempt() -> None:
        starts.append(time.monotonic())
        raise ConnectionError(len(starts))

    with pytest.raises(ConnectionError, match="3"):
        asyncio.run(RetryPolicy(retries=2, backoff_s=0.05).run(attempt, lambda error: asked_s))
    waits = [after - before for before, after in pairwise(starts)]
    assert len(waits) == 2 and all(wait >= needed for wait, needed in zip(waits, least, strict=True))


@pytest.mark.parametrize("error", [TypeError("a mistake"), asyncio.CancelledError()])
def test_a_final_error_is_raised_at_once(error: BaseException) -> None:
    attempts = []

    async def attempt() -> None:
        attempts.append(1)
        raise error

    with pytest.raises(type(error)):
        asyncio.run(RetryPolicy(retries=2, backoff_s=0.0).run(attempt))
    assert attempts == [1]


def test_exceptions_of_the_usual_clients() -> None:
    headers = Message()
    headers["Retry-After"] = "2"
    request = httpx.Request("GET", "http://judge")
    info: Any = SimpleNamespace(real_url="http://judge")
    replied = httpx.Response(503, headers={"retry-after": "2"}, request=request)
    requests_error = OSError("429")
    requests_error.response = SimpleNamespace(status_code=429, headers={"Retry-After": "2"})  # type: ignore[attr-defined]
    for error, status in (
        (aiohttp.ClientResponseError(info, (), status=429, headers={"Retry-After": "2"}), 429),  # type: ignore[arg-type]
        (httpx.HTTPStatusError("", request=request, response=replied), 503),
        (urllib.error.HTTPError("http://judge", 408, "", headers, io.BytesIO()), 408),
        (requests_error, 429),
    ):
        assert failure_of(error) == (status, 2.0)
        assert failure_of(ExceptionGroup("of a TaskGroup", [error])) == (status, 2.0)
    page = aiohttp.ContentTypeError(info, (), status=200, message="HTML")
    for error in (ConnectionResetError(104, "reset"), page, _Raising()):
        assert failure_of(error) == (None, 0.0) and repetition_wait_s(error) == 0.0


class _Raising(Exception):
    @property
    def response(self) -> Any:
        raise RuntimeError("the reply was not read")


class Agent(BaseHTTPRequestHandler):
    """Answers with the statuses that are left, then with a result."""

    left: list[int] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status = self.left.pop(0) if self.left else 200
        content = b'{"weight_versions": [[1, 2]]}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        if status != 200:
            self.send_header("Retry-After", "0.3")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Agent)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


async def with_client(url: str, method: str, *arguments: Any) -> Any:
    client = GymClient(None, {"agent": url}, start_timeout_s=1)
    await client.open()
    try:
        return await getattr(client, method)(*arguments)
    finally:
        await client.close()


@pytest.mark.parametrize(("status", "again"), [(408, True), (425, True), (429, True), (503, True), (404, False)])
def test_an_agents_reply_says_whether_to_ask_again_and_when(url: str, status: int, again: bool) -> None:
    Agent.left = [status]
    with pytest.raises(AgentFailure) as failure:
        asyncio.run(with_client(url, "run", "agent", url, {}))
    assert (failure.value.again, failure.value.wait_s) == (again, 0.3)


def test_the_policys_endpoint_is_asked_again(url: str) -> None:
    endpoint = SimpleNamespace(url=url, token="t")
    Agent.left = [503, 429]
    start = time.monotonic()
    assert asyncio.run(with_client(url, "weight_versions", endpoint, ["f"])) == [[1, 2]]
    assert time.monotonic() - start > 0.6
    for left in ([404], [503] * 3):
        Agent.left = list(left)
        with pytest.raises(AgentFailure, match="the policy's endpoint at"):
            asyncio.run(with_client(url, "weight_versions", endpoint, ["f"]))
