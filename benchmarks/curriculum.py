"""Is a curriculum worth it? Tokens until the goal of recipes/variants/curriculum.yaml, with its sampler and without.

    python benchmarks/curriculum.py [--seeds 3] [--work FOLDER] [key=value ...]

For each seed a task and a start model are made as the demo makes them (they are kept in FOLDER), and trained twice from
there, in this process with one rank: the ratio of tokens depends neither on ranks nor on speed. Overrides go to both.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import mean

from grpo_mcore.algorithms.sft import sft_train
from grpo_mcore.cli.train.demo import FOLDERS, GRPO, make_untrained, warm_up_recipe
from grpo_mcore.cli.train.train import train
from grpo_mcore.driver.run.run_recipe import run_recipe
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.demo.arithmetic import make_arithmetic_task
from grpo_mcore.tools.demo.demo import read_course

ONE_RANK = ("cluster.backend=local", "cluster.gpus_per_node=1", "policy.megatron_cfg.tensor_model_parallel_size=1")
QUIET = ("checkpointing.enabled=false", "logger.num_val_samples_to_print=0")


def make_start(seed: int) -> None:
    """Make the task, and a model that has learned its faulty demonstrations."""
    folder = FOLDERS[GRPO]
    if (folder / "base" / "hf").is_dir():
        return
    task = make_arithmetic_task(folder / "task", seed=seed)
    make_untrained(GRPO, folder / "untrained", task.tokenizer, seed)
    run_recipe("sft", sft_train, warm_up_recipe(folder, folder / "task", seed), None)


def tokens_until_goal(seed: int, name: str, words: list[str]) -> float | None:
    """Train, and return the tokens until the recipe's goal; None if it was not reached."""
    logs = Path("results") / name
    config = load_recipe(
        "variants/curriculum", [f"grpo.seed={seed}", *ONE_RANK, *QUIET, f"logger.log_dir={logs}", *words]
    ).config
    train(config)
    goal = config.grpo.stop_at_validation_threshold
    assert goal is not None
    reached = read_course(max(logs.glob("exp_*/metrics.jsonl"))).until(goal)
    return None if reached is None else reached[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("results/curriculum"))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    work, ratios = args.work.resolve(), []
    for seed in range(1, args.seeds + 1):
        folder = work / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        make_start(seed)
        without = tokens_until_goal(seed, "without", [*args.overrides, "data.sampler=null"])
        taken = tokens_until_goal(seed, "with", args.overrides)
        print(f"seed {seed}: {taken} tokens with the sampler, {without} without", flush=True)
        if taken is not None and without is not None:
            ratios.append(taken / without)
    if ratios:
        print(f"ratios {', '.join(f'{ratio:.2f}' for ratio in ratios)}, mean {mean(ratios):.2f}")


if __name__ == "__main__":
    main()
