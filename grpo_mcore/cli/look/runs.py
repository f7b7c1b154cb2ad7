"""`grpo-mcore runs FOLDER`: every run below a folder in a table, best first."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from grpo_mcore.cli.json_output import print_json
from grpo_mcore.cli.numbers import local


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List every run below a folder, best first: its state, step, score, hours, and the settings in "
        "which the runs differ. `grpo-mcore report RUN RUN ...` draws them."
    )
    parser.add_argument("folder", type=local, metavar="FOLDER", help="a folder with runs anywhere below it")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table. Raises NoRun."""
    from rich.console import Console

    from grpo_mcore.tools.report.comparison import WIDE, standings, table
    from grpo_mcore.tools.report.run_files import find_runs, read_runs

    lines = standings(read_runs(find_runs(Path(args.folder))))
    if args.json:
        print_json([asdict(line) for line in lines])
        return 0
    Console(width=None if sys.stdout.isatty() else WIDE).print(table(lines))
    return 0
