"""Any bytes that a client sends get an answer with a 4xx status or a reply, never a 500, and the endpoint goes on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_mcore.generation.chat.engine_chat import Reply
from grpo_mcore.generation.chat.prompt import ChatPrompts
from grpo_mcore.generation.chat.request import ChatRequest, RequestError
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.generation.endpoint import Endpoint
from grpo_mcore.rollout.trajectory import Sampling
from tests.fuzz import JSON, TEXTS, examples
from tests.unit.generation.chat.endpoints import HEADERS, connect

CONFIG = ChatConfig("policy", (Sampling(8),))


class Engine:
    """Reads a request as an engine does, and generates nothing."""

    name = "engine-0"

    def __init__(self, tokenizer: Any) -> None:
        self.prompts = ChatPrompts(tokenizer, CONFIG, vocab_size=64)

    def stream(self, method: str, kind: str, body: Any, seed: int, **_: Any) -> Iterator[Reply]:
        try:
            yield Reply(200, {"tokens": self.prompts.turn(ChatRequest.read(body, CONFIG))[0].token_ids.tolist()})
        except RequestError as error:
            yield Reply(400, {"error": {"message": str(error)}})


class Engines:
    weight_version, returning = 0, False

    def __init__(self, tokenizer: Any) -> None:
        self.workers = [Engine(tokenizer)]

    def reachable(self) -> list[int]:
        return [0]

    def unanswered(self, engine: Any, error: Exception) -> bool:
        return False


@pytest.fixture(scope="module")
def endpoint(tokenizer: Any) -> Iterator[Endpoint]:
    endpoint = Endpoint(Engines(tokenizer), model="policy", token="secret", host="127.0.0.1", timeout_s=30)
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=endpoint.address.url, headers=HEADERS, timeout=30) as client:
        yield client


MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(
            [
                "role",
                "content",
                "tool_calls",
                "prompt_token_ids",
                "generation_token_ids",
                "generation_log_probs",
                "name",
            ]
        ),
        st.sampled_from(["user", "assistant", "tool"]) | st.just([1, 2]) | JSON,
    ),
    max_size=3,
)
FIELDS = [
    "model", "temperature", "top_p", "max_tokens", "n", "stop", "tools", "tool_choice", "seed", "chat_template_kwargs",
    "required_prefix_token_ids", "add_generation_prompt", "logprobs", "stream", "ids", "response_format",
]  # fmt: skip
BODIES = (
    JSON
    | st.fixed_dictionaries({"messages": MESSAGES | JSON})
    | st.builds(
        lambda messages, more: {"messages": messages, **more}, MESSAGES, st.dictionaries(st.sampled_from(FIELDS), JSON)
    )
)


@examples(40)
@example(body={"messages": [{"tool_calls": True}]}, path="/v1/chat/completions")
@given(body=BODIES, path=st.sampled_from(["/v1/chat/completions", "/tokenize", "/weight_versions"]))
def test_any_json(client: httpx.Client, body: Any, path: str) -> None:
    reply = client.post(path, content=json.dumps(body).encode())
    assert reply.status_code in (200, 400), (reply.status_code, reply.text)
    assert reply.status_code == 200 or reply.json()["error"]["message"]


@examples(20)
@given(said=st.binary(max_size=200), token=st.binary(max_size=20), body=TEXTS)
def test_any_bytes(endpoint: Endpoint, client: httpx.Client, said: bytes, token: bytes, body: str) -> None:
    text = body.encode(errors="surrogatepass")
    whole = (
        b"POST /tokenize HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer "
        + token.replace(b"\r", b"").replace(b"\n", b"")
        + b"\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
    )
    for request in (whole, said + b"\r\n\r\n"):
        with connect(endpoint, request) as connection:
            connection.settimeout(0.2)
            try:
                answer = connection.recv(4096)
            except (TimeoutError, ConnectionResetError):
                answer = b""  # it waits for more, or has closed the connection
        assert not answer.startswith(b"HTTP/1.1 5") and not answer.startswith(b"HTTP/1.0 5"), answer
    assert client.get("/health").status_code == 200
