"""Sessions of the endpoint: an agent's calls with their exact tokens, in every dialect."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from grpo_mcore.data.tokenizer import load_tokenizer
from grpo_mcore.environments.agents.samples import AgentSample, ModelCall, branches_of
from grpo_mcore.generation.chat import sessions
from grpo_mcore.generation.chat.engine_chat import EngineChat, Reply
from grpo_mcore.generation.chat.request import ChatRequest, RequestError
from grpo_mcore.generation.chat.sessions import SESSION_HEADER, ChatSession, ChatSessions, ChatTokens
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.generation.endpoint import Endpoint
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Score, Trajectory, Turn, fingerprint
from grpo_mcore.tools.demo.colours import make_colour_task
from tests.pictures import noise, reader_of
from tests.unit.generation.chat.endpoints import HEADERS, Engines

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ANSWER = {"role": "assistant", "content": "I add.", "reasoning_content": "so", "tool_calls": [CALL]}
HISTORY: dict[str, tuple[str, str, list[Any]]] = {
    "chat/completions": (
        "messages",
        "max_tokens",
        [
            {"role": "assistant", "content": " I add. ", "tool_calls": [{**CALL, "id": "other"}]},
            {"role": "tool", "tool_call_id": "other", "content": "2"},
        ],
    ),
    "messages": (
        "messages",
        "max_tokens",
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "2"}]},
        ],
    ),
    "responses": (
        "input",
        "max_output_tokens",
        [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
            {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "2"},
        ],
    ),
}
"""How an agent of each dialect sends the answer back, with a result; the field of its messages."""


class TokenEngines(Engines):
    """Engines whose prompt is the recorded tokens of the last answer, or [1], and one token a message after it; they
    generate the tokens 100, 101, ..., 102 in the second request, and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[list[int]] = []
        for worker in self.workers:
            worker.stream = self.stream  # type: ignore[method-assign]

    def stream(self, method: str, kind: str, body: Any, seed: int, **_: Any) -> Iterator[Reply]:
        recorded = [m for m in body["messages"] if "generation_token_ids" in m]
        last = recorded[-1] if recorded else {}
        prompt = [*last.get("prompt_token_ids", [1]), *last.get("generation_token_ids", []), 2]
        generated = [100 + len(self.prompts), 7]
        self.prompts.append(prompt)
        choice = {"index": 0, "message": ANSWER, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 2, "total_tokens": len(prompt) + 2}
        body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        ids = prompt + generated
        yield Reply(200, body, fingerprint(ids), ((4, 0, len(ids)),), tokens(prompt, generated))


def tokens(prompt: list[int], generated: list[int]) -> ChatTokens:
    logprobs = np.array([-0.5] * len(generated), np.float32)
    return ChatTokens(np.array(prompt, np.int32), np.array(generated, np.int32), logprobs, "text")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint(TokenEngines(), model="m", token="secret", host="127.0.0.1")
    yield endpoint
    endpoint.close()


