"""Chat requests to one engine, answered in the engine's process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_mcore.generation.chat.answer import AnswerReader
from grpo_mcore.generation.chat.prompt import ChatPrompts
from grpo_mcore.generation.chat.request import ChatRequest, RequestError
from grpo_mcore.generation.chat.sessions import ChatTokens
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.rollout.images import ImageReader
from grpo_mcore.rollout.trajectory import (
    GenerationRequest,
    ImageSpan,
    Sampling,
    Trajectory,
    content_ids,
    fingerprint,
    sample_seed,
)


@dataclass(frozen=True)
class Reply:
    """HTTP `status` and `body` that the endpoint returns. For a completion also the `fingerprint` of its prompt and
    answer together, the weight versions that read and generated these tokens, as in Trajectory.weight_versions, and the
    tokens themselves, for its session. `images`: those of its prompt. In all of these, as in the body, numbers below 0
    tell the tokens of images (`content_ids`): agents send them back, and equal ones are equal images."""

    status: int
    body: dict[str, Any]
    fingerprint: str | None = None
    weight_versions: tuple[tuple[int, int, int], ...] = ()
    tokens: ChatTokens | None = None
    images: tuple[ImageSpan, ...] = ()


Generate = Callable[[list[GenerationRequest], Sampling], Iterator[Trajectory]]


class EngineChat:
    """Answers chat requests. Several threads may call it. `generate`: Engine.generate. `max_model_len`: length of the
    context in tokens. `vocab_size`: number of tokens in the model."""

    def __init__(
        self,
        config: ChatConfig,
        tokenizer: Any,
        generate: Generate,
        *,
        max_model_len: int,
        vocab_size: int,
        images: ImageReader | None = None,
    ) -> None:
        self._config, self._generate, self._max_model_len = config, generate, max_model_len
        self._prompts = ChatPrompts(tokenizer, config, vocab_size, images)
        self._reader = AnswerReader(tokenizer, config)

    def answer(self, kind: str, body: Any, seed: int) -> Reply:
        """Answer a request. `kind`: "complete" or "tokenize". `seed`: the seed that ChatRecord.seed derives, also from
        the body's."""
        try:
            request = ChatRequest.read(body, self._config)
            sampling = request.sampling(self._config) if kind == "complete" else None
            turn, images = self._prompts.turn(request)
            ids = content_ids([turn]).tolist()
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
        # An agent may send the same seed with every request: the length of the prompt makes each turn draw anew.
        seed = sample_seed(seed, 0, "chat", len(ids))
        [trajectory] = self._generate([GenerationRequest("chat", 0, (turn,), seed, images=images)], sampling)
        answer, generated = self._reader.completion(request, trajectory), trajectory.turns[-1]
        assert generated.logprobs is not None
        prompt_ids = np.array(ids, np.int64 if turn.images else np.int32)
        generated_ids = generated.token_ids.numpy().astype(np.int32)
        tokens = ChatTokens(prompt_ids, generated_ids, generated.logprobs.numpy(), generated.text)
        name = fingerprint(trajectory.content_ids().tolist())
        return Reply(200, answer, name, trajectory.weight_versions, tokens, turn.images)
