"""`grpo-mcore rehearse RECIPE [options] [key=value ...]`: run a recipe at full scale in virtual time."""

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from grpo_mcore.cli.json_output import print_json
from grpo_mcore.cli.numbers import count, local
from grpo_mcore.recipe import MasterConfig, load_recipe, recipe_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=count, metavar="N", help="steps to rehearse; default: 10, or the recipe's, if fewer"
    )
    parser.add_argument("--nodes", type=count, metavar="N", help="nodes of the cluster, in place of cluster.num_nodes")
    parser.add_argument("--config-json", metavar="PATH", help="the model's Hugging Face config.json")
    parser.add_argument("--folder", type=Path, metavar="PATH", help="of the run; default: results/rehearse/RECIPE")
    parser.add_argument(
        "--from",
        dest="recorded",
        type=local,
        metavar="RUN",
        help="a run whose samples come again, and whose seconds are taken for other settings",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--sweep",
        action="append",
        metavar="KEY=A,B,C",
        help="rehearse each value, or combination; the best comes first",
    )
    kind.add_argument("--faults", type=int, metavar="SEED", help="let three things break, drawn from this seed")
    kind.add_argument(
        "--kill",
        action="append",
        metavar="WORKER@stepN.PHASE",
        help="end a worker in that phase of a step, such as engine-3@step2.generate",
    )


def run(args: argparse.Namespace) -> int:
    """Rehearse the recipe. Return 0 if it, or with --sweep any combination, came to its end; else 1."""
    from grpo_mcore.tools.rehearse.faults import named_fault, recipe_faults
    from grpo_mcore.tools.rehearse.recording import read_recording
    from grpo_mcore.tools.rehearse.rehearsal_text import plain, rehearsal_text, rehearse_all, sweep_settings, sweep_text
    from grpo_mcore.tools.rehearse.rehearse import Rehearsal, calibrated, rehearse

    folder = args.folder or Path("results/rehearse") / recipe_name(args.recipe)

    nodes = [] if args.nodes is None else [f"cluster.num_nodes={args.nodes}"]

    def load(setting: Mapping[str, str]) -> MasterConfig:
        words = [f"{key}={value}" for key, value in setting.items()]
        return load_recipe(args.recipe, [*args.overrides, *nodes, *words]).config

    steps = args.steps or min(10, load({}).grpo.max_num_steps)
    recording = None if args.recorded is None else calibrated(read_recording(Path(args.recorded)), args.config_json)
    if args.sweep:
        rehearsed = list(rehearse_all(sweep_settings(args.sweep), load, folder, steps, args.config_json, recording))
        if args.json:
            rows = [
                {**setting, **(plain(run) if isinstance(run, Rehearsal) else {"error": run})}
                for setting, run in rehearsed
            ]
            print_json(rows)
        else:
            print(sweep_text(rehearsed))
        return 0 if any(isinstance(run, Rehearsal) for _, run in rehearsed) else 1
    config = load({})
    faults = [named_fault(words) for words in args.kill or ()]
    if args.faults is not None:
        faults = recipe_faults(config, args.faults, steps)
    for fault in faults:
        print(f"will happen: {fault}", file=sys.stderr)
    if args.folder is None:  # the last rehearsal's; a folder that is named may hold anything
        shutil.rmtree(folder, ignore_errors=True)
    rehearsal = rehearse(config, folder, steps, faults=faults, config_json=args.config_json, recording=recording)
    if args.json:
        print_json(plain(rehearsal))
    else:
        print(rehearsal_text(rehearsal))
    return 0