def post(endpoint: Endpoint, path: str, body: Any, session: str | None = None) -> Any:
    headers = HEADERS | ({SESSION_HEADER: session} if session else {})
    reply = httpx.post(endpoint.address.url + path, json=body, headers=headers, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("dialect", HISTORY)
def test_an_answer_that_comes_back_stands_for_its_tokens(endpoint: Endpoint, dialect: str) -> None:
    field, limit, history = HISTORY[dialect]
    first: Any = [{"role": "user", "content": "1 + 1?"}]
    tools = {"max_tokens": 9} if limit == "max_tokens" else {}
    post(endpoint, f"/v1/{dialect}", {"model": "m", field: first, **tools}, dialect)
    post(endpoint, f"/v1/{dialect}", {"model": "m", field: [*first, *history], **tools}, dialect)
    post(endpoint, f"/v1/{dialect}", {"model": "m", field: [*first, *history], **tools}, "another session")
    changed = [{"role": "user", "content": "1 + 2?"}, *history]
    post(endpoint, f"/v1/{dialect}", {"model": "m", field: changed, **tools}, dialect)

    calls = post(endpoint, "/take_session", {"session": dialect})["calls"]
    assert [call["continues"] for call in calls] == [None, 0, None], "another question is another branch"
    assert [call["prompt"] for call in calls] == [[1, 2], [2], [1, 2]]
    assert [call["logprobs"] for call in calls] == [[-0.5, -0.5]] * 3
    assert [call["weight_versions"] for call in calls] == [[[4, 0, 4]], [[4, 0, 7]], [[4, 0, 4]]]
    assert len(post(endpoint, "/take_session", {"session": "another session"})["calls"]) == 1
    assert post(endpoint, "/take_session", {"session": dialect})["calls"] == [], "it is taken once"


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colours")
    make_colour_task(folder / "task", folder / "model", rows=4)
    return folder / "model"


class ImageEngines(Engines):
    """Engines with a real prompt and a policy that answers the word 9 and the mark of an image, which is a word."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.reader, tokenizer = reader_of(model), load_tokenizer(str(model))
        config, sizes = ChatConfig("m", (Sampling(8),)), {"max_model_len": 99, "vocab_size": len(tokenizer)}
        self.chat = EngineChat(config, tokenizer, self.generate, images=self.reader, **sizes)
        self.asked: list[GenerationRequest] = []
        for worker in self.workers:
            worker.stream = self.stream  # type: ignore[method-assign]

    def generate(self, requests: list[GenerationRequest], sampling: Sampling) -> Iterator[Trajectory]:
        self.asked += requests
        (turn,), ids = requests[0].prompt, torch.tensor([9, self.reader.vision.image_token])
        said = Turn("assistant", ids, torch.tensor([-0.5, -0.5]), True, "cat")
        yield Trajectory("chat", 0, (turn, said), ((4, 0, len(turn) + 2),), "length", True)

    def stream(self, method: str, kind: str, body: Any, seed: int, **_: Any) -> Iterator[Reply]:
        reply = self.chat.answer(kind, json.loads(json.dumps(body)), seed)
        assert reply.status == 200, reply.body
        self.text = reply.body["choices"][0]["message"]["content"]
        yield reply


@pytest.mark.parametrize("dialect", HISTORY)
def test_images_of_an_agent_are_told_by_numbers_and_become_those_of_its_sample(
    dialect: str, vision_model: Path
) -> None:
    """Three calls: two turns with an image each, and the first again with another image of equal size."""
    engines, pictures = ImageEngines(vision_model), [noise(64, 64, seed) for seed in range(3)]
    endpoint = Endpoint(engines, model="m", token="secret", host="127.0.0.1")
    field, limit, _ = HISTORY[dialect]

    def shown(picture: bytes) -> dict[str, Any]:
        text = base64.b64encode(picture).decode()
        part: Any = {
            "chat/completions": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}},
            "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}},
            "responses": {"type": "input_image", "image_url": f"data:image/png;base64,{text}"},
        }[dialect]
        return {
            "role": "user",
            "content": [part, {"type": "text" if dialect != "responses" else "input_text", "text": "red"}],
        }

    for seen in (pictures[:1], pictures[:2], [pictures[2], pictures[1]]):
        messages = [shown(seen[0])]
        if len(seen) > 1:
            messages += [{"role": "assistant", "content": engines.text}, shown(seen[1])]
        body = {"model": "m", field: messages, **({limit: 9} if limit == "max_tokens" else {})}
        post(endpoint, f"/v1/{dialect}", body, "agent")
    if dialect == "chat/completions":  # an agent without a session gets the same numbers, and sends them back
        whole = post(endpoint, "/v1/chat/completions", {**body, "logprobs": True})["choices"][0]["message"]
        on = [*body["messages"], whole, {"role": "user", "content": "red"}]
        assert min(whole["prompt_token_ids"]) < 0
        post(endpoint, "/v1/chat/completions", {**body, "messages": on})
        *_, before, after = engines.asked
        assert after.image_spans() == before.image_spans() and after.images == before.images
        ids = before.token_ids().tolist() + whole["generation_token_ids"]
        assert after.token_ids().tolist()[: len(ids)] == ids
        false = [{**on[0], "content": shown(pictures[1])["content"]}, *on[1:]]
        post(endpoint, "/v1/chat/completions", {**body, "messages": false})
        assert set(engines.asked[-1].images.values()) == {pictures[1]}, "another branch, without the recorded tokens"
        with pytest.raises(RequestError, match="tell other images than the messages before it"):
            engines.chat._prompts.turn(ChatRequest.read({"messages": false}, ChatConfig("m", (Sampling(8),))))
    calls = post(endpoint, "/take_session", {"session": "agent"})["calls"]
    endpoint.close()
    assert [call["continues"] for call in calls] == [None, 0, None], "another image is another branch"
    made = list[ModelCall]()
    for call in calls:
        before = [] if call["continues"] is None else made[call["continues"]].tokens
        made.append(ModelCall([*before, *call["prompt"]], call["generated"], call["logprobs"], call["text"]))
    sample = AgentSample(tuple(map(tuple, branches_of(made))), False, Score(1.0, None, "", 0.0), "red")
    told = sample.trajectory("p", 0, [call["weight_versions"] for call in calls])
    trajectory, files = endpoint.record.with_images(told, engines.reader.vision.image_token)
    assert set(files.values()) == set(pictures) and trajectory.content_ids().equal(told.content_ids())
    (turns, again), generated = trajectory.images_by_sequence(), trajectory.token_ids()[trajectory.loss_mask()]
    assert [files[image.digest] for image in (*turns, *again)] == [pictures[i] for i in (0, 1, 2, 1)]
    assert generated.tolist() == [9, engines.reader.vision.image_token] * 3
    asked = [request.token_ids().tolist() for request in engines.asked[:3]]
    assert trajectory.token_ids().tolist() == [*asked[1], *generated[:2].tolist(), *asked[2], *generated[:2].tolist()]
    assert turns == list(engines.asked[1].image_spans()) and again == list(engines.asked[2].image_spans())


def test_what_is_no_session_is_refused(endpoint: Endpoint) -> None:
    reply = httpx.post(endpoint.address.url + "/take_session", json={"session": 3}, headers=HEADERS)
    assert reply.status_code == 400 and "session: a text is needed" in reply.text
    assert httpx.post(endpoint.address.url + "/take_session", json={"session": "x"}).status_code == 401


def test_the_newest_of_several_answers_is_continued() -> None:
    """Two answers to one question, of which the agent goes on from either."""
    session, question = ChatSession(), [{"role": "user", "content": "?"}]
    for number, text in enumerate(("a", "b", "a")):
        session.note(number, question, {"role": "assistant", "content": text}, tokens([1, 2], [10 + number]), ())
    for text, generated in (("a", 12), ("b", 11), ("c", None)):
        asked = {"messages": [*question, {"role": "assistant", "content": text}, {"role": "user", "content": "on"}]}
        sent = session.begin(asked)[1]["messages"][1]
        assert sent.get("generation_token_ids") == (None if generated is None else [generated])
    assert [call["continues"] for call in session.calls()] == [None, None, None]


def test_memory_grows_with_the_tokens_and_not_with_their_square() -> None:
    session, messages, ids = ChatSession(), [{"role": "user", "content": "go"}], [1]
    for turn in range(60):
        answer = {"role": "assistant", "content": f"answer {turn}"}
        session.note(turn, messages, answer, tokens(ids, [turn, turn]), ((turn, 0, len(ids) + 2),))
        messages += [answer, {"role": "user", "content": "on"}]
        ids = [*ids, turn, turn, 5]
    calls = session.calls()
    assert sum(len(call["prompt"]) for call in calls) == 60
    assert [call["continues"] for call in calls] == [None, *range(59)]
    last = session.begin({"messages": messages})[1]["messages"][-2]
    assert last["prompt_token_ids"] + last["generation_token_ids"] == ids[:-1]


def test_messages_that_an_engine_refuses_stay_as_they_are() -> None:
    session = ChatSession()
    for messages in (None, [], [3], [{"role": "user"}], [{"role": "user", "content": {"a": 1}}]):
        asked, body = session.begin({"messages": messages, "x": 1})
        assert body == {"messages": messages, "x": 1}
        session.note(asked, messages, ANSWER, tokens([1], [2]), ())
    assert [call["request"] for call in session.calls()] == [1, 2, 3, 4, 5] and json.dumps(session.calls())


def test_sessions_that_nobody_takes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    known = ChatSessions()
    for name in "abc":
        known.open(name).note(1, [], ANSWER, tokens([1], [2]), ())
    assert [len(known.take(name)) for name in "abc"] == [0, 1, 1]
    held = known.open("d")
    assert known.take("d") == []
    held.note(1, [], ANSWER, tokens([1], [2]), ())
    assert known.take("d") == [], "a request that ends after its session is not recorded"
