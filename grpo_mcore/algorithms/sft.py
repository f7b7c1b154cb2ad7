"""Supervised fine-tuning: make the answers of the data likelier. The same policy, batches and packing as GRPO.

The loop, checkpoints and export are those of training_step/fine_tuning.py; here are the data, the step and the metrics.
There is no padding; examples that are too long are left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from grpo_mcore.algorithms.training_step.fine_tuning import FineTuning, Metrics, filled_up
from grpo_mcore.algorithms.training_step.policy_group import PolicyGroup
from grpo_mcore.algorithms.training_step.step_batch import RankStep, TrainTargets, rank_steps
from grpo_mcore.batching.prefix_trees import Prefixes, prefix_hashes
from grpo_mcore.data import TaskData
from grpo_mcore.objective import NLLLossFn
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.datum import DatumSpec, Message
from grpo_mcore.rollout.trajectory import Trajectory, Turn


class SFT(FineTuning):
    """Minimises the negative log-prob of the assistant's messages, averaged over their tokens."""

    algorithm = "sft"

    @staticmethod
    def load_data(config: MasterConfig, load: Callable[..., TaskData]) -> TaskData:
        return load("sft_processor")

    def train(self, batch: Sequence[DatumSpec]) -> Metrics:
        ranks, targets = _rank_steps(self.policy, batch, self.config)
        self.policy.receive(ranks)
        return self.policy.train(NLLLossFn(), targets)

    def evaluate(self, batches: Iterable[Sequence[DatumSpec]]) -> Metrics:
        """Return val_loss: negative log-likelihood of an answer token, averaged over the validation tokens."""
        total, tokens = 0.0, 0
        for batch in batches:
            ranks, targets = _rank_steps(self.policy, batch, self.config)
            self.policy.receive(ranks)
            count = sum(targets.valid_toks)
            total += self.policy.evaluate(NLLLossFn(), targets)["loss"] * count
            tokens += count
        return {"val_loss": total / max(1, tokens), "num_tokens": float(tokens)}


def _rank_steps(
    policy: PolicyGroup, batch: Sequence[DatumSpec], config: MasterConfig
) -> tuple[tuple[RankStep, ...], TrainTargets]:
    examples, weights = filled_up(batch, policy.layout.data)
    trajectories = [as_trajectory(datum["uid"], datum["message_log"]) for datum in examples]
    _, ranks = rank_steps(
        {i: policy.cluster.store.put(trajectory) for i, trajectory in enumerate(trajectories)},
        [trajectory.length for trajectory in trajectories],
        config,
        policy.layout,
        optimizer_steps=1,
        prefixes=prefixes_of(trajectories) if policy.shares_prefixes else None,
    )
    trained = sum(trajectory.generated_length for trajectory in trajectories[: len(batch)])
    targets = torch.tensor(weights, dtype=torch.float64)
    return ranks, TrainTargets(targets, valid_seqs=(len(batch),), valid_toks=(trained,))


def as_trajectory(uid: str, log: Sequence[Message]) -> Trajectory:
    """Return an example as a trajectory whose trained tokens count as generated."""
    turns = tuple(turn for message in log for turn in _turns(message))
    return Trajectory(uid, 0, turns, (), "stop", truncated=False)


def prefixes_of(trajectories: Sequence[Trajectory]) -> list[Prefixes]:
    """Return the hashes by which examples that begin alike are found."""
    return [prefix_hashes(trajectory.token_ids().tolist()) for trajectory in trajectories]


def _turns(message: Message) -> Iterator[Turn]:
    """Yield the message in runs of tokens that are trained on, and tokens that are not."""
    tokens, mask = message["token_ids"], message["token_loss_mask"].bool()
    edges = [0, *((mask[1:] != mask[:-1]).nonzero().squeeze(1) + 1).tolist(), len(tokens)]
    for start, stop in zip(edges, edges[1:], strict=False):
        if stop > start:
            yield Turn(message["role"], tokens[start:stop], loss_mask=bool(mask[start]))
