"""The function that test_dpo.py runs on the ranks: four pairs of answers in packed rows of uneven lengths."""

from typing import Any

import torch

from grpo_mcore.batching.packed_batch import PackedBatch, pack_rows
from grpo_mcore.objective import PreferenceLossFn, RewardLossFn, sample_stats
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.recipe import DPOConfig
from grpo_mcore.tools.parity.rank import LENGTHS, LayoutCase, make_policy, owned_slices, sequences

PAIRS = len(LENGTHS) // 2
ROWS = ((0, 2), (1,), (3,))  # pairs of each row, distributed over the data-parallel ranks in turns
REFERENCE = tuple(-4.0 * length + 3.0 * (i % 3) for i, length in enumerate(LENGTHS))
"""Log-prob of each answer under an imagined reference."""
LABELS = tuple(0.1 * i for i in range(len(LENGTHS)))
"""Score of each answer for a reward model; that of a chosen one is its margin."""


def prompt_tokens(sample: int) -> int:
    """Return the number of tokens at the start of a sequence that are not trained."""
    return LENGTHS[sample] // 3


def loss_and_gradients(
    address: Address, model: str, case: LayoutCase, dpo: dict[str, Any] | None, pairs: bool = True
) -> dict[str, Any]:
    """Return the metrics (reporting ranks), the log-probs or values by sequence (last stage) and the gradient of the
    loss. `dpo`: None for that of a reward model, from `pairs` or from scores."""
    policy = make_policy(address, model, case)
    tokens = sequences(policy.shape.vocab_size)
    batches = []
    for row in [row for i, row in enumerate(ROWS) if i % policy.layout.data == policy.here.data]:
        samples = [i for pair in row for i in (2 * pair, 2 * pair + 1)]
        columns = [
            {
                "token_mask": (torch.arange(LENGTHS[i]) >= (prompt_tokens(i) if dpo else LENGTHS[i] - 1)).float(),
                "sample_mask": torch.tensor(1.0),
                "reference_sums": torch.tensor(REFERENCE[i], dtype=torch.float64),
                "rewards": torch.tensor(LABELS[i]),
            }
            for i in samples
        ]
        names = [str(i) for i in samples]
        batches.append(pack_rows([tokens[i] for i in samples], columns, policy.row_multiple, names=names))
    # A rank with fewer rows than another one runs padding.
    most = -(-len(ROWS) // policy.layout.data)
    batches += [batches[0].empty_like(policy.row_multiple)] * (most - len(batches))
    found: dict[int, torch.Tensor] = {}
    for batch, scores in zip(batches, policy.logprobs(batches) or (), strict=False):
        found |= {int(name): part for name, part in zip(batch.names, batch.split(scores), strict=True)}
    before = owned_slices(policy)
    loss = PreferenceLossFn(DPOConfig.model_validate(dpo)) if dpo else RewardLossFn(pairs=pairs)
    report = policy.train_step(batches, loss, global_valid_seqs=PAIRS if pairs else len(LENGTHS), global_valid_toks=1)
    gradients = [
        (name, box, was - now) for (name, box, was), (_, _, now) in zip(before, owned_slices(policy), strict=True)
    ]
    metrics = report.metrics if policy.layout.is_reporting_rank(address.rank) else {}
    return {"logprobs": found, "gradients": gradients, "metrics": metrics}


def row_of(answers: list[dict[str, list[int]]]) -> PackedBatch:
    """Return answers, a chosen and a rejected one in turns, as one row."""
    columns = [
        {"token_mask": torch.tensor(answer["trained"]).float(), "sample_mask": torch.tensor(1.0)} for answer in answers
    ]
    return pack_rows([torch.tensor(answer["tokens"]) for answer in answers], columns)


def sums_of_answers(address: Address, model: str, answers: list[dict[str, list[int]]]) -> torch.Tensor:
    """Return the log-prob of each answer, as a run computes those of its reference."""
    batch = row_of(answers)
    (logprobs,) = make_policy(address, model, LayoutCase("TP1")).logprobs([batch]) or ()
    return sample_stats(batch.loss_inputs() | {"reference_policy_logprobs": logprobs})["reference_sum"]


def losses_of_answers(
    address: Address,
    model: str,
    answers: list[dict[str, list[int]]],
    reference_sums: torch.Tensor,
    settings: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return the metrics for each of these sections `dpo`."""
    batch, policy, found = row_of(answers), make_policy(address, model, LayoutCase("TP1")), []
    batch.columns["reference_sums"] = batch.per_token(reference_sums)
    for dpo in settings:
        loss = PreferenceLossFn(DPOConfig.model_validate(dpo))
        report = policy.eval_step([batch], loss, global_valid_seqs=len(answers) // 2, global_valid_toks=1)
        found.append(dict(report.metrics))
    return found
