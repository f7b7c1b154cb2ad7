"""`grpo-mcore report RUN`: a page that shows a run, finished, running or killed, or a trace for Perfetto."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line after `grpo-mcore report`."""
    parser = argparse.ArgumentParser(
        prog="grpo-mcore report",
        description="Write one page that shows a run and needs no network: alarms, curves, device-seconds, a timeline "
        "of each step, samples with every token.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's log folder (exp_NNN), or a folder that holds it")
    parser.add_argument("--compare", type=Path, metavar="RUN2", help="draw the curves of this run too")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the log folder")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a Chrome trace for Perfetto instead of a page"
    )
    samples = parser.add_mutually_exclusive_group()
    samples.add_argument("--samples", metavar="STEPS", help="steps whose samples are in the page, such as 12,40-44")
    samples.add_argument(
        "--all-samples", action="store_true", help="write the samples of every step beside the page, which loads them"
    )
    return parser.parse_args(list(words))


def run(args: argparse.Namespace) -> int:
    """Write the page or the trace, and say where. Return 1 if there is no run."""
    from grpo_mcore.tools.report.page import build_page, write_shards
    from grpo_mcore.tools.report.run_files import NoRun, read_run
    from grpo_mcore.tools.report.trace import chrome_trace

    try:
        shown = read_run(args.run)
        other = read_run(args.compare) if args.compare else None
        if other and other.folder.resolve() == shown.folder.resolve():
            raise NoRun(f"RUN and --compare are both {shown.folder}; name the log folder (exp_NNN) of another run")
        wanted = _steps(args.samples or "")
    except (NoRun, ValueError) as error:
        print(f"grpo-mcore report: {error}", file=sys.stderr)
        return 1
    if args.trace:
        args.trace.write_text(chrome_trace(shown.events, sorted(shown.folder.glob("profile/*/*.json"))))
        print(f"{args.trace}: open it in Perfetto or chrome://tracing")
        return 0
    output = args.output or shown.folder / "report.html"
    beside = None
    if args.all_samples:
        beside = f"{output.stem}_samples"
        print(f"{write_shards(shown, output.parent / beside)} files of samples in {output.parent / beside}")
    output.write_text(build_page(shown, other, wanted=wanted, beside=beside))
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB; open it in a browser")
    return 0


def _steps(text: str) -> set[int]:
    """Return the steps that "12,40-44" names. Raises ValueError."""
    steps: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            raise ValueError(f"--samples: {part!r} is neither a step nor a range of steps such as 40-44")
        steps.update(range(int(first), int(last or first) + 1))
    return steps
