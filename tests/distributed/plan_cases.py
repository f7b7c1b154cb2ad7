"""Measures what a policy rank allocates, for the tests of `plan`, by the storages of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.batching.packed_batch import PackedBatch, pack_rows
from grpo_mcore.layout import EngineLayout
from grpo_mcore.objective import ClippedPGLossConfig, ClippedPGLossFn
from grpo_mcore.parallel.memory import storage_key
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.recipe import PolicyConfig
from grpo_mcore.refit.plan.parts import parts_of
from grpo_mcore.refit.plan.plan import plan_model_refit
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.refit.transport.board import Seat

LENGTHS = (48, 61, 70, 77)  # of each micro-batch
TOKENS = sum(LENGTHS)


def micro_batches(pipeline: int) -> int:
    """Return how many micro-batches are trained on: as many as stages hold at a time, or two, after one another."""
    return 4 if pipeline > 1 else 2


class SavedTensors:
    """Counts the bytes that autograd keeps for the backward pass, without weights; each storage counts once."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {storage_key(tensor) for tensor in weights}
        self._live: Counter[Any] = Counter()
        self._bytes = self.peak = 0

    def __enter__(self) -> SavedTensors:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(tensor.detach(), self), _Saved.get)
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.__exit__(None, None, None)

    def add(self, tensor: Tensor, sign: int) -> None:
        key = storage_key(tensor)
        if key in self._weights:
            return
        before = self._live[key]
        self._live[key] += sign
        if min(before, self._live[key]) == 0:
            self._bytes += sign * tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self._bytes)


class _Saved:
    """Reports to `SavedTensors` when autograd saves a tensor and when it releases it."""

    def __init__(self, tensor: Tensor, counter: SavedTensors) -> None:
        self.tensor, self.counter = tensor, counter
        counter.add(tensor, 1)

    def get(self) -> Tensor:
        return self.tensor

    def __del__(self) -> None:
        self.counter.add(self.tensor, -1)


def rows(policy: Policy) -> list[PackedBatch]:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, policy.shape.vocab_size, (length,), generator=generator) for length in LENGTHS]
    columns = [
        {"token_mask": torch.ones(n), "sample_mask": torch.tensor(1.0), "advantages": torch.tensor((-1.0) ** i)}
        for i, n in enumerate(LENGTHS)
    ]
    names = [str(i) for i in range(len(LENGTHS))]
    return [
        pack_rows(tokens, columns, policy.row_multiple, names=names)
        for _ in range(micro_batches(policy.layout.pipeline))
    ]


def measured_bytes(address: Address, config: PolicyConfig) -> dict[str, int]:
    """Return this rank's bytes of weights, gradients, optimizer and activations (peak) after an optimizer step.

    The first rank also returns the refit buffer.
    """
    policy = Policy(config, address, seed=1, timeout_s=240, reference=False)
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0), prev_equals_curr=True)
    count = micro_batches(policy.layout.pipeline) * policy.layout.data
    with SavedTensors(weight for chunk in policy.chunks for weight in chunk.parameters()) as saved:
        policy.train_step(
            rows(policy),
            loss_fn,
            global_valid_seqs=len(LENGTHS) * count,
            global_valid_toks=(TOKENS - len(LENGTHS)) * count,
        )
    return refit_buffer(policy) | policy.memory() | {"activations": saved.peak}


def refit_buffer(policy: Policy) -> dict[str, int]:
    """Return the size of the buffer that the first rank creates."""
    if policy.here != policy.layout.coordinates(0):
        return {}
    config = policy.config
    size = int(config.refit_buffer_size_gb * 2**30)
    plan = plan_model_refit(policy.shape, policy.layout, EngineLayout(), dtype=config.precision, buffer_bytes=size)
    sender = RefitSender(policy.weights, 0, through_host=True)
    sender.open_refit(parts_of(plan, policy.layout.world_size, (), (), ()).senders[0], Seat(1, 0, 1, 1, 60.0))
    nbytes = sender.buffer_bytes
    sender.close_refit()
    return {"refit buffer": nbytes}
