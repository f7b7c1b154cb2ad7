"""Time of a GRPO step on CPU: tokens/s and the share of each phase, for the demo's model and a 27 M one.

    python benchmarks/step_cpu.py [--steps 3] [--size demo|27m|both] [--json FILE]

Random weights, real parts: two Megatron-Core ranks, a vLLM engine, Ray, math-verify, a refit a step. 32 prompts x 8
generations; up to 8 new tokens for the demo model (float32, TP 2), up to 128 for the 27 M one (Qwen3, hidden 512,
8 layers, vocabulary 4096, bfloat16, DP 2, two engines). The first step loads kernels and is not counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

from grpo_mcore.cli.train.train import train
from grpo_mcore.observe import read_metrics
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.demo.arithmetic import make_arithmetic_task, make_base_config

SIZES = {
    "demo": ({}, ["policy.precision=float32"]),
    "27m": (
        {
            "hidden_size": 512, "intermediate_size": 1536, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4,
            "head_dim": 64, "max_positions": 2048, "vocab_size": 4096,
        },
        [
            "policy.precision=bfloat16", "policy.max_total_sequence_length=160", "policy.generation.max_new_tokens=128",
            "policy.refit_buffer_size_gb=0.1", "policy.train_micro_batch_size=32",
            "policy.megatron_cfg.tensor_model_parallel_size=1", "policy.generation.num_engines=2",
        ],
    ),
}  # fmt: skip
PHASES = ("generate", "reward", "prepare", "logprobs", "train", "refit", "everything_else")


def measure(size: str, steps: int, extra: list[str]) -> dict[str, object]:
    """Return medians over the steps after the first."""
    shape, overrides = SIZES[size]
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        task = make_arithmetic_task(folder / "task")
        parameters = make_base_config(folder / "model", task.tokenizer, **shape)
        recipe = load_recipe(
            "grpo-arithmetic-cpu",
            [
                f"policy.model_name={folder / 'model'}",
                f"data.train.data_path={task.train}",
                f"data.validation.data_path={task.val}",
                f"grpo.max_num_steps={steps + 1}",
                "grpo.val_at_start=false",
                "grpo.val_at_end=false",
                "checkpointing.enabled=false",
                "policy.train_global_batch_size=256",
                "logger.tensorboard_enabled=false",
                f"logger.log_dir={folder / 'logs'}",
                *overrides,
                *extra,
            ],
        )
        train(recipe.config)
        rows = read_metrics(folder / "logs" / "exp_001" / "metrics.jsonl", "train")[1:]
    total = median(row["timing/total"] for row in rows)
    seconds = {phase: median(row.get(f"timing/{phase}", 0.0) for row in rows) for phase in PHASES}
    return {
        "model": size,
        "parameters": parameters,
        "seconds_per_step": round(total, 3),
        "tokens_per_step": median(row["tokens"] for row in rows),
        "tokens_per_second": round(median(row["tokens_per_second"] for row in rows), 1),
        "share": {phase: round(spent / total, 4) for phase, spent in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="steps that are counted")
    parser.add_argument("--size", choices=[*SIZES, "both"], default="both")
    parser.add_argument("--json", nargs="?", const=Path("/dev/stdout"), type=Path, help="print the figures, or to FILE")
    parser.add_argument("overrides", nargs="*", help="further recipe overrides, key=value")
    args = parser.parse_args()
    sizes = list(SIZES) if args.size == "both" else [args.size]
    results = [measure(size, args.steps, args.overrides) for size in sizes]
    print(f"\n{'model':>6} {'params':>10} {'s/step':>8} {'tok/s':>8}  " + "  ".join(f"{p:>15}" for p in PHASES))
    for found in results:
        shares = "  ".join(f"{share:>15.1%}" for share in found["share"].values())
        print(
            f"{found['model']:>6} {found['parameters']:>10,} {found['seconds_per_step']:>8} "
            f"{found['tokens_per_second']:>8}  {shares}"
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
