"""`grpo-mcore report RUN [RUN ...]`: a page that shows a run, finished, running or killed, beside others, or a trace
for Perfetto."""

import argparse
import sys
from collections.abc import Collection
from pathlib import Path

from grpo_mcore.cli.numbers import local


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write one page that shows a run and needs no network: alarms, curves, device-seconds, a timeline "
        "of each step, samples with every token. Of several runs: a table, best first, of where each stands and which "
        "settings differ, the curves of all, and the rest of the first."
    )
    parser.add_argument(
        "runs", nargs="+", type=local, metavar="RUN", help="a run's log folder (exp_NNN), or a folder that holds it"
    )
    parser.add_argument(
        "--compare", type=local, metavar="RUN", action="append", default=[], help="another run, as a further RUN"
    )
    parser.add_argument(
        "--group-by",
        metavar="KEY[,KEY]",
        help="runs with equal values of these keys of the recipe share a curve: their mean, with a band around it",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the log folder")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a Chrome trace for Perfetto instead of a page"
    )
    samples = parser.add_mutually_exclusive_group()
    samples.add_argument("--samples", metavar="STEPS", help="steps whose samples are in the page, such as 12,40-44")
    samples.add_argument(
        "--all-samples", action="store_true", help="write the samples of every step next to the page, which loads them"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page or the trace, and say where. Return 1 if there is no run."""
    from grpo_mcore.tools.report.comparison import runs_by
    from grpo_mcore.tools.report.page import build_page, write_shards
    from grpo_mcore.tools.report.perfetto_trace import chrome_trace
    from grpo_mcore.tools.report.run_files import NoRun, read_run

    try:
        shown, *others = runs = [read_run(Path(run)) for run in [*args.runs, *args.compare]]
        folders = [run.folder.resolve() for run in runs]
        if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
            raise NoRun(f"two of the runs are {twice}; name the log folder (exp_NNN) of another run")
        settings = runs_by(runs, args.group_by) if args.group_by else None
        sample_steps = _steps(args.samples or "", {step for steps in shown.samples.values() for step in steps})
    except (NoRun, ValueError) as error:
        print(f"grpo-mcore report: {error}", file=sys.stderr)
        return 1
    if args.trace:
        args.trace.write_text(
            chrome_trace(shown.events, sorted(shown.folder.glob("profile/*/*.json"))), encoding="utf-8"
        )
        print(f"{args.trace}: open it in Perfetto or chrome://tracing")
        return 0
    output = args.output or shown.folder / "report.html"
    beside = None
    if args.all_samples:
        beside = f"{output.stem}_samples"
        print(f"{write_shards(shown, output.parent / beside)} files of samples in {output.parent / beside}")
    output.write_text(
        build_page(shown, others, settings=settings, sample_steps=sample_steps, beside=beside), encoding="utf-8"
    )
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB; open it in a browser")
    return 0


def _steps(text: str, recorded: Collection[int]) -> set[int]:
    """Return the recorded steps that "12,40-44" names. Raises ValueError if a part of it names none."""
    steps: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            raise ValueError(f"--samples: {part!r} is neither a step nor a range of steps such as 40-44")
        chosen = {step for step in recorded if int(first) <= step <= int(last or first)}
        if not chosen:
            have = f"there are those from {min(recorded)} to {max(recorded)}" if recorded else "there are none"
            raise ValueError(f"--samples: no samples of {part} are recorded; {have}")
        steps |= chosen
    return steps
