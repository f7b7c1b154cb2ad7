"""`grpo-mcore demo [key=value ...]`: makes a small model and its task, warms it up, and trains it with GRPO."""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from grpo_mcore.recipe import load_recipe

FOLDER = Path("results/demo")


def run(args: argparse.Namespace) -> int:
    """Everything lies in results/demo afterwards. Overrides go to recipes/grpo-arithmetic-cpu.yaml; grpo.seed also
    determines the task, the untrained model and the warm-up."""
    began = time.perf_counter()
    grpo = load_recipe("grpo-arithmetic-cpu", args.overrides)  # a wrong override shows before anything runs
    sft = load_recipe("sft-arithmetic-cpu", [f"sft.seed={grpo.config.grpo.seed}"])

    from grpo_mcore.algorithms.sft import SFT
    from grpo_mcore.cli.sft import fine_tune
    from grpo_mcore.cli.train import exit_code, train
    from grpo_mcore.data.arithmetic import make_arithmetic_task, make_base_config
    from grpo_mcore.observe import write_summary
    from grpo_mcore.tools.demo import ask, learned
    from grpo_mcore.tools.export import export

    shutil.rmtree(FOLDER, ignore_errors=True)
    task = make_arithmetic_task(FOLDER / "task", seed=sft.config.sft.seed)
    parameters = make_base_config(
        sft.config.policy.model_name, task.tokenizer, seed=sft.config.sft.seed, initializer_range=0.06
    )
    print(f"1/4  task and untrained Qwen3 with {parameters / 1e6:.1f} M parameters in {FOLDER}", flush=True)
    print("2/4  supervised warm-up, most demonstrations are one too many (recipes/sft-arithmetic-cpu.yaml)", flush=True)
    if (warm_up := fine_tune(SFT, sft.config))["stopped_early"]:
        return exit_code(warm_up)
    print("3/4  GRPO (recipes/grpo-arithmetic-cpu.yaml)", flush=True)
    summary = train(grpo.config)
    if summary["stopped_early"] or not grpo.config.checkpointing.enabled:  # there is no result to show
        return exit_code(summary)
    print("4/4  export of the last checkpoint, and the held-out problems once more, with transformers", flush=True)
    model = FOLDER / "model"
    export(Path(grpo.config.checkpointing.checkpoint_dir), model)
    base = Path(grpo.config.policy.model_name)
    before, after = ask(base, task.val), ask(model, task.val)
    summary |= {
        "greedy_accuracy_before": before.accuracy,
        "greedy_accuracy_after": after.accuracy,
        "seconds": round(time.perf_counter() - began, 2),
        "grpo_seconds": summary["seconds"],
        "model": str(model),
    }
    write_summary(FOLDER / "summary.json", summary)
    for curve in Path(grpo.config.logger.log_dir).glob("exp_*/reward_curve.png"):
        shutil.copy(curve, FOLDER / "reward_curve.png")
    sampled = [_share(summary[f"val_accuracy_{when}"]) for when in ("before", "after")]
    print(
        f"\nheld-out problems solved     before  after {summary['steps']} steps\n"
        f"  most likely answer          {before.accuracy:.3f}  {after.accuracy:.3f}\n"
        f"  sampled at temperature 1    {sampled[0]}  {sampled[1]}"
    )
    if (example := learned(before, after)) is not None:
        problem, was, now = example
        print(f"one of them: {problem} {was} before, {now} after")
    print(
        f"{summary['seconds']:.0f} s in all; summary and curve: {FOLDER}/summary.json, {FOLDER}/reward_curve.png\n"
        f"the model, for transformers, vLLM or a new run: {model}"
    )
    return 0


def _share(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "    -"  # not validated, by an override
