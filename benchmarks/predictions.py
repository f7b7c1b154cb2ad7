"""How well does a recorded run predict other settings? Record one, run four others, and rehearse each from the record.

    python benchmarks/predictions.py custom [--rounds 2] [--steps 25] [--folder FOLDER]
    python benchmarks/predictions.py demo

`custom` is examples/custom_environment under Ray with one rank, after the first two commands of its recipe.yaml; `demo`
is grpo-arithmetic-cpu with two ranks, after `grpo-mcore demo`. Recorded is age 1 with one engine.

A core of a shared machine may be twice as slow for some minutes. So a probe on each core takes the time of the same
small work four times a second, with real-time priority if it may, and the seconds of a run are divided by the mean of
the probe's during the run. Errors are shown with and without that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import NamedTuple

os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # before numpy

import numpy as np

from grpo_mcore.observe import read_metrics
from grpo_mcore.observe.spans import EventFile
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.rehearse.recording import read_recording
from grpo_mcore.tools.rehearse.rehearse import calibrated, rehearse

SETTINGS = {
    "age 1": dict(age=1),
    "age 0": dict(age=0),
    "age 2": dict(age=2),
    "two engines": dict(age=1, engines=2),
    "half the samples": dict(age=1, share=2),
}


class Subject(NamedTuple):
    """A recipe with its overrides. `prompts`: in a step, each with 8 samples."""

    recipe: str
    ranks: int
    prompts: int
    words: tuple[str, ...]


SUBJECTS = {
    "custom": Subject("examples/custom_environment/recipe.yaml", 1, 16, ("cluster.backend=ray",)),
    "demo": Subject(
        "grpo-arithmetic-cpu",
        2,
        32,
        (
            "policy.model_name=results/demo/base/hf",
            "data.train.data_path=results/demo/task/train.jsonl",
            "data.validation.data_path=results/demo/task/val.jsonl",
        ),
    ),
}


def overrides(subject: Subject, steps: int, age: int, engines: int = 1, share: int = 1) -> list[str]:
    """`share`: what the recipe's samples of a step are divided by."""
    words = [
        *subject.words,
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "checkpointing.enabled=false",
        "logger.samples=all",
        f"grpo.max_num_steps={steps}",
        f"grpo.num_prompts_per_step={subject.prompts // share}",
        f"policy.train_global_batch_size={8 * subject.prompts // share}",
        f"cluster.gpus_per_node={subject.ranks + engines}",
        f"policy.generation.colocated={{enabled: false, resources: {{gpus_per_node: {engines}}}}}",
    ]
    if age:
        words += [
            "grpo.async_grpo.enabled=true",
            f"grpo.async_grpo.max_trajectory_age_steps={age}",
            "grpo.async_grpo.in_flight_weight_updates=true",
            "loss_fn.use_importance_sampling_correction=true",
        ]
    return words


def probe(core: int, file: Path) -> None:
    """Write (unix time, seconds of a small piece of work) four times a second."""
    os.sched_setaffinity(0, {core})
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    matrix = np.full((160, 160), 0.01, dtype=np.float32)
    with file.open("a", buffering=1) as out:
        while True:
            began, product = time.perf_counter(), matrix
            for _ in range(12):
                product = np.tanh(product @ matrix)
            sum(number * number for number in range(40_000))
            out.write(f"{time.time()} {time.perf_counter() - began}\n")
            time.sleep(0.25)


@contextmanager
def probed(folder: Path) -> Iterator[Path]:
    """Let a probe run on each core. Yield the folder with what they wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    probes = [context.Process(target=probe, args=(core, folder / f"core-{core}"), daemon=True) for core in cores]
    for process in probes:
        process.start()
    try:
        yield folder
    finally:
        for process in probes:
            process.terminate()


def run(subject: Subject, words: Sequence[str], folder: Path) -> Path:
    """Train in a process of its own, and return the run folder."""
    command = [
        str(Path(sys.executable).with_name("grpo-mcore")),
        "train",
        subject.recipe,
        *words,
        f"logger.log_dir={folder}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return max(folder.glob("exp_*"))


def measured(folder: Path, probes: Path) -> tuple[float, float]:
    """Return (mean seconds of a step, of the probe meanwhile), both without the first step."""
    rows = list(read_metrics(folder / "metrics.jsonl", "train"))
    events = [event for event in EventFile(folder) if event.get("process") == "driver"]
    first = max(event["start"] + event["seconds"] for event in events if event["step"] == rows[0]["step"])
    last = max(event["start"] + event["seconds"] for event in events)
    lines = [line.split() for file in probes.iterdir() for line in file.read_text().splitlines()]
    spent = [float(seconds) for at, seconds in lines if first <= float(at) <= last]
    return fmean(row["timing/total"] for row in rows[1:]), fmean(spent)


def one_round(subject: Subject, steps: int, folder: Path) -> list[tuple[float, float]]:
    """Run all settings, print each prediction, and return (error, error by the probes) of each but the recorded one."""
    runs = {}
    with probed(folder / "probes") as probes:
        for name, setting in SETTINGS.items():
            words = overrides(subject, steps, **setting)
            runs[name] = (words, *measured(run(subject, words, folder / name.replace(" ", "-")), probes))
    recorded = next(iter(runs))
    recording = calibrated(read_recording(folder / recorded.replace(" ", "-")))
    errors = []
    for name, (words, seconds, speed) in runs.items():
        with TemporaryDirectory() as place, redirect_stdout(StringIO()):
            predicted = rehearse(load_recipe(subject.recipe, words).config, Path(place), steps, recording=recording)
        error = predicted.step[0] / seconds - 1
        by_probe = predicted.step[0] / runs[recorded][2] / (seconds / speed) - 1
        print(
            f"{name:17} predicted {predicted.step[0]:.3f} s, measured {seconds:.3f} s, probe {1000 * speed:.1f} ms: "
            f"{error:+.0%}, by the probe {by_probe:+.0%}",
            flush=True,
        )
        if name != recorded:
            errors.append((abs(error), abs(by_probe)))
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--folder", type=Path, default=Path("results/predictions"))
    args = parser.parse_args()
    errors = []
    for number in range(args.rounds):
        errors += one_round(SUBJECTS[args.subject], args.steps, args.folder / args.subject / f"round-{number}")
    for what, values in zip(("as measured", "by the probe"), zip(*errors, strict=True), strict=True):
        print(f"{what}: median error {median(values):.0%}, worst {max(values):.0%}")


if __name__ == "__main__":
    main()
