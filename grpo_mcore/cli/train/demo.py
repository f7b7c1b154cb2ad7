"""`grpo-mcore demo [--quick] [--recipe NAME] [key=value ...]`: makes a small model and its task, warms it up, and
trains it with GRPO, or by distillation from the model that the first demo trained."""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from grpo_mcore.recipe import MasterConfig, load_recipe

GRPO, DISTILL = "grpo-arithmetic-cpu", "distill-arithmetic-cpu"
PPO, SAO = "ppo-arithmetic-cpu", "sao-arithmetic-cpu"
VISION, NANO = "grpo-vision-cpu", "grpo-nano-v3-cpu"
FOLDERS = {
    GRPO: Path("results/demo"),
    PPO: Path("results/demo-ppo"),
    SAO: Path("results/demo-sao"),
    NANO: Path("results/demo-nano-v3"),
    DISTILL: Path("results/demo-distill"),
    VISION: Path("results/demo-vision"),
}
"""Output folder of the demo of each recipe."""

QUICK = {
    GRPO: Path("results/demo-quick"),
    PPO: Path("results/demo-ppo-quick"),
    SAO: Path("results/demo-sao-quick"),
    VISION: Path("results/demo-vision-quick"),
}
"""Output folder of the quick demo of each recipe that has one. It replaces nothing of the whole one."""
QUICK_HIGHEST, QUICK_HELD_OUT, QUICK_WARM_UP = 19, 60, 200
"""The quick demo's sums: of numbers up to this one, so many of them held out, and steps of the warm-up."""

GOAL = 0.9
"""Held-out accuracy by which distillation and GRPO are compared."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = list(FOLDERS)
    parser.add_argument("--recipe", choices=names, default=names[0], help=f"{' or '.join(names)}; default: {names[0]}")
    short = f"30 steps, smaller sums, all in one process: a minute ({' or '.join(QUICK)})"
    parser.add_argument("--quick", action="store_true", help=short)


def run(args: argparse.Namespace) -> int:
    """Overrides go to the recipe."""
    if reason := no_demo(args.recipe, quick=args.quick):
        print(f"grpo-mcore demo: {reason}", file=sys.stderr)
        return 2
    with ExitStack() as held:
        if args.recipe == DISTILL:
            return _distill(args.overrides, held)
        if args.recipe == VISION:
            return _vision(args.overrides, held, quick=args.quick)
        return _grpo(args.recipe, args.overrides, held, quick=args.quick)


def no_demo(recipe: str, *, quick: bool) -> str | None:
    """Return why a recipe has no (quick) demo; None if it has one."""
    recipes = QUICK if quick else FOLDERS
    return None if recipe in recipes else f"{recipe} has no {'quick ' * quick}demo; {', '.join(recipes)} have one"


def _begin(folder: Path, held: ExitStack) -> None:
    """Delete the folder, make it anew, and hold it. Raises FolderInUse where another demo, or a run, is in there."""
    from grpo_mcore.base.files import make_folder
    from grpo_mcore.driver.checkpoints.lease import LEASE_FILE, Lease, dead_holder

    key = "the demo replaces everything in its folder, and"
    for file in folder.glob(f"**/{LEASE_FILE}"):
        dead_holder(file.parent, key=key)
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder, "the demo's folder")
    held.enter_context(Lease(folder, key=key))


def quick_recipe(recipe: str) -> list[str]:
    """Return the overrides that make a run of half a minute of a demo's recipe: no Ray, one rank, few steps."""
    folder, model = QUICK[recipe], "base" if recipe == VISION else "base/hf"
    train = "task/mixed.jsonl" if recipe in (PPO, SAO) else "task/train.jsonl"
    paths = {"logger.log_dir": "logs", "checkpointing.checkpoint_dir": "checkpoints", "policy.model_name": model,
             "data.train.data_path": train, "data.validation.data_path": "task/val.jsonl"}  # fmt: skip
    one_process = ["cluster.backend=local", "cluster.gpus_per_node=1"]
    one_process += ["policy.megatron_cfg.tensor_model_parallel_size=1"]
    steps = ["grpo.max_num_steps=30", "grpo.val_period=0", "checkpointing.save_period=30"]
    steps.append(f"logger.alarms.band=bands/{recipe}-quick.json")
    if recipe in (PPO, SAO):
        steps.append("ppo.max_num_epochs=30")  # each step takes more than half of the prompts
    return [*one_process, *steps, *(f"{key}={folder / path}" for key, path in paths.items())]


