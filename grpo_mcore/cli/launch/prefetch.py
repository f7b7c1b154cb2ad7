"""`grpo-mcore prefetch RECIPE [--folder F | --stage F]`: fetch all that a recipe needs, and open it offline."""

import argparse
import shlex
from pathlib import Path

from grpo_mcore.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fetch the models, tokenizers, reward models and datasets of a recipe into one cache, then open each of them "
        "in a second process that may not use the network."
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--folder", type=Path, help="the cache, for HF_HOME of the run; default: HF_HOME of this shell")
    where.add_argument(
        "--stage",
        type=Path,
        metavar="FOLDER",
        help="fetch nothing: copy the models from the cache to FOLDER on this node's own disk, for a run with "
        "HF_HUB_CACHE=FOLDER/hub (launch.stage_to does it on every node of a job)",
    )


def run(args: argparse.Namespace) -> int:
    """Print what came of each item. Return 1 if the run would miss one."""
    from grpo_mcore.tools.prefetch import prefetch, stage

    config = load_recipe(args.recipe, args.overrides).config
    if args.stage is not None:
        for need, folder, size in stage(config, args.stage):
            print(f"{need.kind} {need.name}: {f'{size / 1e9:,.2f} GB copied to' if size else 'is in'} {folder}")
        print(f"export HF_HUB_CACHE={shlex.quote(str(args.stage.absolute() / 'hub'))}")
        return 0
    fetched, offline = prefetch([args.recipe, *args.overrides], args.folder)
    missing = 0
    for first, second in zip(fetched, offline, strict=True):
        need = second.need
        if first.error or second.error:
            missing += 1
            when = "cannot be fetched" if first.error else "was fetched, but is not found without the network"
            print(f"{need.kind} {need.name} ({need.key}) {when}: {first.error or second.error}")
        else:
            print(f"{need.kind} {need.name} ({need.key}): {second.size}, opened without the network")
    if missing:
        print(f"{missing} of {len(offline)} would be missing")
        return 1
    if args.folder is not None:
        print(f"export HF_HOME={shlex.quote(str(args.folder.absolute()))}")
    print("export HF_HUB_OFFLINE=1   # on nodes without a network")
    return 0
