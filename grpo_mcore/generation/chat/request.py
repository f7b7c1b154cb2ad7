"""A chat completion request: checks which part of the API is served, and refuses the rest with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.rollout.images import inline_image
from grpo_mcore.rollout.messages import MessageError, read_messages, read_tools
from grpo_mcore.rollout.trajectory import Sampling

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("stream", "echo", "use_beam_search", "continue_final_message", "ignore_eos"), (False,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens", "top_logprobs"), (0,)),
    **dict.fromkeys(("allowed_token_ids", "structured_outputs", "truncate_prompt_tokens"), (None,)),
    **dict.fromkeys(("chat_template", "thinking_token_budget"), (None,)),
    **dict.fromkeys(("functions", "documents", "logits_processors"), ([],)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), (None,)),
    "logit_bias": ({},),
    "bad_words": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
"""Accepted values of fields, besides null. Any other value constrains the tokens or draws them from a distribution that
is not trained."""


_StopString = Annotated[str, Field(min_length=1)]


class RequestError(ValueError):
    """A request is not served. `status`: HTTP status of the answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ChatRequest(BaseModel):
    """Fields of a request that have an effect. Other fields are ignored, or must have their neutral value."""

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: _StopString | list[_StopString] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    seed: int | None = None
    logprobs: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    required_prefix_token_ids: list[int] | None = None

    @classmethod
    def read(cls, body: Any, config: ChatConfig) -> ChatRequest:
        """Check a request's body. Raises RequestError, which names the field."""
        try:
            request = cls.model_validate(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise RequestError(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from error
        if request.model not in (None, config.model):
            raise RequestError(f"the model {request.model!r} is not served here, {config.model!r} is", 404)
        for name, neutral in NEUTRAL.items():
            if body.get(name) is not None and body[name] not in neutral:
                raise RequestError(f"{name}: {body[name]!r} is not served, leave it at {neutral[-1]!r}")
        try:
            request.messages = read_messages(request.messages, "messages", inline_image)
            request.tools = read_tools(request.tools, "tools")
        except MessageError as error:
            raise RequestError(str(error)) from error
        return request

    @property
    def stops(self) -> list[str]:
        """The texts at which the client wants an answer to end."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling(self, config: ChatConfig) -> Sampling:
        """Return the sampling settings: those of training or of validation. Raises RequestError for any other."""
        for known in config.samplings:
            pairs = ((self.temperature, known.temperature), (self.top_p, known.top_p))
            same_top_k = self.top_k in (None, -1, 0, known.top_k)
            if same_top_k and all(requested is None or abs(requested - value) < 1e-6 for requested, value in pairs):
                tokens = self.max_completion_tokens or self.max_tokens or known.max_new_tokens
                return replace(
                    known,
                    max_new_tokens=min(tokens, known.max_new_tokens),
                    stop_strings=(*known.stop_strings, *self.stops),
                    stop_token_ids=(*known.stop_token_ids, *(self.stop_token_ids or [])),
                )
        served = " or ".join(f"({s.temperature:g}, {s.top_p:g}, {s.top_k})" for s in config.samplings)
        raise RequestError(
            f"(temperature, top_p, top_k) must be those of training or validation, {served}, or left out; got "
            f"({self.temperature}, {self.top_p}, {self.top_k}): of other samples the policy cannot learn"
        )
