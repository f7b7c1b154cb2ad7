"""Conversion of chat messages to the tokens of a prompt, exact over turns.

An assistant's message that a client sends back carries the token ids of its prompt and of itself. The next prompt
begins with exactly these tokens; the chat template only renders what follows. So generated tokens are never tokenised
again, and reasoning that a template would strip from earlier turns stays in the prompt.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from grpo_mcore.generation.chat.request import ChatRequest, RequestError
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.rollout.chat_form import chat_form
from grpo_mcore.rollout.images import ImageReader, take_images
from grpo_mcore.rollout.messages import REASONING_FIELDS, MessageError, join_texts, refuse_unknown_roles
from grpo_mcore.rollout.text_tokens import tokens_behind
from grpo_mcore.rollout.trajectory import FIRST_CONTENT, Turn
from grpo_mcore.rollout.turn_end import marks_of, said_already

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")
_ANSWER = "@@answer@@"
_LONGEST_VALUE = 10_000


class ChatPrompts:
    """Builds prompts for one tokenizer. `vocab_size`: number of the model's tokens, which may exceed the
    tokenizer's. `images`: what prompts need of the model's images; None: they have none."""

    def __init__(self, tokenizer: Any, config: ChatConfig, vocab_size: int, images: ImageReader | None = None) -> None:
        self._tokenizer, self._vocab_size, self._images = tokenizer, vocab_size, images
        self._options = dict(config.chat_template_kwargs)
        if config.chat_template:
            self._options["chat_template"] = config.chat_template
        self._form = chat_form(tokenizer, config.chat_template)
        self._template = config.chat_template or getattr(tokenizer, "chat_template", None) or ""
        self._variables = _template_variables(self._template)
        self._marks = marks_of(tokenizer)
        self._stop_token_ids = {*self._marks, *config.samplings[0].stop_token_ids}

    def turn(self, request: ChatRequest) -> tuple[Turn, dict[str, bytes]]:
        """Return the prompt, and its images by digest. Raises RequestError if messages, token ids or images cannot be
        used."""
        try:
            messages, images = take_images(request.messages)
            before, after = self.tokens(request.model_copy(update={"messages": messages}))
            if not images and min(before, default=0) >= 0:
                return Turn("user", torch.tensor([*before, *after], dtype=torch.int64)), {}
            if self._images is None:
                raise RequestError("messages: there are images, and this policy reads none")
            before, spans = self._images.recorded(before, images)
            [(after, new)] = self._images.expand([after], images[len(spans) :])
        except ValueError as error:
            raise error if isinstance(error, RequestError) else RequestError(f"messages: {error}") from error
        spans += tuple(replace(span, offset=span.offset + len(before)) for span in new)
        return Turn("user", torch.tensor([*before, *after]), images=spans), self._images.by_digest(images)

    def tokens(self, request: ChatRequest) -> tuple[list[int], list[int]]:
        """Return the recorded tokens with which a prompt begins, and those after them, with a mark for each image.
        Raises RequestError if messages or token ids cannot be used."""
        try:
            refuse_unknown_roles(request.messages, self._template)
        except MessageError as error:
            raise RequestError(str(error)) from error
        if request.stop_token_ids:
            self._check("stop_token_ids", request.stop_token_ids)
        position, before = self._recorded(request)
        messages = [
            {key: value for key, value in message.items() if key not in TOKEN_FIELDS}
            for message in join_texts(request.messages, self._form.joint)
        ]
        if before is not None and position is not None:
            text, after = self._after(messages, position, before[-1], request)
            if messages[position].get("tool_calls"):
                # Templates may write a result by the call that it answers (Gemma 4), or another end behind calls.
                # Its text and thought are in its tokens; a later question would hide the thought.
                answer = {key: value for key, value in messages[position].items() if key not in REASONING_FIELDS}
                calls = [*messages[:position], {**answer, "content": ""}, *messages[position + 1 :]]
                if not (text and self._render(calls, request).endswith(text)):
                    after = self._after_calls(calls, position, before[-1], request) or after
            if after is not None:
                return before, after
        return [], self._ids(self._render(messages, request))

    def _recorded(self, request: ChatRequest) -> tuple[int | None, list[int] | None]:
        """Return (index of the last message with recorded tokens, the tokens of its prompt and of itself)."""
        for position in reversed(range(len(request.messages))):
            message = request.messages[position]
            if message.get("role") == "assistant" and message.get("generation_token_ids"):
                parts = message.get("prompt_token_ids"), message["generation_token_ids"]
                for name, ids in zip(TOKEN_FIELDS, parts, strict=False):
                    self._check(f"messages.{position}.{name}", ids)
                return position, [*parts[0], *parts[1]]  # type: ignore[misc]
        required = request.required_prefix_token_ids
        if not required:
            return None, None
        self._check("required_prefix_token_ids", required)
        answers = [i for i, message in enumerate(request.messages) if message.get("role") == "assistant"]
        return (answers[-1], required) if answers else (None, None)

    def _check(self, name: str, ids: Any) -> None:
        least = 0 if self._images is None or name.endswith("generation_token_ids") else FIRST_CONTENT
        if (
            not isinstance(ids, list)
            or not ids
            or not all(type(i) is int and least <= i < self._vocab_size for i in ids)
        ):
            raise RequestError(f"{name}: must be a list of token ids from 0 to {self._vocab_size - 1}")

    def _after(
        self, messages: list[dict[str, Any]], position: int, last_token: int, request: ChatRequest
    ) -> tuple[str, list[int] | None]:
        """Return the text and the tokens after the answer at `position`, shown as a text without calls; "" and None if
        the rendered text does not show where it ends."""
        shown = [*messages[:position], {"role": "assistant", "content": _ANSWER}]
        try:
            whole = self._render([*shown, *messages[position + 1 :]], request)
            alone = self._render(shown, request.model_copy(update={"add_generation_prompt": False}))
        except RequestError:  # such as a template that requires the calls that a tool answers
            return "", None
        if whole.count(_ANSWER) != 1 or alone.count(_ANSWER) != 1:
            return "", None
        text = whole.partition(_ANSWER)[2]
        system_texts = (
            message["content"].strip() for message in messages[position + 1 :] if message.get("role") == "system"
        )
        if any(system_text in whole and system_text not in text for system_text in system_texts):
            return "", None  # the template gathers them at the beginning, as DeepSeek's does
        ids = tokens_behind(self._tokenizer, _ANSWER, text)
        last = tokens_behind(self._tokenizer, _ANSWER, alone.partition(_ANSWER)[2])
        stop_token = last_token if last_token in self._stop_token_ids else None
        return text, ids[said_already(ids, last, stop_token, self._marks, self._tokenizer.eos_token_id) :]

    def _after_calls(
        self, messages: list[dict[str, Any]], position: int, last_token: int, request: ChatRequest
    ) -> list[int] | None:
        """Return the tokens after the answer at `position`, with its calls; None if the rendered text of the messages
        up to it does not begin that of all."""
        alone = self._render(messages[: position + 1], request.model_copy(update={"add_generation_prompt": False}))
        whole = self._render(messages, request)
        if not whole.startswith(alone):
            return None
        ids = self._ids(alone)
        end = next((index for index in reversed(range(len(ids))) if ids[index] in self._marks), None)
        if end is None:
            return None
        follows = tokens_behind(self._tokenizer, alone, whole.removeprefix(alone))
        if last_token in self._stop_token_ids and last_token != ids[end] and follows[:1] == [last_token]:
            return follows[1:]  # the token that begins the next turn ends this one, as GLM's <|observation|>
        return [*ids[end + (last_token in self._stop_token_ids) :], *follows]

    def _render(self, messages: list[dict[str, Any]], request: ChatRequest) -> str:
        effort = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
        options = self._options | self._chosen_variables(effort | (request.chat_template_kwargs or {}))
        tools = request.tools if request.tools and request.tool_choice != "none" else None
        try:
            return self._tokenizer.apply_chat_template(
                self._form.messages(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=request.add_generation_prompt,
                **options,
            )
        except Exception as error:  # a template may raise anything
            raise RequestError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

    def _chosen_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a request's `chat_template_kwargs` that the template uses. Raises RequestError for arguments
        of the tokenizer, such as another template, and for values that are neither text, numbers nor booleans."""
        for name, value in variables.items():
            if name in _reserved(self._tokenizer):
                raise RequestError(f"chat_template_kwargs.{name}: only variables of the chat template may be set")
            if isinstance(value, dict | list) or isinstance(value, str) and len(value) > _LONGEST_VALUE:
                raise RequestError(
                    f"chat_template_kwargs.{name}: must be a boolean, a number or a text of at most {_LONGEST_VALUE} "
                    "characters"
                )
        return {name: value for name, value in variables.items() if name in self._variables}

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _reserved(tokenizer: Any) -> set[str]:
    """Return the names that `apply_chat_template` gives a meaning."""
    return {*inspect.signature(tokenizer.apply_chat_template).parameters, *getattr(tokenizer, "special_tokens_map", {})}


def _template_variables(template: Any) -> set[str]:
    """Return every name in the chat template; a tokenizer may have several, by name."""
    return set(re.findall(r"[^\W\d]\w*", " ".join(template.values()) if isinstance(template, dict) else template))
