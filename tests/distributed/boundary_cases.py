"""The functions that test_boundaries.py runs on the ranks."""

from typing import Any

import torch

from grpo_mcore.batching.packed_batch import PackedBatch, pack_rows
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.tools.parity.rank import LayoutCase, make_policy, owned_slices

ROW = (7, 13, 4, 9)  # lengths of the sequences of one row
CHANGED = 1  # the sequence whose tokens all change


def score_and_differentiate(address: Address, model: str, case: LayoutCase, change: bool) -> dict[str, Any]:
    """Return the log-probs of each sequence of a row, and the gradient of the sum over all sequences but CHANGED."""
    policy = make_policy(address, model, case)
    batch = row(policy, change)
    logprobs = policy.logprobs([batch])
    before = owned_slices(policy)
    policy.train_step([batch], _weighted_sum, global_valid_seqs=1, global_valid_toks=1)
    return {
        "logprobs": batch.split(logprobs[0]) if logprobs else None,
        "gradients": [was - now for (_, _, was), (_, _, now) in zip(before, owned_slices(policy), strict=True)],
    }


def row(policy: Policy, change: bool = False) -> PackedBatch:
    """Return a row of random tokens; `weight` is 0 for those of CHANGED, and 1 for the others."""
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, 131, (n,), generator=generator) for n in ROW]
    if change:
        tokens[CHANGED] = (tokens[CHANGED] + 17) % 131
    columns = [
        {"token_mask": torch.ones(n), "sample_mask": torch.tensor(1.0), "weight": torch.tensor(float(i != CHANGED))}
        for i, n in enumerate(ROW)
    ]
    return pack_rows(tokens, columns, policy.row_multiple)


def gradients_of_embeddings(address: Address, model: str) -> list[torch.Tensor]:
    """Return, by sequence of a row, the gradient of the embeddings of the sum over all sequences but CHANGED."""
    policy = make_policy(address, model, LayoutCase("TP1"))
    batch, found = row(policy), []

    def watch(_: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(found.append)

    policy.chunks[0].module.embedding.register_forward_hook(watch)
    policy.train_step([batch], _weighted_sum, global_valid_seqs=1, global_valid_toks=1)
    (gradient,) = found
    return list(gradient[:, 0].split(ROW))


def _weighted_sum(logprobs: torch.Tensor, inputs: Any, **_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (logprobs * inputs["weight"]).sum()
    return loss, {"loss": loss.detach()}
