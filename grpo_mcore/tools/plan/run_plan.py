"""`make_plan`: a recipe's batch, layout, memory, time and refit, and warnings with the key to change."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_mcore.families import ModelShape, from_key, parameter_count, read_hf_config, shape_of, with_overrides
from grpo_mcore.families.activations import Kernels
from grpo_mcore.families.known import known_config, known_configs
from grpo_mcore.recipe import MasterConfig, batch_equation, teacher_policies
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.tools.plan.memory import (
    CLOSE,
    EngineMemory,
    StageMemory,
    engines_share,
    fits_device,
    memory,
    node_memory,
)
from grpo_mcore.tools.plan.timing import RefitTraffic, StepTime, refit_traffic, step_time
from grpo_mcore.tools.plan.workload import DEVICES, GIB, Device, PlanError, Workload, workload_of

MEGATRON = "policy.megatron_cfg."
VLLM = "policy.generation.vllm_cfg."
ROOM = (0.6, 0.5, 0.4, 0.3)
"""Values of gpu_memory_utilization to try in place of a larger one, for what is to stay beside the engines."""


@dataclass(frozen=True)
class Plan:
    """Everything that can be predicted of a run, in bytes, FLOPs and seconds."""

    model: str
    batch: str
    load: Workload
    device: Device
    engine: EngineMemory
    stages: tuple[StageMemory, ...]
    times: StepTime
    refit: RefitTraffic | None
    warnings: tuple[str, ...]
    """Each says what is wrong and which key changes it."""
    suggestions: tuple[str, ...] = ()
    """Each names keys that would make a step faster, and its seconds with them."""

    @property
    def fits(self) -> bool:
        possible = self.refit is not None or not self.load.grpo
        return possible and fits_device(self.stages, self.engine, self.load, self.device)

    @property
    def node_memory(self) -> int:
        """Bytes of host memory that a node of the policy needs; 0 on CPU."""
        return node_memory(self.load, self.stages, self.engine, self.device)

    @property
    def bottleneck(self) -> str:
        """Name the slowest phase and what it spends its time on."""
        slowest, total = self.times.slowest, self.times.likely
        return (
            f"{slowest.name} takes {slowest.likely / total:.0%} of a step (about {slowest.likely:.3g} s of "
            f"{total:.3g} s), and most of that is {slowest.bound}"
        )

    def plain(self) -> dict[str, Any]:
        """Return the plan as plain values, for --json."""
        load, layout = self.load, self.load.layout
        return {
            "model": self.model,
            "parameters": parameter_count(load.shape),
            "batch": self.batch,
            "device": asdict(self.device),
            "layout": asdict(layout) | {"world_size": layout.world_size, "describe": layout.describe()},
            "mean_length": load.mean_length,
            "computed_tokens": load.computed,
            "micro_batches": load.micro_batches,
            "stages": [
                {
                    "stage": stage.stage,
                    "ranks": list(ranks_of(load, stage.stage)),
                    "layers": [[chunk.start, chunk.stop] for chunk in load.chunks[stage.stage]],
                    "parameters": load.params(stage.stage).numel,
                    "expert_parameters": load.params(stage.stage).expert_numel,
                    "memory": {phase.name: phase.parts | {"total": phase.total} for phase in stage.phases},
                    "peak": stage.peak.name,
                    "host": stage.host.parts | {"total": stage.host.total},
                }
                for stage in self.stages
            ],
            "engine": asdict(self.engine) | {"longest_samples_at_once": self.engine.sequences(load.max_length)}
            if load.grpo
            else None,
            "teachers": [
                {"alias": teacher.alias, "parameters": parameter_count(teacher.load.shape),
                 "layout": teacher.load.layout.describe(), "backend": "vllm" if teacher.engines else "megatron"}
                for teacher in load.teachers
            ],
            "time": {"phases": [asdict(phase) for phase in self.times.phases], "likely": self.times.likely,
                     "pipeline_bubble": self.times.bubble},
            "refit": asdict(self.refit) if self.refit else None,
            "node_memory": self.node_memory,
            "fits": self.fits,
            "bottleneck": self.bottleneck,
            "warnings": list(self.warnings),
            "suggestions": list(self.suggestions),
        }  # fmt: skip


def ranks_of(load: Workload, stage: int) -> range:
    """Return the policy ranks of a pipeline stage. The order of ranks is tensor, context, data, pipeline."""
    count = load.layout.stage_size
    return range(stage * count, (stage + 1) * count)


def plan_device(
    config: MasterConfig, name: str | None, memory_gb: float | None = None, host_memory_gb: float | None = None
) -> Device:
    """Return the device called `name`, with `memory_gb` (10^9 bytes) of memory if given. Without a name it is cpu if
    cluster.platform is cpu, else an H100. `host_memory_gb` is the host memory of a node, in 10^9 bytes, by default
    launch.memory_gb_per_node, or what NVIDIA's servers with this device have. Raises PlanError."""
    name = name or ("cpu" if config.cluster.platform == "cpu" else "H100")
    device = next((device for known, device in DEVICES.items() if known.lower() == name.lower()), None)
    if device is None:
        raise PlanError(f"--device {name}: known are {', '.join(DEVICES)}; for another, the nearest with --memory-gb")
    if memory_gb is not None:
        device = replace(device, memory=int(memory_gb * 1e9))
    if host_memory_gb is not None:
        return replace(device, host_memory=int(host_memory_gb * 1e9))
    if config.launch.memory_gb_per_node is not None and device.host_memory is not None:
        return replace(device, host_memory=config.launch.memory_gb_per_node * GIB)
    return device


