"""`grpo-mcore diagnose RUN`: name the part that makes a run go otherwise than it should."""

import argparse
import tempfile
from pathlib import Path

from grpo_mcore.base.text import escaped
from grpo_mcore.cli.json_output import print_json
from grpo_mcore.cli.numbers import count, local


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Exchange one part of a recorded step after the other for what it should be (recipe, prompts, rewards, "
        "advantages, mask, log-probs, loss), and name those that differ. Exit code 1 if one does."
    )
    parser.add_argument("run", type=local, metavar="RUN", help="a run's log folder, or a folder that holds it")
    parser.add_argument("--recipe", metavar="RECIPE", help="the recipe as it should be; default: that of its band")
    parser.add_argument("--band", metavar="FILE", help="the band of its recipe; default: logger.alarms.band")
    parser.add_argument("--step", type=count, metavar="N", help="default: the step of the first alarm, or the last one")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what differs, with evidence and a command that shows it. Return 1 if something does."""
    from grpo_mcore.observe.band import BandError, band_of, settings_of
    from grpo_mcore.recipe import load_recipe
    from grpo_mcore.tools.diagnose import DiagnosedRun, diagnose, left_at, of_settings, replayable
    from grpo_mcore.tools.replay.replay import recorded_step
    from grpo_mcore.tools.report.run_files import NoRun, read_run, recorded_run

    files = read_run(Path(args.run))
    if not (lines := files.metrics["train"]):
        raise NoRun(f"{files.folder} has no step yet")
    folder, config = recorded_run(files.folder)
    config.logger.alarms.band = args.band or config.logger.alarms.band
    band, reason = band_of(config.model_dump(mode="json"))
    if args.band and reason:
        raise BandError(reason)
    if args.recipe is not None:
        reference = settings_of(load_recipe(args.recipe).config.model_dump(mode="json"))
    else:
        reference = dict(band.settings) if band is not None else settings_of(config.model_dump(mode="json"))
    left = left_at(lines, band)
    step = args.step or (left[0] if left else max(line["step"] for line in lines))
    if files.rewarded:
        step = replayable(folder, config, step)
        with tempfile.TemporaryDirectory(prefix="grpo-mcore-diagnose-") as scratch:
            recorded = recorded_step(folder, step)
            findings, notes = diagnose(
                DiagnosedRun(folder, config, step, *recorded, lines, reference, Path(scratch), band)
            )
    else:
        notes = [f"all but the recipe: this is a run of {files.algorithm}, and only GRPO has steps to replay"]
        findings = list(of_settings(config, reference))
    if band is None and args.recipe is None:
        notes.insert(
            0, f"recipe: {reason or 'it names no band (logger.alarms.band)'}; --recipe names what to compare with"
        )
    inside = f"inside its band of {len(band.seeds)} runs" if band is not None else "without an alarm"
    state = f"step {left[0]}: {left[1]}" if left else inside
    if args.json:
        print_json({"state": state, "step": step, "findings": [vars(it) for it in findings], "not judged": notes})
        return 1 if findings else 0
    print(escaped(f"{folder}: {state}"))
    for finding in findings:
        print(escaped(f"{finding.part}: {finding.evidence}\n  again: {finding.again}"))
    if not findings:
        print(
            f"unknown: nothing that was looked at in step {step} differs" if left else f"nothing differs in step {step}"
        )
    print("\n".join(escaped(f"not judged: {note}") for note in notes), end="\n" if notes else "")
    return 1 if findings else 0
