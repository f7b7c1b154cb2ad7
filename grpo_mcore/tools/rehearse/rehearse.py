"""Rehearse a recipe: open its run on a virtual cluster, let the real loop train it, and sum up what it would take."""

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from grpo_mcore.algorithms.grpo import grpo_train
from grpo_mcore.base.processes import available_cores
from grpo_mcore.cluster import is_fault
from grpo_mcore.cluster.virtual_cluster import VirtualClock, VirtualCluster, VirtualWorker
from grpo_mcore.data import build_dataloader, build_train_dataloader
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.driver.engines.engine_group import EngineWorker, FollowerWorker, node_of_engine
from grpo_mcore.driver.policy.policy_worker import PolicyWorker
from grpo_mcore.driver.policy.teacher_engines import TeacherEngineWorker
from grpo_mcore.driver.run.checks import Model
from grpo_mcore.driver.run.run import Prepared, Run, open_run
from grpo_mcore.driver.run.supervise import until_over
from grpo_mcore.environments.interfaces import EnvironmentInterface
from grpo_mcore.families import ModelShape
from grpo_mcore.observe import LEDGER_FILE, audit, read_ledger, read_metrics
from grpo_mcore.observe.run_folder import EventFile
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.recipe import (
    MasterConfig,
    PolicyConfig,
    algorithm_of,
    environment_class,
    policy_layout,
    teacher_policies,
    teacher_ranks,
    world_size,
)
from grpo_mcore.rollout.workers import Rendezvous
from grpo_mcore.tools.plan.run_plan import make_plan, plan_device, plan_shape, teacher_shapes
from grpo_mcore.tools.rehearse.durations import Durations, planned
from grpo_mcore.tools.rehearse.faults import DriverKilled, Fault, Faults
from grpo_mcore.tools.rehearse.modelled_engine import (
    ModelledEngine,
    ModelledFollower,
    ModelledTeacherEngine,
    modelled_node,
)
from grpo_mcore.tools.rehearse.modelled_environment import ModelledEnvironment
from grpo_mcore.tools.rehearse.modelled_policy import Mesh, ModelledRank, ModelledTeacher
from grpo_mcore.tools.rehearse.prompts import ROWS, Tokenizer, modelled_data
from grpo_mcore.tools.rehearse.recording import Recording, measured, scaled
from grpo_mcore.tools.rehearse.world import Cores, World
from grpo_mcore.tools.report.device_seconds import WAITS, device_seconds

LATENCY_S = 0.001
"""Longest time of a message between driver and worker."""
CALIBRATIONS, CALIBRATION_STEPS, MOST_CHANGE, MISS = 8, 16, 1.5, 0.005
"""To find the durations of a recorded run, at most so many rehearsals of so many steps are made. Each changes a factor
by at most MOST_CHANGE, until the relative error is below MISS."""
DEATH_NOTICE_S = 5.0
"""Longest time until the driver hears of a death."""
WAITING_SHARE = 0.05
"""A recorded run that waits longer than this share of its step waits for its engines."""


class RehearsalError(ValueError):
    """A recipe that cannot be rehearsed; the message says why."""


@dataclass(frozen=True)
class Try:
    """A rehearsal of a recorded run with these `factors` of its durations: the `figures` that it gave, and its largest
    relative error, `miss`."""

    factors: dict[str, float]
    figures: dict[str, float]
    miss: float


@dataclass(frozen=True)
class Rehearsal:
    """Predictions of a rehearsal. Times are virtual seconds, but for `driver_cpu` and `cpu`: processor seconds of a
    step on this machine, of the driver alone and with the modelled workers. `step` has mean, median and 95 % of a step;
    `busy` is the share of the devices' time in which they compute."""

    steps: int
    devices: int
    step: tuple[float, float, float]
    phases: dict[str, float]
    tokens_per_second: float
    busy: float
    age: float
    gpu_hours: float
    driver_cpu: float
    cpu: float
    memory: int
    folder: Path
    summary: dict[str, Any]

    @property
    def tokens_per_device(self) -> float:
        return self.tokens_per_second / self.devices


