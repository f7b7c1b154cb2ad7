"""`grpo-mcore ledger RUN`: audit the ledger of a run's prompts. Exit code 1 if it is inconsistent."""

import argparse
from pathlib import Path

from grpo_mcore.base.text import escaped
from grpo_mcore.cli.numbers import local

SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Audit a run: every prompt is used exactly once, no sample is too old."
    places = "a run's log folder, its folder of checkpoints, or its ledger.jsonl"
    parser.add_argument("run", type=local, metavar="RUN", help=places)


def run(args: argparse.Namespace) -> int:
    """Print what became of the prompts, and each flaw. Return 1 if there is a flaw, else 0."""
    from grpo_mcore.observe import audit, read_ledger
    from grpo_mcore.tools.report.run_files import NoRun, find_ledger

    path = find_ledger(Path(args.run))
    if not (entries := read_ledger(path)):
        raise NoRun(f"{path} is empty: no run has begun in it")
    checked = audit(entries)
    void = f"; void entries, later than the checkpoint resumed from: {checked.void}" if checked.void else ""
    print(f"{path}: {checked.steps} steps; resumes: {checked.starts - 1}{void}")
    for fate, count in checked.fates.items():
        if count:
            print(f"{count:9,} prompts {fate}")
    if checked.retries:
        print(f"{checked.retries:9,} times a prompt was generated again")
    if checked.restarts:
        print(f"{checked.restarts:9,} times an engine or an environment was restarted")
    ages = ", ".join(f"{count:,} at age {age}" for age, count in checked.by_age.items())
    if ages:
        print(f"trained on: {ages}")
    for flaw in checked.flaws[:SHOWN]:
        print(f"wrong: {escaped(str(flaw))}")
    if len(checked.flaws) > SHOWN:
        print(f"... and {len(checked.flaws) - SHOWN} more")
    print("nothing is lost, nothing was done twice" if not checked.flaws else f"{len(checked.flaws)} flaws")
    return 1 if checked.flaws else 0
