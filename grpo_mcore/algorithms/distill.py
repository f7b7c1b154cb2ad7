"""Distillation on given answers: make the policy's distribution that of a teacher at every token of the data's answers.
The same policy, batches and packing as SFT; no engine generates.

One step: the next examples of the data -> the teacher's hidden states at the answers' tokens -> divergence of the two
distributions over the vocabulary, averaged over these tokens -> update.

Consumes: batches of the data loader. Waits for: the teacher's ranks and the policy's, which take turns on the devices.

On the policy's own samples, distillation is the loop of grpo.py with the same teachers and the same loss: between the
generation and the update of a step, `train_on_groups` has the teachers score the samples.

Not here: the divergences (parallel/divergence.py, the loss in objective/distillation.py), the teachers
(driver/policy/teachers.py), what is logged and when a checkpoint is due (driver/record/tuning_record.py).
"""

from collections.abc import Sequence
from typing import Any

from grpo_mcore.algorithms.sft import SFTStep, TunedStep, build_step, tune, validate
from grpo_mcore.base.stopping import StopRequest
from grpo_mcore.driver.interfaces import ColocatablePolicyInterface
from grpo_mcore.driver.record.tuning_record import Metrics, TuningRecord
from grpo_mcore.driver.run.run import Run
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.step.step_batch import RankStep


def distill_train(run: Run, stop: StopRequest | None = None) -> dict[str, Any]:
    """Train until sft.max_num_steps or the end of the data, or until `stop` asks for the end: the step under way is
    then finished and saved. Go on from the checkpoint, if the run resumes one. Return the summary."""
    policy, config, loss = run.policy, run.master_config, run.loss_fn

    def send(step: SFTStep, policy: ColocatablePolicyInterface) -> None:
        ranks = score(step, policy)
        with policy.ready_for("training"):
            policy.receive(ranks)

    def train(record: TuningRecord, batch: Sequence[DatumSpec]) -> TunedStep:
        with record.clock.phase("prepare"):
            step = build_step(batch, policy, config)
        with record.clock.phase("teachers"):
            send(step, policy)
        with record.clock.phase("train"):
            metrics = policy.train(loss, step.targets, meanwhile=record.look_ahead)
        return step.groups, step.targets, metrics

    def validate_examples(record: TuningRecord) -> Metrics:
        return validate(record.validation_batches(), policy, loss, config, send)

    return tune("sft", run, stop, train, validate_examples)


def score(step: SFTStep, policy: ColocatablePolicyInterface) -> tuple[RankStep, ...]:
    """Return the ranks' shares of a step with the teacher's hidden states at the answers' tokens. The policy makes room
    for a teacher on its devices."""
    teachers = policy.teachers
    assert teachers is not None, "the recipe names no teacher"
    (alias,) = teachers.by_alias
    with policy.ready_for("teachers"):
        return teachers.score_ranks(step.ranks, step.samples, step.examples, [alias] * len(step.samples))
