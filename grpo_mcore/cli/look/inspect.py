"""`grpo-mcore inspect RUN`: what every process of a run is doing, and whom the others wait for."""

import argparse
import socket
import sys
from pathlib import Path

ANSWER_S = 60.0
"""Seconds that the driver gets to ask all nodes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Ask the processes of a run what they are doing: stacks, collectives and their numbers, equal ones "
        "together, those that the others wait for first. On the machine of the driver. The run goes on."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's log folder (exp_NNN), or a folder that holds it")


def run(args: argparse.Namespace) -> int:
    """Print what the run's processes are doing. Return 1 if none of them is on this machine."""
    from grpo_mcore.cluster.diagnostics import wait_graph
    from grpo_mcore.cluster.inspection import ask, driver_key, reports_here, workers_here
    from grpo_mcore.tools.report.run_files import find_run

    logs = find_run(args.run) / "workers"
    if (report := ask(driver_key(logs), ANSWER_S)) is not None:
        print(report, end="")
        return 0
    host = socket.gethostname()
    processes = workers_here(logs)
    if not processes:
        print(
            f"grpo-mcore inspect: no process of the run in {logs.parent} is on this machine ({host}): it is over, or "
            "runs elsewhere; in_use.json in its checkpoint folder names the machine of its driver",
            file=sys.stderr,
        )
        return 1
    print(f"the driver does not answer on this machine ({host}); the run's workers on it:")
    print(wait_graph([], reports_here(processes), sorted(processes)))
    return 0
