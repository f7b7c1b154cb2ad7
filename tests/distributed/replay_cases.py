"""The function that test_router_replay.py runs on the ranks."""

from dataclasses import replace
from typing import Any

import torch

from grpo_mcore.batching.packed_batch import PackedBatch
from grpo_mcore.objective import ClippedPGLossConfig, ClippedPGLossFn
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.tools.parity.rank import LayoutCase, make_policy, owned_slices
from tests.distributed.policy_cases import COUNTS, few_rows


def random_routes(batch: PackedBatch, layers: int, experts: int, active: int) -> PackedBatch:
    """Add random experts for each token of a sequence, the same in whichever row the sequence is packed."""
    found = torch.full((batch.tokens.size(1), layers, active), -1, dtype=torch.int16)
    start = 0
    for name, length in zip(batch.names, batch.lengths, strict=True):
        draw = torch.Generator().manual_seed(int(name))
        chosen = torch.rand(length - 1, layers, experts, generator=draw).argsort(-1)[..., :active]
        found[start : start + length - 1] = chosen.to(torch.int16)
        start += length
    return replace(batch, routes=found)


def replayed(address: Address, model: str, case: LayoutCase, replay: bool) -> dict[str, Any]:
    """Return the same as `tools.parity.rank.logprobs_and_gradients`, with routers that replay `random_routes`."""
    policy = make_policy(address, model, case, router_replay={"enabled": True})
    experts = policy.shape.experts
    assert experts is not None
    batches = few_rows(policy)
    if replay:
        batches = [random_routes(batch, policy.shape.num_layers, experts.count, experts.active) for batch in batches]
    found: dict[int, torch.Tensor] = {}
    for batch, row in zip(batches, policy.logprobs(batches) or (), strict=False):
        found |= {int(name): part for name, part in zip(batch.names, batch.split(row), strict=True)}
    before = owned_slices(policy)
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0), prev_equals_curr=True)
    policy.train_step(batches, loss_fn, **COUNTS)
    moves = zip(before, owned_slices(policy), strict=True)
    gradients = [(name, box, was - now) for (name, box, was), (_, _, now) in moves]
    policy.shutdown()
    return {"logprobs": found, "gradients": gradients}
