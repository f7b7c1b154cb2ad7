"""Faults of parallel layouts, each planted into the product on every rank of one computation. All are silent: the
computation goes on with wrong numbers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from grpo_mcore.families import Split
from grpo_mcore.parallel.mesh import Address, prepare_megatron
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.tools.parity.rank import logprobs_and_gradients
from tests.parity_fuzz import Draw

MODEL, WEIGHTS = "grpo_mcore.parallel.model", "grpo_mcore.parallel.weights.weights.ShardedWeights"
FINALIZE = "megatron.core.distributed.finalize_model_grads"


def _patched(target: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace a function by `change`, whose first argument is what it replaces."""
    module, _, name = target.rpartition(".")
    owner: Any = __import__(module.removesuffix(".ShardedWeights"), fromlist=["_"])
    owner = owner.ShardedWeights if module.endswith("ShardedWeights") else owner
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **how: change(original, *args, **how))


def _skip(*_: Any, **__: Any) -> None:
    return None


def _local_positions(original: Any, *args: Any, **how: Any) -> Any:
    return original(*args, **how | {"positions": torch.arange(len(how["positions"]))})


def _lost_key_gradients(original: Any, key: Any, value: Any, group: Any) -> Any:
    both = [torch.cat(list(torch.distributed.nn.functional.all_gather(x.detach(), group=group))) for x in (key, value)]
    start, size = group.rank() * len(key), len(key)
    for whole, own in zip(both, (key, value), strict=True):
        whole[start : start + size] = own  # only this rank's queries give them a gradient
    return tuple(both)


def _averaged(original: Any, *args: Any, **how: Any) -> Any:
    config = original(*args, **how)
    config.calculate_per_token_loss = False
    return config


def _other_experts(original: Any, self: Any, param: Any, chunk: Any) -> Any:
    if param.expert is None:
        return original(self, param, chunk)
    index, count = param.expert
    moved = (index + count // self.layout.expert) % count
    return original(self, type(param)(**(vars(param) | {"expert": (moved, count)})), chunk)


def _padding_counts(original: Any, *args: Any, **how: Any) -> Any:
    return original(*args, **how | {"vocab_size": 10**6})


def _one_token_late(original: Any, *args: Any, **how: Any) -> Any:
    return original(*args, **how | {"vocab_start": how["vocab_start"] and how["vocab_start"] + 1})


def _marked(original: Any, self: Any, *args: Any) -> None:
    original(self, *args)
    for _, tensor in self.local:
        tensor.tensor_model_parallel = True


def _experts_as_others(original: Any, self: Any, *args: Any) -> None:
    original(self, *args)
    for param, tensor in self.local:
        if param.expert is not None:
            tensor.allreduce = True


def _heads_swapped(original: Any, self: Any, folder: Any) -> None:
    original(self, folder)
    for param, tensor in self.local:
        if "linear_proj" in param.megatron and self.here.tensor and param.split is not Split.REPLICATED:
            with torch.no_grad():
                tensor.copy_(torch.cat([tensor[:, tensor.size(1) // 2 :], tensor[:, : tensor.size(1) // 2]], 1))


FAULTS: dict[str, tuple[str, Callable[..., Any], Callable[[Draw], Any]]] = {
    "norms_under_sequence_parallelism_are_not_summed":
        (f"{FINALIZE}._allreduce_non_tensor_model_parallel_grads", _skip, lambda draw: draw.layout.sequence_parallel),
    "tied_embeddings_of_two_stages_are_not_summed":
        (f"{FINALIZE}._allreduce_word_embedding_grads", _skip,
         lambda draw: draw.layout.pipeline > 1 and draw.sizes.get("tie_word_embeddings")),
    "gradients_are_averaged": (f"{MODEL}.transformer_config", _averaged, lambda draw: draw.layout.data > 1),
    "positions_count_from_the_rank's_first_token":
        (f"{MODEL}.describe_row", _local_positions, lambda draw: draw.layout.context > 1),
    "keys_lose_the_gradient_of_other_ranks'_queries":
        ("grpo_mcore.parallel.layers.attention._gather_context", _lost_key_gradients,
         lambda draw: draw.layout.context > 1),
    "experts_are_those_of_another_rank":
        (f"{WEIGHTS}._local_name", _other_experts, lambda draw: draw.layout.expert > 1),
    "padding_of_the_vocabulary_has_probability":
        (f"{MODEL}.token_scores", _padding_counts, lambda draw: draw.layout.tensor > 1),
    "the_second_part_of_the_vocabulary_is_one_late":
        (f"{MODEL}.token_scores", _one_token_late, lambda draw: draw.layout.tensor > 1),
    "the_norm_counts_copies_of_a_weight": (f"{WEIGHTS}.__init__", _marked, lambda draw: draw.layout.tensor > 1),
    "experts_are_reduced_as_other_weights":
        (f"{WEIGHTS}.__init__", _experts_as_others, lambda draw: draw.layout.expert > 1),
    "heads_are_swapped_on_the_second_rank": (f"{WEIGHTS}.load_hf", _heads_swapped, lambda draw: draw.layout.tensor > 1),
}  # fmt: skip
"""By name: the function that is replaced, by what, and the draws that could show the fault."""


def with_fault(name: str, address: Address, *args: Any) -> dict[str, Any]:
    """Compute a draw with a fault of FAULTS."""
    prepare_megatron(Platform.detect())
    target, change, _ = FAULTS[name]
    with _patched(target, change):
        return logprobs_and_gradients(address, *args)


def __getattr__(name: str) -> Callable[..., Any]:
    """Let each fault be named as a function of this module, as a RankPool takes it."""
    if name not in FAULTS:
        raise AttributeError(name)
    return partial(with_fault, name)
