"""Measure the policy on one device and print one table.

    python -m benchmarks.gpu.proof [--device gpu|cpu] [--tiny] [--parts stack,families,refit,...] [--out FOLDER]

Ends with exit code 1 if a value that is held against another one differs. Runs from the root of a checkout.
scripts/gpu_proof.sh runs it on a machine that has torch for CUDA and nothing else (docs/gpu.md).
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.kit import Row, Setting

PARTS = ("stack", "families", "refit", "cycle", "kernels", "slices")
"""Modules of this folder with `run(setting)`: first those whose failure would stop a run, then those that would spoil
its numbers, then those that measure."""


def table(rows: list[Row]) -> str:
    """Return the rows as text in columns; a row whose value is wrong begins with WRONG."""
    cells = [({None: "", True: "ok", False: "WRONG"}[r.ok], r.part, r.what, r.value, r.expected) for r in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def measured(part: str, setting: Setting, out: Path | None) -> list[Row]:
    """Return the rows of one part. An error in it is a row too, so that the other parts are still measured."""
    rows: list[Row] = []
    began = time.perf_counter()

    def add(row: Row) -> None:
        rows.append(row)
        if out is not None:
            row.print_json(out / "rows.jsonl")

    try:
        for row in importlib.import_module(f"benchmarks.gpu.{part}").run(setting):
            add(row)
    except Exception as error:
        logging.exception("part %s failed", part)
        add(Row(part, "failed", f"{type(error).__name__}: {error}".splitlines()[0][:200], "", False))
    setting.free()
    add(Row(part, "whole part", f"{time.perf_counter() - began:.0f} s"))
    return rows


def main() -> int:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder for rows.jsonl and table.txt")
    args = parser.parse_args()
    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if args.device == "gpu" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu --tiny tries the same code on a CPU")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name(0) if args.device == "gpu" else "CPU"
    rows = [Row("machine", name, f"torch {torch.__version__}", "tiny sizes" if args.tiny else "")]
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts.split(","):
            rows += measured(part, Setting(args.device, args.tiny, Path(folder)), args.out)
    print(table(rows))
    if args.out is not None:
        (args.out / "table.txt").write_text(table(rows) + "\n")
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
