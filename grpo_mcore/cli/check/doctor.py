"""`grpo-mcore doctor [--recipe RECIPE] [--cluster] [--json]`: what is wrong with this machine, or with every node."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from grpo_mcore.cli.json_output import print_json
from grpo_mcore.observe.console.colors import painted
from grpo_mcore.recipe import MasterConfig, environment_class, load_recipe

if TYPE_CHECKING:
    from grpo_mcore.tools.doctor import CheckResult, Needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--recipe", help="check for this recipe: its folders, model, nodes and accelerators")
    parser.add_argument("--cluster", action="store_true", help="check every node of the Ray cluster at RAY_ADDRESS")
    parser.add_argument("--port", type=int, action="append", default=[], help="a port that must be free; repeatable")


def run(args: argparse.Namespace) -> int:
    """Print the findings. Return 0 without a fault, else 1."""
    config = load_recipe(args.recipe, args.overrides).config if args.recipe else None

    from grpo_mcore.tools.doctor import examine
    from grpo_mcore.tools.doctor.nodes import examine_cluster

    needs = needs_of(config, tuple(args.port))
    by_node = examine_cluster(needs) if args.cluster else {"": examine(needs)}
    faults = sum(finding.state == "fault" for findings in by_node.values() for finding in findings)
    if args.json:
        nodes = {node: [asdict(finding) for finding in findings] for node, findings in by_node.items()}
        print_json({"faults": faults, "nodes": nodes})
        return int(faults > 0)
    for node, findings in by_node.items():
        print("\n".join([*([node] if node else []), *map(_line, findings)]))
    print(f"\n{faults} fault{'' if faults == 1 else 's'}" if faults else "\nall is well")
    return int(faults > 0)


def _line(finding: CheckResult) -> str:
    """Return a finding as text, its state coloured in a terminal."""
    style = {"ok": "green", "fault": "red"}.get(finding.state, "yellow")
    return str(finding).replace(finding.state, painted(finding.state, style, sys.stdout), 1)


def needs_of(config: MasterConfig | None, ports: tuple[int, ...] = ()) -> Needs:
    """Return what a recipe needs from a node."""
    from grpo_mcore.environments.code.sandbox.sandboxes import TRUST
    from grpo_mcore.tools.doctor import Needs

    if config is None:
        return Needs(ports=ports)
    cluster, checkpoints = config.cluster, config.checkpointing
    folders = {"checkpoints": checkpoints.checkpoint_dir if checkpoints.enabled else "", "logs": config.logger.log_dir}
    return Needs(
        gpu={"cpu": False, "gpu": True, "auto": None}[cluster.platform],
        nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node,
        folders=folders,
        model=config.policy.model_name,
        shm_bytes=int(1e9 + 2**30 * config.policy.refit_buffer_size_gb),
        ports=ports,
        sandbox=any(
            environment_class(name, section)[0] == "code" and section.get("sandbox") != TRUST
            for name, section in config.env.items()
        ),
        **_of_the_model(config),
    )


def _of_the_model(config: MasterConfig) -> dict[str, Any]:
    """Return what follows from the recipe's model: the optional packages that have fused GPU kernels for it, and the
    bytes of a checkpoint, with float32 weights and both moments of Adam for what is trained."""
    from grpo_mcore.families import parameter_count
    from grpo_mcore.tools.plan.run_plan import plan_shape

    try:
        shape = plan_shape(config)
    except ValueError:  # a model that is not here, and not known by its name
        return {"gpu_packages": ("transformer_engine.pytorch",)}
    mixers = [mixer for mixer in (shape.mamba, shape.delta) if mixer is not None]
    trained = config.checkpointing.save_optimizer and not config.policy.megatron_cfg.peft.enabled
    bytes_each = {"bfloat16": 2, "float32": 4}[config.policy.precision] + 12 * trained
    packages = ("transformer_engine.pytorch", *(name for mixer in mixers for name in mixer.gpu_packages))
    return {"gpu_packages": packages, "checkpoint_bytes": parameter_count(shape) * bytes_each}
