"""The HTTP server in front of the engines: access, choice of the engine, form of errors."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from grpo_mcore.generation import endpoint as endpoints
from grpo_mcore.generation.endpoint import ChatRecord, Endpoint, EndpointError
from grpo_mcore.rollout.trajectory import fingerprint
from tests.unit.generation.chat.endpoints import HEADERS, Engines, connect
from tests.waiting import wait_until


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def endpoint(engines: Engines) -> Iterator[Endpoint]:
    endpoint = Endpoint(engines, model="policy", token="secret", host="127.0.0.1", timeout_s=30, seed=5)
    yield endpoint
    for engine in engines.workers:
        engine.hold.set()
    endpoint.close()


def post(endpoint: Endpoint, path: str = "/v1/chat/completions", body: Any = None, **more: Any) -> httpx.Response:
    more = {"headers": HEADERS, "json": body or {}, "timeout": 30} | more
    return httpx.post(endpoint.address.url + path, **more)


def test_requests_without_the_token_are_refused(endpoint: Endpoint, engines: Engines) -> None:
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret2"}):
        reply = post(endpoint, headers=headers)
        assert reply.status_code == 401 and "asks for its token" in reply.json()["error"]["message"]
        assert httpx.get(endpoint.address.url + "/v1/models", headers=headers).status_code == 401
    assert not any(engine.asked for engine in engines.workers)
    assert httpx.get(endpoint.address.url + "/health").status_code == 200
    models = httpx.get(endpoint.address.url + "/v1/models", headers=HEADERS).json()
    assert [model["id"] for model in models["data"]] == ["policy"]
    assert post(endpoint, "/tokenize").json() == {"tokens": [1]}


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_sent_requests_do_not_keep_their_connections(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "HEADER_S", 0.2)
    endpoint = Endpoint(engines, model="policy", token="secret", host="127.0.0.1")
    silent = [connect(endpoint, said) for said in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\n") * 20]
    with httpx.Client(base_url=endpoint.address.url, headers=HEADERS) as client:
        assert client.post("/tokenize", json={}).status_code == 200
        assert all(is_closed(connection) for connection in silent)
        time.sleep(0.3)
        assert client.post("/tokenize", json={}).status_code == 200  # on the same connection, which was heard
        assert len(endpoint._runner.server.connections) == 1
    for connection in silent:
        connection.close()
    endpoint.close()


def test_clients_without_the_token_cannot_keep_a_connection(endpoint: Endpoint) -> None:
    for path in ("/health", "/v1/models"):
        connection = connect(endpoint, f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        assert b"Connection: close" in connection.recv(4096)
        connection.close()


def test_connections_have_a_limit(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_CONNECTIONS", 3)
    endpoint = Endpoint(engines, model="policy", token="secret", host="127.0.0.1")
    held = [connect(endpoint) for _ in range(3)]
    wait_until(lambda: len(endpoint._runner.server.connections) == 3)
    one_more = connect(endpoint)
    assert is_closed(one_more)
    held.pop().close()
    wait_until(lambda: len(endpoint._runner.server.connections) == 2)
    assert post(endpoint, "/tokenize").status_code == 200
    for connection in (*held, one_more):
        connection.close()
    endpoint.close()


def test_a_body_must_come_in_time(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "BODY_S", 0.1)
    head = b"POST /tokenize HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer secret\r\nContent-Length: 9\r\n\r\n{"
    connection = connect(endpoint, head)
    assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
    connection.close()


@pytest.mark.parametrize("depth", [101, 900, 100_000])
def test_deeply_nested_json_is_refused(endpoint: Endpoint, engines: Engines, depth: int) -> None:
    body = b'{"a": ' + b"[" * depth + b"]" * depth + b"}"
    reply = post(endpoint, json=None, content=body)
    assert reply.status_code == 400 and "nested" in reply.json()["error"]["message"] or "JSON" in reply.text
    assert post(endpoint, body={"a": [[[[1]]]]}).status_code == 200


def test_a_token_in_any_bytes_is_refused(endpoint: Endpoint) -> None:
    said = b"POST /tokenize HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer \xff\xfe\r\nContent-Length: 0\r\n\r\n"
    connection = connect(endpoint, said)
    assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
    connection.close()


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/chat/completions", 404), ("GET", "/v1/responses", 405)]
)
def test_a_path_that_is_not_served_says_which_are(endpoint: Endpoint, method: str, path: str, status: int) -> None:
    """As of a base_url without its /v1, of which openai's client said "Not Found"."""
    reply = httpx.request(method, endpoint.address.url + path, headers=HEADERS)
    told = f"{method} {path} is not served; POST /v1/chat/completions, /v1/responses, /v1/messages are"
    assert (reply.status_code, reply.json()["error"]["message"]) == (status, told)


