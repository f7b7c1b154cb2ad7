"""`grpo-mcore demo [key=value ...]`: makes a small model and its task, warms it up, and trains it with GRPO."""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from grpo_mcore.recipe import load_recipe

FOLDER = Path("results/demo")


def run(args: argparse.Namespace) -> int:
    """Everything lies in results/demo afterwards. Overrides go to recipes/grpo-arithmetic-cpu.yaml."""
    began = time.perf_counter()
    grpo = load_recipe("grpo-arithmetic-cpu", args.overrides)  # a wrong override shows before anything runs
    sft = load_recipe("sft-arithmetic-cpu")

    from grpo_mcore.algorithms.sft import SFT
    from grpo_mcore.cli.sft import fine_tune
    from grpo_mcore.cli.train import train
    from grpo_mcore.data.arithmetic import make_arithmetic_task, make_base_config
    from grpo_mcore.observe import write_summary

    shutil.rmtree(FOLDER, ignore_errors=True)
    task = make_arithmetic_task(FOLDER / "task", seed=sft.config.sft.seed)
    parameters = make_base_config(sft.config.policy.model_name, task.tokenizer, seed=sft.config.sft.seed)
    print(f"1/3  task and untrained Qwen3 with {parameters / 1e6:.1f} M parameters in {FOLDER}", flush=True)
    print("2/3  supervised warm-up, most demonstrations are wrong (recipes/sft-arithmetic-cpu.yaml)", flush=True)
    fine_tune(SFT, sft.config)
    print("3/3  GRPO (recipes/grpo-arithmetic-cpu.yaml)", flush=True)
    summary = train(grpo.config)
    summary |= {"seconds": round(time.perf_counter() - began, 2), "grpo_seconds": summary["seconds"]}
    write_summary(FOLDER / "summary.json", summary)
    for curve in Path(grpo.config.logger.log_dir).glob("exp_*/reward_curve.png"):
        shutil.copy(curve, FOLDER / "reward_curve.png")
    print(
        f"\nheld-out problems solved, sampled at temperature 1: {summary['val_accuracy_before']} before, "
        f"{summary['val_accuracy_after']} after {summary['steps']} steps; {summary['seconds']:.0f} s in all\n"
        f"the whole demo: {FOLDER / 'summary.json'}, {FOLDER / 'reward_curve.png'}"
    )
    return 0
