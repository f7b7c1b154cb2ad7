"""`grpo-mcore plan RECIPE [options] [key=value ...]`: predict a recipe's memory, step time and refit."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mcore.cli.json_output import print_json
from grpo_mcore.cli.numbers import amount, count
from grpo_mcore.recipe import MasterConfig, Problem, RecipeError, algorithm_of, load_recipe

if TYPE_CHECKING:
    from grpo_mcore.families import ModelShape
    from grpo_mcore.tools.plan.workload import Device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    devices = "A100-40GB, A100, H100 (default), H200, B200, GB200, GB300, RTX4090 or cpu"
    parser.add_argument("--device", metavar="NAME", help=devices)
    parser.add_argument("--memory-gb", type=amount, metavar="GB", help="memory of the device, if it differs")
    parser.add_argument(
        "--host-memory-gb",
        type=amount,
        metavar="GB",
        help="host memory of a node; default: launch.memory_gb_per_node, or what NVIDIA's servers with the device have",
    )
    parser.add_argument(
        "--mean-length", type=count, metavar="TOKENS", help="expected prompt and answer; default: half of the longest"
    )
    parser.add_argument("--config-json", metavar="PATH", help="the model's Hugging Face config.json")
    parser.add_argument(
        "--trace", action="store_true", help="let one rank run a step without values, and count memory and kernels"
    )
    parser.add_argument("--search", type=count, metavar="NODES", help="list the fastest layouts that fit NODES nodes")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="with --search: write a recipe with the first of them, on this one"
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan. Return 0 if it fits, with --search if anything fits, else 1."""
    config = load_recipe(args.recipe, args.overrides).config if args.search is None else _on_nodes(args)
    if args.write is not None and args.search is None:
        raise RecipeError([Problem("command line", "--write", "it writes what --search NODES finds")])
    if args.write is not None:
        recipe_with(args, ())  # what cannot be written is said before the search
        if not args.write.parent.is_dir():
            raise RecipeError([Problem("command line", "--write", f"there is no folder {args.write.parent}")])

    from grpo_mcore.base.processor import SLOW_BFLOAT16, lacks_bfloat16
    from grpo_mcore.tools.plan.plan_text import plan_text, search_text
    from grpo_mcore.tools.plan.run_hours import run_text
    from grpo_mcore.tools.plan.run_plan import make_plan, plan_device, plan_shape, plan_workload
    from grpo_mcore.tools.plan.search import saved_layout, search

    shape = plan_shape(config, args.config_json)
    device = plan_device(config, args.device, args.memory_gb, args.host_memory_gb)
    if algorithm_of(config) == "eval":
        return _evaluation(args, config, shape, device)
    if args.trace:
        return _trace(args, config, shape, device)
    if args.search is None:
        plan = make_plan(config, shape, device, mean_length=args.mean_length)
        if args.json:
            print_json(plan.plain())
        else:
            print("\n".join([plan_text(plan), *run_text(plan, config)]))
            if device.name == "cpu" and config.policy.precision == "bfloat16" and lacks_bfloat16():
                print(f"note: {SLOW_BFLOAT16}; policy.precision=float32, or auto with cluster.platform=cpu, avoids it")
        return 0 if plan.fits else 1
    load = plan_workload(config, shape, device, mean_length=args.mean_length)
    result = search(load, device, args.search, saved_layout(config))
    if args.json:
        print_json(result.plain())
    else:
        print(search_text(result, args.search))
    if args.write is not None and result.candidates:
        first = result.candidates[0]
        command = f"grpo-mcore plan {args.recipe} --search {args.search} --write {args.write}"
        head = [f"# {first.layout}", f"# {first.reason}", f"# Written by: {command}", ""]
        args.write.write_text("\n".join(head) + recipe_with(args, first.overrides), encoding="utf-8")
        print(f"written: {args.write}, with the first of them")
    return 0 if result.candidates else 1


def _on_nodes(args: argparse.Namespace) -> MasterConfig:
    """Return the recipe on the nodes that are searched, whatever cluster.num_nodes says; as it is written where its own
    layout does not fit them. Raises RecipeError."""
    key = "cluster.num_nodes="
    words = [word for word in args.overrides if not word.startswith(key)]
    try:
        return load_recipe(args.recipe, [*words, f"{key}{args.search}"]).config
    except RecipeError:
        return load_recipe(args.recipe, words).config


def _evaluation(args: argparse.Namespace, config: MasterConfig, shape: ModelShape, device: Device) -> int:
    """Print the plan of an evaluation. Return 0 if it fits, else 1."""
    from grpo_mcore.tools.plan.evaluation import plan_evaluation

    for option in ("trace", "search"):
        if getattr(args, option):
            message = "an evaluation has engines alone, and no layout of the policy; leave it out"
            raise RecipeError([Problem("command line", f"--{option}", message)])
    plan = plan_evaluation(config, shape, device, mean_length=args.mean_length)
    if args.json:
        print_json(plan.plain())
    else:
        print(plan.text())
    return 0 if plan.fits else 1


def recipe_with(args: argparse.Namespace, overrides: Sequence[str]) -> str:
    """Return a recipe that inherits from the command's and has its overrides and further ones. Raises RecipeError."""
    import yaml

    from grpo_mcore.recipe.loading.load import PRESET, presets_of
    from grpo_mcore.recipe.loading.merge import apply_overrides
    from grpo_mcore.recipe.yaml_tree import Node

    path, problems = Path(args.recipe), list[Problem]()
    words = [*args.overrides, *overrides]
    for word in words:
        key = word.partition("=")[0]
        if key.startswith("~") or any(part.isdecimal() for part in key.split(".")):
            problems.append(Problem("command line", key, "--write has no place for it: change the recipe instead"))
    base = os.path.relpath(path, args.write.parent) if path.is_file() else args.recipe
    overrides = [word for word in words if not word.startswith(PRESET)]
    changed = apply_overrides(Node({}, "command line", ""), overrides, problems).plain()
    if problems:
        raise RecipeError(problems)
    tree = {"defaults": [base, *presets_of(words)]} | changed
    return yaml.safe_dump(tree, sort_keys=False)


def _trace(args: argparse.Namespace, config: MasterConfig, shape: ModelShape, device: Device) -> int:
    """Print what a rank does in a step. Return 0 if it fits the device."""
    from grpo_mcore.tools.plan.plan_text import trace_text
    from grpo_mcore.tools.plan.run_plan import make_plan, plan_config
    from grpo_mcore.tools.plan.trace import trace

    plan = make_plan(config, shape, device, mean_length=args.mean_length, kernels="torch")
    traced = trace(config, plan, plan_config(config, args.config_json))
    if args.json:
        print_json({"model": plan.model, "phases": [asdict(phase) for phase in traced]})
    else:
        print(trace_text(traced, device))
    return int(any(device.memory is not None and phase.peak_bytes > device.memory for phase in traced))
