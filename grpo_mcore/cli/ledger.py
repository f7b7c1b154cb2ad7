"""`grpo-mcore ledger RUN`: audits what a run wrote down of its prompts. Exit code 1 where something does not add up."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

SHOWN = 20


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line after `grpo-mcore ledger`."""
    parser = argparse.ArgumentParser(
        prog="grpo-mcore ledger", description="Audits a run: every prompt has exactly one end, none is too old."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder of checkpoints, or its ledger.jsonl")
    return parser.parse_args(list(words))


def run(args: argparse.Namespace) -> int:
    """Prints what became of the prompts, and each flaw."""
    from grpo_mcore.observe import LEDGER_FILE, LedgerError, audit, read_ledger

    path = args.run / LEDGER_FILE if args.run.is_dir() else args.run
    try:
        found = audit(read_ledger(path))
    except (LedgerError, OSError) as error:
        print(f"grpo-mcore ledger: {error}", file=sys.stderr)
        return 1
    resumes = found.starts - 1
    print(f"{path}: {found.steps} steps, {resumes} resumes, {found.void} entries void")
    for fate, count in found.fates.items():
        if count:
            print(f"{count:9,} prompts {fate}")
    if found.retries:
        print(f"{found.retries:9,} times a prompt was generated anew")
    if found.restarts:
        print(f"{found.restarts:9,} times an engine or an environment was started anew")
    ages = ", ".join(f"{count:,} at age {age}" for age, count in found.by_age.items())
    if ages:
        print(f"trained on: {ages}")
    for flaw in found.flaws[:SHOWN]:
        print(f"wrong: {flaw}")
    if len(found.flaws) > SHOWN:
        print(f"... and {len(found.flaws) - SHOWN} more")
    print("nothing is lost, nothing was done twice" if not found.flaws else f"{len(found.flaws)} flaws")
    return 1 if found.flaws else 0
