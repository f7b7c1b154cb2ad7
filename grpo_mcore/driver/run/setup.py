"""Start the workers of a run: the only place where engines, environments, policy and refit meet."""

import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo_mcore.cluster import Cluster, Future, Worker, WorkerFailed, call_all, gather, is_fault, open_cluster
from grpo_mcore.driver.engines.engine_group import EngineGroup, EngineSlot, EngineWorker, node_of_engine
from grpo_mcore.driver.engines.policy_endpoint import REQUESTS, chat_config
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.policy.policy_group import PolicyGroup
from grpo_mcore.driver.policy.policy_worker import PolicyWorker
from grpo_mcore.driver.policy.refit_settings import refit_settings
from grpo_mcore.driver.policy.teacher_engines import TeacherEngines, TeacherEngineWorker
from grpo_mcore.driver.policy.teachers import Teacher, Teachers, teacher_name
from grpo_mcore.driver.rollouts.agent_rollouts import AgentWorker
from grpo_mcore.driver.rollouts.scoring import EnvironmentWorker
from grpo_mcore.driver.run.checks import Model, image_reader, layers_in_bf16
from grpo_mcore.driver.run.environment_checks import calls_of, environment_of
from grpo_mcore.environments.interfaces import EnvironmentBase
from grpo_mcore.families import engine_options
from grpo_mcore.generation import EngineConfig, LoadFormat, engine_environment
from grpo_mcore.layout import DevicePool, EngineDevices
from grpo_mcore.objective import DistillationLossFn, NLLLossFn, PreferenceLossFn, RewardLossFn, build_loss
from grpo_mcore.observe import Logger
from grpo_mcore.observe.machine import MachineMonitor, peak_flops
from grpo_mcore.parallel.platform import Platform, cpu_threads
from grpo_mcore.parallel.policy import LossFn
from grpo_mcore.recipe import (
    FINE_TUNING,
    Algorithm,
    MasterConfig,
    PolicyConfig,
    compares_distributions,
    engine_layout,
    engine_nodes,
    engine_pool,
    needs_prev,
    needs_reference,
    num_engines,
    policy_pool,
    samples_together,
    shares_prefixes,
    teacher_copies,
    teacher_engines,
    teacher_policies,
    teacher_pools,
    uses_images,
)

log = logging.getLogger(__name__)

START_NOTE_S = 9.0
"""Seconds between two messages about workers that are still starting."""
MONITOR_S = 30.0
"""Deadline of asking the monitors for their metrics, in seconds."""
ENGINE_CALLS, ENGINE_STREAMS = 4, 64
"""Threads of an engine's process. Calls: reading a bucket, receiving the next one, health checks, and aborting a refit
that hangs. Streams: one for each dispatch whose samples are under way."""

SCORING_KWARGS = {"max_num_batched_tokens": 2048}
"""Arguments of a teacher's engines on GPUs. vLLM may hold the logits of a whole batch of prompts while it scores them,
and does not count these when it measures how much memory is left for its cache."""


def start_cluster(config: MasterConfig, log_dir: Path) -> Cluster:
    """Start the cluster of the recipe; workers log to `log_dir`/workers."""
    return open_cluster(config.cluster, log_dir / "workers")


def start_policy_and_engines(config: MasterConfig, cluster: Cluster, model: Model) -> tuple[PolicyGroup, EngineGroup]:
    """Start both and wait until they are ready. `model`: from `check_run`.

    On GPUs that they share the engines come first: vLLM measures the free memory while it starts, and fails when a
    neighbour takes some meanwhile. They give their memory away before the policy takes its own.
    """
    engines_first = model.gpu and config.policy.generation.colocated.enabled
    policy = start_policy(config, cluster, model, build_later=engines_first)
    engines = start_engines(config, cluster, model, policy)
    if engines_first:
        wait_until_ready(config, cluster, engines.all_hosts(), "start of the engines")
        engines.release(keep_weights=False)
        policy.build(config.cluster.start_timeout_s)
    wait_until_ready(config, cluster, [*policy.workers, *engines.all_hosts()])
    start_teachers(config, cluster, model, policy)
    return policy, engines