def modelled_recipe(config: MasterConfig, folder: Path, steps: int | None) -> MasterConfig:
    """Return the recipe as it is rehearsed: with files in `folder`, without trackers, tokens in files, exported models
    and servers. Raises RehearsalError for what has no model."""
    if (algorithm := algorithm_of(config)) != "grpo":
        raise RehearsalError(f"the recipe is one of {algorithm}, in which no engine generates: see `grpo-mcore plan`")
    for name, section in config.env.items():
        if environment_class(name, section)[0] in ("nemo_gym", "verifiers"):
            raise RehearsalError(f"env.{name}: a rehearsal has no model of agents yet")
    if config.cluster.backend == "local":
        raise RehearsalError("cluster.backend is local: a run without other processes has nothing to rehearse")
    plain = config.model_dump()
    plain["logger"] |= {"log_dir": str(folder / "logs"), "samples": "none", "monitor_gpus": False, "custom": []}
    plain["logger"] |= {
        f"{name}_enabled": False for name in ("wandb", "tensorboard", "mlflow", "swanlab", "prometheus")
    }
    plain["logger"]["alarms"]["webhook"] = None
    plain["checkpointing"] |= {"checkpoint_dir": str(folder / "checkpoints"), "save_hf": "none", "mirror": None}
    plain["policy"]["refit_parity"] = None
    plain["policy"]["generation"]["vllm_cfg"]["expose_http_server"] = False
    plain["data"]["use_multiple_dataloader"] = False
    plain["policy"]["hf_config_overrides"] = {}  # they are in the model's shape
    plain["cluster"]["platform"] = "auto"
    if steps is not None:
        plain["grpo"]["max_num_steps"] = steps
        plain["ppo"]["policy_training_start_step"] = min(steps - 1, config.ppo.policy_training_start_step)
    return MasterConfig.model_validate(plain)


def planned_durations(config: MasterConfig, shape: ModelShape, mean_tokens: int | None = None) -> Durations:
    """Return the durations that `plan` predicts for a recipe, with `mean_tokens` a sample in place of the recipe's."""
    section, length = config.rehearse, mean_tokens or config.rehearse.mean_tokens
    plan = make_plan(config, shape, plan_device(config, section.device, None), mean_length=length)
    return planned(plan, section.start_seconds, section.save_seconds)


def calibrated(recording: Recording, config_json: str | None = None) -> Recording:
    """Return the recording with its factors. `config_json` is the file of a model that is not known by name. Raises
    RehearsalError."""
    shape = plan_shape(recording.config, config_json)
    with TemporaryDirectory() as scratch, redirect_stdout(StringIO()):
        return replace(recording, factors=calibration(recording, shape, Path(scratch)))


def calibration(recording: Recording, shape: ModelShape, folder: Path) -> dict[str, float]:
    """Return the factors of the planned durations with which a rehearsal of the recorded run takes as long as it did.
    How fast its engines are shows best in how long it waits for them; where it does not, in how long they are asked for
    samples. Raises RehearsalError."""
    config, targets = recording.config, dict(recording.figures)
    step, wait = targets.pop("step"), targets.pop("wait")
    waits = wait > WAITING_SHARE * step
    if waits:
        targets["decode"] = wait
    steps = min(config.grpo.max_num_steps, CALIBRATION_STEPS)
    tried: list[Try] = []
    factors = dict.fromkeys(targets, 1.0)
    for attempt in range(CALIBRATIONS):
        run_folder = folder / f"calibration-{attempt}"
        modelled = modelled_recipe(config, run_folder, steps)
        durations = scaled(planned_durations(config, shape, recording.mean_tokens), factors)
        clock = VirtualClock(config.rehearse.seed)
        world = World(modelled, durations, clock, config.rehearse.seed, recording, shared_cores(config, clock))
        with open_rehearsal(modelled, shape, world, gpu=config.cluster.platform != "cpu") as run:
            grpo_train(**vars(run))
        figures = measured(run.logger.log_dir)
        if waits:
            figures["decode"] = figures["wait"]
        tried.append(Try(factors, figures, miss(targets, figures)))
        if tried[-1].miss < MISS:
            break
        factors = {name: better_factor(targets[name], name, tried) for name in factors}
    return min(tried, key=lambda rehearsal: rehearsal.miss).factors


def shared_cores(config: MasterConfig, clock: VirtualClock) -> Cores | None:
    """Return the cores that the workers of a recipe for CPU share: as many as this machine has."""
    return Cores(clock, available_cores()) if config.cluster.platform == "cpu" else None


def miss(targets: Mapping[str, float], figures: Mapping[str, float]) -> float:
    """Return the largest relative error of what a rehearsal gave."""
    return max(abs(figures.get(name, 0.0) / value - 1) for name, value in targets.items() if value)


