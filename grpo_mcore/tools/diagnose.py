"""Name what makes a run go otherwise than those of its band: one part after the other is exchanged for what it should
be, from the recipe to the loss, on a step that the run has recorded."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch

from grpo_mcore.base.text import replaced
from grpo_mcore.cluster.local_cluster import LocalCluster
from grpo_mcore.driver.record.recorded_samples import recorded_groups
from grpo_mcore.driver.run.environment_checks import environment_of
from grpo_mcore.driver.run.run import Prepared, prepare
from grpo_mcore.environments.interfaces import EnvironmentInterface
from grpo_mcore.observe.alarms import MISMATCH, alarms_of
from grpo_mcore.observe.band import Band, settings_of
from grpo_mcore.observe.samples import generated_mask, sample_steps
from grpo_mcore.recipe import MasterConfig, changes, needs_reference
from grpo_mcore.recipe.loading.show import HIDDEN
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.pass_rates import row_uid
from grpo_mcore.rollout.trajectory import Trajectory
from grpo_mcore.step.advantages import compute_targets
from grpo_mcore.step.step_batch import build_step_batch
from grpo_mcore.tools.replay.replay import Replay, ReplayError, checkpoint_before, compare, replay, replay_config
from grpo_mcore.tools.verdict.collect import of_run
from grpo_mcore.tools.verdict.judge import Judge
from grpo_mcore.tools.verdict.verdict import CERTAIN, judge_samples, merged

Row = Mapping[str, Any]
ROWS = 20_000
"""Rows of the data among which the prompts of a step are looked for."""
WITHOUT_EFFECT = (
    "grpo.val", "grpo.max_val", "data.validation", "rehearse", "eval.", "policy.refit", "policy.logprob",
    "policy.train_micro_batch_size", "policy.sequence_packing", "policy.dynamic_batching", "policy.generation.vllm_cfg",
    "policy.generation.colocated", "policy.model_name", "policy.tokenizer.name",
)  # fmt: skip
"""Beginnings of keys that say how something is computed, where it lies or how often it is looked at; a critic's are as
those of the policy."""
LAYOUT = ("parallel_size", "num_workers", "sequence_parallel", "data_path")
"""Ends of such keys. The data is compared row by row."""


@dataclass(frozen=True)
class WrongPart:
    """A part that is not as it should be. `evidence`: how it shows, with numbers; `again`: a command that shows it."""

    part: str
    evidence: str
    again: str


@dataclass
class DiagnosedRun:
    """A run that is diagnosed. `step`: a step that it recorded, with its samples `rows` and what was computed of them,
    `recorded`; `lines`: the metrics of all steps; `reference`: settings of the recipe that it should have; `scratch`: a
    folder for workers' logs; `band`: that of its recipe."""

    run: Path
    config: MasterConfig
    step: int
    rows: Sequence[Row]
    recorded: Replay
    lines: Sequence[Mapping[str, Any]]
    reference: Mapping[str, Any]
    scratch: Path
    band: Band | None = None

    def command(self, verb: str, *words: str) -> str:
        return shlex.join(["grpo-mcore", verb, str(self.run), *words])

    def prompts(self) -> dict[str, DatumSpec]:
        """Return the prompts of the step as the data makes them now, by uid."""
        if self._prompts is None:
            self._prepared = prepare(self.config, algorithm="eval", trains=False)
            train, uids = self._prepared.data.train, {row["uid"] for row in self.rows}
            sets = list(train.values()) if isinstance(train, Mapping) else [train]
            found = (rows[index] for rows in sets for index in islice(range(len(rows)), ROWS))
            by_uid = {datum["uid"]: datum for datum in found}
            of_row = {uid: uid if uid in by_uid else row_uid(uid) for uid in uids}
            self._prompts = {uid: by_uid[row] for uid, row in of_row.items() if row in by_uid}
        return self._prompts

    @property
    def prepared(self) -> Prepared:
        self.prompts()
        assert self._prepared is not None
        return self._prepared

    _prompts: dict[str, DatumSpec] | None = None
    _prepared: Prepared | None = None


def left_at(lines: Sequence[Mapping[str, Any]], band: Band | None) -> tuple[int, str] | None:
    """Return the step and the text of the run's first alarm, None without one."""
    return next(((alarm.step, alarm.text) for alarm in alarms_of(lines, band)), None)


def replayable(run: Path, config: MasterConfig, step: int) -> int:
    """Return the last recorded step up to `step` that began with the model or a checkpoint that is kept. Raises
    ReplayError if there is none."""
    for number in sorted(sample_steps(run, "train"), reverse=True):
        if number <= step:
            try:
                checkpoint_before(run, config, number)
            except ReplayError:
                continue
            return number
    if not sample_steps(run, "train"):
        raise ReplayError(f"{run}: the samples of no step are recorded (logger.samples)")
    raise ReplayError(f"{run}: no recorded step up to {step} begins with a checkpoint that is kept")