def plan_shape(config: MasterConfig, config_json: str | Path | None = None) -> ModelShape:
    """Return the model's shape: from `config_json`, from its folder, or by its name. Raises PlanError, FamilyError."""
    return shape_of(plan_config(config, config_json))


def teacher_shapes(config: MasterConfig) -> dict[str, ModelShape]:
    """Return the shape of each of the recipe's teachers, by alias: from its folder or by its name. Raises as
    `plan_shape`."""
    return {
        alias: shape_of(
            plan_config(
                config.model_copy(update={"policy": policy}),
                key=f"on_policy_distillation.teacher_model_by_agent_name.{alias}",
            )
        )
        for alias, policy in teacher_policies(config).items()
    }


def critic_shape(config: MasterConfig, policy: ModelShape) -> ModelShape | None:
    """Return the shape of the recipe's critic, None without one. `policy`: the policy's. Raises as `plan_shape`."""
    if config.value is None or not config.ppo.enabled:
        return None
    if config.value.model_name == config.policy.model_name:
        return replace(policy, head="value", tied_embeddings=False)
    return shape_of(plan_config(config.model_copy(update={"policy": config.value}), key="value.model_name"), "value")


def plan_config(
    config: MasterConfig, config_json: str | Path | None = None, key: str = "policy.model_name"
) -> dict[str, Any]:
    """Return the model's Hugging Face config: from `config_json`, from its folder, or by its name. `key` of
    the recipe names it. Raises PlanError, and WeightsError if the folder's weights are not those of its config."""
    name = config.policy.model_name
    if config_json is not None:
        path = Path(config_json)
        if not path.is_file():
            raise PlanError(f"--config-json {path}: no such file")
        return read_hf_config(path, config.policy.hf_config_overrides)
    if Path(name).is_dir():
        with from_key(key):
            settings = read_hf_config(name, config.policy.hf_config_overrides)
            if any(Path(name).glob("*.safetensors")):  # a folder with its config.json alone can be planned too
                from grpo_mcore.parallel.weights.hf_folder import check_weights  # imports torch

                check_weights(Path(name), shape_of(settings, config.policy.head), required=False)
        return settings
    if (known := known_config(name)) is None:
        remedy = "name a folder that holds its config.json"
        if key == "policy.model_name":
            remedy = "give its Hugging Face config.json with --config-json PATH"
        raise PlanError(
            f"{key} {name!r} is neither a folder here nor among the models known by name "
            f"({', '.join(known_configs())}); {remedy}"
        )
    return with_overrides(known, config.policy.hf_config_overrides)


def check_plan(config: MasterConfig) -> None:
    """Raise what `plan` refuses a recipe with, if its models are known here: as folders, or by name."""
    try:
        shape, teachers = plan_shape(config), teacher_shapes(config)
    except PlanError:
        return
    plan_workload(config, shape, plan_device(config, None), teachers=teachers)


