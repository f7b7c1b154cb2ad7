"""`grpo-mcore sweep RECIPE key=a,b,c --seeds 3`: a run for each combination of values and seeds, in one folder."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING

from grpo_mcore.base.processes import die_with_parent
from grpo_mcore.base.stopping import handled, is_ignored
from grpo_mcore.cli.numbers import count
from grpo_mcore.cli.train.train import VERBS, algorithm_by_verb
from grpo_mcore.observe.exit_codes import INTERRUPTED, STOPPED_EARLY, TERMINATED
from grpo_mcore.recipe import Algorithm, Recipe, load_recipe, recipe_name

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

STOPPED = (STOPPED_EARLY, TERMINATED, INTERRUPTED, *(-number for number in FORWARDED))
"""Exit codes of a run that was asked to stop, also before it had begun."""

DEMOS = {"demo": ["demo"], "demo-quick": ["demo", "--quick"]}
"""Command for each `--algorithm` that makes the recipe's task and model too."""

NOTICE_S = 0.2
"""Seconds within which the sweep says that it has got a signal."""

if TYPE_CHECKING:
    from grpo_mcore.tools.sweep import SweepRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "grpo-mcore sweep RECIPE key=a,b,c [key=x,y] [--seeds N] [options] [key=value ...]"
    parser.description = (
        "Train a recipe with each combination of the values given, one run after the other or each as a job. "
        "preset=gspo,dapo compares algorithms. The same command again goes on: finished runs are left as they are."
    )
    parser.add_argument("--seeds", type=count, default=1, metavar="N", help="runs of each combination (1)")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="default: results/sweeps/RECIPE")
    parser.add_argument(
        "--algorithm",
        choices=(*VERBS, *DEMOS),
        default="grpo",
        help="which command trains (grpo); a demo makes its task and model anew for each seed",
    )
    parser.add_argument(
        "--band", type=Path, metavar="FILE", help="write how the runs of one setting went, for logger.alarms.band"
    )
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
    from grpo_mcore.cli.train.demo import no_demo, quick_recipe, whole_recipe
    from grpo_mcore.observe.logger import check_loggers
    from grpo_mcore.recipe.loading.load import presets_of
    from grpo_mcore.tools.sweep import check_band, claim_band, claim_folder, state, sweep_runs

    folder = args.folder or Path("results/sweeps") / recipe_name(args.recipe)
    demo, below = args.algorithm in DEMOS, list[str]()
    if args.jobs != "local":
        if args.algorithm != "grpo":
            print("grpo-mcore sweep: jobs train with GRPO; run sft, dpo and rm with --jobs local", file=sys.stderr)
            return 2
        command = ["launch", args.jobs, args.recipe]
    elif demo:
        quick = args.algorithm == "demo-quick"
        if reason := no_demo(args.recipe, quick=quick):
            print(f"grpo-mcore sweep: {reason}", file=sys.stderr)
            return 2
        below = quick_recipe(args.recipe) if quick else whole_recipe(args.recipe)
        command = [*DEMOS[args.algorithm], f"--recipe={args.recipe}"]
    else:
        command = [VERBS[args.algorithm], args.recipe, "--resume", "auto"]

    def algorithm(recipe: Recipe) -> Algorithm:
        if args.jobs == "local":
            check_loggers(recipe.config.logger)
        return "grpo" if demo else algorithm_by_verb(VERBS[args.algorithm], recipe)

    # The band that it writes may not be there yet, or be of other sizes.
    words = args.overrides if args.band is None else [*args.overrides, "logger.alarms.band=null"]
    runs = sweep_runs(args.recipe, words, args.seeds, folder, algorithm, below)
    if args.band is not None:
        check_band(runs)
    if len(presets := [Path(name).name for name in presets_of(args.overrides)]) > 1:
        print(f"each run has all presets, {', '.join(presets)}; preset={','.join(presets)} compares them")
    if not args.dry_run:
        claim_folder(folder, args.recipe, runs)
        if args.band is not None:
            claim_band(args.band)
    with forwarding() as stop:
        failed, stopped_in = _run_all(runs, command, args, stop)
    if stopped_in is not None:
        print(f"stopped in {stopped_in}; the same command goes on from there", flush=True)
        return 1 if failed else STOPPED_EARLY
    if not args.dry_run:
        _show(runs, folder)
    if args.band is not None and not failed and not args.dry_run:
        if args.jobs == "local" or all(state(sweep_run, time.time()) == "finished" for sweep_run in runs):
            _write_band(args, runs)
        else:
            print(f"{args.band}: the same command writes it once all jobs are finished")
    if failed:
        print(f"grpo-mcore sweep: {len(failed)} of {len(runs)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _write_band(args: argparse.Namespace, runs: Sequence[SweepRun]) -> None:
    from grpo_mcore.observe.band import band_text
    from grpo_mcore.tools.sweep import sweep_band

    band = sweep_band(recipe_name(args.recipe), runs)
    args.band.write_text(band_text(band), encoding="utf-8")
    print(f"{args.band}: the {band.name}; logger.alarms.band={args.band} compares a run with it", flush=True)


def _run_all(
    runs: Sequence[SweepRun], command: Sequence[str], args: argparse.Namespace, stop: Stop
) -> tuple[list[str], str | None]:
    """Run what is not finished, one run after the other. Return the names of the runs that failed, and the name of the
    run in which the sweep was asked to stop, None if it was not."""
    from grpo_mcore.tools.sweep import state

    failed = list[str]()
    for number, sweep_run in enumerate(runs, 1):
        if stop.signals:
            return failed, sweep_run.name
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
        begins = "starts" if before == "not begun" else f"{before}, goes on"
        print(f"{number}/{len(runs)} {sweep_run.name}: {begins}; its output is in {output}", flush=True)
        code = run_command(words, output, stop)
        if code and code not in STOPPED:
            failed.append(sweep_run.name)
            print(f"  failed with exit code {code}: {_last_line(output)}", flush=True)
        if code in STOPPED:
            return failed, sweep_run.name
    return failed, None


@dataclass
class Stop:
    """The signals that ask the sweep to stop. Its run gets each of them too; the next run, if one comes between two."""

    signals: list[int] = field(default_factory=list)
    unsent: SimpleQueue[int] = field(default_factory=SimpleQueue)
    child: subprocess.Popen[bytes] | None = None

    def forward(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
        self.unsent.put(number)
        self.send()

    def send(self) -> None:
        with suppress(Empty):
            while self.child is not None:  # a signal may come at any line here, and sends what is left
                self.child.send_signal(self.unsent.get_nowait())


@contextmanager
def forwarding() -> Iterator[Stop]:
    """Pass the signals that `train` understands on to the run inside the block: it saves first, or ends at once."""
    stop = Stop()
    with handled({number: stop.forward for number in FORWARDED if not is_ignored(number)}):
        yield stop


def run_command(words: list[str], output: Path, stop: Stop) -> int:
    """Run a command with its output in a file, which is continued. The signals of `stop` are passed on to it, and it
    does not outlive this process."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as file:
        stop.child = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_mcore.cli.main", *words],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            process_group=0,  # a terminal's Ctrl-C goes to the sweep, which passes it on: once
            # The kernel sends it once for each thread of the sweep: a second SIGTERM would end the run without saving.
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGUSR1),
        )  # fmt: skip
    stop.send()
    code, num_said = None, 0
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = stop.child.wait(NOTICE_S)
        if len(stop.signals) > num_said:
            num_said, name = len(stop.signals), signal.Signals(stop.signals[-1]).name
            print(f"{name} is passed on to the run, which stops; a second Ctrl-C ends it at once", flush=True)
    stop.child = None
    return code


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
