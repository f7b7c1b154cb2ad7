"""Report a run to its user: banner, one line a step, metrics files, and the summary with the reward curve."""

import logging
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from grpo_mcore.driver.interfaces import GenerationInterface, PolicyInterface
from grpo_mcore.driver.record.run_output import RunOutput, left_out_if_it_fails
from grpo_mcore.driver.rollouts.validation import Validation
from grpo_mcore.families import ModelShape
from grpo_mcore.observe import Logger, StepRow, Timeline, read_metrics, reward_curve_png
from grpo_mcore.observe.console.console import WIDTH
from grpo_mcore.observe.exit_codes import RunEnd
from grpo_mcore.recipe import (
    MasterConfig,
    batch_equation,
    prompts_per_generation_batch,
    samples_per_step,
    trains_on_rewards,
)
from grpo_mcore.recipe.headline import headline
from grpo_mcore.refit.refit import RefitReport
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.schedule import Schedule
from grpo_mcore.rollout.trajectory import Score
from grpo_mcore.step.step_groups import tail

logger = logging.getLogger(__name__)


class Comparison(Protocol):
    """The predictions of `plan` for a run, next to the values that the run measured."""

    def plain(self) -> list[dict[str, Any]]:
        """Return it for summary.json."""

    def text(self) -> list[str]:
        """Return it as lines of a table."""


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements of a run, for a comparison with its plan. `steps`: seconds of each step by timer; `memory`: one
    `Policy.memory` for each rank; `mean_length`: tokens of a sample; `teachers`: their models by alias."""

    recipe: MasterConfig
    model: ModelShape
    steps: Sequence[Mapping[str, float]]
    memory: Sequence[Mapping[str, Any]]
    mean_length: int
    teachers: Mapping[str, ModelShape] = field(default_factory=dict)


Compare = Callable[[MeasuredRun], Comparison | None]
"""Sets a run against its plan; None where there is nothing to compare."""


class RunReport(RunOutput):
    """Shows the run on the console and writes its files. It decides nothing, and a checkpoint holds nothing of it."""

    def __init__(
        self,
        logger: Logger,
        config: MasterConfig,
        schedule: Schedule,
        policy: PolicyInterface,
        engines: GenerationInterface,
        tokenizer: Any,
        compare: Compare | None = None,
        rows: Sequence[int | None] = (),
    ) -> None:
        """`schedule`: knows the step. `compare`: sets what `plan` predicted against what the run measured, for its
        summary. `rows`: of the training and the validation data, for the banner."""
        super().__init__("grpo", logger, config, policy, engines, tokenizer, step=lambda: schedule.step)
        self._schedule, self._compare = schedule, compare
        self._timers: list[dict[str, float]] = []
        self._rewards: dict[int, float] = {}
        self._validations: dict[int, dict[str, float]] = {}  # accuracy, reward and its parts, by step
        self._mult_errors: dict[int, float] = {}
        self._failed_prompts = 0
        self._samples_asked = 0
        self._samples_done = 0
        self._noted_equal_rewards = self._noted_in_place = self._noted_graded = False
        self._graded = False  # a reward was neither 0 nor 1
        self._refit: RefitReport | None = None
        self._checkpoint: Path | None = None
        self._recall()
        self._banner(policy, engines, rows)

    @property
    def run_name(self) -> str:
        """Name of the run's folder in logger.log_dir, which a resumed run continues."""
        return self.logger.log_dir.name

    def _recall(self) -> None:
        """Read the metrics of earlier steps, so that curve and summary of a resumed run cover the whole run."""
        if self._first_step == 1:
            return
        file = self.logger.log_dir / "metrics.jsonl"
        for target, name in ((self._rewards, "reward"), (self._mult_errors, "token_mult_prob_error")):
            for row in read_metrics(file, "train"):
                if row["step"] < self._first_step and row.get(name) is not None:
                    target[row["step"]] = row[name]
                    self._graded |= _has_graded(row)
        for row in read_metrics(file, "validation"):
            if row["step"] < self._first_step:
                self._validations[row["step"]] = _results(row)
                self._graded |= _has_graded(row)

    def _banner(self, policy: PolicyInterface, engines: GenerationInterface, rows: Sequence[int | None]) -> None:
        config, vllm = self.config, self.config.policy.generation.vllm_cfg
        where = "colocated" if engines.colocated else "with devices of their own"
        start = self._schedule.step
        last = config.grpo.max_num_steps
        sampling = (
            f"dynamic, in batches of {prompts_per_generation_batch(config)} prompts, at most "
            f"{config.grpo.dynamic_sampling_max_gen_batches} a step"
        )
        self.console.banner(
            _title(config),
            headline(config, rows=rows)
            | {
                "batch": batch_equation(config),
                **({"sampling": sampling} if config.grpo.use_dynamic_sampling else {}),
                **({"ahead": _ahead(config)} if config.grpo.async_grpo.max_age else {}),
                "policy": self.describe_policy(),
                **({} if policy.teachers is None else {"teachers": _teachers(config)}),
                "engines": f"{len(engines.workers)} x vLLM {engines.layout.describe()} {vllm.precision}, {where}, "
                f"refit buffer {config.policy.refit_buffer_size_gb:g} GiB"
                if engines.workers
                else "none: the samples are those of the run that is followed",
                "cluster": f"{config.cluster.backend}, {policy.layout.world_size} policy "
                f"{'rank' if policy.layout.world_size == 1 else 'ranks'}{_spread(policy, engines)}",
                "steps": (f"{start + 1} to {last}" if start < last else f"none is left: grpo.max_num_steps is {last}")
                + (f", resumed after step {start}" if start else ""),
                "logs": self.logger.log_dir,
            },
        )

    def dispatched(self, prompts: int) -> None:
        """Count the prompts that were sent to the engines."""
        self._samples_asked += prompts * self.config.grpo.num_generations_per_prompt
        self.samples.generating()

    def sample(self) -> None:
        """Count a generated sample, and show the progress."""
        self._samples_done += 1
        self.console.progress(f"step {self._schedule.step + 1}, samples", self._samples_done, self._samples_asked)

    def refit(self, report: RefitReport | None) -> None:
        """Keep what the next line says of a refit. `report`: None where there are no engines."""
        if report is None:
            return
        first, self._refit = self._refit is None, report
        if report.in_place and not self._noted_in_place:
            self._noted_in_place = True
            self.console.note(
                f"no memory for a second copy of the weights on {', '.join(report.in_place)}: a refit replaces them "
                "layer by layer, and generation stands still for all of it (said only once)"
            )
        if first and report.fallbacks:
            names = ", ".join(report.fallbacks[:4])
            self.console.note(f"{len(report.fallbacks)} tensors reach the engines whole, not in slices: {names}")

    def step(self, step: int, groups: Sequence[Group], metrics: dict[str, float], clock: Timeline) -> dict[str, float]:
        """Print the line of a step, and write its metrics to the files. Return the metrics as they are written."""
        seconds = clock.take()
        self._samples_asked = max(0, self._samples_asked - self._samples_done)  # what is left is of later steps
        self._samples_done = 0
        self._timers.append(seconds)
        tail_metrics, last_samples = tail(groups)
        if last_samples:
            self.spans.tail(last_samples)
        lengths = [sample.length for group in groups for sample in group.samples] if "loss" in metrics else []
        metrics = metrics | tail_metrics
        metrics |= self.speed(metrics["tokens"], lengths, seconds, metrics.get("plan/computed_tokens", 1.0))
        if self._refit is not None:
            metrics |= {f"refit/{name}_seconds": spent for name, spent in self._refit.stage_seconds.items()}
            metrics["refit/bytes"] = float(self._refit.bytes)
            metrics["refit/pause_seconds"] = self._refit.pause_seconds
            metrics["refit/checked"] = float(self._refit.checked)
            if self._refit.mult_prob_error is not None:
                metrics["refit/mult_prob_error"] = self._refit.mult_prob_error
        metrics["num_failed_prompts"] = float(self._failed_prompts)
        self._failed_prompts = 0
        if "token_mult_prob_error" in metrics:
            self._mult_errors[step] = metrics["token_mult_prob_error"]
        metrics |= scoring_metrics(groups) | prompt_metrics(groups)
        self._rewards[step] = metrics["reward"]
        self._graded |= _has_graded(metrics)
        if self._graded:  # all may happen to be 0 in one step: that is no accuracy
            metrics.pop("accuracy", None)
        self.show_step(
            step,
            metrics,
            StepRow(
                step=step,
                max_steps=self.config.grpo.max_num_steps,
                reward=metrics["reward"],
                accuracy=metrics.get("accuracy"),
                kl=metrics.get("kl_penalty", metrics.get("kl_in_reward")),
                token_mult_prob_error=metrics.get("token_mult_prob_error"),
                length=metrics["generated_length"],
                entropy=metrics.get("entropy", metrics.get("approx_entropy")),
                grad_norm=metrics.get("grad_norm"),
                tokens_per_second=metrics["tokens_per_second"],
                computed_tokens=metrics.get("plan/computed_tokens"),
                seconds=seconds,
                notes=[*scoring_notes(groups), *_queued_note(metrics)],
            ),
        )
        if "loss" not in metrics and "critic/loss" not in metrics:
            self.console.note(f"step {step} changed nothing: {_left_out(metrics)}")
        elif metrics["zero_advantage_rate"] == 1 and metrics.get("accuracy") != 1 and not self._noted_equal_rewards:
            self._noted_equal_rewards = True
            self.console.note(
                f"step {step}: every advantage is 0, because the rewards compared are equal. If that goes on,\n"
                "the task is too hard or too easy for the model, or the environment finds no answers (said only once)"
            )
        if failed := _failed(groups):
            kinds = Counter(
                score.failures[-1] if score.failures else score.reason for score in _scores(groups, lost=True)
            )
            by_reason = f"; by reason: {_counted(kinds)}" if len(kinds) > 1 else ""
            self.console.note(f"samples without a reward, left out: {len(failed)}; the first, {failed[0]}{by_reason}")
        return metrics

    def group_failed(self, group: Group, reason: str) -> None:
        self._failed_prompts += 1
        self.samples.left_out(self._schedule.step + 1, group, reason)
        self.console.note(f"prompt {group.uid} failed and is replaced: {reason}")

    def group_filtered(self, group: Group, reason: str) -> None:
        """Record a prompt whose rewards were all equal: dynamic sampling consumed it without training on it."""
        self.samples.left_out(self._schedule.step + 1, group, reason)

    def group_returned(self, group: Group) -> None:
        """Record a finished group that would get too old for its step."""
        self.samples.left_out(self._schedule.step + 1, group, "it would be too old: its prompt goes back to the data")

    def restarted(self, worker: str, reason: str) -> None:
        self.spans.restarted(worker, reason)
        self.console.note(f"{worker} is restarted: {reason}")

    def validation(self, step: int, validation: Validation) -> None:
        """Log the metrics of a validation, and show some of its samples."""
        metrics = validation.metrics
        self._validations[step] = _results(metrics)
        self.logger.log_metrics(metrics | {"seconds": validation.seconds}, step, "validation")
        graded = _has_graded(metrics)
        self._graded |= graded
        self.console.validation(step, metrics, validation.seconds)
        if graded and not self._noted_graded:
            self._noted_graded = True
            self.console.note(
                "the rewards are graded, not 0 or 1, so there is no accuracy: follow the mean reward, or set\n"
                "env.NAME.solved_at to the reward from which on a sample is solved (said only once)"
            )
        self.console.samples(step, validation.samples)
        self.samples.validated(step, validation.groups)

    def checkpoint(self, folder: Path) -> None:
        self._checkpoint = folder

    def not_saved(self, error: Exception) -> None:
        self.console.note(str(error))

    def finish(self, end: RunEnd, followed: dict[str, Any] | None = None) -> dict[str, Any]:
        """Write summary.json and the reward curve, print where everything lies, and return the summary. `followed`: see
        `FollowedRun.conclude`.

        A resumed run that had no step left to do keeps the files of the run before it.
        """
        folder = self.logger.log_dir
        curve, summary = folder / "reward_curve.png", folder / "summary.json"
        courses = self._validation_courses()
        worst = max(self._mult_errors.values(), key=lambda error: (math.isnan(error), error), default=None)
        values: dict[str, Any] = {
            **_before_and_after("val_accuracy", courses.get("accuracy", {})),
            **_before_and_after("val_reward", courses.get("reward", {})),
            **{
                key: value
                for name, course in courses.items()
                if name.startswith("reward/")
                for key, value in _before_and_after(f"val_{name}", course).items()
            },
            "steps": self._schedule.step,
            **self.times(),
            "max_token_mult_prob_error": worst if worst is not None and math.isfinite(worst) else None,
            **end.plain(),
        } | ({} if followed is None else {"followed": followed})
        values |= self.trouble()
        worked = self._schedule.step >= self._first_step
        if worked:
            title = _title(self.config)
            with left_out_if_it_fails("the comparison with the plan"):
                if (compared := self._compared()) is not None:
                    values["predicted_against_measured"] = compared.plain()
                    self.console.note("\n".join(["", *compared.text()]))
            with left_out_if_it_fails(f"the reward curve {curve}"):
                if self.logger.draws_curve:
                    reward_curve_png(curve, self._rewards, courses, title=title)
        self.write_summary(values, self._schedule.step)
        phases: dict[str, float] = values["seconds_by_phase"]
        spent = ", ".join(f"{name} {value:.0f}" for name, value in phases.items() if value >= 0.5)
        facts = {"end": str(end)} | self.trouble_facts() | {"time": f"{sum(phases.values()):.0f} s: {spent}"}
        if worked:
            facts["tokens"] = f"{values['tokens_per_second']:.0f} a second, without the start"
        if worst is not None:
            facts["prob err"] = f"at most {worst:.5f} (engine against policy, 1 is equal)"
        if followed is not None:
            facts |= _followed_facts(followed)
        for name, course in courses.items():
            if name != "reward" or course != courses.get("accuracy"):
                first, last = course[min(course)], course[max(course)]
                facts[name] = f"{first:.3f} at the first validation, {last:.3f} at the last"
        paths = {
            "summary": summary,
            "reward curve": curve,
            "metrics": folder / "metrics.jsonl",
            "TensorBoard": self.logger.tensorboard_dir,
            "worker logs": folder / "workers" if self.config.cluster.backend == "ray" else None,
            "checkpoint": self._checkpoint,
        }
        self.console.summary("the run is over", facts, paths)
        return values

    def _validation_courses(self) -> dict[str, dict[int, float]]:
        """Return accuracy, reward and its parts by step, those that there are. Graded rewards, which in some or all
        validations may happen to be 0 or 1, have no accuracy."""
        steps = sorted(step for step, results in self._validations.items() if results)
        names = dict.fromkeys(name for step in steps for name in self._validations[step])
        courses = {
            name: {step: self._validations[step][name] for step in steps if name in self._validations[step]}
            for name in names
        }
        if self._graded or len(courses.get("accuracy", {})) < len(steps):
            courses.pop("accuracy", None)
        return courses

    def _compared(self) -> Comparison | None:
        if self._compare is None:
            return None
        mean_length = self._tokens // (len(self._timers) * samples_per_step(self.config))
        policy, teachers = self._policy, self._policy.teachers
        shapes = {} if teachers is None else {alias: it.ranks.shape for alias, it in teachers.by_alias.items()}
        return self._compare(MeasuredRun(self.config, policy.shape, self._timers, policy.memory(), mean_length, shapes))