def plan_workload(
    config: MasterConfig,
    shape: ModelShape,
    device: Device,
    *,
    mean_length: int | None = None,
    kernels: Kernels | None = None,
    teachers: Mapping[str, ModelShape] | None = None,
) -> Workload:
    """Return a recipe's step on a device. `teachers` are shapes by alias, by default those that the recipe names.
    Raises what `workload_of` raises, and for a teacher what `plan_shape` does."""
    kernels = kernels or ("cpu" if device.name == "cpu" else "transformer_engine")
    teachers = teacher_shapes(config) if teachers is None else teachers
    critic = critic_shape(config, shape)
    return workload_of(config, shape, kernels=kernels, mean_length=mean_length, teachers=teachers, critic=critic)


def make_plan(
    config: MasterConfig,
    shape: ModelShape,
    device: Device,
    *,
    mean_length: int | None = None,
    kernels: Kernels | None = None,
    teachers: Mapping[str, ModelShape] | None = None,
) -> Plan:
    """Plan a recipe; arguments and errors are those of `plan_workload`. If no refit is possible, the plan has a warning
    and does not fit."""
    load = plan_workload(config, shape, device, mean_length=mean_length, kernels=kernels, teachers=teachers)
    engine, stages = memory(load, device)
    warnings, traffic = [], None
    if load.grpo:
        try:
            traffic = refit_traffic(load)
        except RefitError as error:
            warnings.append(f"no refit: {error}")
    times = step_time(load, device, engine, traffic)
    warnings += [*_memory(load, device, stages), *_host(load, device, stages, engine)]
    warnings += [*_engines(load, device, engine), *_layout(load, times)]
    if traffic is not None and traffic.buckets > 64:
        warnings.append(f"{traffic.buckets} refit buckets: a larger policy.refit_buffer_size_gb makes fewer of them")
    faster, model = tuple(_suggestions(load, device, times, traffic)), config.policy.model_name
    return Plan(model, batch_equation(config), load, device, engine, stages, times, traffic, tuple(warnings), faster)


def _suggestions(load: Workload, device: Device, times: StepTime, traffic: RefitTraffic | None) -> Iterator[str]:
    """Yield what would take less time than now, with the share of an engine's memory that leaves room for it."""
    if device.memory is None or not (load.grpo and load.colocated and load.engines_sleep):
        return
    staying = {"policy.offload_optimizer_for_generation: false": replace(load, keeps_optimizer=True)}
    ahead = {
        "one step ahead (grpo.async_grpo with max_trajectory_age_steps: 1, partial_rollouts: true)": replace(
            load, waits_for_longest=False
        )
    }
    changes = ({} if load.keeps_optimizer or load.offloads else staying) | (ahead if load.waits_for_longest else {})
    for keys, changed in changes.items():
        for share in (load.engine_share, *(share for share in ROOM if share < load.engine_share)):
            option = replace(changed, engine_share=share)
            engine, stages = memory(option, device)
            seconds = step_time(option, device, engine, traffic).likely
            room = max(stage.peak.total for stage in stages) <= CLOSE * device.memory
            if room and fits_device(stages, engine, option, device) and seconds < 0.99 * times.likely:
                beside = "" if share == load.engine_share else f" with {VLLM}gpu_memory_utilization: {share:g}"
                yield f"{keys}{beside}: {seconds:.3g} s a step, {times.likely / seconds:.2f} times as fast"
                break


def _memory(load: Workload, device: Device, stages: Sequence[StageMemory]) -> Iterator[str]:
    if device.memory is None:
        return
    for stage in stages:
        peak = stage.peak
        share = peak.total / device.memory
        if share <= CLOSE:
            continue
        largest = max(peak.parts, key=lambda part: peak.parts[part])
        state = "does not fit" if share > 1 else "is close to the limit"
        yield (
            f"stage {stage.stage} {state}: {peak.name} needs {peak.total / 1e9:.1f} of {device.memory / 1e9:.0f} GB, "
            f"most of it {largest} ({peak.parts[largest] / 1e9:.1f} GB); {_remedy(peak.name, largest, load)}"
        )


