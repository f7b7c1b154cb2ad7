"""The functions that test_distillation.py runs on the ranks: a teacher's pass, and a loss over whole distributions."""

from dataclasses import replace
from typing import Any

import torch

from grpo_mcore.batching.packed_batch import PackedBatch, pack_rows, share_prefixes
from grpo_mcore.objective import DistillationLossFn
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.recipe import DivergenceConfig
from grpo_mcore.tools.parity.rank import LayoutCase, make_policy, owned_slices, policy_config, sequences
from tests.distributed.policy_cases import FEW

PREFIX = 33
"""Tokens that two samples share where `shared` is asked for; a block of 32 of them is computed once."""


def tokens_of(vocab: int, shared: bool) -> list[torch.Tensor]:
    """Return the sequences; `shared`: all of them begin with the same tokens."""
    tokens = sequences(vocab, FEW)
    start = torch.arange(PREFIX) % vocab
    return [torch.cat([start, part]) for part in tokens] if shared else tokens


def trained(length: int) -> torch.Tensor:
    return (torch.arange(length) >= max(1, length // 3)).float()


def rows_of(policy: Policy, shared: bool, hidden: dict[int, torch.Tensor] | None = None) -> list[PackedBatch]:
    """Return this rank's rows. `hidden`: the teacher's states of each sample."""
    tokens, rows = tokens_of(policy.shape.vocab_size, shared), []
    for bin in [bin for i, bin in enumerate(FEW.bins) if i % policy.layout.data == policy.here.data]:
        columns = [{"token_mask": trained(len(tokens[i])), "sample_mask": torch.tensor(float(i != 2))} for i in bin]
        if hidden is None:
            columns = [of_sample | {"sample_mask": torch.tensor(1.0)} for of_sample in columns]
        row = pack_rows([tokens[i] for i in bin], columns, policy.row_multiple, names=[str(i) for i in bin])
        if hidden is not None:
            row = replace(row, teacher_hidden=torch.cat([hidden[i] for i in bin]))
        rows.append(share_prefixes(row, policy.row_multiple, 32) if shared else row)
    return rows


def teacher_states(address: Address, model: str, case: LayoutCase, shared: bool) -> dict[int, torch.Tensor]:
    """Return the hidden states of each sample's trained tokens, from a policy that does not train."""
    policy = Policy(policy_config(model, case), address, seed=1, timeout_s=60, reference=False, trains=False)
    rows = rows_of(policy, shared)
    states: dict[int, torch.Tensor] = {}
    for row, values in zip(rows, policy.hidden_states(rows) or (), strict=False):
        counts = [int(part.sum()) for part in row.split(row.next_token_trained())]
        states |= {int(name): part.clone() for name, part in zip(row.names, values.split(counts), strict=True)}
    return states if policy.layout.is_reporting_rank(address.rank) else {}


def loss_and_gradients(
    address: Address, model: str, case: LayoutCase, teacher: str, hidden: dict[int, torch.Tensor],
    divergence: dict[str, Any], shared: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the metrics (reporting ranks) and the gradient of the loss. Sample 2 is masked."""
    policy = make_policy(address, model, case)
    policy.load_teacher_head(teacher)
    rows = rows_of(policy, shared, hidden)
    lengths = [len(part) for part in tokens_of(policy.shape.vocab_size, shared)]
    count = int(sum(trained(length).sum() for i, length in enumerate(lengths) if i != 2))
    before = owned_slices(policy)
    loss = DistillationLossFn(DivergenceConfig.model_validate({"enabled": True} | divergence))
    report = policy.train_step(rows, loss, global_valid_seqs=len(FEW.lengths) - 1, global_valid_toks=count)
    gradients = [
        (name, box, was - now) for (name, box, was), (_, _, now) in zip(before, owned_slices(policy), strict=True)
    ]
    return {"metrics": report.metrics if policy.layout.is_reporting_rank(address.rank) else {}, "gradients": gradients}
