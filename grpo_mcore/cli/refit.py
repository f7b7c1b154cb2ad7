"""`grpo-mcore refit plan RECIPE`: show which bytes a refit of this recipe moves between which ranks.
`grpo-mcore refit verify RECIPE`: refit once, then compare the log-probs of engines and policy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mcore.recipe import (
    MasterConfig,
    engine_nodes,
    engine_pool,
    is_override,
    load_recipe,
    num_engines,
    policy_pool,
    world_size,
)

if TYPE_CHECKING:
    from grpo_mcore.refit.layout import EngineLayout, TrainerLayout


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line after `grpo-mcore refit`."""
    parser = argparse.ArgumentParser(prog="grpo-mcore refit", description="Plan or verify a refit.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    plan = commands.add_parser(
        "plan",
        help="print and draw the plan of a recipe; needs no GPU",
        usage="grpo-mcore refit plan RECIPE [--picture FILE] [key=value ...]",
    )
    plan.add_argument("--picture", type=Path, metavar="FILE", help="draw bytes by link into this PNG")
    verify = commands.add_parser(
        "verify",
        help="start policy and engines, refit, and compare their log-probs; exit code 1 if they differ",
        usage="grpo-mcore refit verify RECIPE [key=value ...]",
    )
    for command in (plan, verify):
        command.add_argument("recipe", help="the recipe: a YAML file, or the name of one in recipes/")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="a value that replaces the recipe's")
    args, rest = parser.parse_known_args(list(words))  # overrides may stand between options
    args.overrides += rest
    if wrong := [word for word in args.overrides if not is_override(word)]:
        {"plan": plan, "verify": verify}[args.command].error(f"not an override (key=value): {' '.join(wrong)}")
    return args


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 1 if log-probs differ, else 0."""
    return _plan(args) if args.command == "plan" else _verify(args)


def _verify(args: argparse.Namespace) -> int:
    from grpo_mcore.tools.refit_verify import verify_refit

    config = load_recipe(args.recipe, args.overrides).config
    logs = Path(config.logger.log_dir) / "refit-verify"
    print(f"starting policy and engines (logs: {logs}) ...", flush=True)
    report, parity = verify_refit(config, logs)
    print(
        f"refit {report.bytes / 1e9:.3f} GB in {report.seconds:.3g} s, pause {report.pause_seconds:.3g} s; "
        f"{report.checked} checksums agree"
    )
    print(parity.table())
    print("engines and policy agree" if parity.ok else parity.difference())
    return 0 if parity.ok else 1


def _plan(args: argparse.Namespace) -> int:
    """Print the plan, and draw it with --picture."""
    from grpo_mcore.families import check_engine_parallel, check_tensor_parallel, shape_of
    from grpo_mcore.refit.overview import Overview, draw

    config = load_recipe(args.recipe, args.overrides).config
    shape = shape_of(_model_config(config.policy.model_name))
    overview = Overview.of(
        shape,
        _trainer(config),
        _engine(config),
        dtype=config.policy.precision,
        buffer_gb=config.policy.refit_buffer_size_gb,
        nodes=(engine_pool(config) or policy_pool(config)).nodes,
    )
    check_tensor_parallel(shape, overview.trainer.tensor)
    check_engine_parallel(shape, overview.engine.tensor, overview.engine.expert_parallel)
    print(overview.text())
    if args.picture:
        draw(args.picture, overview)
        print(f"picture {args.picture}")
    return 0


def _trainer(config: MasterConfig) -> TrainerLayout:
    from grpo_mcore.refit.layout import TrainerLayout

    megatron = config.policy.megatron_cfg
    model_parallel = (
        megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
    )
    return TrainerLayout(
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        max(1, world_size(config) // model_parallel),
        megatron.context_parallel_size,
        megatron.expert_model_parallel_size,
        megatron.expert_tensor_parallel_size,
        megatron.virtual_pipeline_model_parallel_size or 1,
        first_layers=megatron.num_layers_in_first_pipeline_stage or 0,
        last_layers=megatron.num_layers_in_last_pipeline_stage or 0,
    )


def _engine(config: MasterConfig) -> EngineLayout:
    """Return the layout of the engines on one node, or on the nodes that one engine spans."""
    from grpo_mcore.refit.layout import EngineLayout

    vllm = config.policy.generation.vllm_cfg
    engines = num_engines(config, gpu=config.cluster.platform != "cpu")
    nodes = (engine_pool(config) or policy_pool(config)).nodes
    return EngineLayout(
        vllm.tensor_parallel_size,
        expert_parallel=vllm.expert_parallel_size > 1,
        replicas=max(1, engines * engine_nodes(config) // nodes),
        nodes=engine_nodes(config),
    )


def _model_config(name: str) -> dict[str, Any]:
    """Return the model's config from its folder, by its name, or from the Hugging Face hub."""
    from grpo_mcore.families import read_hf_config
    from grpo_mcore.families.known import known_config

    if Path(name).is_dir():
        return read_hf_config(name)
    if (known := known_config(name)) is not None:
        return known
    from huggingface_hub import hf_hub_download

    return read_hf_config(Path(hf_hub_download(name, "config.json")).parent)