def better_factor(target: float, name: str, tried: Sequence[Try]) -> float:
    """Return the factor of a duration after those that were tried, with what each gave: in proportion first, then on
    the line through the last two, for a part of what is measured depends on no factor. What one factor gives depends on
    the others too, so it moves by at most MOST_CHANGE at a time from the second on."""
    factor, now = tried[-1].factors[name], tried[-1].figures.get(name)
    if now is None:
        return factor
    if now == 0:
        return factor * MOST_CHANGE
    if len(tried) == 1:
        return factor * target / now
    before, gave = tried[-2].factors[name], tried[-2].figures.get(name, now)
    rises = (gave - now) * (before - factor) > 0
    better = factor + (target - now) * (before - factor) / (gave - now) if rises else factor * target / now
    return min(max(better, factor / MOST_CHANGE), factor * MOST_CHANGE)


def stand_in_for(world: World) -> Callable[[Any], Callable[..., Any]]:
    """Return the function that gives, for a class of workers, what a new cluster builds in its place."""
    mesh = Mesh(world)
    world.weights = mesh.weights
    teachers = dict[str, Mesh]()

    def rank(
        address: Rendezvous, policy: PolicyConfig, store: Any, seed: int, timeout_s: float, reference: bool,
        platform: str, build_later: bool, trains: bool = True, images: bool = False,
        critic: PolicyConfig | None = None,
    ) -> ModelledRank:  # fmt: skip
        if trains:
            return ModelledRank(mesh, address, policy, store)
        alias = world.teacher(policy)[0]
        group = teachers.get(alias)
        if group is None or group.broken is not None or address.rank in group.ranks:  # it starts, or starts again
            group = teachers[alias] = Mesh(world)
        return ModelledTeacher(group, address, policy, store)

    known: dict[Any, Callable[..., Any]] = {
        EngineWorker: lambda *args: ModelledEngine(world, *args),
        FollowerWorker: lambda *args: ModelledFollower(world, *args),
        node_of_engine: lambda *args: modelled_node(world, *args),
        PolicyWorker: rank,
        TeacherEngineWorker: lambda *args: ModelledTeacherEngine(world, *args),
    }

    def stand_in(cls: Any) -> Callable[..., Any]:
        if cls in known:
            return known[cls]
        if isinstance(cls, type) and issubclass(cls, EnvironmentInterface):
            return lambda *args: ModelledEnvironment(world)
        raise NotImplementedError(f"{cls.__name__}: a rehearsal has no model of this worker")

    return stand_in


@contextmanager
def open_rehearsal(
    config: MasterConfig,
    shape: ModelShape,
    world: World,
    *,
    gpu: bool,
    resume: str | bool | None = None,
    rows: int = ROWS,
    teachers: Mapping[str, ModelShape] | None = None,
    observe: Callable[[VirtualWorker, str], None] = lambda worker, method: None,
    on_cluster: Callable[[VirtualCluster], None] = lambda cluster: None,
) -> Iterator[Run]:
    """Open the run of a modelled recipe on a virtual cluster. `teachers` are the shapes of its teachers, by alias; by
    default those that the recipe names. `on_cluster` gets the cluster before anything starts there."""
    checkpointer = CheckpointManager(config.checkpointing, world.clock)
    checkpointer.open(resume)
    # The platform as `plan` assumes it; nothing asks this machine.
    platform = Platform("gpu", transformer_engine=True) if gpu else Platform("cpu")
    layout = policy_layout(config.policy.megatron_cfg, world_size(config))
    shapes = teacher_shapes(config) if teachers is None else teachers
    layouts = {
        alias: (its.model_name, policy_layout(its.megatron_cfg, teacher_ranks(config, alias)))
        for alias, its in teacher_policies(config).items()
    }
    its_teachers = {alias: Model(name, shapes[alias], its, platform) for alias, (name, its) in layouts.items()}
    data = modelled_data(config, world.prompt_tokens, rows)
    model = Model("modelled", shape, layout, platform, its_teachers)
    prepared = Prepared(config, "grpo", model, checkpointer, Tokenizer(), data, [])
    grpo = config.grpo
    prepared.dataloader = build_train_dataloader(data.train, config.data, grpo.num_prompts_per_step, grpo.seed)
    if data.validation is not None:
        size = grpo.val_batch_size or len(data.validation)
        prepared.val_dataloader = build_dataloader(data.validation, size, False, grpo.seed, drop_last=False)

    def start_cluster(config: MasterConfig, log_dir: Path) -> VirtualCluster:
        cluster = VirtualCluster(
            world.seed,
            stand_in=stand_in_for(world),
            nodes=config.cluster.num_nodes,
            gpus=config.cluster.gpus_per_node,
            call_timeout_s=config.cluster.step_timeout_s,
            latency_s=LATENCY_S,
            death_notice_s=DEATH_NOTICE_S,
            clock=world.clock,
            observe=observe,
        )
        on_cluster(cluster)
        return cluster

    with open_run(prepared, clock=world.clock, start_cluster=start_cluster) as run:
        run.logger.draws_curve = False
        yield run


