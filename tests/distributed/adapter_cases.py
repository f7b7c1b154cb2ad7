"""The functions that test_adapters.py runs on the ranks."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_mcore.families import pieces
from grpo_mcore.objective import ClippedPGLossFn
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.tools.parity.rank import LayoutCase, compared_loss, policy_config
from tests.distributed.policy_cases import COUNTS, few_rows
from tests.distributed.policy_state_cases import ADAM, SCHEDULE

if TYPE_CHECKING:
    from grpo_mcore.parallel.weights.adapters import LowRank

PEFT = {"enabled": True, "dim": 4, "alpha": 6.0}
Parts = dict[tuple[str, str], list[tuple[str, Any, Tensor]]]  # (weight, "up" or "down") -> its slices


def adapted_policy(
    address: Address, model: str, case: LayoutCase, peft: dict[str, Any], *, adam: bool = False
) -> Policy:
    """Build a policy with adapters whose `up` is random, drawn from tensor names and so the same on every layout.

    `adam`: train as usual, instead of moving by the gradient.
    """
    config = policy_config(model, case)
    megatron = config.megatron_cfg
    megatron.peft = megatron.peft.model_copy(update=PEFT | peft)
    if adam:
        megatron.optimizer = megatron.optimizer.model_copy(update=ADAM)
        megatron.scheduler = megatron.scheduler.model_copy(update=SCHEDULE)
    policy = Policy(config, address, seed=1, timeout_s=60, reference=True)
    with torch.no_grad():
        for addition in additions(policy) if (PEFT | peft)["enabled"] else ():
            whole = {
                tensor.name: 0.05 * torch.randn(tensor.shape, generator=seeded(tensor.name))
                for tensor in addition.adapter.up.hf
            }
            for name, box, view in slices(policy, addition, "up"):
                view.copy_(whole[name][tuple(slice(*span) for span in box)])
    policy.optimizer.reload_model_params()
    return policy


def seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def additions(policy: Policy) -> list[LowRank]:
    return [addition for chunk in policy.chunks for addition in chunk.module.adapters.all]


def slices(policy: Policy, addition: LowRank, part: str) -> list[tuple[str, Any, Tensor]]:
    """Return (tensor, box in it, view of the values on this rank)."""
    param, local = getattr(addition.adapter, part), getattr(addition, part).detach()
    return [
        (piece.hf, piece.hf_box, local[tuple(slice(*span) for span in piece.local_box)])
        for piece in pieces(param, policy.shape, *policy.weights.split(param))
    ]


def parts(policy: Policy) -> Parts:
    return {
        (addition.adapter.weight.hf[0].name, part): [
            (name, box, view.clone()) for name, box, view in slices(policy, addition, part)
        ]
        for addition in additions(policy)
        for part in ("down", "up")
    }


def logprobs_of(policy: Policy, *, reference: bool = False) -> dict[int, Tensor]:
    """Return log-probs by sequence; only the last stage has any."""
    batches, found = few_rows(policy), {}
    rows = policy.reference_logprobs(batches) if reference else policy.logprobs(batches)
    for batch, row in zip(batches, rows or (), strict=False):
        found |= {int(name): part for name, part in zip(batch.names, batch.split(row), strict=True)}
    return found


def step(policy: Policy) -> float:
    """Train one step and return the gradient norm."""
    report = policy.train_step(few_rows(policy), compared_loss(), **COUNTS)
    policy.advance_schedule()
    return report.grad_norm


def learn(address: Address, model: str, case: LayoutCase, peft: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train one step. Return log-probs of policy and reference, adapters before and after, and whether others changed.

    The merged model is written to `folder`, unless that is empty.
    """
    policy = adapted_policy(address, model, case, peft)
    if folder:
        policy.export_hf(folder)
    frozen = [tensor.detach().clone() for _, tensor in policy.weights.local]
    found = {"logprobs": logprobs_of(policy), "reference": logprobs_of(policy, reference=True), "before": parts(policy)}
    norm = step(policy)
    trained = sum(p.numel() for chunk in policy.chunks for p in chunk.parameters() if p.requires_grad)
    buffers = [b for chunk in policy.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return found | {
        "after": parts(policy),
        "norm": norm,
        "frozen": all(torch.equal(was, now) for was, (_, now) in zip(frozen, policy.weights.local, strict=True)),
        "trained": (trained, sum(p.numel() for a in additions(policy) for p in a.parameters())),
        "gradients": sum(buffer.grad_data.numel() for buffer in buffers),
        "copies": policy._reference is not None,
    }


def drop(address: Address, model: str, case: LayoutCase, peft: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return what `learn` returns for the second step, with dropout: `logprobs` as in training,
    `first` as in training of the first step. The merged model that acts in training is written to `folder`, unless that
    is empty. The loss gets the log-probs as those of the previous policy."""
    policy = adapted_policy(address, model, case, peft)
    batches = few_rows(policy)

    def found(rows: list[Tensor] | None) -> dict[int, Tensor]:
        by_name: dict[int, Tensor] = {}
        for batch, row in zip(batches, rows or (), strict=False):
            by_name |= {int(name): part for name, part in zip(batch.names, batch.split(row), strict=True)}
        return by_name

    first = found(policy.logprobs(batches, dropout=True))
    policy.advance_schedule()
    if folder:
        with policy._dropout(True):
            policy.export_hf(folder)
    rows, before = policy.logprobs(batches, dropout=True), parts(policy)
    for batch, row in zip(batches, rows or (), strict=False):
        batch.columns["prev_logprobs"] = row
    loss = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0})
    report = policy.train_step(batches, loss, **COUNTS)
    ratios = {name: value for name, value in report.metrics.items() if name in ("probs_ratio_min", "probs_ratio_max")}
    return {"first": first, "logprobs": found(rows), "ratios": ratios, "before": before, "after": parts(policy)}


def train_save_train(address: Address, model: str, case: LayoutCase, folder: str) -> list[float]:
    policy = adapted_policy(address, model, case, {}, adam=True)
    for _ in range(2):
        step(policy)
    policy.save(folder)
    return [step(policy) for _ in range(2)]


def load_train(address: Address, model: str, case: LayoutCase, folder: str, peft: dict[str, Any]) -> list[float]:
    policy = adapted_policy(address, model, case, peft, adam=True)
    policy.load(folder)
    return [step(policy) for _ in range(2)]