def test_the_engine_with_the_fewest_pending_requests_is_chosen(endpoint: Endpoint, engines: Engines) -> None:
    engines[0].hold.clear()
    waiting = threading.Thread(target=post, args=(endpoint,))
    waiting.start()
    wait_until(lambda: engines[0].asked)
    assert [post(endpoint).json()["by"] for _ in range(3)] == ["engine-1"] * 3
    engines[0].hold.set()
    waiting.join(30)
    assert post(endpoint).json()["by"] == "engine-0"


def test_a_conversation_stays_with_its_engine_unless_that_is_busy(endpoint: Endpoint, engines: Engines) -> None:
    engines[0].hold.clear()
    waiting = [threading.Thread(target=post, args=(endpoint,)) for _ in range(2)]
    waiting[0].start()
    wait_until(lambda: engines[0].asked)
    assert post(endpoint, body={"ids": [1, 2, 3]}).json()["by"] == "engine-1"
    engines[0].hold.set()
    waiting[0].join(30)
    answer = {"role": "assistant", "prompt_token_ids": [1, 2], "generation_token_ids": [3]}
    assert post(endpoint, body={"messages": [answer, {"role": "user"}]}).json()["by"] == "engine-1"
    assert post(endpoint, body={"messages": [answer | {"generation_token_ids": [4]}]}).json()["by"] == "engine-0"


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "go"}]}, {"role": "assistant", "content": "b"}], True),
        ([{"role": "user", "content": "go"}, {"role": "assistant", "content": None}], True),
        ([{"role": "user", "content": "go on"}, {"role": "assistant", "content": "b"}], False),
        ([{"role": "user", "content": "go"}], False),
    ],
)
def test_tokens_of_a_conversation_that_was_changed_are_left_out(
    endpoint: Endpoint, engines: Engines, caplog: pytest.LogCaptureFixture, before: list[Any], kept: bool
) -> None:
    """An agent shortened what a tool had said, or dropped old turns: the policy was shown all of it nevertheless."""
    engines.gone = {1}
    asked = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "<think>a</think>b"}]
    post(endpoint, body={"ids": [1, 2, 3], "messages": asked})
    tokens = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-1.0]}
    answer = {"role": "assistant", "content": "c"}
    for path in ("/v1/chat/completions", "/tokenize"):
        post(endpoint, path, {"messages": [*before, answer | tokens, {"role": "user", "content": "d"}]})
        told = [*before, answer | tokens if kept else answer, {"role": "user", "content": "d"}]
        assert engines[0].body["messages"] == told
    assert any("other messages before an earlier answer" in text for text in caplog.messages) != kept


def test_weight_versions_of_generated_tokens(endpoint: Endpoint) -> None:
    post(endpoint, body={"ids": [4, 5]})
    names = [fingerprint([4, 5]), fingerprint([5, 4])]
    found = post(endpoint, "/weight_versions", {"fingerprints": names})
    assert found.json() == {"weight_versions": [[[3, 0, 2]], None]}
    assert post(endpoint, "/weight_versions", {"fingerprints": 3}).status_code == 400


