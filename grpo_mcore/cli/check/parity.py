"""`grpo-mcore parity MODEL`: compare a model in transformers, in the policy on several layouts, and in an engine."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mcore.cli.json_output import print_json

if TYPE_CHECKING:
    from grpo_mcore.tools.parity.parity import ParityCase

TINY = "tiny:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare the policy's log-probs and gradients with transformers, in float32 on CPU. Exit code 1 if they differ."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a Hugging Face folder, also of a sequence classifier, or {TINY}FAMILY for a small random model",
    )
    parser.add_argument(
        "--layouts", metavar="A,B", help="such as TP2,PP2xCP2,EP2xTP2-SP; default: all that the model allows"
    )
    parser.add_argument("--engine", action="store_true", help="compare a vLLM engine too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the comparison. Return 1 if anything differs or a layout given by --layouts is refused, else 0."""
    with tempfile.TemporaryDirectory(prefix="grpo-mcore-parity-") as scratch:
        return _run(args, _folder(args.model, Path(scratch), args.engine), Path(scratch))


def _run(args: argparse.Namespace, folder: Path, scratch: Path) -> int:
    from grpo_mcore.families import head_of, read_hf_config, shape_of
    from grpo_mcore.tools.parity.parity import as_held, compare_engine, compare_layouts, fitting, reference_of
    from grpo_mcore.tools.parity.rank import DEFAULT_LAYOUTS, layout_named, standard_work
    from grpo_mcore.tools.parity.rank_pool import RankPool

    config = read_hf_config(folder)
    shape = shape_of(config, head_of(config))
    names = args.layouts.split(",") if args.layouts else DEFAULT_LAYOUTS
    layouts, refused = fitting(folder, [layout_named(name, shape) for name in names])
    folder, rounded = as_held(folder, scratch)
    reference = reference_of(folder, work=standard_work(shape))
    with closing(RankPool(max((case.world_size for case in layouts), default=0))) as pool:
        cases = compare_layouts(reference, layouts, pool)
    if args.engine:
        case, reason = compare_engine(reference)
        cases += [case] if case else []
        refused |= {"engine": reason} if reason else {}
    if args.json:
        plain = {"model": args.model, "cases": [case.plain() for case in cases], "refused": refused, "rounded": rounded}
        print_json(plain)
    else:
        print("\n".join([*_table(cases), *(f"{name}: refused: {reason}" for name, reason in refused.items())]))
        if rounded:
            print(
                f"{len(rounded)} tensors of the file, such as {rounded[0]}, are compared in bfloat16, as runs hold them"
            )
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
