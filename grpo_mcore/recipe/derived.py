"""Numbers that follow from a configuration: devices and ranks, engines, batch sizes, and the log-prob passes of a
step."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from pydantic import ValidationError

from grpo_mcore.families import ModelShape
from grpo_mcore.layout import DevicePool, EngineDevices, EngineLayout, Finding, PolicyLayout, fits
from grpo_mcore.recipe.schema.data import IMAGE_DATASETS, IMAGE_PROCESSOR, dataset_by_name
from grpo_mcore.recipe.schema.distillation import TeacherConfig
from grpo_mcore.recipe.schema.generation import GenerationConfig
from grpo_mcore.recipe.schema.master import VERIFIERS, Algorithm, RecipeSections, algorithm_of
from grpo_mcore.recipe.schema.megatron import MegatronConfig, PeftConfig
from grpo_mcore.recipe.schema.policy import (
    DynamicBatchingConfig,
    PolicyConfig,
    RouterReplayConfig,
    SequencePackingConfig,
)

MATH_REWARDS = ("correct", "format")
"""Names of the rewards of the environment math with `format_pattern`."""
RULES = ("rules", "vlm", *IMAGE_DATASETS)
"""Names of the environment whose rewards are its components."""
RewardWeights: TypeAlias = Mapping[str, float] | Sequence[float]


def policy_pool(config: RecipeSections) -> DevicePool:
    """Return the policy's devices: those of the cluster without the engines' and the teachers' own."""
    cluster, colocated = config.cluster, config.policy.generation.colocated
    nodes, per_node, taken = nodes_left(config), cluster.gpus_per_node, colocated.resources
    if colocated.enabled:
        return DevicePool(nodes, per_node)
    if taken.num_nodes is not None and not divides_nodes(config):
        return DevicePool(max(0, nodes - taken.num_nodes), per_node)
    return DevicePool(nodes, max(0, per_node - (taken.gpus_per_node or 0)))


def divides_nodes(config: RecipeSections) -> bool:
    """Return whether engines with their own devices take some devices of each node and leave the others to the
    policy."""
    resources, cluster = config.policy.generation.colocated.resources, config.cluster
    if resources.num_nodes is None:
        return True
    share = resources.gpus_per_node
    return resources.num_nodes == nodes_left(config) and share is not None and share < cluster.gpus_per_node


def engine_pool(config: RecipeSections) -> DevicePool | None:
    """Return the engines' own devices, or None if they share the policy's."""
    cluster, colocated = config.cluster, config.policy.generation.colocated
    if colocated.enabled:
        return None
    resources = colocated.resources
    if resources.num_nodes is not None:
        return DevicePool(resources.num_nodes, resources.gpus_per_node or cluster.gpus_per_node)
    return DevicePool(nodes_left(config), resources.gpus_per_node or 0)


def nodes_left(config: RecipeSections) -> int:
    """Return the number of nodes of the cluster that no teacher has to itself."""
    return config.cluster.num_nodes - sum(pool.nodes for pool in teacher_pools(config).values())


def num_engines(config: RecipeSections, *, gpu: bool) -> int:
    """Return the number of engines: policy.generation.num_engines, or as many as fit their devices, which may be 0. On
    CPU the default is 1 engine where engines share the policy's devices."""
    pool, generation = engine_pool(config), config.policy.generation
    if generation.num_engines is not None:
        return generation.num_engines
    if pool is None and not gpu:
        return 1
    return (pool or policy_pool(config)).ranks // generation.vllm_cfg.ranks


def uses_images(config: RecipeSections) -> bool:
    """Return whether prompts may have images: where a dataset has them by its name, or its processor takes them; for
    those of agents policy.is_vlm says so."""
    entries = [*config.data.train, *config.data.validation]
    return algorithm_of(config) not in ("dpo", "rm") and (
        config.policy.is_vlm
        or any(
            entry.processor == IMAGE_PROCESSOR
            or (entry.processor is None and dataset_by_name(entry.dataset_name) in IMAGE_DATASETS)
            for entry in entries
        )
    )


