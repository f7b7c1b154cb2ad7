"""Compute a recorded step again, from the checkpoint before it and its recorded samples, on any layout.

The step is the training loop's own (`train_on_groups`); only the samples come from files, and no engine runs.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from grpo_mcore.algorithms.grpo import train_on_groups
from grpo_mcore.cluster import Cluster, Future
from grpo_mcore.driver.checkpoints.checkpoint_files import policy_folder
from grpo_mcore.driver.checkpoints.checkpoints import step_of
from grpo_mcore.driver.engines.engine_group import EngineGroup
from grpo_mcore.driver.policy.policy_group import PolicyGroup, logprobs_by_sample
from grpo_mcore.driver.record.recorded_samples import recorded_groups, sample_name
from grpo_mcore.driver.run.checks import Model, check_model
from grpo_mcore.driver.run.setup import make_loss, start_cluster, start_policy, start_teachers, wait_until_ready
from grpo_mcore.families import read_hf_config, shape_of
from grpo_mcore.observe import Timeline, read_metrics
from grpo_mcore.observe.logger import METRICS_FILE
from grpo_mcore.observe.run_folder import damage_raised_as
from grpo_mcore.observe.samples import read_samples, sample_steps
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.group import Group
from grpo_mcore.step.step_batch import TrainTargets, build_step_batch
from grpo_mcore.tools.export import kept_checkpoints
from grpo_mcore.tools.parity.rank import layout_named

LOSS_LIMIT = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest difference of the losses of two computations of a step, by precision."""
GRADIENT_LIMIT = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest difference of the gradients' norms, relative to the norm."""
TOKEN_LIMIT = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest difference of a token's log-prob, and of a layer's output relative to its norm."""


class ReplayError(ValueError):
    """A step cannot be replayed; the message says what is missing."""


@dataclass
class Replay:
    """A computation of a step. `metrics`: loss, grad_norm and so on; `logprobs`: float32 [length] by sample, 0 for
    tokens that are not trained on; `layers`: float64 [2, length] by sample and layer, see
    parallel/probes.py."""

    name: str
    metrics: dict[str, float]
    logprobs: dict[str, Tensor]
    layers: dict[str, dict[int, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepDifference:
    """Where two computations of a step differ. `first`: the first place in words, None if they are equal within the
    limits."""

    names: tuple[str, str]
    loss: float
    gradient: float  # of the norms, relative
    logprob: float
    first: str | None

    @property
    def ok(self) -> bool:
        return self.first is None


class _Taken:
    """Takes the log-probs that `train_on_groups` records."""

    wants_logprobs = True

    def __init__(self) -> None:
        self.logprobs: dict[int, Tensor] = {}

    def trained(self, step: int, groups: Sequence[Group], targets: TrainTargets, logprobs: Sequence[Future]) -> None:
        by_index = logprobs_by_sample(logprobs)
        self.logprobs |= {index: torch.tensor(columns["policy"]) for index, columns in by_index.items()}


def recorded_step(run: Path, step: int, uids: Collection[str] = ()) -> tuple[list[dict[str, Any]], Replay]:
    """Return the samples of a step that it trained on, or those of the prompts `uids`, and what the run computed of
    them. Raises ReplayError."""
    files = sample_steps(run, "train")
    if step not in files:
        recorded = f"there are those of {min(files)} to {max(files)}" if files else "logger.samples was none"
        raise ReplayError(f"{run}: the samples of step {step} are not recorded; {recorded}")
    with damage_raised_as(ReplayError, files[step]):
        rows = [row for row in read_samples(files[step]) if row["left_out"] is None]
    if uids:
        if unknown := set(uids) - {row["uid"] for row in rows}:
            raise ReplayError(f"step {step} has no prompt {', '.join(sorted(unknown))}")
        rows = [row for row in rows if row["uid"] in uids]
    lines = {line["step"]: line for line in read_metrics(run / METRICS_FILE, "train")}
    metrics = {name: value for name, value in lines.get(step, {}).items() if isinstance(value, float | int)}
    if uids:  # the loss is of all samples
        metrics = {}
    with damage_raised_as(ReplayError, files[step]):
        logprobs = {sample_name(row): torch.tensor(row["policy_logprobs"]) for row in rows if row["policy_logprobs"]}
    return rows, Replay("recorded", metrics, logprobs)


def checkpoint_before(run: Path, config: MasterConfig, step: int) -> Path | None:
    """Return the checkpoint that step of `run` started from; None for the first step, which started from the model.
    Raises ReplayError."""
    if step == 1:
        return None
    folder = Path(config.checkpointing.checkpoint_dir)
    if (checkpoint := folder / f"step_{step - 1}").is_dir():
        return checkpoint
    after = {step_of(kept.name) + 1 for kept in kept_checkpoints(folder)}
    steps = sorted((after | {1}) & sample_steps(run, "train").keys())
    raise ReplayError(
        f"{folder}/step_{step - 1} is not there: step {step} can be replayed only from the checkpoint before it. Steps "
        f"with one: {', '.join(map(str, steps)) or 'none'}; name another folder with --checkpoint"
    )


def replay_config(config: MasterConfig, layout: str | None, precision: str | None = None) -> MasterConfig:
    """Return the recipe with another layout ("TP2xPP2"; None: its own) or precision, on one node. Raises
    LayoutNameError, RecipeError."""
    plain = config.model_dump(mode="json")
    models = [section for section in (plain["policy"], plain["value"]) if section is not None]
    ranks = config.cluster.num_nodes * config.cluster.gpus_per_node
    if layout is not None:
        shape = shape_of(read_hf_config(config.policy.model_name, config.policy.hf_config_overrides))
        case = layout_named(layout, shape)
        ranks = case.world_size
        sizes = {
            "tensor_model_parallel_size": case.tensor,
            "pipeline_model_parallel_size": case.pipeline,
            "virtual_pipeline_model_parallel_size": case.virtual,
            "num_layers_in_first_pipeline_stage": None,
            "num_layers_in_last_pipeline_stage": None,
            "context_parallel_size": case.context,
            "expert_model_parallel_size": case.expert,
            "expert_tensor_parallel_size": case.expert_tensor,
            "sequence_parallel": case.sequence_parallel,
        }
        for model in models:
            model["megatron_cfg"] |= sizes
    for model in models if precision is not None else ():
        model["precision"] = precision
        model["megatron_cfg"]["pipeline_dtype"] = model["megatron_cfg"]["optimizer"]["bf16"] = None  # follow it
    plain["policy"]["generation"]["colocated"] = {"enabled": True}
    plain["on_policy_distillation"]["non_colocated_teachers"]["enabled"] = False
    plain["cluster"] |= {"num_nodes": 1, "gpus_per_node": ranks, "backend": "local" if ranks == 1 else "ray"}
    plain["cluster"]["max_restarts"] = 0  # a restart needs checkpoints
    plain["checkpointing"] |= {"enabled": False, "mirror": None, "save_hf": "none"}
    return MasterConfig.model_validate(plain)


@contextmanager
def policy_before(
    config: MasterConfig, step: int, checkpoint: Path | None, scratch: Path
) -> Iterator[tuple[Cluster, Model, PolicyGroup]]:
    """Hold a cluster and a policy as it is before a step, without engines. `checkpoint`: that of the step before it,
    None before the first; `scratch`: folder of the workers' logs."""
    model = check_model(config)
    with start_cluster(config, scratch) as cluster:
        policy = start_policy(config, cluster, model)
        wait_until_ready(config, cluster, policy.workers, "start of the policy")
        if checkpoint is not None:
            policy.load(policy_folder(checkpoint))
        policy.updates = step - 1
        yield cluster, model, policy


