"""`grpo-mcore verdict RUN --step N | MODEL`: say why engine and policy disagree, with transformers as the judge."""

import argparse
import shlex
import tempfile
from pathlib import Path

from grpo_mcore.base.text import escaped
from grpo_mcore.cli.json_output import print_json
from grpo_mcore.cli.numbers import count, local


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare the log-probs of policy and engine with transformers in float64, and name why one "
        "differs. Exit code 1 if one does."
    )
    parser.add_argument(
        "target", type=local, metavar="RUN|MODEL", help="a run's log folder, a Hugging Face folder, or tiny:FAMILY"
    )
    parser.add_argument("--step", type=count, metavar="N", help="of a run: the recorded step")
    parser.add_argument("--samples", type=count, default=8, metavar="N", help="of a run: samples that are judged (8)")
    parser.add_argument("--layout", default="TP1", metavar="A", help="of a model: the policy's layout (TP1)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the verdict, its evidence and the command that shows it again. Return 1 if a side differs."""
    from transformers.utils import logging

    from grpo_mcore.families import read_hf_config, shape_of
    from grpo_mcore.tools.demo.tiny_models import ENGINE_SIZES, make_tiny_model
    from grpo_mcore.tools.parity.rank import layout_named
    from grpo_mcore.tools.replay.replay import ReplayError
    from grpo_mcore.tools.report.run_files import holds_run, recorded_grpo_run
    from grpo_mcore.tools.verdict.collect import of_model, of_run
    from grpo_mcore.tools.verdict.judge import Judge
    from grpo_mcore.tools.verdict.verdict import judge_samples, merged

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="grpo-mcore-verdict-") as scratch:
        if args.step is not None:
            folder, recipe = recorded_grpo_run(Path(args.target))
            cases = of_run(folder, recipe, args.step, args.samples, Path(scratch))
        else:
            model, family = Path(args.target), args.target.removeprefix("tiny:")
            if not (model / "config.json").is_file() and holds_run(model):
                raise ReplayError(f"{args.target} is a run: say with --step which of its recorded steps to judge")
            if family != args.target:
                model = make_tiny_model(family, Path(scratch), words=True, **ENGINE_SIZES.get(family, {}))
            cases = [of_model(model, layout_named(args.layout, shape_of(read_hf_config(model))))]
        judged = [
            judge_samples(Judge(case.folder, case.sampling, case.older, case.unquantized), case.samples, case.precision)
            for case in cases
        ]
    verdict, notes = merged(judged), [note for case in cases for note in case.notes]
    words = ["grpo-mcore", "verdict", args.target, *(("--step", str(args.step)) if args.step is not None else ())]
    words += ["--layout", args.layout] if args.layout != "TP1" else []
    again = shlex.join(words)
    if args.json:
        plain = {
            "causes": {side: vars(cause) for side, cause in verdict.causes.items()},
            "evidence": [vars(evidence) for evidence in verdict.evidence],
        }
        print_json(plain | {"notes": notes, "again": again})
    else:
        print(escaped(verdict.line))
        for line in verdict.table():
            print(escaped(f"  {line}"))
        print("\n".join([*(f"not judged: {note}" for note in notes), f"again: {again}"]))
    return 1 if verdict.causes else 0