def whole_recipe(recipe: str) -> list[str]:
    """Return the overrides of the whole demo of a recipe: the band with which it is compared, if it has one."""
    return [f"logger.alarms.band=bands/{recipe}.json"] if recipe in (GRPO, DISTILL) else []


def _grpo(recipe: str, overrides: Sequence[str], held: ExitStack, *, quick: bool = False) -> int:
    """Run the demo of a GRPO recipe. grpo.seed also determines the task, the untrained model and the warm-up."""
    started_at, folder = time.perf_counter(), (QUICK if quick else FOLDERS)[recipe]
    defaults = quick_recipe(recipe) if quick else whole_recipe(recipe)
    grpo = load_recipe(recipe, [*defaults, *overrides])  # a wrong override shows first
    untrained = folder / "untrained"
    sft = warm_up_recipe(folder, folder / "task", grpo.config.grpo.seed, QUICK_WARM_UP if quick else None)

    from grpo_mcore.algorithms.sft import sft_train
    from grpo_mcore.cli.train.train import exit_code, train
    from grpo_mcore.driver.run.run_recipe import run_recipe
    from grpo_mcore.observe import RunConsole, write_summary
    from grpo_mcore.tools.demo.arithmetic import make_arithmetic_task
    from grpo_mcore.tools.demo.demo import ask, learned
    from grpo_mcore.tools.export import export

    _begin(folder, held)
    sizes = {"highest": QUICK_HIGHEST, "num_val": QUICK_HELD_OUT} if quick else {}
    demonstrations = 6 if quick else 2
    task = make_arithmetic_task(folder / "task", seed=sft.sft.seed, demonstrations_per_problem=demonstrations, **sizes)
    model_kind, parameters = make_untrained(recipe, untrained, task.tokenizer, sft.sft.seed)
    print(f"1/4  task and untrained {model_kind} with {parameters / 1e6:.1f} M parameters in {folder}", flush=True)
    print("2/4  supervised warm-up, most demonstrations are wrong by one (recipes/sft-arithmetic-cpu.yaml)", flush=True)
    if (warm_up := run_recipe("sft", sft_train, sft, None))["stopped_early"]:
        return exit_code(warm_up)
    print(f"3/4  {recipe.partition('-')[0].upper()} (recipes/{recipe}.yaml)", flush=True)
    summary = train(grpo.config)
    if summary["stopped_early"] or not grpo.config.checkpointing.enabled:  # there is no result to show
        return exit_code(summary)
    print("4/4  export of the last checkpoint, and the held-out problems once more, with transformers", flush=True)
    model = folder / "model"
    export(Path(grpo.config.checkpointing.checkpoint_dir), model)
    before, after = ask(Path(grpo.config.policy.model_name), task.val), ask(model, task.val)
    summary |= {
        "greedy_accuracy_before": before.accuracy,
        "greedy_accuracy_after": after.accuracy,
        "seconds": round(time.perf_counter() - started_at, 2),
        "grpo_seconds": summary["seconds"],
        "model": str(model),
    }
    write_summary(folder / "summary.json", summary)
    for curve in Path(grpo.config.logger.log_dir).glob("exp_*/reward_curve.png"):
        shutil.copy(curve, folder / "reward_curve.png")
    was, now = (_share(summary[f"val_accuracy_{when}"]) for when in ("before", "after"))
    results = {
        "held-out sums solved": f"before  after {summary['steps']} steps",
        "most likely answer": f"{before.accuracy:.3f}   {after.accuracy:.3f}",
        "sampled at temperature 1": f"{was}   {now}",
    }
    if "band" in summary:
        results["beside runs with other seeds"] = summary["band"]
    if (example := learned(before, after)) is not None:
        results["one of them"] = f"{example[0]} {example[1]} before, {example[2]} after"
    files = {
        "model": f"{model}, for transformers, vLLM or a new run",
        "summary, reward curve": f"{folder}/summary.json, {folder}/reward_curve.png",
        "logs, checkpoints": f"{grpo.config.logger.log_dir}, {grpo.config.checkpointing.checkpoint_dir}",
    }
    commands = {
        f"grpo-mcore report {folder}": "the run as a page: curves, samples by token, seconds by device",
        f"grpo-mcore ledger {folder}": "was every prompt trained on exactly once",
        "docs/your_task.md": "a task of your own, in 15 minutes",
    }
    RunConsole().summary(f"the demo is over after {summary['seconds']:.0f} s", results, files, commands)
    return 0