def rehearse(
    recipe: MasterConfig,
    folder: Path,
    steps: int | None = None,
    *,
    faults: Sequence[Fault] = (),
    config_json: str | None = None,
    recording: Recording | None = None,
) -> Rehearsal:
    """Rehearse a recipe, and return what it predicts. Its run folder is in `folder`/logs. `faults` are let happen;
    without faults that need it, the driver is not restarted. `config_json` is the file of a model that is not known by
    name. The samples and durations of a calibrated `recording` are taken."""
    gpu = recipe.cluster.platform != "cpu"
    shape = plan_shape(recipe, config_json)
    config = modelled_recipe(recipe, folder, steps)
    durations = planned_durations(recipe, shape, None if recording is None else recording.mean_tokens)
    if recording is not None:
        if recording.config.policy.model_name != recipe.policy.model_name:
            raise RehearsalError(
                f"policy.model_name: the recorded run trained {recording.config.policy.model_name}, the recipe "
                f"{recipe.policy.model_name}: its seconds say nothing about another model"
            )
        durations = scaled(durations, recording.factors)
    clock = VirtualClock(config.rehearse.seed, timer=time.thread_time)
    world = World(config, durations, clock, config.rehearse.seed, recording, shared_cores(recipe, clock))
    broken, runs = Faults(faults, world), list[tuple[dict[str, Any], Path]]()

    def attempt(resume: str | bool | None) -> tuple[int, str | None]:
        stop = broken.request()
        try:
            with open_rehearsal(
                config, shape, world, gpu=gpu, resume=resume, observe=broken.observe, on_cluster=broken.attach
            ) as run:
                runs.append((grpo_train(**vars(run), stop=stop), run.logger.log_dir))
        except DriverKilled:
            return 137, "its driver was killed"
        except Exception as error:
            if not faults or not is_fault(error):
                raise
            return 69, str(error).partition("\n")[0]
        finally:
            broken.detach()
        return 0, None

    start = time.process_time()
    until_over(attempt, config, None, verb="rehearse", clock=clock)
    if not runs:
        raise RehearsalError("the run was lost too often (cluster.max_restarts); see its console above")
    summary, logs = runs[-1]
    return summed_up(config, recipe.grpo.max_num_steps, summary, logs, time.process_time() - start, clock.spent)


def summed_up(
    config: MasterConfig, steps_in_all: int, summary: dict[str, Any], logs: Path, cpu_s: float, modelled_s: float
) -> Rehearsal:
    """Sum up a run folder. The recipe has `steps_in_all` steps, of which fewer may be rehearsed. The rehearsal took
    `cpu_s` processor seconds, `modelled_s` of them for the models."""
    rows = list(read_metrics(logs / "metrics.jsonl", "train"))
    steady = rows[1:] or rows  # the first step of a run ahead of its training has more to wait for
    seconds = np.array([row["timing/total"] for row in steady])
    names = [name for name in rows[-1] if name.startswith("timing/") and name.count("/") == 1]
    devices = config.cluster.num_nodes * config.cluster.gpus_per_node
    by_activity = device_seconds(EventFile(logs)).total()
    busy = sum(spent for activity, spent in by_activity.items() if activity not in WAITS)
    mean, steps = float(seconds.mean()), len(rows)
    return Rehearsal(
        steps=steps,
        devices=devices,
        step=(mean, float(np.median(seconds)), float(np.quantile(seconds, 0.95))),
        phases={name[7:]: float(np.mean([row.get(name) or 0.0 for row in steady])) for name in names},
        tokens_per_second=float(sum(row["tokens"] for row in steady) / seconds.sum()),
        busy=busy / max(1e-9, sum(by_activity.values())),
        age=_mean_age(logs, config),
        gpu_hours=steps_in_all * mean * devices / 3600,
        driver_cpu=(cpu_s - modelled_s) / steps,
        cpu=cpu_s / steps,
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        folder=logs,
        summary=summary,
    )


def _mean_age(logs: Path, config: MasterConfig) -> float:
    """Return the mean trajectory age of the groups that were trained on, in weight versions."""
    folder = Path(config.checkpointing.checkpoint_dir) if config.checkpointing.enabled else logs
    ages = audit(read_ledger(folder / LEDGER_FILE)).by_age
    return sum(age * count for age, count in ages.items()) / max(1, sum(ages.values()))
