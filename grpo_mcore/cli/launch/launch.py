"""`grpo-mcore launch slurm|k8s RECIPE [key=value ...]`: run a recipe as a job of a cluster."""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

from grpo_mcore.recipe import load_recipe

TARGETS = ("slurm", "k8s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(targets=TARGETS)
    parser.usage = "grpo-mcore launch slurm|k8s RECIPE [options] [key=value ...]"
    parser.description = (
        "Run a recipe as a job: `launch slurm` submits an sbatch script, `launch k8s` a RayJob of KubeRay."
    )
    parser.add_argument("--dry-run", action="store_true", help="print the job instead of submitting it")
    parser.add_argument("--output", metavar="FILE", help="write the job to FILE instead of submitting it")
    parser.add_argument("--check", metavar="FILE", action="append", help="k8s: check manifests instead; no recipe")
    parser.add_argument(
        "--crd",
        metavar="FILE",
        help="k8s --check: the cluster's own schema, as `kubectl get crd rayjobs.ray.io -o yaml` prints it; default: "
        "a schema of KubeRay that comes with this package",
    )


def run(args: argparse.Namespace) -> int:
    """Submit, print or write the job, or check manifests."""
    if args.check:
        return _check(args.check, args.crd)
    from grpo_mcore.tools.launch import launch_spec

    spec = launch_spec(load_recipe(args.recipe, args.overrides), args.target)
    for note in spec.notes:
        print(f"grpo-mcore launch: {note}", file=sys.stderr)
    if args.target == "slurm":
        from grpo_mcore.tools.launch.slurm import sbatch_command, sbatch_script

        text, submit, by_hand = sbatch_script(spec), sbatch_command(spec), "sbatch"
    else:
        from grpo_mcore.tools.launch.kubernetes import documents, manifest
        from grpo_mcore.tools.launch.kubernetes_check import bundled_schema, check

        if problems := check(documents(spec)[1], bundled_schema()):
            rules = "\n".join(f"  {problem}" for problem in problems)
            print(f"grpo-mcore launch: Kubernetes would refuse what launch.k8s asks for:\n{rules}", file=sys.stderr)
            return 2
        text, submit, by_hand = manifest(spec), ["kubectl"], "kubectl create -f"
    if args.output:
        Path(args.output).write_text(text, encoding="utf-8")
        print(f"written: {args.output}; {by_hand} {shlex.quote(args.output)}")
        return 0
    if args.dry_run:
        print(text, end="")
        return 0
    try:
        if args.target == "slurm":
            return subprocess.run(submit, input=text, text=True, encoding="utf-8").returncode
        return _create(text)
    except FileNotFoundError:
        print(f"grpo-mcore launch: {submit[0]} is not installed here; --dry-run prints the job", file=sys.stderr)
        return 1


def _create(manifest: str) -> int:
    """Create what a manifest describes. A ConfigMap that exists is that of an earlier launch with the same recipe; a
    RayJob stays when it has ended."""
    words = ["kubectl", "create", "-o", "name", "-f", "-"]
    done = subprocess.run(words, input=manifest, text=True, encoding="utf-8", capture_output=True)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    if any(line.startswith("rayjob.") for line in done.stdout.splitlines()):
        return 0
    if match := re.search(r'\brayjobs\.\S+ "(\S+)" already exists', done.stderr):
        advice = f"kubectl delete rayjob {match[1]} if that one has ended, or launch.name=ANOTHER"
        print(f"grpo-mcore launch: an earlier job has this name: {advice}", file=sys.stderr)
    return done.returncode or 1


def _check(files: list[str], crd: str | None) -> int:
    from grpo_mcore.tools.launch.kubernetes_check import bundled_schema, check_file, read_crd

    schema = bundled_schema() if crd is None else read_crd(Path(crd))
    wrong = 0
    for file in files:
        findings = check_file(Path(file), schema)
        wrong += bool(findings)
        print("\n".join([f"{file}: {'ok' if not findings else f'{len(findings)} problems'}", *findings]))
    print(f"rules that no schema holds: kubectl create --dry-run=server -f {' -f '.join(files)}")
    return 1 if wrong else 0