def _followed_facts(followed: Mapping[str, Any]) -> dict[str, str]:
    """Return the lines of the summary that say how equal a run is to the one that it followed."""
    differs = followed["differs_first"]
    equal = "log-probs and metrics are equal bit by bit" if differs is None else f"DIFFERS first in {differs}"
    return {"followed": f"{followed['run']}: {followed['steps']} steps, {followed['tokens']} tokens; {equal}"}


def _spread(policy: PolicyInterface, engines: GenerationInterface) -> str:
    """Describe how many nodes policy and engines use, where there are several."""
    nodes = len({worker.place().node for worker in policy.workers})
    if not engines.slots:
        return f" on {nodes} nodes" if nodes > 1 else ""
    engine_nodes = len(engines.nodes().hosts)
    return f" on {nodes} nodes, engines on {engine_nodes}" if max(nodes, engine_nodes) > 1 else ""


def _title(config: MasterConfig) -> str:
    return f"{'GRPO' if trains_on_rewards(config) else 'On-policy distillation'} of {config.policy.model_name}"


def _teachers(config: MasterConfig) -> str:
    models = config.on_policy_distillation.teacher_model_by_agent_name
    return ", ".join(models.values() if len(models) == 1 else (f"{alias}: {name}" for alias, name in models.items()))


