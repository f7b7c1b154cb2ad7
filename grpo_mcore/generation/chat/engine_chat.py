"""Chat completions of one engine, in its process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from grpo_mcore.generation.chat.answer import AnswerReader
from grpo_mcore.generation.chat.prompt import ChatPrompts
from grpo_mcore.generation.chat.request import ChatRequest, RequestError
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.rollout.exact_tokens import fingerprint
from grpo_mcore.rollout.seeds import sample_seed
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Trajectory, Turn


@dataclass(frozen=True)
class Reply:
    """What the endpoint sends back: `status` and `body` of HTTP. Of a completion: the `fingerprint` of its prompt and
    answer together, and which weight versions read and generated these tokens, as Trajectory.weight_versions."""

    status: int
    body: dict[str, Any]
    fingerprint: str | None = None
    weight_versions: tuple[tuple[int, int, int], ...] = ()


Generate = Callable[[list[GenerationRequest], Sampling], Iterator[Trajectory]]


class EngineChat:
    """`generate`: the engine's. `max_model_len`: its context, in tokens. `vocab_size`: of its model. Several threads
    may use one."""

    def __init__(
        self, config: ChatConfig, tokenizer: Any, generate: Generate, *, max_model_len: int, vocab_size: int
    ) -> None:
        self._config, self._generate, self._max_model_len = config, generate, max_model_len
        self._prompts = ChatPrompts(
            tokenizer,
            chat_template=config.chat_template,
            chat_template_kwargs=config.chat_template_kwargs,
            stop_token_ids=config.samplings[0].stop_token_ids,
            vocab_size=vocab_size,
        )
        self._reader = AnswerReader(tokenizer, config)

    def complete(self, body: Any, seed: int) -> Reply:
        """A chat completion. `seed`: of the request, where its body has none."""
        try:
            request = ChatRequest.read(body, self._config)
            sampling = request.sampling(self._config)
            ids = self._prompts.tokens(request)
            if len(ids) >= self._max_model_len:
                raise RequestError(
                    f"This model's maximum context length is {self._max_model_len} tokens, and the messages have "
                    f"{len(ids)}: there is no room for an answer"
                )
        except RequestError as error:
            return refusal(error)
        turn = Turn("user", torch.tensor(ids, dtype=torch.int64))
        # An agent may ask with one seed again and again: each place in the conversation draws anew.
        seed = sample_seed(seed if request.seed is None else request.seed, 0, "chat", len(ids))
        [trajectory] = self._generate([GenerationRequest("chat", 0, (turn,), seed)], sampling)
        return Reply(
            200,
            self._reader.completion(request, trajectory),
            fingerprint(trajectory.token_ids().tolist()),
            trajectory.weight_versions,
        )

    def tokenize(self, body: Any) -> Reply:
        """The tokens of the prompt that these messages would have."""
        try:
            ids = self._prompts.tokens(ChatRequest.read(body, self._config))
        except RequestError as error:
            return refusal(error)
        return Reply(200, {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids})


def refusal(error: RequestError) -> Reply:
    """In the form that OpenAI's clients read."""
    kind = "NotFoundError" if error.status == 404 else "BadRequestError"
    return Reply(
        error.status,
        {"error": {"message": error.message, "type": kind, "code": error.status}, "object": "error"}
        | {"message": error.message},
    )
