"""Direct preference optimization: make the chosen answer of a pair likelier than the rejected one, measured against the
model that training starts from. Reward models: make its score the higher one, or that of an answer the given one. The
same policy, batches and packing as GRPO; no engine generates.

One step: the next pairs of the data -> reference log-probs of pairs that are new -> one pass over both answers of each
pair -> update. The two answers of a pair lie in one packed row (a micro-batch counts pairs), so that the loss compares
them without a second pass.

Consumes: batches of the data loader. Waits for: the policy's ranks; while they train it reads and tokenises the next
batch. Nothing else goes on beside it but the files that are being written.

Not here: what is logged and when a validation or a checkpoint is due (driver/record/tuning_record.py), the losses
(objective/preference.py), the network (parallel/).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_mcore.algorithms.sft import TunedStep, tune
from grpo_mcore.base.stopping import StopRequest
from grpo_mcore.driver.interfaces import PolicyInterface
from grpo_mcore.driver.record.tuning_record import Metrics, TuningRecord
from grpo_mcore.driver.run.run import Run
from grpo_mcore.parallel.policy import LossFn
from grpo_mcore.recipe import Algorithm, MasterConfig, algorithm_of, needs_reference, samples_together
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.group import Group
from grpo_mcore.step.examples import as_group, as_trajectory, filled_up, prefixes_of
from grpo_mcore.step.step_batch import RankStep, TrainTargets, rank_steps

NEMO_RL_LOSS = "validation-default_loss"
"""NeMo RL's name of DPO's validation loss, for recipes that choose checkpoints by it; that of a reward model is
val_loss."""

ANSWERS: tuple[tuple[str, Literal["message_log", "rejected_log"]], ...] = (
    ("chosen", "message_log"),
    ("rejected", "rejected_log"),
)
"""Name and field of each answer of a pair. A reward model that learns from scores has the first alone."""

References = dict[str, tuple[float, float]]
"""Digest of a pair, see `_digest` -> log-probs of its chosen and its rejected answer under the reference. Computed when
the pair first occurs, and held by every checkpoint: a resumed run has the same values, unless it reads other tokens or
starts from another model."""


def dpo_train(run: Run, stop: StopRequest | None = None) -> dict[str, Any]:
    """Train until dpo.max_num_steps or the end of the data, or until `stop` asks for the end: the step under way is
    then finished and saved. Go on from the checkpoint, if the run resumes one. Return the summary."""
    return _train("dpo", run, stop)


def rm_train(run: Run, stop: StopRequest | None = None) -> dict[str, Any]:
    """Do the same for a reward model: until rm.max_num_steps."""
    return _train("rm", run, stop)


def _train(algorithm: Algorithm, run: Run, stop: StopRequest | None) -> dict[str, Any]:
    policy, config, loss = run.policy, run.master_config, run.loss_fn

    def train(record: TuningRecord, batch: Sequence[DatumSpec]) -> TunedStep:
        with record.clock.phase("prepare"):
            step = build_step(batch, policy, config)
            policy.receive(step.ranks)
        with record.clock.phase("logprobs"):
            sums = reference_sums(step.pairs, record.extra_state, policy, config)
            targets = replace(step.targets, reference_sums=sums)
        with record.clock.phase("train"):
            metrics = policy.train(loss, targets, meanwhile=record.look_ahead)
        return step.groups, targets, metrics

    def validate_pairs(record: TuningRecord) -> Metrics:
        return validate(record.validation_batches(), policy, loss, record.extra_state, config)

    return tune(algorithm, run, stop, train, validate_pairs)


def validate(
    batches: Iterable[Sequence[DatumSpec]],
    policy: PolicyInterface,
    loss: LossFn,
    references: References,
    config: MasterConfig,
) -> Metrics:
    """Return the means over all pairs, or samples."""
    totals: dict[str, float] = defaultdict(float)
    for batch in batches:
        step = build_step(batch, policy, config)
        policy.receive(step.ranks)
        targets = replace(step.targets, reference_sums=reference_sums(step.pairs, references, policy, config))
        for name, value in policy.evaluate(loss, targets).items():
            totals[name] += value if name.startswith("num_") else value * len(batch)
    pairs = totals["num_valid_samples"]
    means = {name: total if name.startswith("num_") else total / pairs for name, total in totals.items()}
    return means | {NEMO_RL_LOSS: means["loss"], "val_loss": means["loss"]}


@dataclass(frozen=True)
class DPOStep:
    """A batch of pairs, or of scored answers, as the ranks get it. `pairs`: those of the batch, with copies if they are
    fewer than the ranks; `groups`: the answers of each."""

    pairs: list[DatumSpec]
    ranks: tuple[RankStep, ...]
    targets: TrainTargets
    groups: list[Group]


def build_step(batch: Sequence[DatumSpec], policy: PolicyInterface, config: MasterConfig) -> DPOStep:
    """Distribute pairs over data-parallel ranks and bins, as the recipe packs them. The targets lack the references."""
    algorithm = algorithm_of(config)
    pairs, weights = filled_up(batch, policy.layout.data)
    of_each = samples_together(config, algorithm)
    answers = [
        as_trajectory(f"{pair['uid']}/{name}", pair[log], index)
        for pair in pairs
        for index, (name, log) in enumerate(ANSWERS[:of_each])
    ]
    refs = [policy.cluster.store.put(answer) for answer in answers]
    _, ranks = rank_steps(
        dict(enumerate(refs)),
        [answer.length for answer in answers],
        config,
        policy.layout,
        optimizer_steps=1,
        algorithm=algorithm,
        prefixes=prefixes_of(answers) if policy.shares_prefixes else None,
    )
    targets = TrainTargets(
        weights=torch.tensor(weights, dtype=torch.float64).repeat_interleave(of_each),
        valid_seqs=(len(batch),),
        valid_toks=(sum(answer.generated_length for answer in answers[: of_each * len(batch)]),),
        rewards=torch.tensor([score for pair in pairs for score in (pair["score"], 0.0)[:of_each]], dtype=torch.float64)
        if algorithm == "rm"
        else None,
    )
    version = policy.updates + 1
    parts = [slice(of_each * i, of_each * (i + 1)) for i in range(len(batch))]
    groups = [as_group(pair, answers[part], refs[part], version) for pair, part in zip(batch, parts, strict=True)]
    return DPOStep(pairs, ranks, targets, groups)


def reference_sums(
    pairs: Sequence[DatumSpec], references: References, policy: PolicyInterface, config: MasterConfig
) -> Tensor | None:
    """Return the log-prob of each answer of the pairs just sent under the reference, float64 [2 x pairs]; None for a
    loss without a reference. The passes over all of them run only if a pair is new, which `references` then gets."""
    if not needs_reference(config):
        return None
    digests = [_digest(pair, config) for pair in pairs]
    if any(digest not in references for digest in digests):
        stats = policy.infer_logprobs(2 * len(digests), prev=False, reference=True, kl_kind=None)
        sums = stats["reference_sum"].reshape(-1, 2).tolist()
        for digest, (chosen, rejected) in zip(digests, sums, strict=True):
            references.setdefault(digest, (chosen, rejected))
    return torch.tensor([references[digest] for digest in digests], dtype=torch.float64).reshape(-1)


def _digest(pair: DatumSpec, config: MasterConfig) -> str:
    """Return a digest of what decides the log-probs of a pair under the reference: the model, the tokens, and which of
    them count. Its uid does not: a resumed run may read a file, or a template, that was changed."""
    model = config.policy.model_name, config.policy.hf_config_overrides
    digest = sha256(repr(model).encode())
    for log in (pair["message_log"], pair["rejected_log"]):
        digest.update(b"answer")
        for message in log:
            digest.update(message["token_ids"].numpy().tobytes() + message["token_loss_mask"].numpy().tobytes())
    return digest.hexdigest()[:32]
