"""Supervised fine-tuning: make the answers of the data likelier. The same policy, batches and packing as GRPO.

What it is not: there is no padding, no preference loss, no adapter; too long examples are left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from grpo_mcore.algorithms.checkpointing.checkpoints import CheckpointManager, GRPOSaveState, RunSnapshot
from grpo_mcore.algorithms.rollouts.prompt_stream import PromptStream
from grpo_mcore.algorithms.training_step.policy_group import PolicyGroup
from grpo_mcore.algorithms.training_step.step_batch import RankStep, TrainTargets, rank_steps
from grpo_mcore.objective import NLLLossFn
from grpo_mcore.observe import Logger, RunConsole, Timeline
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.datum import DatumSpec, Message
from grpo_mcore.rollout.trajectory import Trajectory, Turn

SHOW_EVERY = 50  # steps


def sft_train(
    policy: PolicyGroup,
    dataloader: Any,
    val_dataloader: Any,
    logger: Logger,
    checkpointer: CheckpointManager,
    config: MasterConfig,
    console: RunConsole,
) -> None:
    """Trains until sft.max_num_steps or the end of the data. A batch of `dataloader` is one optimizer step."""
    sft, saving = config.sft, config.checkpointing
    examples = PromptStream(dataloader, sft.max_num_epochs)
    clock, metrics = Timeline(), dict[str, float]()

    def validate(step: int) -> None:
        with clock.pause():
            found = evaluate(policy, val_dataloader, config)
        logger.log_metrics(found, step, "validation")
        console.note(f"step {step}: val_loss {found['val_loss']:.4f} over {found['num_tokens']:.0f} tokens")
        metrics.update({f"val:{name}": value for name, value in found.items()})

    if val_dataloader is not None and sft.val_at_start:
        validate(0)
    for step in range(1, sft.max_num_steps + 1):
        batch = examples.take(config.policy.train_global_batch_size)
        if len(batch) < config.policy.train_global_batch_size:
            break
        with clock.phase("train"):
            metrics |= train_on_examples(policy, batch, config)
        seconds = clock.take()
        logger.log_metrics(metrics | {"timing": seconds}, step, "train")
        last = step == sft.max_num_steps
        if last or step % SHOW_EVERY == 0:
            console.note(
                f"step {step:>5} of {sft.max_num_steps}  loss {metrics['loss']:.4f}  "
                f"grad norm {metrics['grad_norm']:.2f}  lr {metrics['lr']:.2e}  {seconds['total']:.3f} s"
            )
        if val_dataloader is not None and _due(step, sft.val_period, last and sft.val_at_end):
            validate(step)
        if saving.enabled and _due(step, saving.save_period, last):
            state = GRPOSaveState(current_step=step, total_steps=step)
            checkpointer.save(step, policy.save, RunSnapshot(state, examples.state_dict(), metrics), config)


def train_on_examples(policy: PolicyGroup, batch: Sequence[DatumSpec], config: MasterConfig) -> dict[str, float]:
    """One optimizer step on these examples."""
    ranks, targets = _rank_steps(policy, batch, config)
    policy.receive(ranks)
    return policy.train(NLLLossFn(), targets)


def evaluate(policy: PolicyGroup, val_dataloader: Any, config: MasterConfig) -> dict[str, float]:
    """val_loss: negative log-likelihood of an answer token, averaged over the validation tokens."""
    batches: Iterator[Sequence[DatumSpec]] = islice(iter(val_dataloader), config.sft.val_batches)
    total, tokens = 0.0, 0
    for batch in batches:
        ranks, targets = _rank_steps(policy, batch, config)
        policy.receive(ranks)
        count = sum(targets.valid_toks)
        total += policy.evaluate(NLLLossFn(), targets)["loss"] * count
        tokens += count
    return {"val_loss": total / max(1, tokens), "num_tokens": float(tokens)}


def _rank_steps(
    policy: PolicyGroup, batch: Sequence[DatumSpec], config: MasterConfig
) -> tuple[tuple[RankStep, ...], TrainTargets]:
    trajectories = [as_trajectory(datum) for datum in batch]
    _, ranks = rank_steps(
        {i: policy.cluster.store.put(trajectory) for i, trajectory in enumerate(trajectories)},
        [trajectory.length for trajectory in trajectories],
        config,
        policy.layout,
        optimizer_steps=1,
    )
    trained = sum(trajectory.generated_length for trajectory in trajectories)
    weights = torch.ones(len(trajectories), dtype=torch.float64)
    return ranks, TrainTargets(weights, valid_seqs=(len(trajectories),), valid_toks=(trained,))


def as_trajectory(datum: DatumSpec) -> Trajectory:
    """An example as a trajectory whose trained tokens count as generated."""
    turns = tuple(turn for message in datum["message_log"] for turn in _turns(message))
    return Trajectory(datum["uid"], 0, turns, (), "stop", truncated=False)


def _turns(message: Message) -> Iterator[Turn]:
    """The message in runs of tokens that are trained on, and tokens that are not."""
    tokens, mask = message["token_ids"], message["token_loss_mask"].bool()
    edges = [0, *((mask[1:] != mask[:-1]).nonzero().squeeze(1) + 1).tolist(), len(tokens)]
    for start, stop in zip(edges, edges[1:], strict=False):
        if stop > start:
            yield Turn(message["role"], tokens[start:stop], loss_mask=bool(mask[start]))


def _due(step: int, period: int, also: bool) -> bool:
    return also or (period > 0 and step % period == 0)