def replay(
    config: MasterConfig,
    rows: Sequence[Mapping[str, Any]],
    step: int,
    checkpoint: Path | None,
    scratch: Path,
    name: str = "replay",
) -> Replay:
    """Compute the step on the recipe's layout. `rows`: its samples (`recorded_step`); `scratch`: folder for the
    workers' logs. Raises ReplayError where teachers read what is not recorded."""
    if config.on_policy_distillation.enabled and any(entry.hint_key for entry in config.data.train):
        raise ReplayError("its teachers got a hint (data.train.hint_key), which the samples do not record")
    with policy_before(config, step, checkpoint, scratch) as (cluster, model, policy):
        start_teachers(config, cluster, model, policy)
        groups = recorded_groups(rows, cluster.store)
        names = [sample_name(row) for row in rows]
        layers: dict[int, dict[int, Tensor]] = {}
        batch = build_step_batch(groups, config, model.layout, shares_prefixes=policy.shares_prefixes)
        if batch.ranks:
            policy.receive(batch.ranks)
            layers = policy.trace_layers()
        taken = _Taken()
        no_engines = EngineGroup(cluster, [], sleeps=False)
        metrics = train_on_groups(policy, no_engines, groups, make_loss(config), config, Timeline(), cast(Any, taken))
    return Replay(
        name,
        metrics,
        {names[index]: logprobs for index, logprobs in taken.logprobs.items()},
        {names[index]: traces for index, traces in layers.items()},
    )