def _distill(overrides: Sequence[str], held: ExitStack) -> int:
    """Run the demo of distillation. distillation.seed also determines the untrained student and its warm-up, and the
    teacher if there is none yet. Without validations (distillation.val_period=0) no GRPO is trained to compare with."""
    started_at, folder, of_teacher = time.perf_counter(), FOLDERS[DISTILL], FOLDERS[GRPO]
    distillation = load_recipe(DISTILL, [*whole_recipe(DISTILL), *overrides]).config  # a wrong override shows first
    seed, every = distillation.grpo.seed, distillation.grpo.val_period
    sft = warm_up_recipe(folder, of_teacher / "task", seed)
    words = [f"policy.model_name={folder / 'base' / 'hf'}", f"grpo.seed={seed}", f"grpo.val_period={every}"]
    words.append(f"grpo.max_num_steps={distillation.grpo.max_num_steps}")
    grpo = load_recipe(GRPO, [*words, "checkpointing.enabled=false", f"logger.log_dir={folder / 'logs-grpo'}"]).config

    from grpo_mcore.algorithms.sft import sft_train
    from grpo_mcore.cli.train.train import exit_code, train
    from grpo_mcore.driver.run.run_recipe import run_recipe
    from grpo_mcore.observe import write_summary
    from grpo_mcore.tools.demo.demo import courses_png, read_course

    if not (of_teacher / "model").is_dir():
        print(f"1/4  the teacher: grpo-mcore demo, in {of_teacher}", flush=True)
        if code := _grpo(GRPO, (f"grpo.seed={seed}",), held):
            return code
    _begin(folder, held)
    _, parameters = make_untrained(DISTILL, folder / "untrained", of_teacher / "task" / "tokenizer", seed)
    print(f"2/4  a student with {parameters / 1e6:.1f} M parameters, warmed up like the teacher", flush=True)
    if (warm_up := run_recipe("sft", sft_train, sft, None))["stopped_early"]:
        return exit_code(warm_up)
    courses, summaries = {}, {}
    for number, (name, config) in enumerate({"distillation": distillation, "GRPO": grpo}.items(), start=3):
        print(f"{number}/4  {name}", flush=True)
        summaries[name] = summary = train(config)
        if summary["stopped_early"] or not every:
            return exit_code(summary)
        courses[name] = read_course(max(Path(config.logger.log_dir).glob("exp_*/metrics.jsonl")))
    curves = folder / "curves.png"
    courses_png(curves, courses, f"From the same start: {parameters / 1e6:.1f} M parameters, a teacher of 0.5 M")
    reached = {name: course.until(GOAL) for name, course in courses.items()}
    print(f"\nuntil {GOAL:g} of the held-out problems are solved     tokens  seconds of training")
    for name, cost in reached.items():
        costs = "not reached" if cost is None else f"{cost[0]:>10,.0f}  {cost[1]:>19.1f}"
        print(f"  {name:38}{costs}")
    if "band" in summaries["distillation"]:
        print(f"distillation is {summaries['distillation']['band']}")
    write_summary(
        folder / "summary.json",
        {
            "goal": GOAL,
            "reached": {name: cost and {"tokens": cost[0], "seconds": cost[1]} for name, cost in reached.items()},
            "accuracy": {name: course.accuracy[-1] for name, course in courses.items()},
            "seconds": round(time.perf_counter() - started_at, 2),
        },
    )
    print(f"the curves: {curves}")
    return 0


