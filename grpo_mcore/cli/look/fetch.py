"""`grpo-mcore fetch URL`: fetch a run from where checkpointing.mirror copied it, for the commands that read folders."""

import argparse
import re
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fetch the newest whole checkpoint of a run, its ledger and its logs into a folder. Credentials "
        "come from the environment, as for the run."
    )
    parser.add_argument(
        "url",
        metavar="URL",
        help="the run's checkpointing.mirror, or below it one of its ids (run_001_3f2a9c) or checkpoints (step_N)",
    )
    parser.add_argument(
        "--to", type=Path, metavar="FOLDER", help="default: a folder here with the last name of the URL"
    )
    parser.add_argument("--logs", action="store_true", help="fetch logs and ledger only")


def run(args: argparse.Namespace) -> int:
    """Fetch, and say where everything lies. Return 1 if there is nothing whole."""
    from grpo_mcore.driver.checkpoints import copy_to_url

    url, step = args.url.rstrip("/"), None
    if (match := re.fullmatch(r"(.*)/step_(\d+)", url)) is not None:
        url, step = match[1], int(match[2])
    folder = args.to or Path(url.rpartition("/")[2])
    store = copy_to_url.open_store(url)
    with copy_to_url.explained(url):
        prefix, steps = next(reversed(copy_to_url.whole_steps(store).items()), ("", []))
        if not steps or (step is not None and step not in steps):
            whole = f"whole are {', '.join(f'step_{step}' for step in steps)}" if steps else "give a run's own URL"
            print(f"grpo-mcore fetch: {args.url} holds no whole checkpoint; {whole}", file=sys.stderr)
            return 1
        step = step or steps[-1]
        folder.mkdir(parents=True, exist_ok=True)
        copy_to_url.fetch_logs(store, prefix, folder / "logs")
        copy_to_url.fetch_ledger(store, prefix, folder)
        if not args.logs and not (folder / f"step_{step}").exists():
            if (problem := copy_to_url.fetch_checkpoint(store, prefix, step, folder)) is not None:
                others = ", ".join(f"{url}/{prefix}step_{other}" for other in steps if other != step)
                print(
                    f"grpo-mcore fetch: step_{step} is damaged: {problem}; others: {others or 'none'}", file=sys.stderr
                )
                return 1
    print(f"{folder}: {prefix.rstrip('/') or 'the run'}, logs and ledger{'' if args.logs else f', step_{step}'}")
    return 0
