"""`grpo-mcore replay RUN --step N`: compute a recorded step again on any layout, and say where it differs."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mcore.base.text import escaped
from grpo_mcore.cli.numbers import count, local

if TYPE_CHECKING:
    from grpo_mcore.recipe import MasterConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compute log-probs, loss and gradient of a recorded step again, from the checkpoint before it, and "
        "name the first layer, sample or token that differs. Exit code 1 if anything does."
    )
    parser.add_argument(
        "run", type=local, metavar="RUN", help="a run's log folder (exp_NNN), or a folder that holds it"
    )
    parser.add_argument("--step", type=count, required=True, metavar="N")
    parser.add_argument("--layout", metavar="A,B", help="such as TP1,TP2xPP2; default: the run's own")
    parser.add_argument("--samples", metavar="UID,UID", help="only the samples of these prompts")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), help="in place of policy.precision")
    parser.add_argument("--checkpoint", type=local, metavar="FOLDER", help="start from this checkpoint (step_N)")
    parser.add_argument(
        "--loss",
        action="append",
        metavar="LOSS",
        help="twice or more: compare the gradients of these losses. own: the run's; the name of a preset (gspo, cispo, "
        "dapo) or recipe, for its loss_fn; or key=value,key=value of loss_fn",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="save what is computed, for --against")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with it, layer by layer")


def run(args: argparse.Namespace) -> int:
    """Print each comparison. Return 1 if anything differs."""
    from grpo_mcore.base import tensor_files
    from grpo_mcore.tools.replay.replay import Replay, checkpoint_before, compare, recorded_step, replay, replay_config
    from grpo_mcore.tools.report.run_files import recorded_grpo_run

    folder, recipe = recorded_grpo_run(Path(args.run))
    uids = args.samples.split(",") if args.samples else ()
    rows, recorded = recorded_step(folder, args.step, uids)
    start = Path(args.checkpoint) if args.checkpoint else checkpoint_before(folder, recipe, args.step)
    print(f"step {args.step} of {folder}: {len(rows)} samples, from {start or recipe.policy.model_name}")
    if args.loss:
        return _compare_losses(args, folder, recipe, rows, start)
    others, differs = [recorded], False
    if args.against:
        others.append(Replay(**tensor_files.load(args.against)))
    for layout in args.layout.split(",") if args.layout else [None]:
        config = replay_config(recipe, layout, args.precision)
        with tempfile.TemporaryDirectory(prefix="grpo-mcore-replay-") as scratch:
            result = replay(config, rows, args.step, start, Path(scratch), layout or "replay")
        loss, norm = (result.metrics.get(name, float("nan")) for name in ("loss", "grad_norm"))
        print(f"{result.name}: loss {loss:.8g}, norm of the gradient {norm:.6g}")
        for other in others:
            difference = compare(result, other, config.policy.precision)
            differs = differs or not difference.ok
            print(
                f"  against {other.name}: loss differs by {difference.loss:.1e}, the gradient's norm by "
                f"{difference.gradient:.1e} of it, a token's log-prob by at most {difference.logprob:.1e}; "
                + ("equal within the limits" if difference.ok else "DIFFERS")
            )
            if difference.first:
                print(escaped(f"    first in {difference.first}"))
        others.append(result)
    if args.save:
        tensor_files.save(vars(others[-1]), args.save)
    return 1 if differs else 0


def _compare_losses(
    args: argparse.Namespace, folder: Path, recipe: MasterConfig, rows: Sequence[Mapping[str, Any]], start: Path | None
) -> int:
    from grpo_mcore.tools.replay.losses import OWN, compare_losses, lines_of, with_loss
    from grpo_mcore.tools.replay.replay import replay_config

    names = dict.fromkeys(args.loss if len(args.loss) > 1 else [OWN, *args.loss])
    with tempfile.TemporaryDirectory(prefix="grpo-mcore-replay-") as scratch:
        base = replay_config(recipe, args.layout, args.precision)
        configs = {name: with_loss(base, name, Path(scratch)) for name in names}
        print("\n".join(lines_of(compare_losses(configs, rows, args.step, start, folder, Path(scratch)))))
    return 0