def start_policy(
    config: MasterConfig, cluster: Cluster, model: Model, algorithm: Algorithm = "grpo", *, build_later: bool = False
) -> PolicyGroup:
    """Spawn the policy's ranks. Calls to them wait until they hold their weights; `wait_until_ready` raises their
    errors. `algorithm`: the algorithm that trains it; only GRPO's log-probs are those of a sampler. `build_later`: they
    take no memory before `PolicyGroup.build`."""
    changes: dict[str, Any] = {"model_name": model.folder}
    if config.policy.tokenizer.name == config.policy.model_name:  # the model's own, also where that is on the hub
        changes["tokenizer"] = config.policy.tokenizer.model_copy(update={"name": model.folder})
    if algorithm in FINE_TUNING:  # the data's log-probs: of the whole distribution, at temperature 1
        changes["generation"] = config.policy.generation.model_copy(
            update={"temperature": 1.0, "top_p": 1.0, "top_k": None}
        )
    policy = config.policy.model_copy(update=changes)
    return _spawn_ranks(
        "policy",
        config.model_copy(update={"policy": policy}),
        cluster,
        model,
        reference=algorithm != "sft" and needs_reference(config),
        build_later=build_later,
        images=uses_images(config),
    )


def _spawn_ranks(
    name: str,
    config: MasterConfig,
    cluster: Cluster,
    model: Model,
    *,
    reference: bool = False,
    build_later: bool = False,
    trains: bool = True,
    beside: Sequence[Worker] = (),
    own: DevicePool | None = None,
    images: bool = False,
) -> PolicyGroup:
    """Spawn the ranks of config.policy, whose folder is the model's. `beside`: the ranks on whose devices they are.
    `own`: nodes that they have to themselves; None: the policy's. `images`: samples may have images."""
    critic = None
    if model.critic is not None and config.value is not None:
        critic = config.value.model_copy(update={"model_name": model.critic.folder})
    layout, policy, gpu, pool = model.layout, config.policy, model.gpu, own or policy_pool(config)
    arguments: tuple[Any, ...] = (
        policy, cluster.store, config.grpo.seed, config.cluster.step_timeout_s, reference, config.cluster.platform,
        build_later, trains, images, critic,
    )  # fmt: skip
    workers = cluster.spawn_group(
        name,
        PolicyWorker,
        [arguments] * layout.world_size,
        cpus=1.0 if gpu else 0.1,
        gpus=1.0 if gpu and not beside else 0.0,
        env=rank_environment(config, layout.world_size, gpu=gpu),
        nodes=pool.nodes,
        colocate_with=[[worker] for worker in beside],
    )
    return PolicyGroup(
        cluster,
        workers,
        layout,
        model.shape,
        policy.model_name,
        policy.precision,
        refit_settings(config),
        offloads=own is None
        and (policy.generation.colocated.enabled or policy.offload_optimizer_for_logprob or not trains),
        offloads_for_logprobs=policy.offload_optimizer_for_logprob,
        shares_prefixes=shares_prefixes(policy.sequence_packing, transformer_engine=model.platform.transformer_engine),
    )


def start_teachers(config: MasterConfig, cluster: Cluster, model: Model, policy: PolicyGroup) -> None:
    """Give a policy that is ready the recipe's teachers, if there are any: start them one after another, and move each
    to the host if it shares the policy's devices. Raises what their constructors raise."""
    section, policies, pools = config.on_policy_distillation, teacher_policies(config), teacher_pools(config)
    by_alias, copies = dict[str, Teacher](), teacher_copies(config)
    for alias, its_model in model.teachers.items():
        if copies[alias] != alias:
            by_alias[alias] = by_alias[copies[alias]]
            continue
        recipe = config.model_copy(
            update={"policy": policies[alias].model_copy(update={"model_name": its_model.folder})}
        )
        engines = teacher_engines(config, alias, gpu=its_model.gpu)
        start: Callable[[], PolicyGroup | TeacherEngines]
        if engines is None:
            start = partial(_start_teacher, alias, recipe, cluster, its_model, policy, pools.get(alias))
        else:
            apart = alias in pools
            start = partial(_start_teacher_engines, alias, recipe, cluster, its_model, policy, engines, own=apart)
        restarts = _engine_restarts(config, cluster)
        by_alias[alias] = Teacher(alias, recipe, start, start(), restarts)
    policy.teachers = Teachers(section, by_alias) if by_alias else None
    if by_alias and section.divergence.enabled:
        (teacher,) = model.teachers.values()
        policy.load_teacher_head(teacher.folder)


