"""Layouts of policy and engines on their devices, and arguments and endpoint of the engines."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mcore.layout import Finding
from grpo_mcore.recipe.derived import engine_pool, environment_class, layout_findings, policy_pool
from grpo_mcore.recipe.errors import in_yaml
from grpo_mcore.recipe.schema.master import GYM, RecipeSections

_ANY_INTERFACE = ("0.0.0.0", "::", "*", "")
_COLOCATED = "policy.generation.colocated."
_NODES, _GPUS = _COLOCATED + "resources.num_nodes", _COLOCATED + "resources.gpus_per_node"
_VLLM = "policy.generation.vllm_cfg."
_CHAT = _VLLM + "http_server_serving_chat_kwargs."
_KWARGS = "policy.generation.vllm_kwargs"
_MEGATRON = "policy.megatron_cfg."
HAVE_KEYS = {
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "revision": "policy.model_name",
    "code_revision": "policy.model_name",
    "tokenizer_revision": "policy.tokenizer.name",
    "hf_overrides": "policy.hf_config_overrides",
    "hf_config_path": "policy.hf_config_overrides",
    "generation_config": "policy.generation.stop_token_ids",
    "override_generation_config": "policy.generation.stop_token_ids",
    "dtype": _VLLM + "precision",
    "tensor_parallel_size": _VLLM + "tensor_parallel_size",
    "pipeline_parallel_size": _VLLM + "pipeline_parallel_size",
    "data_parallel_size": "policy.generation.num_engines",
    "enable_expert_parallel": _VLLM + "expert_parallel_size",
    "max_model_len": _VLLM + "max_model_len",
    "load_format": _VLLM + "load_format",
    "gpu_memory_utilization": _VLLM + "gpu_memory_utilization",
    "kv_cache_dtype": _VLLM + "kv_cache_dtype",
    "kv_cache_memory_bytes": _VLLM + "kv_cache_memory_gb",
    "enforce_eager": _VLLM + "enforce_eager",
    "enable_return_routed_experts": _VLLM + "enable_return_routed_experts",
    "enable_lora": "policy.megatron_cfg.peft.refit",
    "max_lora_rank": "policy.megatron_cfg.peft.dim",
}
"""Engine arguments that a recipe sets by other keys."""
OF_EVERY_ENGINE = {
    "logprobs_mode": "training needs log-probs of the distribution that samples are drawn from",
    "enable_sleep_mode": "engines sleep when they share their devices with the policy",
    "distributed_executor_backend": "the run starts the engine's ranks",
    "prefill_context_parallel_size": "the run starts the engine's ranks",
    "device_ids": "the run gives engines their devices",
    "nnodes": "the run places engines on nodes",
    "node_rank": "the run places engines on nodes",
    "master_addr": "the run places engines on nodes",
    "master_port": "the run places engines on nodes",
}
"""Engine arguments that a run decides, and why, for engines of the policy and of teachers alike."""
DECIDED = OF_EVERY_ENGINE | {
    "watermark_config": "training needs samples of the policy's own distribution",
    "quantization": "a refit brings weights that are not quantized",
    "quantization_config": "a refit brings weights that are not quantized",
    "model_impl": "a refit fills vLLM's own classes of models",
    "model_class_overrides": "a refit fills vLLM's own classes of models",
    "expert_placement_strategy": "a refit fills the experts in their order",
    "enable_eplb": "a refit fills the experts in their order",
    "eplb_config": "a refit fills the experts in their order",
    "enable_elastic_ep": "a refit fills the experts in their order",
    "kv_transfer_config": "a refit clears the engine's own cache; keys and values of old weights would stay in another",
    "weight_transfer_config": "refits have one of their own",
    "max_loras": "an engine has the policy's adapter, and no other",
}
"""Engine arguments that a run decides, and why, for the policy's engines."""


def check_layout(config: RecipeSections) -> Iterator[Finding]:
    """The layouts of policy and engines must fit the cluster and each other, as far as the recipe alone can say."""
    pool = policy_pool(config)
    if not pool.ranks:
        return  # reported by check_pools
    yield from layout_findings(config)
    if config.cluster.backend == "local" and pool.ranks > 1:
        yield Finding(
            ("cluster.backend", "cluster.gpus_per_node", "cluster.num_nodes"),
            f"the local backend runs one rank in this process, but the cluster has num_nodes {pool.nodes} x "
            f"gpus_per_node {pool.per_node} = {pool.ranks}",
        )


def check_router_replay(config: RecipeSections) -> Iterator[Finding]:
    """Router replay and recomputation exclude each other with pipeline stages: a stage runs the forward pass of one
    micro-batch between those of another, so recomputation would use the wrong micro-batch's routes."""
    replay, megatron = config.policy.router_replay, config.policy.megatron_cfg
    if replay.enabled and megatron.activation_checkpointing and megatron.pipeline_model_parallel_size > 1:
        yield Finding(
            (
                "policy.router_replay.enabled",
                _MEGATRON + "activation_checkpointing",
                _MEGATRON + "pipeline_model_parallel_size",
            ),
            "cannot be combined with both activation_checkpointing and pipeline stages; switch one of them off",
        )