def _vision(overrides: Sequence[str], held: ExitStack, *, quick: bool = False) -> int:
    """Run the demo with images. grpo.seed also determines the images and the untrained model."""
    started_at, folder = time.perf_counter(), (QUICK if quick else FOLDERS)[VISION]
    overrides = [*quick_recipe(VISION), *overrides] if quick else overrides
    config = load_recipe(VISION, overrides).config  # a wrong override shows first

    from grpo_mcore.cli.train.train import exit_code, train
    from grpo_mcore.observe import RunConsole, write_summary
    from grpo_mcore.tools.demo.colours import make_colour_task
    from grpo_mcore.tools.export import export

    _begin(folder, held)
    make_colour_task(folder / "task", folder / "base", config.grpo.seed)
    print(f"1/3  squares of four colours and an untrained Qwen3-VL in {folder}", flush=True)
    print(f"2/3  GRPO (recipes/{VISION}.yaml)", flush=True)
    summary = train(config)
    if summary["stopped_early"] or not config.checkpointing.enabled:
        return exit_code(summary)
    print("3/3  export of the last checkpoint", flush=True)
    export(Path(config.checkpointing.checkpoint_dir), folder / "model")
    summary |= {"seconds": round(time.perf_counter() - started_at, 2), "grpo_seconds": summary["seconds"]}
    write_summary(folder / "summary.json", summary)
    was, now = (_share(summary[f"val_accuracy_{when}"]) for when in ("before", "after"))
    results = {"held-out squares named": f"{was} before, {now} after {summary['steps']} steps; by chance 0.25"}
    if "band" in summary:
        results["beside runs with other seeds"] = summary["band"]
    files = {"model": f"{folder / 'model'}, for transformers or vLLM", "summary": f"{folder}/summary.json"}
    commands = {f"grpo-mcore report {folder}": "the run as a page", "docs/vision.md": "images in a task of your own"}
    RunConsole().summary(f"the demo is over after {summary['seconds']:.0f} s", results, files, commands)
    return 0


def warm_up_recipe(folder: Path, task: Path, seed: int, steps: int | None = None) -> MasterConfig:
    """Return the recipe that teaches the untrained model in `folder` the task's faulty demonstrations, in so many
    steps; None: as many as the recipe has."""
    overrides = [f"policy.model_name={folder / 'untrained'}", f"data.train.data_path={task / 'sft.jsonl'}"]
    overrides += [f"checkpointing.checkpoint_dir={folder / 'base'}", f"logger.log_dir={folder / 'logs-sft'}"]
    if steps is not None:
        overrides += [f"sft.max_num_steps={steps}", f"policy.megatron_cfg.scheduler.lr_decay_iters={steps}"]
        overrides += ["policy.megatron_cfg.optimizer.lr=4.0e-3"]
    return load_recipe("sft-arithmetic-cpu", [f"sft.seed={seed}", *overrides]).config


def make_untrained(recipe: str, folder: Path, tokenizer: Path, seed: int) -> tuple[str, int]:
    """Write the demo's untrained model with its tokenizer. Return its kind and its number of parameters."""
    from grpo_mcore.families import parameter_count, read_hf_config, shape_of
    from grpo_mcore.tools.demo.arithmetic import make_base_config, make_tokenizer
    from grpo_mcore.tools.demo.tiny_models import ENGINE_SIZES, make_tiny_model

    if recipe != NANO:
        smaller = {"hidden_size": 96, "intermediate_size": 384} if recipe == DISTILL else {}
        return "Qwen3", make_base_config(folder, tokenizer, seed=seed, initializer_range=0.06, **smaller)
    sizes = ENGINE_SIZES["nemotron_h_moe"] | {"vocab_size": 32, "eos_token_id": 2}
    make_tiny_model("nemotron_h_moe", folder, seed=seed, **sizes)
    make_tokenizer(folder)
    return "Nemotron-3 Nano", parameter_count(shape_of(read_hf_config(folder)))


def _share(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "    -"  # not validated, by an override
