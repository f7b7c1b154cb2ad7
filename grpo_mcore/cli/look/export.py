"""`grpo-mcore export CHECKPOINT --output DIR`: write a checkpoint as a model in Hugging Face's format."""

import argparse
import resource
import time
from pathlib import Path

from grpo_mcore.cli.numbers import local


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a checkpoint, of any layout, as a folder that transformers, vLLM and a new run can load. "
        "Runs in one process on the CPU; no engine, no Ray, no GPU."
    )
    parser.add_argument(
        "checkpoint", type=local, metavar="CHECKPOINT", help="a folder step_N, or a run's checkpoint_dir for its newest"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder to write; must be new")
    parser.add_argument("--adapter", action="store_true", help="write only the LoRA adapters, in the format of PEFT")
    parser.add_argument("--critic", action="store_true", help="write the critic, as a classifier with one output")
    parser.add_argument(
        "--model", metavar="FOLDER", help="the model that the run started from, if it has moved: config and tokenizer"
    )


def run(args: argparse.Namespace) -> int:
    """Export, and print what was written."""
    from grpo_mcore.tools.export import export

    started_at = time.perf_counter()
    folder = export(Path(args.checkpoint), args.output, model=args.model, adapter=args.adapter, critic=args.critic)
    size = sum(path.stat().st_size for path in args.output.iterdir())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"exported {folder} to {args.output}: {size / 1e9:.3f} GB in {time.perf_counter() - started_at:.1f} s, "
        f"peak memory {peak:.2f} GiB"
    )
    return 0