def check_pools(config: RecipeSections) -> Iterator[Finding]:
    """Engines with their own devices must have some and leave some to the policy."""
    cluster, resources = config.cluster, config.policy.generation.colocated.resources
    if engine_pool(config) is None:
        return
    if cluster.backend == "local":
        yield Finding(
            (_COLOCATED + "enabled", "cluster.backend"),
            "engines with their own devices need processes of their own, and the local backend has one; set "
            "cluster.backend: ray",
        )
    if resources.num_nodes is None and resources.gpus_per_node is None:
        yield Finding(
            (_COLOCATED + "enabled", _NODES, _GPUS),
            f"say what the engines get: {_NODES} (of cluster.num_nodes), or {_GPUS} alone (of each node's "
            "cluster.gpus_per_node)",
        )
    elif not policy_pool(config).ranks:
        have, of = ("num_nodes", _NODES) if resources.num_nodes is not None else ("gpus_per_node", _GPUS)
        yield Finding((of, f"cluster.{have}"), f"takes all of cluster.{have} {cluster[have]}: none is left to train")


def check_engine_arguments(config: RecipeSections) -> Iterator[Finding]:
    """vllm_kwargs must not contradict other keys or what a run needs: vLLM would accept it silently."""
    for name in config.policy.generation.vllm_kwargs:
        if (key := HAVE_KEYS.get(name)) is not None:
            yield Finding((f"{_KWARGS}.{name}",), f"is set by {key}; set it there")
        elif (reason := DECIDED.get(name)) is not None:
            yield Finding((f"{_KWARGS}.{name}",), f"cannot be chosen: {reason}; remove it")


def check_engine_experts(config: RecipeSections) -> Iterator[Finding]:
    """Whole experts are divided among all ranks of an engine, or not at all."""
    vllm = config.policy.generation.vllm_cfg
    if vllm.expert_parallel_size not in (1, vllm.tensor_parallel_size):
        yield Finding(
            (_VLLM + "expert_parallel_size", _VLLM + "tensor_parallel_size"),
            f"{vllm.expert_parallel_size} is neither 1 nor tensor_parallel_size = {vllm.tensor_parallel_size}; experts "
            "are divided among all ranks of an engine or none",
        )


def check_engine_stages(config: RecipeSections) -> Iterator[Finding]:
    """Adapters and recorded routes come from one stage of an engine, so it may have only one."""
    vllm, key = config.policy.generation.vllm_cfg, _VLLM + "pipeline_parallel_size"
    if vllm.pipeline_parallel_size == 1:
        return
    if config.policy.megatron_cfg.peft.refit == "adapters":
        yield Finding(
            (key, "policy.megatron_cfg.peft.refit"),
            "an engine of several stages takes merged weights: set peft.refit: merged",
        )
    for name, enabled in (
        (_VLLM + "enable_return_routed_experts", vllm.enable_return_routed_experts),
        ("policy.router_replay.enabled", config.policy.router_replay.enabled),
    ):
        if enabled:
            yield Finding((key, name), "the experts chosen for a token are recorded on one stage alone; use 1")


def check_endpoint(config: RecipeSections) -> Iterator[Finding]:
    """The endpoint's keys must fit each other, and NeMo Gym needs an endpoint that samples as training does."""
    generation = config.policy.generation
    vllm = generation.vllm_cfg
    chat = vllm.http_server_serving_chat_kwargs
    if vllm.http_server_host in _ANY_INTERFACE:
        yield Finding(
            (_VLLM + "http_server_host",),
            "the endpoint listens on one interface; give its address, or null for the cluster's",
        )
    if chat.enable_auto_tools != (chat.tool_parser is not None):
        yield Finding(
            (_CHAT + "tool_parser", _CHAT + "enable_auto_tools"),
            "tool calls are parsed only if both are set: enable_auto_tools: true and a tool_parser, such as hermes",
        )
    gyms = [name for name, section in config.env.items() if environment_class(name, section)[0] == GYM]
    if not gyms:
        return
    gym_key = f"env.{gyms[0]}"
    if not vllm.expose_http_server:
        yield Finding(
            (_VLLM + "expose_http_server", gym_key), "agents of NeMo Gym query the policy's endpoint: set it to true"
        )
    for name in ("stop_strings", "val_top_k"):
        if generation[name] is not None:
            yield Finding(
                (f"policy.generation.{name}", gym_key),
                f"{in_yaml(generation[name])} cannot be requested through NeMo Gym; leave it null",
            )