def of_settings(config: MasterConfig, reference: Mapping[str, Any]) -> Iterator[WrongPart]:
    """Compare a recipe with settings, key by key."""
    settings = settings_of(config.model_dump(mode="json"))
    shown = {key: value for key, value in reference.items() if HIDDEN not in str(value)}
    for change in changes(shown, config):
        key, theirs, mine = change.key, change.saved, change.new
        without_effect = re.sub(r"^value\.", "policy.", key).startswith(WITHOUT_EFFECT) or key.endswith(LAYOUT)
        if key in settings.keys() | shown.keys() and not without_effect:
            again = f"grpo-mcore train RECIPE {shlex.quote(f'{key}={theirs}')}"
            yield WrongPart(key, f"{mine} in the run, {theirs} in the recipe", again)


def of_prompts(case: DiagnosedRun) -> Iterator[WrongPart]:
    """Look at the texts of the prompts, and make them anew with the tokenizer and the template."""
    samples = {row["uid"]: row for row in case.rows if row["turns"]}
    asked = {uid: list(takewhile(lambda turn: not turn["generated"], row["turns"])) for uid, row in samples.items()}
    texts = {uid: "".join(turn["text"] for turn in turns) for uid, turns in asked.items()}
    images = {uid: [it["digest"] for turn in turns for it in turn.get("images") or ()] for uid, turns in asked.items()}
    count, again = len({(text, *images[uid]) for uid, text in texts.items()}), case.command("report")
    if 2 * count <= len(texts):
        text = next(iter(texts.values()))
        alike = f"all {len(texts)} prompts of step {case.step} are the same: {text!r}"
        several = f"{len(texts)} prompts of step {case.step} have {count} texts"
        yield WrongPart("prompts", alike, again) if count == 1 else WrongPart("data", several, again)
    for uid in samples.keys() & case.prompts().keys():
        messages = case.prompts()[uid]["message_log"]
        if images[uid] != [image.digest for message in messages for image in message.get("images", ())]:
            yield WrongPart("images", f"prompt {uid} was shown other images than the data has now", again)
            return
        ids = torch.cat([message["token_ids"] for message in messages]).tolist()
        if samples[uid]["token_ids"][: sum(turn["tokens"] for turn in asked[uid])] != ids:
            shown = case.prepared.tokenizer.decode(ids)
            evidence = f"prompt {uid} was {texts[uid]!r}; data and template make {shown!r} of it"
            yield WrongPart("template", evidence, "grpo-mcore data check RECIPE")
            return


def of_rewards(case: DiagnosedRun) -> Iterator[WrongPart]:
    """Score the recorded answers again, with the ground truths that the data has now."""
    again = case.command("report")
    scored = [row for row in case.rows if row["reward"] is not None and row["uid"] in case.prompts()]
    if not scored:
        raise ReplayError(f"none of its prompts with a reward is among the first {ROWS:,} rows of the data")
    for row in scored:
        truth = replaced(str(case.prompts()[row["uid"]]["extra_env_info"].get("ground_truth")))
        if row["truth"] not in (None, truth):
            evidence = f"the ground truth of {row['uid']} was {row['truth']}, and is {truth}"
            yield WrongPart("data", evidence, again)
            return
    for task in dict.fromkeys(row["task"] for row in scored):
        cls, section, _ = environment_of(task, case.prepared.env_names.get(task), case.config)
        plays = cls.sample_timeout_s(section) is not None or case.config.grpo.max_rollout_turns > 1
        if plays or cls.resources(section)["gpus"]:
            raise ReplayError(f"the environment of {task} has several turns or needs a GPU")
        environment, rows = (
            cls(cls.completed(section, case.prepared.tokenizer)),
            [r for r in scored if r["task"] == task],
        )
        try:
            assert isinstance(environment, EnvironmentInterface)
            infos = [dict(case.prompts()[row["uid"]]["extra_env_info"]) for row in rows]
            outcomes = environment.advance(infos, *_trajectories(rows))
        finally:
            environment.shutdown()
        pairs = zip(rows, outcomes, strict=True)
        if wrong := [(r, o) for r, o in pairs if o.reward is None or abs(o.reward - r["reward"]) > 1e-6]:
            row, outcome = wrong[0]
            evidence = (
                f"{len(wrong)} of {len(rows)} recorded answers get another reward: {row['answer']!r} of {row['uid']} "
                f"had {row['reward']:g} ({row['reason']}), and gets {outcome.reward} ({outcome.reason})"
            )
            yield WrongPart("reward", evidence, again)


def _trajectories(rows: Sequence[Row]) -> list[Trajectory]:
    store = LocalCluster().store
    groups = recorded_groups(rows, store)
    by_name = {(s.uid, s.generation_index): s.ref for group in groups for s in group.samples}
    return list(store.fetch_many([by_name[row["uid"], row["generation"]] for row in rows]))


def of_mask(case: DiagnosedRun) -> Iterator[WrongPart]:
    """Compare which tokens have a log-prob of the policy with those that were generated."""
    for row in case.rows:
        if not row["policy_logprobs"] or not row["weight"]:
            continue
        mask = generated_mask(row["turns"], len(row["token_ids"]))
        of_engine = row["engine_logprobs"]
        for token, (logprob, generated) in enumerate(zip(row["policy_logprobs"], mask, strict=True)):
            left_out = generated and logprob == 0 and of_engine[token] < -CERTAIN
            if left_out or (logprob != 0 and not generated):
                done = "generated and not trained on" if left_out else "trained on and not generated"
                evidence = f"token {token} of {len(mask)} of {row['uid']}#{row['generation']} was {done}"
                yield WrongPart("mask", evidence, case.command("verdict", "--step", str(case.step)))
                return


