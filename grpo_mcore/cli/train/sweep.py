"""`grpo-mcore sweep RECIPE key=a,b,c --seeds 3`: a run for each combination of values and seeds, in one folder."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mcore.cli.numbers import count
from grpo_mcore.cli.train.train import VERBS
from grpo_mcore.observe.exit_codes import INTERRUPTED, STOPPED_EARLY, TERMINATED
from grpo_mcore.recipe import load_recipe, recipe_name

if TYPE_CHECKING:
    from grpo_mcore.tools.sweep import SweepRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.usage = "grpo-mcore sweep RECIPE key=a,b,c [key=x,y] [--seeds N] [options] [key=value ...]"
    parser.description = (
        "Train a recipe with each combination of the values given, one run after the other or each as a job. "
        "preset=gspo,dapo compares algorithms. The same command again goes on: finished runs are left as they are."
    )
    parser.add_argument("--seeds", type=count, default=1, metavar="N", help="runs of each combination (1)")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="default: results/sweeps/RECIPE")
    parser.add_argument("--algorithm", choices=tuple(VERBS), default="grpo", help="which command trains (grpo)")
    parser.add_argument(
        "--jobs",
        choices=("local", "slurm", "k8s"),
        default="local",
        help="local: here, one after the other (default); else each run as a job of a cluster",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands instead of running them")


def run(args: argparse.Namespace) -> int:
    """Run what is not finished, then print the table and write the page. Return 0 if every run is finished, 75 if a run
    was stopped on request, else 1."""
    from grpo_mcore.recipe.loading.load import presets_of
    from grpo_mcore.tools.sweep import claim_folder, state, sweep_runs

    folder = args.folder or Path("results/sweeps") / recipe_name(args.recipe)
    if args.jobs != "local":
        if args.algorithm != "grpo":
            print("grpo-mcore sweep: jobs train with GRPO; run sft and dpo with --jobs local", file=sys.stderr)
            return 2
        command = ["launch", args.jobs, args.recipe]
    else:
        command = [VERBS[args.algorithm], args.recipe, "--resume", "auto"]
    runs = sweep_runs(args.recipe, args.overrides, args.seeds, folder, args.algorithm)
    if len(presets := [Path(name).name for name in presets_of(args.overrides)]) > 1:
        print(f"each run has all presets, {', '.join(presets)}; preset={','.join(presets)} compares them")
    if not args.dry_run:
        claim_folder(folder, args.recipe, runs)
    failed = []
    for number, sweep_run in enumerate(runs, 1):
        before = state(sweep_run, time.time())
        if before == "running" and args.jobs == "local":  # by whom? `train` refuses a folder that another run holds
            before = "interrupted"
        if before in ("finished", "running"):
            print(f"{number}/{len(runs)} {sweep_run.name}: {before}, left as it is", flush=True)
            continue
        words = [*command, *sweep_run.words]
        if args.jobs != "local":
            words.append(f"launch.name={_job_name(args.recipe, sweep_run)}")
        if args.dry_run:
            print(shlex.join(["grpo-mcore", *words]))
            continue
        output = sweep_run.folder / "output.txt"
        try:
            begins = "starts" if before == "not begun" else f"{before}, goes on"
            print(f"{number}/{len(runs)} {sweep_run.name}: {begins}; its output is in {output}", flush=True)
            code = run_command(words, output)
        except KeyboardInterrupt:  # before the run's process was there
            code = INTERRUPTED
        if code in (STOPPED_EARLY, TERMINATED, INTERRUPTED, -signal.SIGINT):
            print(f"stopped in {sweep_run.name}; the same command goes on from there", flush=True)
            return STOPPED_EARLY
        if code:
            failed.append(sweep_run.name)
            print(f"  failed with exit code {code}: {_last_line(output)}", flush=True)
    if not args.dry_run:
        _show(runs, folder)
    if failed:
        print(f"grpo-mcore sweep: {len(failed)} of {len(runs)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run_command(words: list[str], output: Path) -> int:
    """Run a command with its output in a file, which is continued. A Ctrl-C reaches it too: it saves and ends first."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as file:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_mcore.cli.main", *words],
            stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                print("stopping the run; a second Ctrl-C ends it at once", flush=True)


def _job_name(recipe: str, run: SweepRun) -> str:
    """Return a name for the job of a run: Kubernetes takes each only once. It begins with that of the recipe's jobs."""
    from grpo_mcore.tools.launch.spec import job_name

    name = load_recipe(recipe, run.words).config.launch.name or job_name(recipe_name(recipe))
    return f"{name[:31].rstrip('-')}-{sha256(str(run.folder).encode()).hexdigest()[:8]}"


def _last_line(output: Path) -> str:
    lines = output.read_text(errors="replace", encoding="utf-8").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def _show(runs: Sequence[SweepRun], folder: Path) -> None:
    from rich.console import Console

    from grpo_mcore.tools.report.comparison import WIDE, ranking, standings, table
    from grpo_mcore.tools.report.page import build_page
    from grpo_mcore.tools.sweep import by_setting

    settings = by_setting(runs)
    if not (written := [files for group in settings.values() for files in group]):
        print(f"no run has written anything yet; `grpo-mcore runs {folder}` shows the table later")
        return
    Console(width=None if sys.stdout.isatty() else WIDE).print(table(standings(written)))
    if any(len(group) > 1 for group in settings.values()):
        print("settings, best first; the same place: their difference is within the seeds' spread")
        print("\n".join(ranking(settings)))
    page = folder / "report.html"
    page.write_text(build_page(written[0], written[1:], settings=settings), encoding="utf-8")
    print(f"{page}: open it in a browser")
