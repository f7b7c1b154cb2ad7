"""`LaunchSpec`: everything a launcher needs to know about a run, derived from its recipe alone."""

import math
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import grpo_mcore
from grpo_mcore.base.processes import HUB_VARIABLES
from grpo_mcore.families import FamilyError
from grpo_mcore.layout import LayoutError
from grpo_mcore.recipe import (
    LaunchConfig,
    MasterConfig,
    Recipe,
    algorithm_of,
    divides_nodes,
    environment_class,
    only_evaluates,
    resolved_yaml,
    runs_grpo,
    shown,
)
from grpo_mcore.recipe.schema.master import set_value_at
from grpo_mcore.tools.launch.validation import (
    RECIPE_FOLDER,
    Target,
    carried_texts,
    code_files,
    is_below,
    seconds,
    validate,
)
from grpo_mcore.tools.plan.memory import fits_device, memory, node_memory
from grpo_mcore.tools.plan.run_hours import SOURCE
from grpo_mcore.tools.plan.run_plan import plan_device, plan_shape, plan_workload
from grpo_mcore.tools.plan.timing import step_time
from grpo_mcore.tools.plan.workload import PlanError

FROM_SUBMITTER = (*HUB_VARIABLES, "XDG_CACHE_HOME", "LD_LIBRARY_PATH", "CUDA_HOME", "HF_TOKEN", "WANDB_API_KEY")
"""Variables of the submitting shell that a job inherits if they are set, in addition to those of cluster.env_vars."""

FOR_MIRROR = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
    "GOOGLE_APPLICATION_CREDENTIALS",
)
"""Further variables that a job with checkpointing.mirror inherits. Only their names are in the script."""

FOR_TRACKERS = {
    "wandb_enabled": ("WANDB_BASE_URL", "WANDB_MODE", "WANDB_ENTITY"),
    "mlflow_enabled": (
        *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    ),
    "swanlab_enabled": ("SWANLAB_API_KEY",),
}
"""Further variables that a job inherits whose recipe sets this key of `logger`."""

DEFAULT_MEMORY = 512
"""Memory of a node in GiB where `plan` predicts none."""
LEAST_MEMORY = 256
"""Least memory of a node in GiB that is asked for: driver, datasets and Ray's object store are in no plan."""
LONGEST = 4 * 3600
"""Wall-clock limit of a job in seconds, if the recipe has none and the run is longer."""

LAUNCH_KEY = re.compile(r"[+~]*launch\.(?!env\b)")
"""Beginning of an override that a job's own command does not need. launch.env is read as cluster.env_vars."""


@dataclass(frozen=True)
class Pool:
    """A number of equal nodes. `gpus_per_node` is 0 on CPU."""

    name: str
    nodes: int
    gpus_per_node: int