def _start_teacher(
    alias: str, config: MasterConfig, cluster: Cluster, model: Model, policy: PolicyGroup, pool: DevicePool | None
) -> PolicyGroup:
    """Start a teacher on nodes of its own, or beside the policy, which makes room first, and wait until it is ready.
    `config`: the recipe with the teacher in place of the policy."""
    if pool is None:
        policy.offload()
    beside = policy.workers if pool is None else ()
    teacher = _spawn_ranks(teacher_name(alias), config, cluster, model, trains=False, beside=beside, own=pool)
    wait_until_ready(config, cluster, teacher.workers, f"start of the teacher {alias}")
    teacher.offload()
    return teacher


def _start_teacher_engines(
    alias: str,
    config: MasterConfig,
    cluster: Cluster,
    model: Model,
    policy: PolicyGroup,
    devices: EngineDevices,
    *,
    own: bool,
) -> TeacherEngines:
    """Start a teacher as engines, as `_start_teacher` does. `own`: whether it has nodes of its own."""
    generation, gpu, ranks = config.policy.generation, model.gpu, devices.layout.ranks
    vllm, sleeps = generation.vllm_cfg, gpu and not own
    if not own:
        policy.offload()
    slots = []
    for index in range(devices.count):
        engine = EngineConfig(
            model=model.folder,
            name=f"{teacher_name(alias)}-{index}",
            platform="gpu" if gpu else "cpu",
            dtype=vllm.activations,
            tensor_parallel_size=devices.layout.tensor,
            pipeline_parallel_size=devices.layout.pipeline,
            expert_parallel=devices.layout.expert_parallel,
            max_model_len=vllm.max_model_len,
            enforce_eager=vllm.enforce_eager,
            gpu_memory_utilization=vllm.gpu_memory_utilization,
            kv_cache_memory_gb=vllm.kv_cache_memory_gb,
            sleep_between_phases=sleeps,
            threads=cpu_threads(devices.count * ranks),
            vllm_kwargs=(SCORING_KWARGS if gpu else {}) | _vllm_kwargs(config.policy, model),
            logit_temperature=generation.temperature,
            **engine_options(model.shape, gpu=gpu) | {"prefix_caching": False},  # a prompt that is scored is computed
        )
        worker = cluster.spawn(
            engine.name,
            TeacherEngineWorker,
            engine,
            cluster.store,
            cpus=1.0 if gpu else 0.1,
            gpus=float(ranks) if gpu and own else 0.0,
            env={**engine_environment(engine), **vllm.env_vars},
            concurrency=ENGINE_CALLS,
            colocate_with=policy.workers[index * ranks : (index + 1) * ranks] if sleeps else (),
        )
        slots.append(EngineSlot(worker))
    engines = EngineGroup(
        cluster, slots, sleeps, devices.layout, colocated=not own, start_timeout_s=config.cluster.start_timeout_s
    )
    wait_until_ready(config, cluster, engines.workers, f"start of the teacher {alias}")
    engines.release()
    return TeacherEngines(engines, model.shape, offloads=not own)