def test_errors_are_returned_and_logged_once(endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    assert post(endpoint, content=b"{", json=None).json()["error"]["message"].startswith("the body is not JSON")
    assert post(endpoint, content=b"[1]", json=None).status_code == 400
    for _ in range(2):
        reply = post(endpoint, body={"fails": True})
        assert (reply.status_code, reply.json()["error"]["message"]) == (502, "the engine is gone")
    assert [record.message for record in caplog.records].count(
        "endpoint: engine-0 did not answer: OSError: the engine is gone"
    ) == 1
    assert post(endpoint).status_code == 200


def test_tools_without_a_parser_of_calls_are_warned_of(endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    """The agent would see no call at all; vLLM's own server refuses such requests."""
    assert post(endpoint, body={"tools": [{}], "tool_choice": "none"}).status_code == 200 and not caplog.messages
    for _ in range(2):
        assert post(endpoint, body={"tools": [{}]}).status_code == 200
    (said,) = caplog.messages
    assert "calls of them stay text of the answers: set enable_auto_tools and tool_parser" in said


def test_the_log_of_warnings_is_bounded(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer of a client may have another text of many characters."""
    monkeypatch.setattr("grpo_mcore.generation.endpoint.MAX_WARNINGS", 5)
    for number in range(20):
        endpoint._warn(f"{number} " + "x" * 100_000)
    assert len(caplog.messages) == 5 and caplog.messages[-1].endswith("; further warnings are left out")
    assert sum(map(len, endpoint._warned)) < 5 * 600


def test_another_engine_takes_the_requests_of_a_dead_one(endpoint: Endpoint, engines: Engines) -> None:
    engines[0].dead = True
    assert [post(endpoint).json()["by"] for _ in range(3)] == ["engine-1"] * 3
    assert engines[0].asked == 1
    answer = {"role": "assistant", "prompt_token_ids": [1], "generation_token_ids": []}
    engines.replace(0)
    assert post(endpoint).json()["by"] == "engine-0"  # its pending requests do not count for its successor
    assert post(endpoint, body={"messages": [answer]}).json()["by"] == "engine-0"


def test_requests_wait_while_an_engine_is_being_restarted(endpoint: Endpoint, engines: Engines) -> None:
    engines[0].dead = engines[1].dead = True
    reply = post(endpoint)
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "no engine is there now")
    engines.returning = True
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(post(endpoint).json()))
    waiting.start()
    engines.replace(1)
    waiting.join(30)
    assert [answer["by"] for answer in answers] == ["engine-1"]


def test_requests_whose_client_has_given_up_do_not_reach_an_engine(engines: Engines) -> None:
    """openai's client asks again after a timeout: each attempt that was queued had been answered, for nobody."""
    endpoint = Endpoint(engines, model="policy", token="secret", host="127.0.0.1", timeout_s=30, max_requests=1)
    engines[0].hold.clear()
    waiting = threading.Thread(target=post, args=(endpoint,))
    waiting.start()
    wait_until(lambda: engines[0].asked)
    for _ in range(3):
        with pytest.raises(httpx.TimeoutException):
            post(endpoint, timeout=0.5)
    wait_until(lambda: len(endpoint._runner.server.connections) == 1)  # type: ignore[union-attr]
    httpx.get(endpoint.address.url + "/health")  # the endpoint's loop has gone round since
    engines[0].hold.set()
    waiting.join(30)
    assert post(endpoint).status_code == 200
    assert engines[0].asked + engines[1].asked == 2
    endpoint.close()


def test_a_port_that_is_taken(engines: Engines) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EndpointError, match=f"cannot listen at 127.0.0.1:{port}: .*http_server_port"):
            Endpoint(engines, model="policy", token="secret", host="127.0.0.1", port=port)


def test_nobody_listens_after_close(engines: Engines) -> None:
    endpoint = Endpoint(engines, model="policy", token="secret", host="127.0.0.1")
    endpoint.close()
    endpoint.close()
    with pytest.raises(httpx.ConnectError):
        post(endpoint)


def test_a_request_that_waits_for_an_engine_does_not_outlive_the_endpoint(engines: Engines) -> None:
    """Python joins the threads of requests when it exits, so a run would hang for as long as an engine may return."""
    endpoint = Endpoint(engines, model="policy", token="secret", host="127.0.0.1", timeout_s=120)
    engines.gone, engines.returning = {0, 1}, True
    before = workers()
    client = threading.Thread(target=suppress_errors, args=(endpoint,))
    client.start()
    wait_until(lambda: workers() - before)
    endpoint.close()
    began = time.monotonic()
    client.join()
    for thread in workers() - before:
        thread.join(60)
    assert not workers() - before and time.monotonic() - began < 60


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("endpoint_")}


def suppress_errors(endpoint: Endpoint) -> None:
    with suppress(httpx.HTTPError):
        post(endpoint)


def test_equal_requests_get_different_seeds_and_a_rerun_the_same() -> None:
    def seeds(record: ChatRecord) -> list[int]:
        asked = [({"m": 1}, 1), ({"m": 1}, 1), ({"m": 2}, 1), ({"m": 1}, 2)]
        return [record.seed(body, version) for body, version in asked]

    first = seeds(ChatRecord(5))
    assert len(set(first)) == 4 and seeds(ChatRecord(5)) == first and not set(seeds(ChatRecord(6))) & set(first)


def test_equal_requests_with_one_seed_are_different_samples() -> None:
    """A Gym gives all requests of a rollout one seed: an agent that tried again, or asked several times for a vote, got
    one and the same answer."""
    record, body = ChatRecord(5), {"messages": [{"role": "user", "content": "a"}], "seed": 7}
    first, *others = [record.seed(body, 1) for _ in range(3)]
    assert first == 7 == ChatRecord(6).seed(body, 3) and len({first, *others}) == 3
    assert record.seed(body | {"seed": 8}, 1) == 8
