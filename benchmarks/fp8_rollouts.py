"""Does the demo's task get learned from rollouts of engines with FP8 weights? Train its start model with engines in
bfloat16, in FP8 blocks and in MXFP8, and in FP8 without importance weights; compare the curves.

    python benchmarks/fp8_rollouts.py [--arms bfloat16 fp8 ...] [--seeds 1 2 3] [--json FILE] [--plot FILE]
        [--overrides key=value ...]

`grpo-mcore demo` first: it makes the model and the task. Overrides go to recipes/grpo-arithmetic-cpu.yaml. All arms
have a bfloat16 policy of one rank and differ in nothing else. A recipe without importance weights is refused, so this
script takes them away from a recipe that has them.

November 2026, 100 steps, 2 min a run on two cores of a loaded machine: docs/refit.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from grpo_mcore.cli.train.train import train
from grpo_mcore.observe import read_metrics
from grpo_mcore.recipe import MasterConfig, load_recipe
from grpo_mcore.tools.demo.demo import Course, courses_png, read_course

EVERY = 10
"""Steps between two validations."""
GOAL = 0.9
FP8 = ["policy.generation.vllm_cfg.precision=fp8"]
ARMS = {
    "bfloat16": [],
    "fp8": FP8,
    "mxfp8": [*FP8, "policy.generation.vllm_cfg.is_mx=true"],
    "fp8-per-channel": [*FP8, "policy.generation.vllm_cfg.fp8_per_channel=true"],
    "fp8-unweighted": FP8,
}


def settings(arm: str, seed: int, overrides: list[str]) -> MasterConfig:
    one_process = ["cluster.backend=local", "cluster.gpus_per_node=1"]
    one_process += ["policy.megatron_cfg.tensor_model_parallel_size=1", "policy.precision=bfloat16"]
    steps = [f"grpo.seed={seed}", f"grpo.val_period={EVERY}", "grpo.val_at_end=false", "checkpointing.enabled=false"]
    weights = "loss_fn.use_importance_sampling_correction=true"
    logs = f"logger.log_dir=results/fp8-rollouts/{arm}-{seed}"
    config = load_recipe("grpo-arithmetic-cpu", [*one_process, *steps, weights, logs, *ARMS[arm], *overrides]).config
    if arm == "fp8-unweighted":
        config.loss_fn.use_importance_sampling_correction = False
    return config


def measured(config: MasterConfig) -> tuple[Course, dict[str, Any]]:
    """Train; return the course and {accuracy by step, step of GOAL, mean of token_mult_prob_error, of the gradient's
    norm}."""
    train(config)
    metrics = max(Path(config.logger.log_dir).glob("exp_*/metrics.jsonl"))
    rows = read_metrics(metrics, "train")
    accuracy = {row["step"]: row["accuracy"] for row in read_metrics(metrics, "validation")}
    return read_course(metrics), {
        "accuracy": accuracy,
        "steps_to_goal": next((step for step, share in accuracy.items() if share >= GOAL), None),
        "mult_prob_error": mean(row["token_mult_prob_error"] for row in rows),
        "grad_norm": mean(row["grad_norm"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["bfloat16", "fp8", "mxfp8"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--overrides", nargs="*", default=[], metavar="key=value")
    options = parser.parse_args()
    courses, found = {}, {}
    for seed in options.seeds:
        for arm in options.arms:
            courses[f"{arm}, seed {seed}"], found[f"{arm}, seed {seed}"] = measured(
                settings(arm, seed, options.overrides)
            )
            print(json.dumps({f"{arm}, seed {seed}": found[f"{arm}, seed {seed}"]}), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
            if options.plot:
                courses_png(options.plot, courses, "Two-digit addition, engines in bfloat16 and in FP8")


if __name__ == "__main__":
    main()
