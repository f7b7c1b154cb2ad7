"""`grpo-mcore data gym-to-grpo|gym-to-sft|gym-to-dpo|check|collect ...`: convert NeMo Gym rollouts to training data,
check data, collect rollouts."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mcore.base.text import escaped
from grpo_mcore.cli.numbers import count, finite
from grpo_mcore.recipe import environment_class

if TYPE_CHECKING:
    from grpo_mcore.data.gym import Summary
    from grpo_mcore.recipe import MasterConfig
    from grpo_mcore.rollout.group import Group


def _transformation(parser: argparse.ArgumentParser, *options: tuple[str, Any, Any, str]) -> None:
    """Add the options of a transformation: those of all, and (name, type or choices, default, help)."""
    parser.add_argument("--input", required=True, type=Path, metavar="FILE", help="rollouts, JSONL, may be gzip")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="JSONL; appears whole or not at all")
    parser.add_argument("--strict", action="store_true", help="stop at the first malformed line and write nothing")
    for name, kind, default, text in options:
        kinds = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        parser.add_argument(name, default=default, help=f"{text} (default: {default})", **kinds)


_PROMPT_FORMAT = (
    "--prompt_format",
    ("text", "messages"),
    "text",
    "the prompt: the user's last text, or the whole input as chat messages",
)


def _grpo_arguments(parser: argparse.ArgumentParser) -> None:
    least = "minimum reward of a rollout that is kept; 0.0 keeps all rollouts, negative rewards included"
    _transformation(parser, ("--reward_threshold", finite, 0.0, least), _PROMPT_FORMAT)
    parser.add_argument(
        "--no_ground_truth", dest="ground_truth", action="store_false", help="leave the ground truth out of the output"
    )
    parser.add_argument(
        "--ground_truth_key",
        dest="ground_truth_keys",
        action="append",
        default=[],
        metavar="PATH",
        help="field of the ground truth, such as expected_answer or verifier_metadata.answer; searched before the "
        "usual fields; may be given several times",
    )


def _sft_arguments(parser: argparse.ArgumentParser) -> None:
    formats = "whole conversations with tool calls, or the last question and the last answer as text"
    _transformation(
        parser,
        ("--reward_threshold", finite, 0.95, "minimum reward of a rollout that is kept"),
        ("--format", ("openai", "simple"), "openai", formats),
    )
    parser.add_argument(
        "--no_reasoning", dest="reasoning", action="store_false", help="leave the agent's reasoning out of the messages"
    )


def _dpo_arguments(parser: argparse.ArgumentParser) -> None:
    strategies = (
        "the best answer to a prompt with the worst one, or answers above the high threshold with answers to the same "
        "prompt below the low one"
    )
    _transformation(
        parser,
        ("--min_gap", finite, 0.2, "minimum difference of the rewards of a pair"),
        ("--strategy", ("same_prompt", "stratified"), "same_prompt", strategies),
        ("--high_threshold", finite, 0.7, "minimum reward of a stratified pair's better answer"),
        ("--low_threshold", finite, 0.4, "maximum reward of a stratified pair's worse answer"),
        ("--max_pairs_per_prompt", int, 8, "maximum number of stratified pairs per prompt"),
        ("--seed", int, 0, "seed of the choice of stratified pairs"),
        _PROMPT_FORMAT,
    )


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} FILE [options] [key=value ...]"
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="data: JSON, JSONL (may be gzip), Parquet, Arrow, CSV, TSV; or a recipe: all its files",
    )
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="a YAML file, or the name of one in recipes/; without it only fields are checked",
    )
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="rows that are shown (default: 2)")


def _collect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="rollouts, JSONL; appears whole or not at all"
    )
    parser.add_argument("--num_prompts", type=count, metavar="N", help="the first N prompts (default: all)")
    parser.add_argument(
        "--num_repeats", type=count, metavar="N", help="rollouts per prompt (default: the recipe's generations)"
    )
    parser.add_argument("--validation", action="store_true", help="use the validation data and its sampling")
    parser.add_argument("--token_ids", action="store_true", help="write the tokens and log-probs of every turn")


def _print(text: object) -> None:
    try:
        print(escaped(str(text)), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _transform(args: argparse.Namespace) -> int:
    from grpo_mcore.data import gym

    options = {name: value for name, value in vars(args).items() if name not in ("verb", "command", "input", "output")}
    summary: Summary = getattr(gym, args.command.replace("-", "_"))(args.input, args.output, **options)
    _print(summary)
    if summary.written:
        return 0
    print(f"grpo-mcore data: no row was kept, so {summary.target} was not written", file=sys.stderr)
    return 1


def _check(args: argparse.Namespace) -> int:
    from grpo_mcore.data.check import check_file, recipe_files
    from grpo_mcore.recipe import load_recipe

    files = [args.file]
    config = load_recipe(args.recipe, args.overrides).config if args.recipe else None
    if config is None and _is_recipe(args.file):  # all data of a recipe
        config = load_recipe(args.file, args.overrides).config
        files = recipe_files(config)
    if config is None and args.overrides:
        print(f"grpo-mcore data: {args.overrides[0]} replaces a recipe's value: name it, --recipe", file=sys.stderr)
        return 2
    truths = functools.partial(_truth_problems, config)
    reports = [check_file(file, config, args.samples, truths) for file in files]
    _print("\n\n".join(map(str, reports)))
    return 0 if all(report.usable for report in reports) else 1


def _is_recipe(file: Path) -> bool:
    """Return whether this is a recipe: a YAML file, or the name of one in recipes/ where no file has it."""
    from grpo_mcore.recipe import recipe_folders

    is_recipe = any((folder / f"{file}.yaml").exists() for folder in recipe_folders())
    return file.suffix in (".yaml", ".yml") or is_recipe and not file.exists()


def _truth_problems(config: MasterConfig | None, env_name: str | None, rows: list[dict[str, Any]]) -> list[str | None]:
    """Return for each row why no answer to it could be right, by the recipe's environment. Without a recipe only the
    kind of the truths is looked at."""
    from grpo_mcore.environments import create_env_class
    from grpo_mcore.environments.math.verifiers import ground_truths

    if config is None:
        return [_kind_problem(ground_truths, row) for row in rows]
    sections = {name: dict(section) for name, section in config.env.items() if isinstance(section, Mapping)}
    name = (
        env_name
        or (config.data.default or {}).get("env_name")
        or (next(iter(sections)) if len(sections) == 1 else None)
    )
    if name is None:
        return [None] * len(rows)
    section = sections.get(name, {})
    section.pop("verdict_timeout_s", None)
    class_name, section = environment_class(name, section)
    return create_env_class(class_name)[0].check_truths(section, rows)


def _kind_problem(read: Callable[..., Any], row: dict[str, Any]) -> str | None:
    try:
        read(row, "math")
    except ValueError as error:
        return str(error)
    return None


def _collect(args: argparse.Namespace) -> int:
    from grpo_mcore.observe.console.console import RunConsole
    from grpo_mcore.recipe import load_recipe
    from grpo_mcore.tools.gym_collection import collect

    config = load_recipe(args.recipe, args.overrides).config
    console, done = RunConsole(), 0

    def progress(group: Group) -> None:
        nonlocal done
        done += 1
        console.progress("prompts", done, max(done, args.num_prompts or 0))

    collected = collect(
        config,
        args.output,
        num_prompts=args.num_prompts,
        generations=args.num_repeats,
        validation=args.validation,
        token_ids=args.token_ids,
        on_group=progress,
    )
    _print(collected)
    return 0 if collected.rows else 1


COMMANDS = {
    "gym-to-grpo": ("NeMo Gym rollouts to prompts for GRPO", None, _grpo_arguments, _transform),
    "gym-to-sft": ("NeMo Gym rollouts to demonstrations for SFT", None, _sft_arguments, _transform),
    "gym-to-dpo": ("NeMo Gym rollouts to pairs of answers for DPO", None, _dpo_arguments, _transform),
    "collect": ("sample a recipe's prompts, score the samples, write rollouts", True, _collect_arguments, _collect),
    "check": ("check a data file, or all data of a recipe", False, _check_arguments, _check),
}
