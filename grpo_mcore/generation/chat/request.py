"""A chat completion request: what of the API is served, and a refusal with its reason for the rest."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.rollout.trajectory import Sampling

# Any value but these draws tokens from another distribution than the one that is trained, or constrains them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "stream": (None, False),
    "echo": (None, False),
    "use_beam_search": (None, False),
    "continue_final_message": (None, False),
    "ignore_eos": (None, False),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "truncate_prompt_tokens": (None,),
    "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
}


class RequestError(ValueError):
    """A request that is not served. `status`: of HTTP."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message, status)
        self.message, self.status = message, status

    def __str__(self) -> str:
        return self.message


class ChatRequest(BaseModel):
    """The fields that are read; others have no effect, or must be neutral."""

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
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    required_prefix_token_ids: list[int] | None = None

    @classmethod
    def read(cls, body: Any, config: ChatConfig) -> ChatRequest:
        """Raises RequestError that names the field."""
        try:
            request = cls.model_validate(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise RequestError(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from error
        if request.model not in (None, config.model):
            raise RequestError(f"the model {request.model!r} is not served here, {config.model!r} is", 404)
        for name, neutral in _NEUTRAL.items():
            if name in body and body[name] not in neutral:
                raise RequestError(f"{name}: {body[name]!r} is not served, leave it at {neutral[-1]!r}")
        return request

    def sampling(self, config: ChatConfig) -> Sampling:
        """How tokens are drawn: as in training or in validation. Raises RequestError for any other way."""
        for known in config.samplings:
            if (
                _is(self.temperature, known.temperature)
                and _is(self.top_p, known.top_p)
                and (self.top_k in (None, -1, 0) or self.top_k == known.top_k)
            ):
                asked = self.max_completion_tokens or self.max_tokens or known.max_new_tokens
                return Sampling(
                    min(asked, known.max_new_tokens),
                    known.temperature,
                    known.top_p,
                    known.top_k,
                    known.stop_token_ids,
                    (*known.stop_strings, *self._stops()),
                )
        served = " or ".join(f"({s.temperature:g}, {s.top_p:g}, {s.top_k})" for s in config.samplings)
        raise RequestError(
            f"(temperature, top_p, top_k) must be those of training or validation, {served}, or left out; got "
            f"({self.temperature}, {self.top_p}, {self.top_k}): of other samples the policy cannot learn"
        )

    def _stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _is(asked: float | None, known: float) -> bool:
    return asked is None or abs(asked - known) < 1e-6
