"""From chat messages to the tokens of a prompt, exact over turns.

An assistant's message that comes back carries the token ids of its prompt and of itself. A prompt that holds such a
message begins with these very tokens; the chat template only says what comes after it. So nothing that was generated is
tokenised again, and thoughts that a template would strip from earlier turns stay where they were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

from grpo_mcore.generation.chat.request import ChatRequest, RequestError
from grpo_mcore.rollout.exact_tokens import said_already

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")
_ANSWER = "@@answer@@"


class ChatPrompts:
    """Makes prompts for one tokenizer. `stop_token_ids`: tokens that may have ended an answer. `vocab_size`: of the
    model, which may have more tokens than the tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None,
        chat_template_kwargs: Mapping[str, Any],
        stop_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        """`chat_template`: the text of one in place of the tokenizer's own."""
        self._tokenizer = tokenizer
        self._options = {**chat_template_kwargs, **({"chat_template": chat_template} if chat_template else {})}
        self._stop_token_ids = frozenset(stop_token_ids)
        self._vocab_size = vocab_size

    def tokens(self, request: ChatRequest) -> list[int]:
        """Raises RequestError where messages or token ids cannot be used."""
        position, before = self._recorded(request)
        messages = [_as_template_has_it(message) for message in request.messages]
        if before is not None and position is not None:
            after = self._after(messages, position, before[-1], request)
            if after is not None:
                return [*before, *after]
        return self._ids(self._render(messages, request))

    def _recorded(self, request: ChatRequest) -> tuple[int | None, list[int] | None]:
        """(index of the last message that came with its tokens, these tokens with those of its prompt)."""
        for position in reversed(range(len(request.messages))):
            message = request.messages[position]
            if message.get("role") == "assistant" and message.get("generation_token_ids"):
                parts = message.get("prompt_token_ids"), message["generation_token_ids"]
                for name, ids in zip(TOKEN_FIELDS, parts, strict=False):
                    self._check(f"messages.{position}.{name}", ids)
                recorded = [*parts[0], *parts[1]]  # type: ignore[misc]
                return position, recorded
        required = request.required_prefix_token_ids
        if not required:
            return None, None
        self._check("required_prefix_token_ids", required)
        answers = [i for i, message in enumerate(request.messages) if message.get("role") == "assistant"]
        return (answers[-1], required) if answers else (None, None)

    def _check(self, name: str, ids: Any) -> None:
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < self._vocab_size for i in ids):
            raise RequestError(f"{name}: must be a list of token ids from 0 to {self._vocab_size - 1}")

    def _after(
        self, messages: list[dict[str, Any]], position: int, last_token: int, request: ChatRequest
    ) -> list[int] | None:
        """The tokens after the answer at `position`. None: the template does not show where that answer ends."""
        shown = [*messages[:position], {"role": "assistant", "content": _ANSWER}]
        try:
            whole = self._render([*shown, *messages[position + 1 :]], request)
            alone = self._render(shown, request, add_generation_prompt=False)
        except RequestError:  # one that wants to see the calls, say: then it renders the conversation as it is
            return None
        if whole.count(_ANSWER) != 1 or alone.count(_ANSWER) != 1:
            return None
        rest, end = whole.partition(_ANSWER)[2], alone.partition(_ANSWER)[2]
        ids, end_ids = self._ids(rest), self._ids(commonprefix([rest, end]))
        stop_token = last_token if last_token in self._stop_token_ids else None
        return ids[said_already(ids, end_ids, stop_token, self._tokenizer.eos_token_id) :]

    def _render(
        self, messages: list[dict[str, Any]], request: ChatRequest, *, add_generation_prompt: bool | None = None
    ) -> str:
        if add_generation_prompt is None:
            add_generation_prompt = request.add_generation_prompt
        options = self._options | (request.chat_template_kwargs or {})
        tools = request.tools if request.tools and request.tool_choice != "none" else None
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        except Exception as error:  # a template is a program of the model's author and raises what it likes
            raise RequestError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _as_template_has_it(message: Mapping[str, Any]) -> dict[str, Any]:
    """Text for content, objects for the arguments of calls, a role that templates know; without token ids."""
    found = {key: value for key, value in message.items() if key not in TOKEN_FIELDS}
    if found.get("role") == "developer":
        found["role"] = "system"
    content = found.get("content")
    if isinstance(content, list):
        found["content"] = "".join(_text(part) for part in content)
    elif content is None:
        found["content"] = ""
    elif not isinstance(content, str):
        raise RequestError(f"a message's content must be text or a list of parts, got {type(content).__name__}")
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    else:
        found.pop("tool_calls", None)
    return found


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RequestError(f"a part of type {kind!r} in a message: only text is served")
    return text


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call  # what the policy said, as it said it
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