def engine_nodes(config: RecipeSections) -> int:
    """Return the number of nodes over which one engine extends: more than 1 if a node has fewer devices than ranks."""
    pool = engine_pool(config) or policy_pool(config)
    needed = -(-config.policy.generation.vllm_cfg.ranks // max(1, pool.per_node))
    return max(1, min(pool.nodes, needed))


def policy_layout(megatron: MegatronConfig, ranks: int) -> PolicyLayout:
    """Return the layout of policy.megatron_cfg on `ranks` ranks; `fits` says whether it uses all of them."""
    sizes = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    return PolicyLayout(
        *sizes,
        max(1, ranks // (math.prod(sizes) * megatron.context_parallel_size)),
        megatron.context_parallel_size,
        megatron.expert_model_parallel_size,
        megatron.expert_tensor_parallel_size,
        megatron.virtual_pipeline_model_parallel_size or 1,
        megatron.num_layers_in_first_pipeline_stage,
        megatron.num_layers_in_last_pipeline_stage,
        megatron.sequence_parallel,
    )


def engine_layout(config: RecipeSections) -> EngineLayout:
    vllm = config.policy.generation.vllm_cfg
    whole_experts = vllm.expert_parallel_size > 1
    return EngineLayout(vllm.tensor_parallel_size, vllm.pipeline_parallel_size, whole_experts, engine_nodes(config))


def layout_findings(
    config: RecipeSections, shape: ModelShape | None = None, *, gpu: bool | None = None
) -> list[Finding]:
    """Return all that is wrong with the layouts of policy and engines. `shape` is the model's, where it is known. `gpu`
    says whether they run on GPUs; None: cluster.platform decides."""
    gpu = config.cluster.platform == "gpu" if gpu is None else gpu
    engines_pool, devices = engine_pool(config), engine_pool(config) or policy_pool(config)
    engines = None
    if algorithm_of(config) in ("grpo", "eval") and devices.ranks:
        counted = gpu or engines_pool is not None
        engines = EngineDevices(engine_layout(config), num_engines(config, gpu=gpu), devices, counted)
    layout = policy_layout(config.policy.megatron_cfg, world_size(config))
    return fits(layout, world_size(config), shape, engines)


def world_size(config: RecipeSections) -> int:
    """Return the number of policy ranks."""
    return policy_pool(config).ranks


def model_parallel_size(config: RecipeSections) -> int:
    """Return the number of ranks that hold one copy of the policy: TP x PP x CP."""
    megatron = config.policy.megatron_cfg
    return megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size


def data_parallel_size(config: RecipeSections) -> int:
    """Return the number of copies of the policy (DP)."""
    return world_size(config) // model_parallel_size(config)


def token_budget(config: PolicyConfig) -> SequencePackingConfig | DynamicBatchingConfig | None:
    """Return the section that bounds micro-batches by tokens. None: they have train_micro_batch_size samples."""
    return next((section for section in (config.sequence_packing, config.dynamic_batching) if section.enabled), None)


def bins_per_logprob_row(config: PolicyConfig) -> int:
    """Return how many training bins are joined into one row of the log-prob passes: as many as its capacity holds when
    they are full, the same on every rank."""
    if config.deterministic:
        return 1
    if bounded := token_budget(config):
        return max(1, bounded.logprob_mb_tokens // bounded.train_mb_tokens)
    return max(1, config.logprob_batch_size // config.train_micro_batch_size)


def shares_prefixes(packing: SequencePackingConfig, *, transformer_engine: bool) -> bool:
    """Return whether samples may share the computation of their common prefixes. The default is to share where
    attention is `PackedAttention` anyway: sharing needs it, in place of TransformerEngine's kernels of attention and
    rotary embedding."""
    enabled = packing.shared_prefix.enabled
    return packing.enabled and (not transformer_engine if enabled is None else enabled)


def own_attention(packing: SequencePackingConfig) -> bool:
    """Return whether attention is `PackedAttention` also where TransformerEngine is installed."""
    return shares_prefixes(packing, transformer_engine=True)


def samples_per_step(config: RecipeSections) -> int:
    return config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt


def prompts_per_generation_batch(config: RecipeSections) -> int:
    """Return the number of prompts of a generation batch of dynamic sampling: num_prompts_per_step x batch_multiplier,
    rounded up."""
    multiplier = Fraction(str(config.grpo.batch_multiplier))  # the decimal as written: 10 x 1.1 is 11, not 12
    return math.ceil(config.grpo.num_prompts_per_step * multiplier)


def exports_model(config: RecipeSections) -> bool:
    """Return whether a run of FINE_TUNING writes its model, as `hf` in checkpointing.checkpoint_dir, when it ends."""
    return config.checkpointing.enabled or config.checkpointing.save_hf != "none"


def needs_reference(config: RecipeSections) -> bool:
    """Return whether reference log-probs are computed at all."""
    if (algorithm := algorithm_of(config)) != "grpo":
        return algorithm == "dpo" and config.dpo.preference_loss != "simpo"
    return config.loss_fn.reference_policy_kl_penalty > 0 and not compares_distributions(config)


def compares_distributions(config: RecipeSections) -> bool:
    """Return whether the loss is a divergence from a teacher over the vocabulary; it reads no other log-probs."""
    section = config.on_policy_distillation
    return section.enabled and section.divergence.enabled


def needs_prev(config: RecipeSections) -> bool:
    """Return whether log-probs from before the step's first update are computed: the policy changes within the step, or
    rewards or masks depend on these log-probs."""
    grpo, loss = config.grpo, config.loss_fn
    changes = samples_per_step(config) > config.policy.train_global_batch_size and not compares_distributions(config)
    changes = (changes or (config.ppo.enabled and config.ppo.ppo_epochs > 1)) and not loss.ratio_to_engine
    measured = loss.use_kl_in_reward or grpo.seq_logprob_error_threshold is not None
    return changes or measured or teacher_weight(config) > 0


def reads_whole_samples(config: RecipeSections) -> bool:
    """Return whether the loss or the advantages read all tokens of a sample at once, which must then be in one bin."""
    loss, estimator = config.loss_fn, config.grpo.adv_estimator
    by_sequence = loss.sequence_level_importance_ratios or loss.policy_term in ("gmpo", "vespo", "flash_reinforce")
    by_sequence |= loss.truncated_importance_sampling_type == "seq-mask-tis"
    return by_sequence or config.ppo.enabled or (loss.use_kl_in_reward and estimator.name == "reinforce_plus_plus")


def has_greedy_baseline(config: RecipeSections) -> bool:
    """Return whether the first sample of each group is decoded greedily, and only a baseline for the others."""
    return config.grpo.adv_estimator.name == "remax" and config.grpo.adv_estimator.path is None


def trains_on_rewards(config: RecipeSections) -> bool:
    """Return whether rewards are part of the advantages. Otherwise teachers alone decide them."""
    return config.grpo.adv_estimator.name != "opd" or config.on_policy_distillation.use_orm_advantage


def teacher_weight(config: RecipeSections) -> float:
    """Return the weight of the teacher's log-prob minus the policy's in a token's advantage; 0 without teachers, and
    where the loss compares whole distributions."""
    estimator, section = config.grpo.adv_estimator, config.on_policy_distillation
    if not section.enabled or compares_distributions(config):
        return 0.0
    return 1.0 if estimator.name == "opd" else estimator.opd_weight


def teacher_settings(config: RecipeSections) -> dict[str, TeacherConfig]:
    """Return the layout of each teacher, by alias: default_teacher_cfg, with the values of teacher_overrides in place
    of its own. megatron_cfg_overrides and vllm_kwargs are merged key by key."""
    section = config.on_policy_distillation
    if not section.enabled:
        return {}
    default, overrides = section.non_colocated_teachers.default_teacher_cfg, dict[str, dict[str, Any]]()
    for alias, its in section.non_colocated_teachers.teacher_overrides.items():
        overrides[alias] = {
            name: {**default[name], **its[name]} if isinstance(its[name], dict) else its[name]
            for name in its.model_fields_set
        }
    names = section.teacher_model_by_agent_name
    return {alias: default.model_copy(update=overrides.get(alias, {})) for alias in names}


def teacher_copies(config: RecipeSections) -> dict[str, str]:
    """Return, for each alias, the first alias that uses the same copy of a model: the same model, layout and backend.
    Without deduplicate_shared_teacher_checkpoints every alias has a copy of its own."""
    settings, first = teacher_settings(config), dict[str, str]()
    if not config.on_policy_distillation.deduplicate_shared_teacher_checkpoints:
        return {alias: alias for alias in settings}
    models = config.on_policy_distillation.teacher_model_by_agent_name
    try:
        layouts = {alias: policy.model_dump_json() for alias, policy in teacher_policies(config).items()}
    except ValidationError:  # the checks of a recipe name the key that is wrong
        layouts = {alias: f"{models[alias]} {its.model_dump_json()}" for alias, its in settings.items()}
    return {alias: first.setdefault(f"{settings[alias].backend} {text}", alias) for alias, text in layouts.items()}


def teacher_pools(config: RecipeSections) -> dict[str, DevicePool]:
    """Return the nodes that teachers have to themselves, by alias; aliases that share a copy appear once, under the
    first. Empty if teachers share the policy's devices."""
    section, cluster = config.on_policy_distillation, config.cluster
    if not (section.enabled and section.non_colocated_teachers.enabled):
        return {}
    settings = teacher_settings(config)
    return {
        alias: DevicePool(settings[alias].num_nodes or 1, settings[alias].gpus_per_node or cluster.gpus_per_node)
        for alias in dict.fromkeys(teacher_copies(config).values())
    }


def teacher_ranks(config: RecipeSections, alias: str) -> int:
    """Return the number of a teacher's ranks: the devices of its own nodes, or as many ranks as the policy has. `alias`
    is the first of the aliases that share its copy."""
    pool = teacher_pools(config).get(alias)
    return world_size(config) if pool is None else pool.ranks


def teacher_engines(config: RecipeSections, alias: str, *, gpu: bool) -> EngineDevices | None:
    """Return the engines of a teacher whose backend is vllm, None for another backend. `alias` is the first of the
    aliases that share its copy."""
    if teacher_settings(config)[alias].backend != "vllm":
        return None
    vllm, nodes = teacher_policies(config)[alias].generation.vllm_cfg, teacher_pools(config).get(alias)
    layout = EngineLayout(vllm.tensor_parallel_size, vllm.pipeline_parallel_size, vllm.expert_parallel_size > 1)
    pool, counted = nodes or policy_pool(config), gpu or nodes is not None
    return EngineDevices(layout, pool.ranks // layout.ranks if counted else 1, pool, counted)


def teacher_findings(
    config: RecipeSections, alias: str, shape: ModelShape | None = None, *, gpu: bool | None = None
) -> list[Finding]:
    """Return all that is wrong with a teacher's layout on its devices. `alias` is the first of the aliases that share
    its copy; `shape` and `gpu` are those of `layout_findings`."""
    gpu = config.cluster.platform == "gpu" if gpu is None else gpu
    engines, ranks = teacher_engines(config, alias, gpu=gpu), teacher_ranks(config, alias)
    if engines is None:
        return fits(policy_layout(teacher_policies(config)[alias].megatron_cfg, ranks), ranks, shape)
    if engines.counted and engines.pool.per_node % engines.layout.ranks:
        key = "on_policy_distillation.non_colocated_teachers.default_teacher_cfg.tensor_model_parallel_size"
        message = (
            f"the {engines.layout.ranks} ranks of an engine ({engines.layout.describe()}) do not divide the "
            f"{engines.pool.per_node} devices of a node; an engine of a teacher stays on one node"
        )
        return [Finding((key,), message)]
    return fits(PolicyLayout(data=ranks), ranks, shape, engines)


def teacher_policies(config: RecipeSections) -> dict[str, PolicyConfig]:
    """Return the model and the layout of each teacher by alias, written as a section `policy`; empty without teachers.
    A teacher's log-probs have the temperature, top_k and top_p of the policy's. For a vllm teacher `generation`
    describes the engines, and megatron_cfg holds their sizes."""
    models = config.on_policy_distillation.teacher_model_by_agent_name
    return {
        alias: _teacher_policy(config.policy, models[alias], settings)
        for alias, settings in teacher_settings(config).items()
    }


def _teacher_policy(policy: PolicyConfig, model: str, settings: TeacherConfig) -> PolicyConfig:
    precision = settings.precision or policy.precision
    sizes, defaults = dict[str, int](), policy.megatron_cfg
    if settings.backend == "vllm":
        engine = policy.generation.vllm_cfg
        of_engine = {
            "tensor_model_parallel_size": engine.tensor_parallel_size,
            "pipeline_model_parallel_size": engine.pipeline_parallel_size,
            "expert_model_parallel_size": engine.expert_parallel_size,
        }
        defaults = defaults.model_copy(update=dict.fromkeys(_TEACHER_SIZES, 1) | of_engine)
    for key in _TEACHER_SIZES:
        sizes[key] = settings[key] if settings[key] is not None else defaults[key]
    whole = policy.megatron_cfg.model_dump() | {
        **sizes,
        "sequence_parallel": sizes["tensor_model_parallel_size"] > 1
        and (policy.megatron_cfg.sequence_parallel or settings.backend == "vllm"),
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "peft": PeftConfig().model_dump(),
        **(settings.megatron_cfg_overrides if settings.backend == "megatron" else {}),
    }
    micro = settings.micro_batch_size or policy.logprob_batch_size
    changes: dict[str, Any] = {
        "model_name": model,
        "hf_config_overrides": {},
        "precision": precision,
        "train_micro_batch_size": micro,
        "logprob_batch_size": micro,
        "megatron_cfg": MegatronConfig.model_validate(whole),
        "router_replay": RouterReplayConfig(),
    }
    if settings.backend == "vllm":
        changes["generation"] = _teacher_generation(policy, sizes, precision, settings)
    for name in ("sequence_packing", "dynamic_batching"):
        tokens = policy[name].logprob_mb_tokens
        if settings.micro_batch_size is not None:
            tokens = policy.max_total_sequence_length * micro
        changes[name] = policy[name].model_copy(update={"train_mb_tokens": tokens, "logprob_mb_tokens": tokens})
    return policy.model_copy(update=changes)


def _teacher_generation(
    policy: PolicyConfig, sizes: Mapping[str, int], precision: str, settings: TeacherConfig
) -> GenerationConfig:
    """Return `policy.generation` with the engines of a teacher. Each request generates one token after the sample,
    which nobody reads."""
    generation, vllm = policy.generation, policy.generation.vllm_cfg
    engine = {
        "tensor_parallel_size": sizes["tensor_model_parallel_size"],
        "pipeline_parallel_size": sizes["pipeline_model_parallel_size"],
        "expert_parallel_size": sizes["expert_model_parallel_size"],
        "precision": precision,
        "gpu_memory_utilization": settings.gpu_memory_utilization or vllm.gpu_memory_utilization,
        "max_model_len": policy.max_total_sequence_length + 1,
        "enable_return_routed_experts": False,
    }
    changes = {"vllm_cfg": vllm.model_copy(update=engine), "num_engines": None, "vllm_kwargs": settings.vllm_kwargs}
    return generation.model_copy(update=changes)


_TEACHER_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def samples_together(config: RecipeSections, algorithm: Algorithm) -> int:
    """Return how many samples stay in one micro-batch: 2 where the loss compares the answers of a pair, as DPO's and
    that of a Bradley-Terry model do."""
    of_rm = algorithm == "rm" and config.rm.reward_model_type == "bradley_terry"
    return 2 if algorithm == "dpo" or of_rm else 1


def bin_tokens(config: RecipeSections, algorithm: Algorithm) -> int | None:
    """Return the tokens of a micro-batch in training: train_mb_tokens, and twice as many for pairs of answers, since
    policy.train_micro_batch_size counts pairs. None if micro-batches are not bounded by tokens."""
    bounded = token_budget(config.policy)
    return samples_together(config, algorithm) * bounded.train_mb_tokens if bounded else None


def batch_equation(config: RecipeSections, algorithm: Algorithm | None = None) -> str:
    """Return one line, such as "32 prompts x 16 generations = 512 samples = 2 optimizer steps x 256 = 2 x DP 4 x 64
    samples, packed into bins of at most 2,048 tokens". `algorithm` is the recipe's by default."""
    policy, dp, algorithm = config.policy, data_parallel_size(config), algorithm or algorithm_of(config)
    per_rank = policy.train_global_batch_size // dp
    noun = "pair" if samples_together(config, algorithm) == 2 else "sample"
    if algorithm != "grpo":
        head, factor = _count(policy.train_global_batch_size, noun), ""
    else:
        samples = samples_per_step(config)
        steps = samples // policy.train_global_batch_size
        greedy = f" ({config.grpo.num_prompts_per_step} greedy, not trained on)" if has_greedy_baseline(config) else ""
        head = (
            f"{_count(config.grpo.num_prompts_per_step, 'prompt')} x "
            f"{_count(config.grpo.num_generations_per_prompt, 'generation')} = {_count(samples, 'sample')}{greedy} = "
            f"{_count(steps, 'optimizer step')} x {policy.train_global_batch_size}"
        )
        factor = f"{steps} x " if steps > 1 else ""
    equation = f"{head} = {factor}DP {dp} x "
    if capacity := bin_tokens(config, algorithm):
        how = "packed into bins" if policy.sequence_packing.enabled else "in micro-batches"
        return f"{equation}{_count(per_rank, noun)}, {how} of at most {capacity:,} tokens"
    micro = policy.train_micro_batch_size
    return f"{equation}{_count(per_rank // micro, 'micro-batch', 'es')} x {_count(micro, noun)}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def scoring_settings(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environments without the settings that only change how fast they score, not the rewards."""
    speed = ("num_workers", "threads_per_worker", "batch")
    return {
        name: {key: value for key, value in section.items() if key not in speed}
        if isinstance(section, Mapping)
        else section
        for name, section in env.items()
    }


def environment_class(name: str, section: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name or import path of the class of the environment `env.<name>`, and the section that the class
    reads. A custom class reads its `options` together with the other keys of the section. A section with the key
    `verifiers` is an environment of that package."""
    rest = dict(section)
    if "environment" in rest:
        return str(rest.pop("environment")), rest
    if "path" in rest:
        path, options = rest.pop("path"), rest.pop("options", None)
        return str(path), {**(options or {}), **rest}
    return (VERIFIERS if VERIFIERS in rest else name), rest


def _sections_of_training(config: RecipeSections) -> list[tuple[str, dict[str, Any]]]:
    """Return the `environment_class` of each environment that scores training data."""
    names = {entry.env_name for entry in config.data.train}
    return [environment_class(name, section) for name, section in config.env.items() if name in names]


def reward_names(config: RecipeSections) -> set[str] | None:
    """Return the names of the rewards that samples of the training data get. None where only the run tells: an
    environment of one's own, an agent's, or none."""
    names, environments = set[str](), _sections_of_training(config)
    for kind, section in environments:
        if kind == "math":
            names |= set(MATH_REWARDS) if section.get("format_pattern") is not None else set()
        elif kind in RULES:
            names |= {*(section.get("components") or ())} | {
                str(part["name"]) for part in section.get("reward_functions") or () if "name" in part
            }
        elif kind not in ("code", "reward_model"):
            return None
    return names if environments else None


def reward_weights(config: RecipeSections) -> RewardWeights | None:
    """Return grpo.adv_estimator.reward_weights, by name where the recipe tells the names of the rewards. Raises
    ValueError if the weights do not match them."""
    names, weights = reward_names(config), config.grpo.adv_estimator.reward_weights
    return weights if None in (names, weights) else weights_by_name(sorted(names or ()), weights)


def weights_by_name(names: Sequence[str], weights: RewardWeights | None) -> dict[str, float]:
    """Return the weight of each of the sorted names. Raises ValueError if the weights do not match them."""
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if isinstance(weights, Mapping):
        if not weights.keys() >= set(names):  # a step may lack the rewards of a task
            raise ValueError(f"reward_weights names {sorted(weights)}, the rewards are {list(names)}")
        return dict(weights)
    if len(weights) != len(names):
        raise ValueError(
            f"reward_weights has {len(weights)} entries for the {len(names)} rewards {list(names)}, in that order"
        )
    return dict(zip(names, weights, strict=True))


def gives_negative_rewards(config: RecipeSections) -> bool:
    """Return whether the sections of the environments that score training data name a reward or weight below 0."""
    keys = ("timeout_reward", "verify_timeout_reward", "unfinished_reward", "weight")
    sections = [section for _, section in _sections_of_training(config)]
    parts = [part for section in sections for part in (section.get("components") or {}).values()]
    values = [part.get(key) for part in [*sections, *parts] if isinstance(part, Mapping) for key in keys]
    return any(isinstance(value, int | float) and value < 0 for value in values)
