"""Samples until a dialogue of six turns is learned, with one reward of the whole and with credit by turn.

    python -m benchmarks.turn_credit [--seeds 1 2 3] [--steps 150] [--modes difference gigpo] [--work FOLDER]

The environment names a digit d, and the right answer is 3 d + 1 modulo 10; six times. The reward is 1 where all six
answers are right, else 0; `turn_rewards` has the number of right answers so far. The model starts from demonstrations
of which a third are right. Learned is the first step at which the mean share of right answers, over four steps, reaches
0.8; each step has 4 prompts x 8 samples. Everything runs in this process, on one rank, with the real engine.
"""

import argparse
import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_mcore.algorithms.sft import sft_train
from grpo_mcore.cli.train.train import train
from grpo_mcore.driver.run.run_recipe import run_recipe
from grpo_mcore.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from grpo_mcore.observe import read_metrics
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.demo.arithmetic import make_base_config, make_tokenizer

TURNS, PROMPTS, GENERATIONS, GOAL, MEAN_OF = 6, 4, 8, 0.8, 4
DIGITS = "0123456789"
RIGHT_SHARE = 1 / 3


def answer(digit: str) -> str:
    """Return the right answer to a digit."""
    return str((3 * int(digit) + 1) % 10)


class Digits(EnvironmentInterface):
    """Asks for the digits of the row's ground truth, one after the other."""

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        asked = [str(fields["ground_truth"]) for fields in metadata]
        turns = [fields.get("turn", 0) for fields in metadata]
        right = [
            fields.get("right", 0) + (messages[-1]["content"] == answer(digits[turn]))
            for messages, fields, digits, turn in zip(message_log_batch, metadata, asked, turns, strict=True)
        ]
        over = [turn + 1 == TURNS for turn in turns]
        return EnvironmentReturn(
            observations=[
                {"role": "user", "content": "" if end else digits[turn + 1]}
                for digits, turn, end in zip(asked, turns, over, strict=True)
            ],
            metadata=[
                fields | {"turn": turn + 1, "right": count}
                for fields, turn, count in zip(metadata, turns, right, strict=True)
            ],
            next_stop_strings=[list(DIGITS)] * len(asked),
            rewards=[float(count == TURNS) for count in right],
            terminateds=over,
            rewards_by_name=[{"right": count / TURNS if end else 0.0} for count, end in zip(right, over, strict=True)],
            turn_rewards=list(map(float, right)),
            state_keys=[digits[turn] for digits, turn in zip(asked, turns, strict=True)],
        )


def make_task(seed: int) -> None:
    """Write model, demonstrations and prompts to the folder `task`; the same for the same seed."""
    if Path("task/train.jsonl").exists():
        return
    make_tokenizer("task/tokenizer", DIGITS)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
    make_base_config("task/untrained", "task/tokenizer", seed, initializer_range=0.06, **sizes)
    draw = random.Random(seed)

    def demonstration() -> dict[str, Any]:
        messages = []
        for digit in draw.choices(DIGITS, k=TURNS):
            wrong = draw.choice(DIGITS.replace(answer(digit), ""))
            said = answer(digit) if draw.random() < RIGHT_SHARE else wrong
            messages += [{"role": "user", "content": digit}, {"role": "assistant", "content": said}]
        return {"messages": messages}

    dialogues = ["".join(draw.choices(DIGITS, k=TURNS)) for _ in range(2000)]
    _write("task/sft.jsonl", [demonstration() for _ in range(4000)])
    _write("task/train.jsonl", [{"input": digits[0], "output": digits} for digits in dialogues])


