"""Do we learn as TRL does? Train the demo's start model with our loop and with TRL's GRPOTrainer; compare the curves.

    python benchmarks/learning.py [--seeds 3] [--json FILE] [--plot FILE] [grpo.max_num_steps=120 ...]

`grpo-mcore demo` first: it makes the model and the task. Overrides go to recipes/grpo-arithmetic-cpu.yaml, from which
both sides take their settings. Equal on both: prompts and their order, groups, samples of an optimizer step,
temperature, advantages, loss, clipping, Adam, learning rate of each step. Different: the model's code, tensor
parallelism, the engine (vLLM; transformers in TRL), the verifier, which of a step's samples go into its first optimizer
step (TRL shuffles them), and the random numbers of sampling. This script installs TRL into a folder of its own, beside
the torch and transformers of the project.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from grpo_mcore.cli.train.train import train
from grpo_mcore.data.loader import PromptBatchSampler
from grpo_mcore.observe import read_metrics
from grpo_mcore.recipe import MasterConfig, load_recipe

TRL = ("trl==1.16.0", "accelerate==1.15.0")  # what else TRL needs, the project has
EVERY = 10
"""Steps between two validations."""
GOAL = 0.9


def settings(seed: int, work: Path, overrides: Sequence[str]) -> MasterConfig:
    return load_recipe(
        "grpo-arithmetic-cpu",
        [
            f"grpo.seed={seed}",
            f"grpo.val_period={EVERY}",
            "grpo.val_at_end=false",  # it is one of the others
            "grpo.use_leave_one_out_baseline=false",  # TRL's advantage: (reward - mean) / deviation of the whole group
            "checkpointing.enabled=false",
            "logger.num_val_samples_to_print=0",
            f"logger.log_dir={work / 'ours'}",
            *overrides,
        ],
    ).config


def train_ours(config: MasterConfig) -> dict[str, Any]:
    """Return {accuracy, seconds, lr}, each by step; seconds without start and validations."""
    train(config)
    newest = max(Path(config.logger.log_dir).glob("exp_*/metrics.jsonl"))
    steps = read_metrics(newest, "train")
    spent = {0: 0.0}
    for row in steps:
        spent[row["step"]] = spent[row["step"] - 1] + row["timing/total"]
    accuracy = {row["step"]: row["accuracy"] for row in read_metrics(newest, "validation")}
    return {
        "accuracy": accuracy,
        "seconds": {step: spent[step] for step in accuracy},
        "lr": [row["lr"] for row in steps],
    }


def install_trl(folder: Path) -> None:
    """Install TRL and accelerate, and nothing that the project has."""
    if not (folder / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *TRL]
        subprocess.run(command, check=True)


def train_trl(config: MasterConfig, rates: Sequence[float], work: Path) -> dict[str, Any]:
    """Return {accuracy, seconds}, each by step. `rates`: the learning rate of each step."""
    grpo, policy, optimizer = config.grpo, config.policy, config.policy.megatron_cfg.optimizer
    rows = Path(config.data.train[0].data_path).read_text(encoding="utf-8").splitlines()
    order = PromptBatchSampler(rows, grpo.num_prompts_per_step, True, grpo.seed, True).order(epoch=0)
    used = order[: grpo.max_num_steps * grpo.num_prompts_per_step]
    prompts = work / f"prompts_{grpo.seed}.jsonl"
    prompts.write_text("".join(rows[index] + "\n" for index in used), encoding="utf-8")
    batch = policy.train_global_batch_size
    told = {
        "seed": grpo.seed,
        "work": str(work / "trl-output"),
        "model": policy.model_name,
        "prompts": str(prompts),
        "validation": config.data.validation[0].data_path,
        "steps": grpo.max_num_steps,
        "every": grpo.val_period,
        "generations": grpo.num_generations_per_prompt,
        "optimizer_batch": batch,
        "updates": grpo.num_prompts_per_step * grpo.num_generations_per_prompt // batch,
        "max_new_tokens": policy.generation.max_new_tokens,
        "temperature": policy.generation.temperature,
        "clip": config.loss_fn.ratio_clip_min,
        "rates": list(rates),
        "betas": [optimizer.adam_beta1, optimizer.adam_beta2],
        "eps": optimizer.adam_eps,
        "clip_grad": optimizer.clip_grad,
    }
    command = [sys.executable, str(Path(__file__).with_name("learning_trl.py")), json.dumps(told)]
    environment = os.environ | {"PYTHONPATH": str(work / "trl-packages")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: {int(step): value for step, value in found[name].items()} for name in ("accuracy", "seconds")}


def summarised(runs: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return {seeds, accuracy: by seed and step, mean: by step, seconds_to_0.9: by seed, None if never reached}."""
    first = next(iter(runs.values()))
    reached = {
        seed: next((run["seconds"][step] for step, share in run["accuracy"].items() if share >= GOAL), None)
        for seed, run in runs.items()
    }
    return {
        "seeds": list(runs),
        "accuracy": {seed: run["accuracy"] for seed, run in runs.items()},
        "mean": {step: mean(run["accuracy"][step] for run in runs.values()) for step in first["accuracy"]},
        "seconds_to_0.9": reached,
        "seconds": {seed: max(run["seconds"].values()) for seed, run in runs.items()},
    }


def plot(found: Mapping[str, Any], target: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, label, colour in (("ours", "grpo_mcore", "#1f77b4"), ("trl", "TRL 1.16", "#d95f02")):
        for curve in found[name]["accuracy"].values():
            axes.plot(list(curve), list(curve.values()), color=colour, alpha=0.25, linewidth=1)
        average = found[name]["mean"]
        axes.plot(list(average), list(average.values()), color=colour, marker="o", markersize=4, label=label)
    axes.set(xlabel="step", ylabel="held-out problems solved, sampled", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", title=f"mean of {len(found['ours']['seeds'])} seeds; thin: each")
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("results/learning"), help="logs, and TRL's packages")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--plot", type=Path, help="write a picture of both curves there")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    install_trl(work / "trl-packages")
    ours, trl = {}, {}
    for seed in range(1, args.seeds + 1):
        config = settings(seed, work, args.overrides)
        ours[seed] = train_ours(config)
        trl[seed] = train_trl(config, ours[seed]["lr"], work)
    found: dict[str, Any] = {"ours": summarised(ours), "trl": summarised(trl)}
    apart = {step: abs(share - found["trl"]["mean"][step]) for step, share in found["ours"]["mean"].items()}
    found["largest_difference_of_means"] = max(apart.values())
    print(" step    ours     TRL")
    for step, share in found["ours"]["mean"].items():
        print(f"{step:5d}  {share:6.3f}  {found['trl']['mean'][step]:6.3f}")
    for name in ("ours", "trl"):
        print(f"{name:5s} seconds to {GOAL}, by seed: {found[name]['seconds_to_0.9']}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if args.plot is not None:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