def compare(replay: Replay, other: Replay, precision: str) -> StepDifference:
    """Compare two computations of a step. The first place where they differ is looked for from the bottom up: in the
    layers, then in the log-probs of the tokens, in the loss and the norm of the gradient, first of a critic's."""
    losses, norms = (
        {of: [it.metrics.get(f"{of}{name}", math.nan) for it in (replay, other)] for of in ("critic/", "")}
        for name in ("loss", "grad_norm")
    )
    loss = {of: abs(pair[0] - pair[1]) for of, pair in losses.items()}
    gradient = {of: abs(pair[0] - pair[1]) / max(pair[1], 1e-12) for of, pair in norms.items()}
    gaps = {
        name: (replay.logprobs[name] - other.logprobs[name]).abs() for name in replay.logprobs if name in other.logprobs
    }
    logprob = max((gap.max().item() for gap in gaps.values()), default=0.0)
    first = _first_layer(replay, other, TOKEN_LIMIT[precision])
    if first is None:
        for name, gap in gaps.items():
            if (beyond := (~(gap <= TOKEN_LIMIT[precision])).nonzero().flatten()).numel():
                token = int(beyond[0])
                first = (
                    f"the log-prob of token {token} of sample {name}: {replay.logprobs[name][token]:.6f} against "
                    f"{other.logprobs[name][token]:.6f}"
                )
                break
    for of, whose in (("critic/", "the critic's"), ("", "the")):
        if first is None and loss[of] > LOSS_LIMIT[precision]:
            first = f"{whose} loss, though all log-probs agree: {losses[of][0]:.8g} against {losses[of][1]:.8g}"
        if first is None and gradient[of] > GRADIENT_LIMIT[precision]:
            first = f"{whose} norm of the gradient, though loss and log-probs agree: "
            first += f"{norms[of][0]:.6g} against {norms[of][1]:.6g}"
    return StepDifference((replay.name, other.name), loss[""], gradient[""], logprob, first)


def _first_layer(replay: Replay, other: Replay, limit: float) -> str | None:
    """Return the first layer whose output differs, with the sample and token where it does so most."""
    shared = [name for name in replay.layers if name in other.layers]
    for number in sorted({number for name in shared for number in replay.layers[name]}):
        worst, where = 0.0, ""
        for name in shared:
            values, other_values = replay.layers[name][number], other.layers[name][number]
            relative = (values - other_values).abs().amax(0) / values[0].clamp(min=1e-12)
            token = int(relative.argmax())
            if not relative[token] <= worst:  # also NaN
                worst, where = relative[token].item(), f"token {token} of sample {name}"
        if not worst <= limit:
            return f"the output of layer {number}: at {where} by {worst:.2g} of its norm; the layers before it agree"
    return None