def _write(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def recipe(name: str, seed: int, **sections: Any) -> Any:
    """Return a recipe of this folder's task. `sections` replace the keys that it shares with the others."""
    policy = {
        "train_global_batch_size": PROMPTS * GENERATIONS,
        "train_micro_batch_size": PROMPTS * GENERATIONS,
        "max_total_sequence_length": 96,
        "precision": "float32",
        "refit_buffer_size_gb": 0.01,
        "generation": {"max_new_tokens": 4, "stop_strings": list(DIGITS), "vllm_cfg": {"kv_cache_memory_gb": 0.1}},
    }
    common = {
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": name, "num_val_samples_to_print": 0},
        "cluster": {"backend": "local", "platform": "cpu"},
    }
    changed = sections.pop("policy")
    Path(f"{name}.json").write_text(json.dumps(common | sections | {"policy": policy | changed}), encoding="utf-8")
    return load_recipe(f"{name}.json", [f"{'sft' if 'sft' in sections else 'grpo'}.seed={seed}"]).config


def optimizer(lr: float) -> dict[str, Any]:
    scheduler = {"lr_decay_style": "constant", "lr_warmup_iters": 0}
    return {"optimizer": {"lr": lr, "weight_decay": 0.0}, "scheduler": scheduler}


def warm_up(seed: int) -> None:
    """Make the model that knows a third of the answers."""
    if Path("base/hf").is_dir():
        return
    config = recipe(
        "warm-up", seed,
        sft={"max_num_steps": 300, "max_num_epochs": 10, "val_period": 0, "val_at_start": False},
        policy={"model_name": "task/untrained", "megatron_cfg": optimizer(2e-3)},
        data={"train": {"dataset_name": "openai_format", "data_path": "task/sft.jsonl"}},
        checkpointing={"enabled": False, "save_hf": "last", "checkpoint_dir": "base"},
    )  # fmt: skip
    run_recipe("sft", sft_train, config, None)


def samples_until_learned(
    seed: int, name: str, steps: int, credit: Mapping[str, Any]
) -> tuple[int | None, float, float]:
    """Train; return the samples until the goal, and the shares of right answers at the first and the last steps."""
    config = recipe(
        name, seed,
        grpo={
            "num_prompts_per_step": PROMPTS, "num_generations_per_prompt": GENERATIONS, "max_rollout_turns": TURNS,
            "max_num_steps": steps, "max_num_epochs": 10, "val_period": 0, "turn_credit": credit,
        },
        loss_fn={"reference_policy_kl_penalty": 0.0},
        policy={"model_name": "base/hf", "megatron_cfg": optimizer(1e-3)},
        data={"train": {"data_path": "task/train.jsonl"}},
        env={"digits": {"path": "benchmarks.turn_credit:Digits"}},
    )  # fmt: skip
    train(config)
    right = [row["reward/right"] for row in read_metrics(max(Path(name).glob("exp_*")) / "metrics.jsonl", "train")]
    means = [fmean(right[i : i + MEAN_OF]) for i in range(len(right) - MEAN_OF + 1)]
    step = next((i + MEAN_OF for i, mean in enumerate(means) if mean >= GOAL), None)
    return (None if step is None else step * PROMPTS * GENERATIONS), means[0], means[-1]


def main(args: argparse.Namespace) -> None:
    work = args.work.resolve()
    for seed in args.seeds:
        folder = work / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        make_task(seed)
        warm_up(seed)
        needed: dict[str, int | None] = {}
        for mode in args.modes:
            credit = {"weight": args.weight, "mode": mode}
            needed[mode], *shares = samples_until_learned(seed, mode, args.steps // 2, credit)
            print(
                f"seed {seed}: {mode}: {needed[mode]} samples; right at first {shares[0]:.2f}, at last {shares[1]:.2f}",
                flush=True,
            )
        alone, *shares = samples_until_learned(seed, "one_reward", args.steps, {"weight": 0.0})
        print(
            f"seed {seed}: one reward: {alone} samples; right at first {shares[0]:.2f}, at last {shares[1]:.2f}",
            flush=True,
        )
        for mode, samples in needed.items():
            most = alone or args.steps * PROMPTS * GENERATIONS
            if samples is not None:
                print(f"seed {seed}: {mode} / one reward: {'' if alone else 'below '}{samples / most:.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=150, help="of the run with one reward; half of them with credit")
    parser.add_argument("--modes", nargs="*", default=["difference"], choices=["difference", "gigpo"])
    parser.add_argument("--weight", type=float, default=1.0)
    parser.add_argument("--work", type=Path, default=Path("results/turn_credit"))
    main(parser.parse_args())
