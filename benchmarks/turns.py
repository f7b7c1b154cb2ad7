"""Seconds a step of real runs whose samples take their turns freely, divided by those of runs that take them together.

    python -m benchmarks.turns [--seeds 1 2 3] [--steps 10] [--prompts 16] [--case tool_4_turns_tail] [--json]

The runs are those of examples/custom_environment under Ray. Turns of a sample and seconds of a call are those of a case
of `benchmarks/rollouts.py`, where engines and environments are modelled.

`tool alone` is the ratio that the tool allows: the calls of the slowest sample one after another, divided by the
slowest call of each turn, the mean of 300 draws. What the measured ratio is above it is work: engine, driver,
environment and training on the cores that the run has. Two cores are full at about 64 samples (`--prompts 8`).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.rollouts import CASES, FIXED, Case
from examples.custom_environment.calculator import Calculator
from grpo_mcore.environments.interfaces import EnvironmentReturn
from grpo_mcore.observe import read_metrics

GENERATIONS, WARM_UP = 8, 2
FOLDER = Path("results/custom_environment")
GRPO_MCORE = [sys.executable, "-m", "grpo_mcore.cli.main"]


class SlowCalculator(Calculator):
    """Takes its time over each call, and ends a dialogue after its last turn only. The calls of a batch run beside each
    other."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._case, self._draw = CASES[config["case"]], random.Random(config["seed"])

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        time.sleep(max(self._case.answers_in(self._draw) for _ in metadata))
        turns = [info.get("turn", 0) + 1 for info in metadata]
        answers = super().step(message_log_batch, metadata)
        return answers._replace(
            metadata=[info | {"turn": turn} for info, turn in zip(metadata, turns, strict=True)],
            terminateds=[turn == self._case.turns for turn in turns],
        )


def tool_alone(samples: int, case: Case, draws: int = 300) -> float:
    """Return the ratio of free to joint turns of a step in which nothing but the tool takes time."""
    free, joint = 0.0, 0.0
    draw = random.Random(0)
    for _ in range(draws):
        calls = [[case.answers_in(draw) for _ in range(case.turns)] for _ in range(samples)]
        free += max(map(sum, calls))
        joint += sum(map(max, zip(*calls, strict=True)))
    return free / joint


def prepare() -> None:
    """Make the example's task and the model that it starts from, where they are missing."""
    if not (FOLDER / "base" / "hf" / "config.json").exists():
        task = [sys.executable, "-m", "examples.custom_environment.make_task", str(FOLDER / "task")]
        subprocess.run(task, check=True)
        subprocess.run([*GRPO_MCORE, "sft", "examples/custom_environment/sft.yaml"], check=True, stdout=sys.stderr)


def run(turns: str, seed: int, args: argparse.Namespace) -> tuple[float, list[float]]:
    """Return the mean seconds of a step after the first two, and the reward of each step."""
    logs = FOLDER / f"turns-{turns}-{seed}"
    samples = args.prompts * GENERATIONS
    section = {"path": "benchmarks.turns:SlowCalculator", "case": args.case, "seed": seed, "concurrency": samples}
    words = [
        f"grpo.turns={turns}",
        f"grpo.seed={seed}",
        f"grpo.max_num_steps={args.steps + WARM_UP}",
        f"grpo.num_prompts_per_step={args.prompts}",
        f"grpo.max_rollout_turns={CASES[args.case].turns}",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        f"policy.train_global_batch_size={samples}",
        "policy.max_total_sequence_length=96",
        f"env.calculator={json.dumps(section)}",
        "env.calculator.batch={max_size: 1}",
        "cluster.backend=ray",
        f"logger.log_dir={logs}",
    ]
    subprocess.run(
        [*GRPO_MCORE, "train", "examples/custom_environment/recipe.yaml", *words], check=True, stdout=sys.stderr
    )
    rows = read_metrics(max(logs.glob("exp_*")) / "metrics.jsonl", "train")
    return fmean(row["timing/total"] for row in rows[WARM_UP:]), [row["reward"] for row in rows]


def main(args: argparse.Namespace) -> None:
    prepare()
    pairs = []
    for seed in args.seeds:
        (free, of_free), (joint, of_joint) = run("free", seed, args), run("together", seed, args)
        differs = max(abs(a - b) for a, b in zip(of_free, of_joint, strict=True))
        pairs.append({"seed": seed, "seconds": free, "together_seconds": joint, "rewards_differ_by": differs})
        if not args.json:
            print(
                f"seed {seed}: {free:.2f} s a step, together {joint:.2f}: {free / joint:.2f}; "
                f"the rewards of no step differ by more than {differs:.3f}",
                flush=True,
            )
    ratio = sum(pair["seconds"] for pair in pairs) / sum(pair["together_seconds"] for pair in pairs)
    bound = tool_alone(args.prompts * GENERATIONS, CASES[args.case])
    if args.json:
        print(json.dumps({"pairs": pairs, "ratio": ratio, "tool_alone": bound}, indent=2))
    else:
        print(f"{ratio:.2f} of together; the tool alone {bound:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=10, help="measured; two more come before them")
    parser.add_argument("--prompts", type=int, default=16, help="of a step, each with 8 samples")
    parser.add_argument("--case", default="tool_4_turns_tail", choices=[c for c in CASES if c not in FIXED])
    parser.add_argument("--json", action="store_true")
    main(parser.parse_args())
