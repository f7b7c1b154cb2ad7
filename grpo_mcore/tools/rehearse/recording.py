"""A recorded run as the source of a rehearsal: its samples, and how long its phases took."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_mcore.observe import read_metrics
from grpo_mcore.observe.run_folder import EventFile
from grpo_mcore.observe.samples import read_samples
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.tools.rehearse.durations import Durations
from grpo_mcore.tools.report.run_files import read_run

MOST_FILES = 32
"""Steps whose samples are read, the last ones of a run."""
WARM_UP = 1
"""Steps at the beginning of a run that are not measured."""
PHASES = {"logprobs": "logprobs", "train": "train", "refit": "refit", "prepare": "receive"}
"""Timer of a step -> the duration that it measures."""


class RecordingError(ValueError):
    """A run of which no rehearsal can be made; the message says why."""


@dataclass(frozen=True)
class RecordedSample:
    """A sample of a recorded run. `generated` has the tokens of each generated turn, `observed` those of the
    environment's message after each but the last. `reward` is None if scoring failed; `seconds` is the mean time of the
    environment for a turn."""

    generated: tuple[int, ...]
    observed: tuple[int, ...]
    reward: float | None
    seconds: float


@dataclass(frozen=True)
class Recording:
    """A run. `groups` are its samples by prompt, `figures` are as of `measured`. With the `factors` of the planned
    durations a rehearsal takes as long as the run did."""

    config: MasterConfig
    prompt_tokens: int
    mean_tokens: int
    groups: tuple[tuple[RecordedSample, ...], ...]
    figures: Mapping[str, float]
    factors: Mapping[str, float] = field(default_factory=dict)


def read_recording(folder: Path) -> Recording:
    """Read the run that `folder` is or holds. Raises RecordingError, NoRun, SamplesError."""
    run = read_run(folder)
    files = [run.samples["train"][step] for step in sorted(run.samples["train"])[-MOST_FILES:]]
    if not files:
        raise RecordingError(f"{run.folder} has no samples: record the run with logger.samples: all, or sampled")
    if len(run.steps) <= WARM_UP:
        raise RecordingError(f"{run.folder} has {len(run.steps)} steps, of which the first warms up: record more")
    groups: dict[tuple[int, str], list[RecordedSample]] = defaultdict(list)
    prompts, totals = [], []
    for number, path in enumerate(files):
        for row in read_samples(path, ("uid", "reward", "score_seconds", "turns")):
            if row["turns"]:
                prompt, sample = _sample(row)
                groups[number, row["uid"]].append(sample)
                prompts.append(prompt)
                totals.append(prompt + sum(sample.generated) + sum(sample.observed))
    return Recording(
        MasterConfig.model_validate(run.recipe),
        round(fmean(prompts)),
        round(fmean(totals)),
        tuple(map(tuple, groups.values())),
        measured(run.folder),
    )


def _sample(row: Mapping[str, Any]) -> tuple[int, RecordedSample]:
    """Return (tokens of the prompt, the sample)."""
    lengths: list[tuple[bool, int]] = []  # (generated, tokens), neighbours of one kind as one
    for turn in row["turns"]:
        if lengths and lengths[-1][0] == turn["generated"]:
            lengths[-1] = turn["generated"], lengths[-1][1] + turn["tokens"]
        else:
            lengths.append((turn["generated"], turn["tokens"]))
    first = 0 if lengths[0][0] else lengths.pop(0)[1]
    generated_turns = tuple(tokens for generated, tokens in lengths if generated)
    observed = tuple(tokens for generated, tokens in lengths if not generated)[: len(generated_turns) - 1]
    return first, RecordedSample(
        generated_turns, observed, row["reward"], (row["score_seconds"] or 0.0) / len(generated_turns)
    )


def measured(folder: Path) -> dict[str, float]:
    """Return what the folder of a run or of a rehearsal says about durations: the mean seconds of a step in log-probs,
    training and refit, if there were any; of the whole "step", and in its "wait" for samples; and as "decode" the
    seconds in which an engine is asked for samples, for each token that was trained on."""
    rows = list(read_metrics(folder / "metrics.jsonl", "train"))[WARM_UP:]
    figures = {}
    for timer, name in PHASES.items():
        if values := [row[f"timing/{timer}"] for row in rows if row.get(f"timing/{timer}")]:
            figures[name] = fmean(values)
    by_engine: dict[str, list[tuple[float, float]]] = defaultdict(list)
    steps = {row["step"] for row in rows}
    for event in EventFile(folder):
        if event["what"] == "generate" and event["process"].startswith("engine") and event["step"] in steps:
            by_engine[event["process"]].append((event["start"], event["start"] + event["seconds"]))
    figures["step"] = fmean(row["timing/total"] for row in rows)
    figures["wait"] = fmean(row.get("timing/generate", 0.0) for row in rows)
    return figures | {"decode": sum(map(_covered, by_engine.values())) / sum(row["tokens"] for row in rows)}


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds in which at least one of the spans goes on."""
    covered, until = 0.0, 0.0
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def scaled(durations: Durations, factors: Mapping[str, float]) -> Durations:
    """Return the durations, those of `factors` longer by that much."""
    decode, logprobs, train = (factors.get(name, 1.0) for name in ("decode", "logprobs", "train"))
    refit, receive = factors.get("refit", 1.0), factors.get("receive", 1.0)
    return replace(
        durations,
        decode=lambda samples, tokens: decode * durations.decode(samples, tokens),
        prefill=decode * durations.prefill,
        request=decode * durations.request,
        logprobs=lambda lengths: logprobs * durations.logprobs(lengths),
        train=lambda lengths: train * durations.train(lengths),
        refit=refit * durations.refit,
        commit=refit * durations.commit,
        receive=lambda samples: receive * durations.receive(samples),
    )