def _host(load: Workload, device: Device, stages: Sequence[StageMemory], engine: EngineMemory) -> Iterator[str]:
    needed = node_memory(load, tuple(stages), engine, device)
    if device.host_memory is None or needed <= device.host_memory:
        return
    parts = max(stages, key=lambda stage: stage.host.total).host.parts
    largest = max(parts, key=lambda part: parts[part], default="processes")
    remedy = {
        "updated there": f"lower {MEGATRON}optimizer.optimizer_offload_fraction, or add nodes",
        "a checkpoint, while it is written": f"set {MEGATRON}dist_ckpt_optim_fully_reshardable: false",
        "reference, and weights in its place": "set loss_fn.reference_policy_kl_penalty: 0",
    }.get(largest, "add nodes")
    if largest.startswith("a checkpoint") and not load.gathers:
        remedy = "add nodes"
    yield (
        f"a node's host memory does not suffice: {needed / 1e9:,.0f} of {device.host_memory / 1e9:,.0f} GB, most of it "
        f"{largest}; {remedy}, or say with --host-memory-gb or launch.memory_gb_per_node what a node has"
    )


def _remedy(phase: str, part: str, load: Workload) -> str:
    if phase == "generation" or part in ("KV cache", "engine overhead"):
        return f"lower {VLLM}gpu_memory_utilization (now {load.engine_share:g})"
    if part == "activations" and not (load.recompute or load.recomputed):
        return f"set {MEGATRON}activation_checkpointing: true, or lower policy.sequence_packing.train_mb_tokens"
    if part == "activations":
        return "lower policy.sequence_packing.train_mb_tokens"
    if part == "logits":
        return f"raise {MEGATRON}tensor_model_parallel_size, or lower policy.logprob_chunk_size"
    if part == "gradients" and load.gradient > load.element:
        return (
            f"raise {MEGATRON}tensor_model_parallel_size or pipeline_model_parallel_size, or set "
            f"{MEGATRON}distributed_data_parallel_config.grad_reduce_in_fp32: false"
        )
    if part == "optimizer":
        return (
            "add data-parallel ranks (cluster.num_nodes), over which the optimizer is split, or set "
            f"{MEGATRON}optimizer.optimizer_cpu_offload: true"
        )
    if part == "engine weights":
        return f"raise {VLLM}tensor_parallel_size"
    if phase == "teachers":
        section = "on_policy_distillation.non_colocated_teachers.default_teacher_cfg."
        return f"raise {section}tensor_model_parallel_size, or lower {section}micro_batch_size"
    return f"raise {MEGATRON}tensor_model_parallel_size or pipeline_model_parallel_size"


def _engines(load: Workload, device: Device, engine: EngineMemory) -> Iterator[str]:
    if not load.grpo:
        return
    together = engine.sequences(load.max_length)
    samples = -(-load.samples // load.engines)
    key = f"{VLLM}gpu_memory_utilization" if load.kv_cache is None else f"{VLLM}kv_cache_memory_gb"
    if together < 1:
        yield (
            f"an engine's KV cache cannot hold one sample of {load.max_length:,} tokens: raise {key} or "
            f"{VLLM}tensor_parallel_size"
        )
    elif together < min(samples, load.max_sequences) // 4:
        yield f"an engine's KV cache holds {together} longest samples of the {samples} it gets: raise {key}"
    if engine.receiver and (share := engines_share(load, engine, device)) > 1:
        yield (
            f"a refit needs {engine.receiver / 1e9:.1f} GB more on the first GPU of an engine, for a bucket and NCCL: "
            f"{share:.0%} of its memory in all; lower {key} or policy.refit_buffer_size_gb"
        )
    used = load.engines * load.engine_layout.ranks
    if load.colocated and load.kernels != "cpu" and used < load.world:
        yield (
            f"the engines use {used} of {load.world} accelerators: policy.generation.num_engines {load.engines} x "
            f"{load.engine_layout.describe()}"
        )


def _layout(load: Workload, times: StepTime) -> Iterator[str]:
    tensor = load.layout.tensor
    if tensor > load.gpus_per_node:
        yield (
            f"{MEGATRON}tensor_model_parallel_size {tensor} crosses nodes of {load.gpus_per_node}: every layer waits "
            "for the network; use pipeline_model_parallel_size instead"
        )
    if tensor > 1 and not load.layout.sequence_parallel:
        yield f"{MEGATRON}sequence_parallel: true would also split the activations between TP regions, at no cost"
    if times.bubble > 0.2:
        yield (
            f"the pipeline waits {times.bubble:.0%} of the time: {load.micro_batches} micro-batches for "
            f"{load.layout.pipeline} stages; lower {MEGATRON}pipeline_model_parallel_size or "
            "policy.sequence_packing.train_mb_tokens, or raise policy.train_global_batch_size"
        )
