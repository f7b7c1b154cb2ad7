"""Records of agents' calls, by session: the exact tokens of each, in every dialect.

A session is one run of an agent; its requests name it in the header `X-Session-ID`. Where an answer of the policy comes
back in it, the next prompt begins with exactly the tokens that were generated.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from grpo_mcore.generation.chat.prompt import TOKEN_FIELDS
from grpo_mcore.rollout.images import data_url, is_image
from grpo_mcore.rollout.messages import MessageError, content_text, read_messages

SESSION_HEADER = "X-Session-ID"
MAX_SESSIONS = 10_000
"""Maximum number of sessions that nobody has taken; beyond it the oldest one is forgotten."""


@dataclass(frozen=True, eq=False)
class ChatTokens:
    """Tokens of one completion: `prompt` [n] int32, with images int64 (`content_ids`); `generated` int32 [m] and
    `logprobs` float32 [m]. `text`: what was generated, for people to read."""

    prompt: np.ndarray
    generated: np.ndarray
    logprobs: np.ndarray
    text: str


@dataclass(frozen=True, eq=False)
class _Call:
    """A recorded call. `request`: its number. `continues`: the call whose tokens its prompt begins with;
    `tokens.prompt` is what follows them, so that a session's memory grows with its tokens, not with their square.
    `versions`: as in Trajectory.weight_versions."""

    request: int
    continues: int | None
    tokens: ChatTokens
    versions: Sequence[Sequence[int]]


class ChatSession:
    """The calls of one session. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[_Call] = []
        self._requests = 0
        self._ends: dict[bytes, int] = {}  # hash of a conversation up to the answer of a call -> the call

    def begin(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the number of a request, and the request in the normal form, with its tokens in the last answer that
        was generated here after these very messages."""
        messages = _normal(body.get("messages"))
        with self._lock:
            self._requests += 1
            for position, digest in reversed([*enumerate(_hashes(messages))]):
                if (call := self._ends.get(digest)) is not None:
                    tokens = zip(TOKEN_FIELDS, (ids.tolist() for ids in self._ids(call)), strict=False)
                    messages[position] = {**messages[position], **dict(tokens)}
                    break
            return self._requests, {**body, "messages": messages} if messages else dict(body)

    def note(
        self,
        request: int,
        messages: Any,
        answer: Mapping[str, Any],
        tokens: ChatTokens,
        versions: Sequence[Sequence[int]],
    ) -> None:
        """Record a completion. `request`, `messages`: number and messages of its request; `answer`: the assistant's
        message."""
        with self._lock:
            continues = next((i for i in reversed(range(len(self._calls))) if self._begins(tokens.prompt, i)), None)
            if continues is not None:
                length = sum(map(len, self._ids(continues)))
                tokens = replace(tokens, prompt=tokens.prompt[length:].copy())
            self._calls.append(_Call(request, continues, tokens, versions))
            if conversation := _normal([*messages, answer] if isinstance(messages, list) else None):
                self._ends[_hashes(conversation)[-1]] = len(self._calls) - 1

    def _begins(self, prompt: np.ndarray, number: int) -> bool:
        ids = np.concatenate(self._ids(number))
        return np.array_equal(ids, prompt[: len(ids)])

    def _ids(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the whole prompt and the generated tokens of a call."""
        call, parts = self._calls[number], list[np.ndarray]()
        before = call
        while before.continues is not None:
            parts.append(before.tokens.prompt)
            before = self._calls[before.continues]
            parts.append(before.tokens.generated)
        return np.concatenate([before.tokens.prompt, *reversed(parts)]), call.tokens.generated

    def calls(self) -> list[dict[str, Any]]:
        """Return all calls in the order in which they ended, as JSON. `prompt`: the tokens after those of the call that
        it `continues`."""
        with self._lock:
            return [
                {
                    "request": call.request,
                    "continues": call.continues,
                    "prompt": call.tokens.prompt.tolist(),
                    "generated": call.tokens.generated.tolist(),
                    "logprobs": call.tokens.logprobs.tolist(),
                    "text": call.tokens.text,
                    "weight_versions": call.versions,
                }
                for call in self._calls
            ]


class ChatSessions:
    """The sessions under way: each begins with its first request, and ends when it is taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, ChatSession] = OrderedDict()

    def open(self, name: str) -> ChatSession:
        with self._lock:
            session = self._sessions.setdefault(name, ChatSession())
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
            return session

    def take(self, name: str) -> list[dict[str, Any]]:
        """Return the calls of a session and forget it. A request of it that still runs is not recorded any more."""
        with self._lock:
            session = self._sessions.pop(name, None)
        return session.calls() if session else []


def _normal(messages: Any) -> list[dict[str, Any]]:
    """Return messages in the normal form; none if the engine would refuse them."""
    try:
        return read_messages(messages, "messages", data_url)
    except MessageError:
        return []


def _hashes(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return for each message a hash of the conversation up to it: its roles, texts, images and calls. What an agent
    may write in another way is left out: the id of a call, reasoning, space around a text."""
    digest, hashes = blake2b(digest_size=16), []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]  # a text that is no JSON object: as /v1/messages has it
            calls.append((call["function"]["name"], arguments if isinstance(arguments, dict) else {"_raw": arguments}))
        parts = message["content"] if isinstance(message.get("content"), list) else ()
        images = [part["image"] for part in parts if is_image(part)]
        content = [message["role"], content_text(message.get("content")).strip(), calls, images]
        digest.update(json.dumps(content, sort_keys=True).encode())
        hashes.append(digest.digest())
    return hashes
