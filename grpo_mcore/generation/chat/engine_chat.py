"""Chat requests to one engine, answered in the engine's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from grpo_mcore.generation.chat.answer import AnswerReader
from grpo_mcore.generation.chat.prompt import ChatPrompts
from grpo_mcore.generation.chat.request import ChatRequest, RequestError
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Trajectory, Turn, fingerprint, sample_seed


@dataclass(frozen=True)
class Reply:
    """HTTP `status` and `body` that the endpoint returns. For a completion also the `fingerprint` of its prompt and
    answer together, and the weight versions that read and generated these tokens, as in Trajectory.weight_versions."""

    status: int
    body: dict[str, Any]
    fingerprint: str | None = None
    weight_versions: tuple[tuple[int, int, int], ...] = ()


Generate = Callable[[list[GenerationRequest], Sampling], Iterator[Trajectory]]


class EngineChat:
    """Answers chat requests. Several threads may call it. `generate`: Engine.generate. `max_model_len`: length of the
    context in tokens. `vocab_size`: number of tokens in the model."""

    def __init__(
        self, config: ChatConfig, tokenizer: Any, generate: Generate, *, max_model_len: int, vocab_size: int
    ) -> None:
        self._config, self._generate, self._max_model_len = config, generate, max_model_len
        self._prompts = ChatPrompts(tokenizer, config, vocab_size)
        self._reader = AnswerReader(tokenizer, config)

    def answer(self, kind: str, body: Any, seed: int) -> Reply:
        """Answer a request. `kind`: "complete" or "tokenize". `seed`: the seed that ChatRecord.seed derives, also from
        the body's."""
        try:
            request = ChatRequest.read(body, self._config)
            sampling = request.sampling(self._config) if kind == "complete" else None
            ids = self._prompts.tokens(request)
            if sampling is None:
                return Reply(200, {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids})
            if len(ids) >= self._max_model_len:
                raise RequestError(
                    f"This model's maximum context length is {self._max_model_len} tokens, and the messages have "
                    f"{len(ids)}: there is no room for an answer"
                )
        except RequestError as error:
            type_ = "NotFoundError" if error.status == 404 else "BadRequestError"
            details = {"message": str(error), "type": type_, "code": error.status}
            return Reply(error.status, {"error": details, "object": "error", "message": str(error)})
        turn = Turn("user", torch.tensor(ids, dtype=torch.int64))
        # An agent may send the same seed with every request: the length of the prompt makes each turn draw anew.
        seed = sample_seed(seed, 0, "chat", len(ids))
        [trajectory] = self._generate([GenerationRequest("chat", 0, (turn,), seed)], sampling)
        return Reply(
            200,
            self._reader.completion(request, trajectory),
            fingerprint(trajectory.token_ids().tolist()),
            trajectory.weight_versions,
        )
