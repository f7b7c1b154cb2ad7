"""`grpo-mcore refit plan RECIPE`: show the bytes that a refit of this recipe moves, by ranks; as JSON, its costs.
`grpo-mcore refit verify RECIPE`: refit once, then compare the log-probs of engines and policy."""

import argparse
from pathlib import Path

from grpo_mcore.cli.json_output import print_json
from grpo_mcore.recipe import Problem, RecipeError, load_recipe


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the costs of the refit as JSON instead")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw bytes by link into this PNG")


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
    from grpo_mcore.families.known import known_config
    from grpo_mcore.refit.plan.overview import Overview, draw
    from grpo_mcore.tools.plan.run_plan import plan_shape
    from grpo_mcore.tools.plan.workload import workload_of

    config = load_recipe(args.recipe, args.overrides).config
    name, config_json = config.policy.model_name, None
    if not Path(name).is_dir() and known_config(name) is None:
        from huggingface_hub import snapshot_download

        try:  # it asks the hub once; for one file it would ask again and again
            config_json = Path(snapshot_download(name, allow_patterns="config.json"), "config.json")
        except Exception as error:  # of the hub, of the net, or of a name that is none
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            message = f"{name!r} is not a folder here, and could not be fetched from the Hugging Face hub: {cause}"
            raise RecipeError([Problem("", "policy.model_name", message)], args.recipe) from None
    shape = plan_shape(config, config_json)
    load = workload_of(config, shape, kernels="cpu" if config.cluster.platform == "cpu" else "transformer_engine")
    overview = Overview.of(
        shape,
        load.layout,
        load.engine_layout,
        dtype=config.policy.precision,
        buffer_gb=config.policy.refit_buffer_size_gb,
        nodes=load.engine_nodes,
        replicas=max(1, load.engines * load.engine_layout.nodes // load.engine_nodes),
        node_of_rank=tuple(rank * load.nodes // load.world for rank in range(load.world)) if load.colocated else (),
    )
    if args.json:
        print_json(overview.numbers())
    else:
        print(overview.text())
    if args.picture:
        draw(args.picture, overview)
        print(f"picture {args.picture}")
    return 0


COMMANDS = {
    "plan": ("print and draw the plan of a recipe; needs no GPU", True, _plan_arguments, _plan),
    "verify": (
        "start policy and engines, refit, and compare their log-probs; exit code 1 if they differ",
        True, lambda parser: None, _verify,
    ),
}  # fmt: skip
