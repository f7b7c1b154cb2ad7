"""`grpo-mcore parity MODEL`: compare a model in transformers, in the policy on several layouts, and in an engine."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mcore.cli.json_output import print_json
from grpo_mcore.cli.numbers import count

if TYPE_CHECKING:
    from grpo_mcore.tools.parity.parity import ParityCase

TINY = "tiny:"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line after `grpo-mcore parity`."""
    parser = argparse.ArgumentParser(
        prog="grpo-mcore parity",
        description="Compare the policy's log-probs and gradients with transformers, in float32 on CPU. Exit code 1 if "
        "they differ.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help=f"a Hugging Face folder, or {TINY}FAMILY for a small random model"
    )
    parser.add_argument(
        "--layouts", metavar="A,B", help="such as TP2,PP2xCP2,EP2xTP2-SP; default: all that the model allows"
    )
    parser.add_argument("--engine", action="store_true", help="compare a vLLM engine too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--fuzz",
        type=int,
        metavar="SEED",
        help="random layouts, features and small shapes of the model instead, each against transformers in float64; "
        "the first case that differs is made smaller for as long as it differs",
    )
    parser.add_argument("--draws", type=count, default=200, metavar="N", help="cases that --fuzz computes (200)")
    parser.add_argument("--ranks", type=count, default=2, metavar="N", help="largest layout of --fuzz, in ranks (2)")
    parser.add_argument("--case", metavar="JSON", help="compute one case that --fuzz has printed")
    return parser.parse_args(list(words))


def run(args: argparse.Namespace) -> int:
    """Print the comparison. Return 1 if anything differs or a layout given by --layouts is refused, else 0."""
    with tempfile.TemporaryDirectory(prefix="grpo-mcore-parity-") as scratch:
        if args.fuzz is not None or args.case:
            return _fuzz(args, Path(scratch))
        return _run(args, _folder(args.model, Path(scratch), args.engine))


def _fuzz(args: argparse.Namespace, scratch: Path) -> int:
    from transformers.utils import logging

    from grpo_mcore.families import read_hf_config
    from grpo_mcore.tools.demo.tiny_models import tiny_like
    from grpo_mcore.tools.parity.fuzz import Draw, Failure, Fuzzer, fuzz
    from grpo_mcore.tools.parity.rank_pool import RankPool

    logging.disable_progress_bar()  # it loads a model for each case
    family, values = args.model.removeprefix(TINY), dict[str, Any]()
    if not args.model.startswith(TINY):
        family, values = tiny_like(read_hf_config(args.model))
    draw = Draw.from_json(args.case) if args.case else None
    with closing(RankPool(draw.layout.world_size if draw else args.ranks)) as pool:
        fuzzer = Fuzzer(family, values, pool, scratch)
        if draw is not None:
            done, difference = 1, fuzzer.failure(draw)
            failure = Failure(draw, difference) if difference else None
        else:
            done, failure = fuzz(fuzzer, args.fuzz, args.draws, args.ranks)
    if failure is None:
        if args.json:
            print_json({"model": args.model, "cases": done, "what": None, "again": None})
        else:
            print(f"{done} cases of {args.model}: none differs")
        return 0
    again = f"grpo-mcore parity {args.model} --case {shlex.quote(failure.draw.to_json())}"
    if args.json:
        print_json({"model": args.model, "cases": done, "what": failure.difference, "again": again})
    else:
        print(f"case {done} of {args.model} differs; the smallest that still does:")
        print(f"  {failure.draw.describe()}\n  {failure.difference}\nagain: {again}")
    return 1


def _run(args: argparse.Namespace, folder: Path) -> int:
    from grpo_mcore.families import read_hf_config, shape_of
    from grpo_mcore.tools.parity.parity import compare_engine, compare_layouts, fitting, reference_of
    from grpo_mcore.tools.parity.rank import DEFAULT_LAYOUTS, layout_named
    from grpo_mcore.tools.parity.rank_pool import RankPool

    shape = shape_of(read_hf_config(folder))
    names = args.layouts.split(",") if args.layouts else DEFAULT_LAYOUTS
    layouts, refused = fitting(folder, [layout_named(name, shape) for name in names])
    reference = reference_of(folder)
    with closing(RankPool(max((case.world_size for case in layouts), default=0))) as pool:
        cases = compare_layouts(reference, layouts, pool)
    if args.engine:
        case, reason = compare_engine(reference)
        cases += [case] if case else []
        refused |= {"engine": reason} if reason else {}
    if args.json:
        plain = {"model": args.model, "cases": [case.plain() for case in cases], "refused": refused}
        print_json(plain)
    else:
        print("\n".join([*_table(cases), *(f"{name}: refused: {reason}" for name, reason in refused.items())]))
    return 1 if (refused and args.layouts) or not all(case.ok for case in cases) else 0


def _folder(model: str, scratch: Path, engine: bool) -> Path:
    if not model.startswith(TINY):
        return Path(model)
    from grpo_mcore.tools.demo.tiny_models import ENGINE_SIZES, make_tiny_model

    family = model.removeprefix(TINY)
    return make_tiny_model(family, scratch, words=engine, **(ENGINE_SIZES.get(family, {}) if engine else {}))


def _table(cases: Sequence[ParityCase]) -> list[str]:
    """Return one line for each case: the sequence and the layer that differ most."""
    lines = [f"{'layout':14} {'rows':9} {'log-probs':>9} {'sequence':>8}  {'gradients':>9}  parameter"]
    for case in cases:
        rows = {True: "packed", False: "unpacked", None: "-"}[case.packed]
        sequence = max(case.logprobs, key=case.logprobs.__getitem__)
        line = f"{case.layout:14} {rows:9} {case.logprobs[sequence]:9.1e} {sequence:8}"
        if case.gradients:
            error, name = max(case.by_layer().values())
            line += f"  {error:9.1e}  {name}"
        lines.append(line + ("" if case.ok else "  DIFFERS"))
    return lines
