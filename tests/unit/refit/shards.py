"""A whole model's weights cut as Megatron-Core's tensor-parallel ranks hold them, by the family's
declaration."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.families import Box, ModelShape, Param, local_shape, params_of, pieces, shape_of


class ShardedModel:
    """One policy rank's weight source, tensor-parallel only: every rank has all experts. `whole`: Hugging Face tensors
    by name."""

    def __init__(
        self,
        whole: Mapping[str, Tensor],
        shape: ModelShape,
        rank: int,
        size: int,
        params: Sequence[Param] | None = None,
    ) -> None:
        self.held: dict[str, Tensor] = {}
        for param in params or params_of(shape):
            if param.copy:
                continue
            local = torch.zeros(local_shape(param, shape, size), dtype=whole[param.hf[0].name].dtype)
            for piece in pieces(param, shape, rank, size):
                local[index(piece.local_box)].copy_(whole[piece.hf][index(piece.hf_box)])
            name = param.megatron.format(layer=param.layer, expert=param.expert[0] if param.expert else 0)
            self.held[name] = local

    def parameters(self) -> dict[str, Tensor]:
        return self.held


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


class Handle:
    """A worker in this process, as the driver sees it."""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target = name, target

    def call(self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None) -> Any:
        if method == "send_refit":  # it waits for the other ranks
            return in_a_thread(getattr(self.target, method), *args)
        return Answer(getattr(self.target, method), args)


def in_a_thread(function: Any, *args: Any) -> Future[Any]:
    """Call a function in a thread of its own."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(function(*args))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


class Answer:
    """A call that has already run, as in a local cluster."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self._error: Exception | None = None
        try:
            self._value = function(*args)
        except Exception as error:
            self._error = error

    def result(self) -> Any:
        if self._error:
            raise self._error
        return self._value


SHAPE = shape_of({
    "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 24, "vocab_size": 29, "tie_word_embeddings": False,
})  # fmt: skip
TENSORS = [tensor for param in params_of(SHAPE) if not param.copy for tensor in param.hf]


def random_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor in TENSORS}


class Source:
    """A source whose weights change between refits."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.weights = random_weights(0)

    def parameters(self) -> dict[str, Tensor]:
        return ShardedModel(self.weights, SHAPE, self.rank, self.size).parameters()