def of_answers(case: DiagnosedRun) -> Iterator[WrongPart]:
    """Look at how answers end."""
    cut = [row for row in case.rows if row["truncated"]]
    usual = case.band.largest("truncated") if case.band is not None else 0.0
    if len(cut) > max(0.5, usual) * len(case.rows):
        evidence = (
            f"{len(cut)} of {len(case.rows)} answers are cut off by policy.generation.max_new_tokens or the length"
        )
        yield WrongPart("truncation", evidence, case.command("report"))


def of_advantages(case: DiagnosedRun) -> Iterator[WrongPart]:
    """Compute the advantages of the recorded rewards."""
    config = replay_config(case.config, "TP1")
    if config.ppo.enabled or config.on_policy_distillation.enabled or needs_reference(config):
        raise ReplayError("they depend on log-probs or values")
    groups = recorded_groups(case.rows, LocalCluster().store)
    batch = build_step_batch(groups, config, case.prepared.model.layout)
    targets, _ = compute_targets(batch, {}, config)
    computed, rows = targets.sample_advantages(), [row for group in _by_group(case.rows) for row in group]
    for value, row in zip([] if computed is None else computed.tolist(), rows, strict=True):
        if row["advantage"] is not None and abs(value - row["advantage"]) > 1e-4 * max(1.0, abs(value)):
            evidence = f"{row['uid']}#{row['generation']} with reward {row['reward']:g} was trained on with advantage "
            evidence += f"{row['advantage']:.4g}, and its group's rewards give {value:.4g}"
            yield WrongPart("advantages", evidence, case.command("report"))
            return


def _by_group(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["uid"], []).append(row)
    return list(groups.values())


def of_logprobs(case: DiagnosedRun) -> Iterator[WrongPart]:
    """Ask transformers in float64 which side is wrong where engine and policy disagree."""
    errors = {int(line["step"]): line.get("token_mult_prob_error") for line in case.lines}
    wrong = [step for step, error in errors.items() if error is None or error > MISMATCH]
    if not wrong:
        return
    first, step = min(wrong), replayable(case.run, case.config, max(min(wrong), case.step))
    again = case.command("verdict", "--step", str(step))
    cases = of_run(case.run, case.config, step, 4, case.scratch)
    verdict = merged(
        [
            judge_samples(Judge(it.folder, it.sampling, it.older, it.unquantized), it.samples, it.precision)
            for it in cases
        ]
    )
    for side, cause in verdict.causes.items():
        part = {"temperature": "sampling temperature", "version": "refit"}.get(cause.cause, f"log-probs of the {side}")
        yield WrongPart(part, f"{side} in step {step}: {cause.cause} ({cause.what})", again)
    if not verdict.causes and first > 1:
        evidence = f"engine and policy agree until step {first - 1} and differ from step {first} on by a factor of "
        evidence += f"{errors[first]:.3g} and {errors[max(errors)]:.3g} in the end: weights that training has changed"
        yield WrongPart("refit", evidence, "grpo-mcore refit verify RECIPE")


def of_loss(case: DiagnosedRun) -> Iterator[WrongPart]:
    """Compute the step again."""
    config = replay_config(case.config, "TP1")
    start = checkpoint_before(case.run, case.config, case.step)
    computed = replay(config, case.rows, case.step, start, case.scratch)
    difference = compare(computed, case.recorded, config.policy.precision)
    if difference.first is not None:
        parts = {"the critic's": "critic", "the loss": "loss"}
        part = next((part for text, part in parts.items() if difference.first.startswith(text)), "update")
        yield WrongPart(part, difference.first, case.command("replay", "--step", str(case.step), "--layout", "TP1"))


CHEAP: dict[str, Callable[[DiagnosedRun], Iterator[WrongPart]]] = {
    "recipe": lambda case: of_settings(case.config, case.reference), "mask": of_mask,
    "prompts and template": of_prompts, "truncation": of_answers, "reward": of_rewards, "advantages": of_advantages,
    "log-probs": of_logprobs,
}  # fmt: skip
"""Looks that compute no training step, in their order, by the name of the part."""


def diagnose(case: DiagnosedRun) -> tuple[list[WrongPart], list[str]]:
    """Return what is not as it should be, and what could not be looked at. The step is computed again only where
    nothing else of the step itself differs, since its loss would too."""
    findings, notes = list[WrongPart](), list[str]()
    for name, look in {**CHEAP, "loss": of_loss}.items():
        if look is of_loss and any(finding.part in ("mask", "advantages") for finding in findings):
            continue
        try:
            findings += look(case)
        except Exception as error:  # such as of a model that is not here: the other parts can be looked at all the same
            notes.append(f"{name}: {error}")
    return findings, notes
