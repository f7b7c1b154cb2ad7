"""The function that test_deterministic.py runs on the ranks."""

from typing import Any

import torch
from torch import Tensor

from grpo_mcore.batching.packed_batch import pack_rows
from grpo_mcore.batching.plan import plan_alone, plan_step
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.tools.parity.rank import LayoutCase, compared_loss
from tests.distributed.policy_state_cases import adam_config

LENGTHS = (9, 31, 4, 17, 8, 26, 3, 12, 5, 22, 14)
CLIP = 0.05


def train(address: Address, model: str, case: LayoutCase, how: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Train some optimizer steps on the same samples. `how`: deterministic, and arguments of `plan_step`. Return the
    log-probs of this rank's samples before each step by sample, norms, and the weights in the end."""
    config = adam_config(model, case)
    how = dict(how)
    config.deterministic, config.max_grad_norm = how.pop("deterministic"), CLIP
    policy = Policy(config, address, seed=1, timeout_s=60, reference=False)
    draw = torch.Generator().manual_seed(3)
    samples = [torch.randint(0, 90, (length,), generator=draw) for length in LENGTHS]
    columns = [
        {
            "token_mask": (torch.arange(length) >= 2).float(),
            "sample_mask": torch.tensor(1.0),
            "advantages": torch.tensor((-1.0) ** number * (0.5 + 0.1 * number)),
        }
        for number, length in enumerate(LENGTHS)
    ]
    dp = policy.layout.data
    plan = plan_alone(LENGTHS, dp=dp) if config.deterministic else plan_step(LENGTHS, dp=dp, **how)
    (bins,) = plan.for_rank(policy.here.data)
    filled = [bin for bin in bins if bin]
    batches = [
        pack_rows(
            [samples[i] for i in bin], [columns[i] for i in bin], policy.row_multiple, names=[str(i) for i in bin]
        )
        for bin in filled
    ]
    batches += [batches[0].empty_like(policy.row_multiple)] * (len(bins) - len(filled))
    norms, logprobs = [], []
    for _ in range(steps):
        rows = policy.logprobs(batches) or []
        parts = [part for batch, row in zip(batches, rows, strict=False) for part in batch.split(row)]
        logprobs.append(dict(zip((i for bin in filled for i in bin), (part.clone() for part in parts), strict=False)))
        report = policy.train_step(batches, compared_loss(), global_valid_seqs=len(LENGTHS), global_valid_toks=100)
        norms.append(report.grad_norm)
    weights: dict[str, Tensor] = {
        name: weight.detach().clone() for chunk in policy.chunks for name, weight in chunk.module.named_parameters()
    }
    return {"norms": norms, "logprobs": logprobs, "weights": weights}
