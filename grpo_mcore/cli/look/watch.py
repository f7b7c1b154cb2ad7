"""`grpo-mcore watch RUN`: a run in the terminal, live or afterwards. It only reads the run's files."""

import argparse
from pathlib import Path

from grpo_mcore.cli.numbers import amount, local


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show a run in the terminal: progress, curves, devices, alarms, newest samples. Ctrl-C leaves it; "
        "the run goes on."
    )
    parser.add_argument(
        "run", type=local, metavar="RUN", help="a run's log folder (exp_NNN), or a folder that holds it"
    )
    parser.add_argument("--interval", type=amount, default=2.0, metavar="S", help="seconds between two looks (2)")
    parser.add_argument("--once", action="store_true", help="show it once and end")


def run(args: argparse.Namespace) -> int:
    """Show the run until it is over or the user leaves. Raises NoRun."""
    from rich.console import Console

    from grpo_mcore.tools.report.watch import watch

    console = Console()
    try:
        still = not console.is_terminal or console.is_dumb_terminal  # there is nothing to draw over
        watch(Path(args.run), console, args.interval, once=args.once or still)
    except KeyboardInterrupt:
        pass  # the user leaves; the run goes on
    return 0
