"""Supervised fine-tuning: make the answers of the data likelier. The same policy, batches and packing as GRPO.

One step: the next examples of the data -> packed rows on the ranks -> negative log-prob of the assistant's tokens,
averaged over them -> update.

Consumes: batches of the data loader. Waits for: the policy's ranks; while they train it reads and tokenises the next
batch. Nothing else goes on beside it but the files that are being written. There is no padding; examples that are too
long are left out and counted.

Not here: what is logged and when a validation or a checkpoint is due (driver/record/tuning_record.py), the loss
(objective/loss.py), the network (parallel/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_mcore.base.stopping import StopRequest
from grpo_mcore.driver.checkpoints.background import BackgroundCheckpoints
from grpo_mcore.driver.interfaces import ColocatablePolicyInterface
from grpo_mcore.driver.record.tuning_record import Metrics, TuningRecord
from grpo_mcore.driver.run.run import Run
from grpo_mcore.parallel.policy import LossFn
from grpo_mcore.recipe import Algorithm, MasterConfig
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import TrajectoryRef
from grpo_mcore.step.examples import as_group, as_trajectory, filled_up, prefixes_of
from grpo_mcore.step.step_batch import RankStep, TrainTargets, rank_steps


def sft_train(run: Run, stop: StopRequest | None = None) -> dict[str, Any]:
    """Train until sft.max_num_steps or the end of the data, or until `stop` asks for the end: the step under way is
    then finished and saved. Go on from the checkpoint, if the run resumes one. Return the summary."""
    policy, config, loss = run.policy, run.master_config, run.loss_fn

    def train(record: TuningRecord, batch: Sequence[DatumSpec]) -> TunedStep:
        with record.clock.phase("prepare"):
            step = build_step(batch, policy, config)
            policy.receive(step.ranks)
        with record.clock.phase("train"):
            metrics = policy.train(loss, step.targets, meanwhile=record.look_ahead)
        return step.groups, step.targets, metrics

    return tune("sft", run, stop, train, lambda record: validate(record.validation_batches(), policy, loss, config))


TunedStep = tuple[list[Group], TrainTargets, Metrics]
"""(examples of a step, what they were trained to, metrics)"""


def tune(
    algorithm: Algorithm,
    run: Run,
    stop: StopRequest | None,
    train: Callable[[TuningRecord, Sequence[DatumSpec]], TunedStep],
    validate: Callable[[TuningRecord], Metrics],
) -> dict[str, Any]:
    """Run the loop of an algorithm that learns from given examples (SFT, DPO, distillation), and return its summary.
    `train`: trains one step on a batch. `validate`: returns the metrics of a validation."""
    record = TuningRecord(
        algorithm, run.logger, run.master_config, run.policy, run.policy_generation, run.tokenizer,
        checkpointer=run.checkpointer, state=run.grpo_save_state, dataloader=run.dataloader,
        val_dataloader=run.val_dataloader, stop=stop or StopRequest(), rows=run.rows(),
    )  # fmt: skip
    checkpoints = BackgroundCheckpoints(run.checkpointer, run.policy, run.master_config, on_failure=record.not_saved)

    def validated() -> None:
        with record.clock.pause("validation"):
            metrics = validate(record)
        record.validated(metrics)

    with record, checkpoints:
        if record.validates_first:
            validated()
        while batch := record.next_batch():
            checkpoints.poll()
            record.trained(batch, *train(record, batch))
            if record.validation_is_due:
                validated()
            if record.checkpoint_is_due:
                with record.clock.pause("checkpoint"):
                    checkpoints.start(record.step, record.snapshot)
        return record.ended(unsaved=checkpoints.finish())


def validate(
    batches: Iterable[Sequence[DatumSpec]],
    policy: ColocatablePolicyInterface,
    loss: LossFn,
    config: MasterConfig,
    send: Callable[[SFTStep, ColocatablePolicyInterface], None] = lambda step, policy: policy.receive(step.ranks),
) -> Metrics:
    """Return val_loss: the loss (SFT: negative log-likelihood) of an answer token, averaged over the tokens of all
    batches. `send`: gives the ranks their examples."""
    total, tokens = 0.0, 0
    for batch in batches:
        step = build_step(batch, policy, config)
        send(step, policy)
        count = sum(step.targets.valid_toks)
        total += policy.evaluate(loss, step.targets)["loss"] * count
        tokens += count
    return {"val_loss": total / max(1, tokens), "num_tokens": float(tokens)}


@dataclass(frozen=True)
class SFTStep:
    """A batch of examples as the ranks get it. `groups`: one example each; `samples`, `examples`: all that the ranks
    hold, with the copies of examples that are fewer than these."""

    ranks: tuple[RankStep, ...]
    targets: TrainTargets
    groups: list[Group]
    samples: list[TrajectoryRef]
    examples: list[DatumSpec]


def build_step(batch: Sequence[DatumSpec], policy: ColocatablePolicyInterface, config: MasterConfig) -> SFTStep:
    """Distribute examples over data-parallel ranks and bins, as the recipe packs them."""
    examples, weights = filled_up(batch, policy.layout.data)
    trajectories = [as_trajectory(datum["uid"], datum["message_log"]) for datum in examples]
    refs = [policy.cluster.store.put(trajectory) for trajectory in trajectories]
    images = [
        {digest: policy.cluster.store.put(file) for digest, file in datum.get("images", {}).items()}
        for datum in examples
    ]
    _, ranks = rank_steps(
        dict(enumerate(refs)),
        [trajectory.length for trajectory in trajectories],
        config,
        policy.layout,
        optimizer_steps=1,
        prefixes=prefixes_of(trajectories) if policy.shares_prefixes else None,
        images=images,
    )
    trained = sum(trajectory.generated_length for trajectory in trajectories[: len(batch)])
    targets = TrainTargets(torch.tensor(weights, dtype=torch.float64), valid_seqs=(len(batch),), valid_toks=(trained,))
    version = policy.updates + 1
    groups = [
        as_group(datum, [trajectory], [ref], version, files)
        for datum, trajectory, ref, files in zip(examples, trajectories, refs, images, strict=True)
    ]
    return SFTStep(ranks, targets, groups[: len(batch)], [group.samples[0] for group in groups], examples)
