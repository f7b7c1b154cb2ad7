"""Direct preference optimization: make the chosen answer of a pair likelier than the rejected one, measured against the
model that training starts from. The same policy, batches and packing as GRPO; no engine generates.

One step: reference log-probs of pairs that are new -> one pass over both answers of each pair -> update. The two
answers of a pair lie in one packed row (a micro-batch counts pairs), so that the loss compares them without a second
pass. The losses are those of objective/preference.py; the loop is that of training_step/fine_tuning.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from grpo_mcore.algorithms.sft import as_trajectory, prefixes_of
from grpo_mcore.algorithms.training_step.fine_tuning import FineTuning, Metrics, filled_up
from grpo_mcore.algorithms.training_step.policy_group import PolicyGroup
from grpo_mcore.algorithms.training_step.step_batch import TrainTargets, rank_steps
from grpo_mcore.data import TaskData, load_preference_dataset
from grpo_mcore.objective import PreferenceLossFn
from grpo_mcore.recipe import MasterConfig, needs_reference
from grpo_mcore.rollout.datum import DatumSpec

NEMO_RL_LOSS = "validation-default_loss"
"""NeMo RL's name of the validation loss, for recipes that choose checkpoints by it."""


class DPO(FineTuning):
    """Minimises the preference loss of the recipe's section `dpo`.

    A row's reference log-probs, (chosen, rejected), are computed when the row first occurs, and kept by its uid in
    `state`: a resumed run has the same values.
    """

    algorithm = "dpo"

    def __init__(self, policy: PolicyGroup, config: MasterConfig) -> None:
        super().__init__(policy, config)
        self._loss = PreferenceLossFn(config.dpo)

    @staticmethod
    def load_data(config: MasterConfig, load: Callable[..., TaskData]) -> TaskData:
        return partial(load, load=load_preference_dataset)("preference_processor")

    def train(self, batch: Sequence[DatumSpec]) -> Metrics:
        return self.policy.train(self._loss, self._send(batch))

    def evaluate(self, batches: Iterable[Sequence[DatumSpec]]) -> Metrics:
        """Return the means over the validation pairs."""
        totals: dict[str, float] = defaultdict(float)
        for batch in batches:
            for name, value in self.policy.evaluate(self._loss, self._send(batch)).items():
                totals[name] += value if name.startswith("num_") else value * len(batch)
        pairs = totals["num_valid_samples"]
        means = {name: total if name.startswith("num_") else total / pairs for name, total in totals.items()}
        return means | {NEMO_RL_LOSS: means["loss"]}

    def _send(self, batch: Sequence[DatumSpec]) -> TrainTargets:
        """Send the pairs to the policy's ranks. Return their targets, with the log-probs under the reference."""
        policy = self.policy
        pairs, weights = filled_up(batch, policy.layout.data)
        answers = [
            as_trajectory(f"{pair['uid']}/{name}", log)
            for pair in pairs
            for name, log in (("chosen", pair["message_log"]), ("rejected", pair["rejected_log"]))
        ]
        _, ranks = rank_steps(
            {i: policy.cluster.store.put(answer) for i, answer in enumerate(answers)},
            [answer.length for answer in answers],
            self.config,
            policy.layout,
            optimizer_steps=1,
            algorithm="dpo",
            prefixes=prefixes_of(answers) if policy.shares_prefixes else None,
        )
        policy.receive(ranks)
        return TrainTargets(
            weights=torch.tensor(weights, dtype=torch.float64).repeat_interleave(2),
            valid_seqs=(len(batch),),
            valid_toks=(sum(answer.generated_length for answer in answers[: 2 * len(batch)]),),
            reference_sums=self._reference_sums([_row(pair) for pair in pairs]),
        )

    def _reference_sums(self, rows: Sequence[str]) -> Tensor | None:
        """Return the log-prob of each answer of the pairs just sent under the reference, float64 [2 x pairs]. The
        passes over all of them run only if a row is new."""
        if not needs_reference(self.config):
            return None
        if any(row not in self.state for row in rows):
            stats = self.policy.infer_logprobs(2 * len(rows), prev=False, reference=True, kl_kind=None)
            found = stats["reference_sum"].reshape(-1, 2).tolist()
            for row, (chosen, rejected) in zip(rows, found, strict=True):
                self.state.setdefault(row, (chosen, rejected))
        return torch.tensor([self.state[row] for row in rows], dtype=torch.float64).reshape(-1)


def _row(pair: DatumSpec) -> str:
    """Return the name of the pair's row in the data. From the second epoch on, the uid ends with `@` and the epoch."""
    return re.sub(r"@\d+$", "", pair["uid"])
