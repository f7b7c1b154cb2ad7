"""Does a band notice a fault, and does `diagnose` name it? Plant faults of recipe, data and code in the quick demos,
and in the demo of distillation.

    python benchmarks/planted_faults.py grpo-vision-cpu [FAULT ...]

The demo runs once without a fault, with a seed that its band has not seen. With each fault a run trains from its model
and data until the first alarm, or to the end, in a forked process. Then the fault is taken away, and `grpo-mcore
diagnose` looks at the run. Prints for each fault: first alarm | parts that are named. Files: results/planted.
"""

import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from grpo_mcore.algorithms import grpo
from grpo_mcore.cli.main import main
from grpo_mcore.cli.train.demo import DISTILL, FOLDERS, GRPO, PPO, QUICK, VISION, quick_recipe, whole_recipe
from grpo_mcore.driver.policy import policy_worker
from grpo_mcore.driver.run import loop_parts
from grpo_mcore.environments.math.math_environment import MathEnvironment
from grpo_mcore.environments.rules.rule_environment import RuleEnvironment
from grpo_mcore.objective import critic, distillation, loss
from grpo_mcore.parallel.weights import tower
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.rollout.trajectory import Trajectory
from grpo_mcore.step import advantages
from grpo_mcore.tools.report.run_files import find_run, read_run

OPTIMIZER = "megatron_cfg.optimizer"
RATES = {
    GRPO: {"policy": (6e-4, 6e-5)}, PPO: {"policy": (6e-4, 6e-5), "value": (2e-3, 2e-4)},
    VISION: {"policy": (1e-3, 3e-4)}, DISTILL: {"policy": (1e-3, 1e-4)},
}  # fmt: skip
"""Highest and lowest learning rate of each model, by recipe."""
ONE_PROCESS = ["cluster.backend=local", "cluster.gpus_per_node=1", "policy.megatron_cfg.tensor_model_parallel_size=1"]
WORDS = {
    **{recipe: [*quick_recipe(recipe), "grpo.seed=101"] for recipe in QUICK},
    DISTILL: [*whole_recipe(DISTILL), *ONE_PROCESS, "distillation.val_period=0", "distillation.seed=102"],
}
"""Overrides of the demo of each recipe."""
UNCHANGED = shutil.ignore_patterns("logs*", "checkpoints", "*.txt")
Plant = Callable[[Path], object]
"""Changes the code of its process, or the files in the folder of results."""