def engine_ranks(index: int, config: MasterConfig, *, gpu: bool) -> list[slice]:
    """Return, per node of a colocated engine, the policy ranks that it shares devices with. On CPU: all ranks of that
    node, engines taking nodes in turns; none where there is only one node."""
    pool, nodes = policy_pool(config), engine_nodes(config)
    parts = range(index * nodes, (index + 1) * nodes)
    if gpu:
        ranks = config.policy.generation.vllm_cfg.ranks // nodes
        return [slice(part * ranks, (part + 1) * ranks) for part in parts]
    if pool.nodes == 1:
        return [slice(0)]
    return [slice(part % pool.nodes * pool.per_node, (part % pool.nodes + 1) * pool.per_node) for part in parts]


def rank_environment(config: MasterConfig, ranks: int, *, gpu: bool) -> dict[str, str]:
    """Return the environment variables of a policy rank, to be set before it starts Python; the recipe's win."""
    settings = config.policy.megatron_cfg
    return {
        "OMP_NUM_THREADS": str(rank_threads(config, ranks, gpu=gpu)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_FR_BUFFER_SIZE": "2000",  # the flight recorder: collectives that `grpo-mcore inspect` tells of
        **Platform("gpu" if gpu else "cpu").environment(settings.tensor_model_parallel_size),
        **settings.env_vars,
    }


def _vllm_kwargs(policy: PolicyConfig, model: Model) -> dict[str, Any]:
    """Return the recipe's arguments for vLLM, with the changes to the model's config.json."""
    return policy.generation.vllm_kwargs | ({"hf_overrides": dict(model.hf_overrides)} if model.hf_overrides else {})


def rank_threads(config: MasterConfig, ranks: int, *, gpu: bool) -> int:
    """Return the number of CPU threads of each rank. `ranks`: number of ranks of the policy, or of all engines.
    Colocated policy and engines take turns on the cores; with a pool each they share the cores. On GPUs those of a node
    share its cores; on CPU all ranks do, as all nodes may be on one machine."""
    if gpu:
        return cpu_threads(config.cluster.gpus_per_node)
    pool = engine_pool(config)
    return cpu_threads(ranks if pool is None else policy_pool(config).ranks + pool.ranks)


def start_engines(config: MasterConfig, cluster: Cluster, model: Model, policy: PolicyGroup | None) -> EngineGroup:
    """Spawn the engines on the devices of the policy's ranks, or on devices of their own; they start while the policy
    does. Without a policy they keep the weights of the model.

    `model`: from `check_run`.
    """
    generation, gpu = config.policy.generation, model.gpu
    vllm, nodes = generation.vllm_cfg, engine_nodes(config)
    count, colocated = num_engines(config, gpu=gpu), generation.colocated.enabled
    pauses = config.grpo.async_grpo.pauses
    # An engine that generates while the policy trains cannot give its memory away.
    shares_devices = policy is not None and colocated
    sleeps = gpu and shares_devices and (pauses or not config.grpo.async_grpo.max_age)
    # A run's first command is a refit, which fills every parameter of an engine that serves no adapters.
    first_weights: LoadFormat = "auto" if policy is not None and policy.refit.adapters else "dummy"
    chat = chat_config(config)
    own_tokenizer = config.policy.tokenizer.name == config.policy.model_name
    vllm_kwargs = _vllm_kwargs(config.policy, model)
    images = image_reader(config, model)
    limit = vllm.limit_mm_per_prompt.image if images else 0
    if images:  # a refit brings no tower
        first_weights = "auto"

    def start(index: int) -> Sequence[Worker]:
        """Spawn an engine, and its followers on further nodes if it has several."""
        engine = EngineConfig(
            model=model.folder,
            name=f"engine-{index}",
            tokenizer=None if own_tokenizer else config.policy.tokenizer.name,
            platform="gpu" if gpu else "cpu",
            dtype=vllm.activations,
            quantization=vllm.quantization,
            unquantized=layers_in_bf16(config, model),
            deep_gemm=vllm.use_deep_gemm,
            tensor_parallel_size=vllm.tensor_parallel_size,
            pipeline_parallel_size=vllm.pipeline_parallel_size,
            expert_parallel=vllm.expert_parallel_size > 1,
            max_model_len=vllm.max_model_len,
            load_format=(vllm.load_format or first_weights) if policy is not None else "auto",
            adapter_rank=config.policy.megatron_cfg.peft.dim if policy and policy.refit.adapters else None,
            record_routes=vllm.enable_return_routed_experts or config.policy.router_replay.enabled,
            enforce_eager=vllm.enforce_eager,
            gpu_memory_utilization=vllm.gpu_memory_utilization,
            kv_cache_memory_gb=vllm.kv_cache_memory_gb,
            max_num_seqs=vllm.sequences,
            sleep_between_phases=sleeps,
            threads=rank_threads(config, count * vllm.ranks, gpu=gpu),
            vllm_kwargs=vllm_kwargs,
            chat=chat,
            **engine_options(model.shape, gpu=gpu, images=limit),
        )
        places = (
            [policy.workers[ranks] for ranks in engine_ranks(index, config, gpu=gpu)]
            if policy and shares_devices
            else []
        )
        how: dict[str, Any] = {
            "cpus": 1.0 if gpu else 0.1,
            "gpus": vllm.ranks / nodes if gpu and not shares_devices else 0.0,
            "env": {**engine_environment(engine), **vllm.env_vars},
            "concurrency": ENGINE_CALLS,
            "streams": ENGINE_STREAMS + (REQUESTS if chat else 0),
        }
        if nodes == 1:
            neighbours = places[0] if places else ()
            return [cluster.spawn(engine.name, EngineWorker, engine, cluster.store, colocate_with=neighbours, **how)]
        arguments = engine, cluster.store, secrets.token_hex(16)
        return cluster.spawn_group(
            engine.name, node_of_engine, [arguments] * nodes, nodes=nodes, colocate_with=places, **how
        )

    started = [start(index) for index in range(count)]
    return EngineGroup(
        cluster,
        [EngineSlot(engine, followers) for engine, *followers in started],
        sleeps,
        engine_layout(config),
        colocated=colocated,
        pauses=pauses,
        images=images,
        start=start,
        start_timeout_s=config.cluster.start_timeout_s,
        restarts=_engine_restarts(config, cluster),
    )


def start_environments(
    config: MasterConfig, cluster: Cluster, env_names: Mapping[str, str | None], tokenizer: Any
) -> dict[str, EnvironmentWorker]:
    """Start one worker for each environment. Return task name -> worker. `tokenizer`: the policy's, of transformers.

    Some keys of a section are read here, not by the environment's class: `environment`, the name or import path of the
    class if it differs from the section's name, `verdict_timeout_s`, the deadline of one call, and `concurrency` and
    `batch` (see `calls_of`). Raises SetupError for a wrong value of these, and for a task without an environment unless
    the recipe has exactly one.
    """
    workers: dict[str, EnvironmentWorker] = {}
    by_task = {}
    for task, name in env_names.items():
        cls, section, timeout_s = environment_of(task, name, config)
        if str(name) not in workers:
            section = dict(cls.completed(section, tokenizer))
            workers[str(name)] = _start_environment(str(name), cls, section, timeout_s, config, cluster)
        by_task[task] = workers[str(name)]
    return by_task


def _start_environment(
    name: str,
    cls: type[EnvironmentBase],
    section: dict[str, Any],
    timeout_s: float,
    config: MasterConfig,
    cluster: Cluster,
) -> EnvironmentWorker:
    needs, gpu = cls.resources(section), Platform.detect(config.cluster.platform).on_gpu
    calls, batch = calls_of(name, cls, section, config)
    sample_timeout_s = cls.sample_timeout_s(section)
    runs_agents = sample_timeout_s is not None
    built = (AgentWorker, cls, section) if runs_agents else (cls, section)

    def start() -> Worker:
        return cluster.spawn(
            f"environment-{name}",
            *built,
            cpus=needs["cpus"] if gpu else 0.1,
            gpus=needs["gpus"] if gpu else 0.0,
            concurrency=calls,
            streams=REQUESTS if runs_agents else 0,
        )

    if sample_timeout_s is not None:
        timeout_s = sample_timeout_s
    return EnvironmentWorker(cluster, start, calls=calls, timeout_s=timeout_s, runs_agents=runs_agents, batch=batch)


def wait_until_ready(
    config: MasterConfig, cluster: Cluster, workers: Sequence[Worker], what: str = "start of policy and engines"
) -> None:
    """Wait until all workers are constructed, and log how long each kind took and what late ones are doing. Raises what
    a constructor raised, or DeadlineExceeded after cluster.start_timeout_s."""
    clock = cluster.clock
    began = said = clock.now()
    starting = [worker.name for worker in workers]

    def ready(future: Future) -> None:
        starting.remove(future.whom)
        kind = _kind(future.whom)
        if kind not in map(_kind, starting):
            spawning = max(worker.spawn_seconds for worker in workers if _kind(worker.name) == kind)
            log.info("  %s: ready after %.0f s", kind, clock.now() - began + spawning)

    def watch() -> None:
        nonlocal said
        if clock.now() - said >= START_NOTE_S:
            said, late = clock.now(), starting[0]
            others = f" and {len(starting) - 1} more" if starting[1:] else ""
            log.info("  still starting after %.0f s: %s%s: %s", said - began, late, others, cluster.last_log_line(late))

    gather(
        cluster, [worker.ready() for worker in workers], timeout_s=config.cluster.start_timeout_s, purpose=what,
        on_result=ready, watch=watch,
    )  # fmt: skip


def _engine_restarts(config: MasterConfig, cluster: Cluster) -> Retries:
    """Return how often engines may die in a row. A request to stop ends the wait for the next start."""
    tolerated, wait_s = config.cluster.max_engine_restarts, config.cluster.retry_wait_s
    return Retries(tolerated, wait_s, cluster.clock, lambda: cluster.watch())


def _kind(worker: str) -> str:
    """Return what a worker is, such as "policy" for policy-3."""
    return re.sub(r"(-\d+)+$", "", worker)


def make_loss(config: MasterConfig, algorithm: Algorithm = "grpo") -> LossFn:
    """Build the recipe's loss. With one optimizer step per RL step, GRPO's log-probs before the update are those of the
    training pass itself."""
    if compares_distributions(config):
        return DistillationLossFn(config.on_policy_distillation.divergence)
    if algorithm == "sft":
        return NLLLossFn()
    if algorithm == "dpo":
        return PreferenceLossFn(config.dpo)
    if algorithm == "rm":
        return RewardLossFn(pairs=samples_together(config, algorithm) == 2)
    return build_loss(config.loss_fn, prev_equals_curr=not needs_prev(config), max_age=config.grpo.async_grpo.max_age)


def watch_machines(config: MasterConfig, cluster: Cluster, logger: Logger) -> None:
    """Start a monitor on each node, whose metrics the logger takes with each step. A monitor that is lost ends the
    monitoring, not the run."""
    nodes, interval = config.cluster.num_nodes, config.logger.gpu_monitoring.collection_interval
    monitors = cluster.spawn_group("monitor", MachineMonitor, [(interval,)] * nodes, cpus=0.01, nodes=nodes)
    start_s, purpose = config.cluster.start_timeout_s, "start of the monitors"
    names = call_all(cluster, monitors, MachineMonitor.gpu_names, timeout_s=start_s, purpose=purpose)()
    peaks = [peak_flops(name) for node in names for name in node]
    logger.peak_flops = peaks[0] if peaks else None

    def take() -> dict[str, float]:
        try:
            taken = call_all(cluster, monitors, MachineMonitor.take, timeout_s=MONITOR_S, purpose="machine metrics")()
        except Exception as error:
            if not (isinstance(error, WorkerFailed) or is_fault(error)):
                raise
            log.warning("the machines are not monitored any more: %s", str(error).partition("\n")[0])
            logger.machines = dict
            return {}
        return {f"node.{node}.{name}": value for node, values in enumerate(taken) for name, value in values.items()}

    logger.machines = take
