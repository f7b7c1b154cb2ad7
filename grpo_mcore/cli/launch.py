"""`grpo-mcore launch slurm|k8s RECIPE [key=value ...]`: run a recipe as a job of a cluster."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from grpo_mcore.recipe import load_recipe

TARGETS = ("slurm", "k8s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.set_defaults(targets=TARGETS)
    parser.add_argument("--dry-run", action="store_true", help="print the job instead of submitting it")
    parser.add_argument("--output", metavar="FILE", help="write the job to FILE instead of submitting it")
    parser.add_argument("--check", metavar="FILE", action="append", help="k8s: check manifests instead; no recipe")
    parser.add_argument(
        "--crd", metavar="FILE", help="k8s --check: what `kubectl get crd rayjobs.ray.io -o yaml` prints"
    )


def run(args: argparse.Namespace) -> int:
    """Submit, print or write the job, or check manifests."""
    if args.check:
        return _check(args.check, args.crd)
    from grpo_mcore.tools.launch import launch_spec

    spec = launch_spec(load_recipe(args.recipe, args.overrides), args.target)
    if args.target == "slurm":
        from grpo_mcore.tools.launch.slurm import sbatch_script

        text, submit = sbatch_script(spec), ["sbatch"]
    else:
        from grpo_mcore.tools.launch.kubernetes import manifest

        text, submit = manifest(spec), ["kubectl", "create", "-f", "-"]
    if args.output:
        Path(args.output).write_text(text)
        print(f"written: {args.output}; {' '.join(submit).removesuffix(' -')} {args.output}")
        return 0
    if args.dry_run:
        print(text, end="")
        return 0
    try:
        return subprocess.run(submit, input=text, text=True).returncode
    except FileNotFoundError:
        print(f"grpo-mcore launch: {submit[0]} is not installed here; --dry-run prints the job", file=sys.stderr)
        return 1


def _check(files: list[str], crd: str | None) -> int:
    from grpo_mcore.tools.launch.kubernetes_check import check_file, read_crd

    if crd is None:
        print(
            "grpo-mcore launch: --check needs --crd FILE; save it by `kubectl get crd rayjobs.ray.io -o yaml > FILE`",
            file=sys.stderr,
        )
        return 2
    schema = read_crd(Path(crd))
    wrong = 0
    for file in files:
        findings = check_file(Path(file), schema)
        wrong += bool(findings)
        print("\n".join([f"{file}: {'ok' if not findings else f'{len(findings)} problems'}", *findings]))
    print(f"rules that no schema holds: kubectl create --dry-run=server -f {' -f '.join(files)}")
    return 1 if wrong else 0