@dataclass(frozen=True)
class LaunchSpec:
    """A job. `launch` is that section of the recipe, `memory_gb` the memory of each node in GiB; `restarts` is 0 if the
    run writes no checkpoint to resume from. `variables` are set in the job's environment.

    `recipe_yaml` is the resolved recipe. `texts` holds, on Kubernetes, whose nodes do not see the checkout, the text
    files that the recipe names and those of launch.code, as (name in RECIPE_FOLDER, content). `sandboxes` says whether
    programs run in sandboxes, which need namespaces of their own. `code` is this package's version and revision.
    """

    name: str
    pools: tuple[Pool, ...]
    from_submitter: tuple[str, ...]
    verb: str
    recipe_file: str
    overrides: tuple[str, ...]
    recipe_yaml: str
    texts: tuple[tuple[str, str], ...]
    restarts: int
    start_timeout_s: int
    launch: LaunchConfig
    variables: Mapping[str, str]
    memory_gb: int
    time_limit: str
    sandboxes: bool = False
    metrics_port: int | None = None
    """Port at which the driver serves Prometheus; None: it does not."""
    code: str = ""
    notes: tuple[str, ...] = ()
    """Remarks for the person who launches it: values taken from the plan, and values that do not agree with it."""

    @property
    def nodes(self) -> int:
        return sum(pool.nodes for pool in self.pools)

    def command(self, recipe: str, overrides: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the command that trains. It resumes if there is a checkpoint, so a restart is the same command."""
        resume = ("--resume=auto",) if self.restarts else ()
        return ("grpo-mcore", self.verb, recipe, *overrides, *resume)


def launch_spec(recipe: Recipe, target: Target) -> LaunchSpec:
    """Return the job of a recipe. Raises RecipeError with every problem that would only show up later on `target`."""
    memory_gb, time_limit, notes = planned(recipe.config)
    filled = {"memory_gb_per_node": memory_gb, "time_limit": time_limit}
    launch = recipe.config.launch.model_copy(update=filled)
    config = recipe.config.model_copy(update={"launch": launch})
    validate(replace(recipe, config=config), target)
    texts: tuple[tuple[str, str], ...] = ()
    if target == "k8s":
        travelling, texts = _with_texts(recipe.config)
        recipe = replace(recipe, config=travelling)
    cluster = config.cluster
    resumes = config.checkpointing.enabled and algorithm_of(config) != "eval"
    return LaunchSpec(
        name=launch.name or job_name(recipe.path.stem),
        pools=pools(config),
        from_submitter=_from_submitter(config),
        verb="train" if runs_grpo(config) else algorithm_of(config),
        recipe_file=shown(recipe.path),
        overrides=tuple(word for word in recipe.overrides if not LAUNCH_KEY.match(word)),
        recipe_yaml=resolved_yaml(recipe, sources=False, without=frozenset({"launch"})),
        texts=texts,
        restarts=launch.max_restarts if resumes else 0,
        start_timeout_s=int(cluster.start_timeout_s),
        launch=launch,
        variables={name: text for name, text in sorted(cluster.env_vars.items()) if text is not None},
        memory_gb=memory_gb,
        time_limit=time_limit,
        sandboxes=any(
            environment_class(name, section)[0] == "code" and section.get("sandbox") != "none_i_trust_the_code"
            for name, section in config.env.items()
        ),
        metrics_port=config.logger.prometheus.port if config.logger.prometheus_enabled else None,
        code=code_revision(),
        notes=notes,
    )


def _from_submitter(config: MasterConfig) -> tuple[str, ...]:
    """Return the names of the variables that the job inherits."""
    names = [*FROM_SUBMITTER, *(FOR_MIRROR if config.checkpointing.mirror else ())]
    for key, more in FOR_TRACKERS.items():
        names += more if getattr(config.logger, key) else ()
    return tuple(dict.fromkeys([*names, *(name for name, text in config.cluster.env_vars.items() if text is None)]))


def planned(config: MasterConfig) -> tuple[int, str, tuple[str, ...]]:
    """Return the memory of a node in GiB, the time limit, and remarks about both. What the recipe leaves open follows
    from its plan on an H100: the memory of a host depends little on its device."""
    launch, notes = config.launch, list[str]()
    memory_gb, limit = launch.memory_gb_per_node, launch.time_limit
    try:
        shape, device = plan_shape(config), plan_device(config, None)
        load = plan_workload(config, shape, device)
        engine, stages = memory(load, device)
        step_s = step_time(load, device, engine, None).likely
    except (PlanError, FamilyError, LayoutError) as error:
        notes.append(f"memory and time are not from a plan: {error}")
        needed, run_s, fits = 0, 0.0, True
    else:
        needed, fits = node_memory(load, stages, engine, device), fits_device(stages, engine, load, device)
        steps = 0 if only_evaluates(config) else config[algorithm_of(config)].max_num_steps
        run_s = (steps or 0) * step_s if device.memory is not None else 0.0
    if not fits:
        notes.append("plan says that this does not fit an H100 server; grpo-mcore plan shows what is lacking")
    if memory_gb is None:
        memory_gb = 64 * math.ceil(1.25 * needed / 2**30 / 64) or DEFAULT_MEMORY
        memory_gb = max(memory_gb, LEAST_MEMORY)
        if needed:
            notes.append(f"launch.memory_gb_per_node={memory_gb} is taken: plan predicts {needed / 2**30:,.0f} GiB")
    start = launch.save_before_end_s + config.cluster.start_timeout_s
    if limit is None:
        hours = math.ceil((1.5 * run_s + start) / 3600) if run_s else LONGEST // 3600
        hours = max(min(hours, LONGEST // 3600), math.ceil((start + 1800) / 3600))
        limit = f"{hours:02d}:00:00"
        jobs = math.ceil(run_s / max(1, seconds(limit) - start))
        after = f", in about {jobs} jobs, each of which goes on from the one before" if jobs > 1 else ""
        usual = f"{run_s / 3600:,.1f} h for all steps ({SOURCE})"
        reason = f": plan predicts {usual}{after}" if run_s else ""
        notes.append(f"launch.time_limit={limit} is taken{reason}")
    resumes = launch.max_restarts + 1 if config.checkpointing.enabled else 1
    training_s = resumes * max(0, seconds(limit) - start)
    if run_s > training_s:
        notes.append(
            f"plan predicts {run_s / 3600:,.1f} h for all steps, and {resumes} job{'s' if resumes > 1 else ''} of "
            f"{limit} train for {training_s / 3600:,.1f} h: raise launch.max_restarts or launch.time_limit"
        )
    return memory_gb, limit, tuple(notes)


def code_revision() -> str:
    """Return this package's version, and in a checkout its commit and whether files differ from it."""
    version, folder = f"grpo-mcore {grpo_mcore.__version__}", Path(grpo_mcore.__file__).parent
    describe = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--abbrev=12",
        "--dirty=, with changes",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):  # no git
        return version
    return f"{version}, commit {done.stdout.strip()}" if done.returncode == 0 else version


def pools(config: MasterConfig) -> tuple[Pool, ...]:
    """Return one pool if policy and engines share nodes; else `policy` and `engines`, together cluster.num_nodes."""
    cluster, colocated = config.cluster, config.policy.generation.colocated
    gpus = 0 if cluster.platform == "cpu" else cluster.gpus_per_node
    engines = colocated.resources.num_nodes
    if colocated.enabled or not engines or divides_nodes(config):
        return (Pool("workers", cluster.num_nodes, gpus),)
    engine_gpus = 0 if cluster.platform == "cpu" else colocated.resources.gpus_per_node or gpus
    return (Pool("policy", cluster.num_nodes - engines, gpus), Pool("engines", engines, engine_gpus))


def job_name(stem: str) -> str:
    """Return a name that Slurm and Kubernetes accept, made from a file's name."""
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return (name if name[:1].isalpha() else f"grpo-{name}")[:40].rstrip("-")


def _with_texts(config: MasterConfig) -> tuple[MasterConfig, tuple[tuple[str, str], ...]]:
    """Return the recipe as pods read it, which names its text files in RECIPE_FOLDER, and these files and those of
    launch.code as (name in RECIPE_FOLDER, content)."""
    travelling, files = config.model_copy(deep=True), {name: Path(name) for name in code_files(config.launch.code)}
    for path, file in carried_texts(config).items():
        name = file.as_posix() if is_below(file.as_posix()) else f"texts{file.resolve()}"
        files[name] = file
        set_value_at(travelling, path, f"{RECIPE_FOLDER}/{name}")
    return travelling, tuple((name, file.read_text(encoding="utf-8")) for name, file in sorted(files.items()))