def _ahead(config: MasterConfig) -> str:
    """Describe how far generation may be ahead of training."""
    ahead = config.grpo.async_grpo
    versions = f"{ahead.max_age} weight version{'s' if ahead.max_age > 1 else ''}"
    refit = "while engines generate" if ahead.in_flight_weight_updates else "once they are idle"
    if ahead.pauses:
        refit = "while samples stand still, as they do in training"
    return f"trajectories at most {versions} old, groups {ahead.group_order.replace('_', ' ')}, refit {refit}"


def _has_graded(metrics: Mapping[str, Any]) -> bool:
    """Return whether rewards of a step or a validation were graded: there are some, and they have no accuracy."""
    return metrics.get("accuracy") is None and metrics["num_samples"] > metrics["num_failed_samples"]


def _results(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return accuracy, reward and its named parts of a validation, those that have a value."""
    return {
        name: value
        for name, value in metrics.items()
        if value is not None
        and (name in ("accuracy", "reward") or name.startswith("reward/"))
        and not name.startswith("reward/by/")
    }


def _before_and_after(name: str, course: Mapping[int, float]) -> dict[str, float | None]:
    """Return a summary's two entries of a validation metric: before the first step, and at the last validation."""
    return {f"{name}_before": course.get(0), f"{name}_after": course[max(course)] if course else None}


def _queued_note(metrics: Mapping[str, float]) -> list[str]:
    """Return the line that says how many samples waited for room on their engines, if any did."""
    queued = int(metrics.get("num_queued_samples", 0))
    return (
        [f"up to {queued} samples waited for room on their engines (policy.generation.max_running)"] if queued else []
    )


def _left_out(metrics: dict[str, float]) -> str:
    """Explain why no sample was left to train on."""
    count, failed = metrics["num_samples"], metrics["num_failed_samples"]
    masked = metrics.get("num_masked_by_seq_logprob_error", 0.0)
    filtered = count - failed - masked - metrics["num_trained_samples"]
    reasons = {"without a reward": failed, "truncated or empty": filtered, "above seq_logprob_error_threshold": masked}
    listed = ", ".join(f"{number:.0f} {reason}" for reason, number in reasons.items() if number)
    return f"{metrics['num_trained_samples']:.0f} of {count:.0f} samples are in the loss" + (
        f" ({listed})" if listed else ""
    )


def _scores(groups: Sequence[Group], *, lost: bool) -> list[Score]:
    """Return the scores of all samples; `lost`: only those without a reward."""
    return [score for group in groups for score in group.scores if score.reward is None or not lost]


def scoring_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the seconds that scoring a sample took, and the attempts that failed, also by component."""
    scores = _scores(groups, lost=False)
    seconds = [score.seconds for score in scores]
    failed = Counter(failure.partition(":")[0] for score in scores for failure in score.failures)
    return {
        "timing/reward/sample_mean": sum(seconds) / max(len(seconds), 1),
        "timing/reward/sample_max": max(seconds, default=0.0),
        "scoring/failed_attempts": float(failed.total()),
        **{f"scoring/failed_attempts/{name}": float(count) for name, count in failed.items()},
    }


def prompt_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the share of a step's prompts that are not the same, text and images, as one before them."""
    shown = [
        tuple(
            (str(it["content"]), *(image.digest for image in it.get("images", ())))
            for it in group.prompt["message_log"]
        )
        for group in groups
        if group.prompt.get("message_log")
    ]
    return {"distinct_prompts": len(set(shown)) / len(shown)} if shown else {}


def scoring_notes(groups: Sequence[Group]) -> list[str]:
    """Return a line about the attempts to score that failed, if there were any, by component and reason."""
    scores = _scores(groups, lost=False)
    failed = Counter(failure for score in scores for failure in score.failures)
    if not failed:
        return []
    lost = sum(score.reward is None for score in scores)
    line = f"scoring: attempts that failed: {_counted(failed)}; {lost} of {len(scores)} samples have no reward"
    return textwrap.wrap(line, WIDTH, initial_indent="        ", subsequent_indent="          ")


def _counted(kinds: Counter[str], most: int = 4) -> str:
    """Return the total, and the most frequent kinds with their counts."""
    listed = [f"{textwrap.shorten(kind, 60)} {count}" for kind, count in kinds.most_common(most)]
    more = f", and {len(kinds) - most} other kinds" if len(kinds) > most else ""
    return f"{kinds.total()} ({', '.join(listed)}{more})"


def _failed(groups: Sequence[Group]) -> list[str]:
    """Return the samples without a reward, each with the reason."""
    return [
        f"{sample.uid}#{sample.generation_index}: {score.reason}"
        for group in groups
        for sample, score in zip(group.samples, group.scores, strict=True)
        if score.reward is None
    ]