def changed(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Plant `change(result, *arguments)` in place of what a function returns."""
    original = getattr(owner, name)
    return lambda _: setattr(owner, name, lambda *args, **named: change(original(*args, **named), *args))


def rate(factor: float, model: str = "policy") -> Callable[[str], list[str]]:
    names = [f"{model}.{OPTIMIZER}.{key}" for key in ("lr", "min_lr")]
    return lambda recipe: [f"{key}={factor * value}" for key, value in zip(names, RATES[recipe][model], strict=True)]


def rewards(change: Callable[[float], float]) -> Plant:
    def changed_rewards(outcomes: list[Any], *_: Any) -> list[Any]:
        return [replace(outcome, reward=change(outcome.reward)) for outcome in outcomes]

    return lambda _: [changed(cls, "advance", changed_rewards)(_) for cls in (MathEnvironment, RuleEnvironment)]


def first_weights(folder: Path) -> None:
    kept = dict[Any, torch.Tensor]()
    changed(RefitSender, "_values", lambda now, _, it: kept.setdefault((it.param, str(it.box)), now.clone()))(folder)


def each_row(change: Callable[[list[dict[str, Any]], int], dict[str, Any]]) -> Plant:
    """Plant `change(rows, index)` in place of each row of the training data."""

    def write(folder: Path) -> None:
        for file in [*folder.glob("*/task/train.jsonl"), *folder.glob("*/task/mixed.jsonl")]:
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            file.write_text("\n".join(json.dumps(change(rows, index)) for index in range(len(rows))) + "\n")

    return write


def opposite(targets: Any) -> Any:
    """Return the targets of a step with advantages of the other sign, those of tokens (mean, scale) too."""
    by_token = targets.by_token and (targets.by_token[0], -targets.by_token[1])
    return replace(targets, advantages=-targets.advantages, by_token=by_token)


GAE = critic.gae


@dataclass(frozen=True)
class Fault:
    """`words`: changes of the recipe; `of`: the demos for which it is a fault."""

    name: str
    plant: Plant = lambda _: None
    words: Callable[[str], list[str]] = lambda _: []
    of: tuple[str, ...] = (*QUICK, DISTILL)


FAULTS = [
    Fault("learning rate x 30", words=rate(30)),
    Fault("learning rate / 30", words=rate(1 / 30)),
    Fault("weight decay of 10", words=lambda _: [f"policy.{OPTIMIZER}.weight_decay=10"]),
    Fault("answers of two tokens", words=lambda _: ["policy.generation.max_new_tokens=2"], of=(GRPO, PPO, DISTILL)),
    Fault("KL of the wrong sign", changed(loss, "kl_penalty", lambda penalty, *_: -penalty),
          lambda _: ["loss_fn.reference_policy_kl_penalty=0.5"], of=tuple(QUICK)),
    Fault("advantages of the wrong sign", changed(grpo, "compute_targets", lambda it, *_: (opposite(it[0]), it[1])),
          of=tuple(QUICK)),
    Fault("divergence to the policy", changed(distillation, "Divergence", lambda it, *_: it._replace(kind="forward")),
          of=(DISTILL,)),
    Fault("divergence at temperature 4", words=lambda _: ["loss_fn.temperature=4"], of=(DISTILL,)),
    Fault("the student teaches", lambda folder: shutil.copytree(
          folder / "demo-distill/base/hf", folder / "demo/model", dirs_exist_ok=True), of=(DISTILL,)),
    Fault("groups mixed up", changed(advantages, "_group_ids", lambda of, _: torch.arange(len(of)) % len(of.unique())),
          of=(GRPO, VISION)),
    Fault("critic's learning rate / 30", words=rate(1 / 30, "value"), of=(PPO,)),
    Fault("lambda of the wrong sign", changed(
          critic, "gae", lambda _, values, rewards, gamma, lambda_: GAE(values, rewards, gamma, -lambda_)), of=(PPO,)),
    Fault("advantages of the next token", changed(
          policy_worker, "critic_columns", lambda it, *_: {name: of.roll(-1, -1) for name, of in it.items()}),
          of=(PPO,)),
    Fault("mask shifted by one", changed(Trajectory, "loss_mask", lambda mask, _: mask.roll(-1))),
    Fault("last token left out", changed(Trajectory, "loss_mask", lambda mask, _: mask & mask.roll(-1))),
    Fault("engine keeps its first weights", first_weights),
    Fault("drawn at temperature 1.5", changed(loop_parts, "sampling_of", lambda it, *_: replace(it, temperature=1.5))),
    Fault("rewards x 10", rewards(lambda reward: 10 * reward)),
    Fault("rewards of the wrong sign", rewards(lambda reward: 1 - reward)),
    Fault("policy sees the negatives", changed(tower, "pixels", lambda it, *_: (-it[0], it[1])), of=(VISION,)),
    Fault("another chat template", lambda folder: [
          it.write_text(it.read_text().replace("<assistant>", "<user>")) for it in folder.glob("*/base/**/*.jinja")]),
    Fault("answers of other rows", each_row(lambda rows, i: rows[i] | {"output": rows[i - 1]["output"]})),
    Fault("the same prompts again", each_row(lambda rows, i: rows[i % 8])),
    Fault("no question", each_row(lambda rows, i: rows[i] | {"input": "="}), of=(GRPO, PPO, DISTILL)),
    Fault("one image for all", each_row(lambda rows, i: rows[i] | {"image": rows[0]["image"]}), of=(VISION,)),
]  # fmt: skip


def run(folder: Path, words: list[str], plant: Plant = lambda _: None) -> str:
    """Run a command of grpo-mcore in a process of its own, in a folder. Return what it printed."""

    def child() -> None:
        os.chdir(folder)
        sys.stdout, sys.stderr = (Path(name).open("w", encoding="utf-8") for name in ("output.txt", "errors.txt"))
        plant(folder / "results")
        sys.exit(main(words))

    folder.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return (folder / "output.txt").read_text(encoding="utf-8")


def study(recipe: str, fault: Fault, clean: Path) -> str:
    """Return the line of a fault. `clean`: the folder of the demo without one."""
    demo, folder = (FOLDERS | QUICK)[recipe], clean.parent / fault.name.replace(" ", "-").replace("/", "by")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(clean, folder, ignore=UNCHANGED)
    run(folder, ["train", recipe, *WORDS[recipe], "logger.alarms.stop_after=1", *fault.words(recipe)], fault.plant)
    shutil.copytree(clean, folder, ignore=UNCHANGED, dirs_exist_ok=True)
    summary = read_run(find_run(folder / demo)).summary or {}
    alarms = [f"{it['kind']} in step {it['step']}" for it in summary.get("alarms", [])]
    findings = json.loads(run(folder, ["diagnose", str(demo), "--json"]))["findings"]
    named = ", ".join(dict.fromkeys(it["part"] for it in findings)) or "unknown"
    return f"{fault.name} | {alarms[0] if alarms else 'not noticed'} | {named}"


if __name__ == "__main__":
    of, *names = sys.argv[1:]
    without = Path("results/planted").resolve() / of / "clean"
    if not without.is_dir():
        run(without, ["demo", *(["--quick"] if of in QUICK else []), f"--recipe={of}", *WORDS[of]])
    for it in FAULTS:
        if of in it.of and (not names or it.name in names):
            print(study(of, it, without), flush=True)
