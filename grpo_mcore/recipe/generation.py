"""`policy.generation`: sampling and the vLLM engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_mcore.recipe.section import NonNegativeFloat, OffWhenNull, Positive, PositiveFloat, PositiveShare, Section


class ColocatedResourcesConfig(Section):
    """`policy.generation.colocated.resources`: what the engines get for themselves when they are not
    colocated."""

    gpus_per_node: Positive | None = None
    """Accelerators of each node that belong to engines; on CPU processes. Without num_nodes they are taken from
    cluster.gpus_per_node, on every node; with it null means all of the engines' nodes. Inert while colocated.enabled is
    true."""
    num_nodes: Positive | None = None
    """Nodes of cluster.num_nodes that belong to engines. Inert while colocated.enabled is true."""


class ColocatedConfig(Section):
    """`policy.generation.colocated`: do engines and policy share accelerators."""

    enabled: bool = True
    """Engines and policy share the same accelerators. false: each has its own, and a refit goes over the network."""
    resources: ColocatedResourcesConfig = Field(default_factory=ColocatedResourcesConfig)
    """The engines' own resources when enabled is false."""


class ServingChatConfig(Section):
    """`policy.generation.vllm_cfg.http_server_serving_chat_kwargs`."""

    enable_auto_tools: bool = False
    """Read calls of tools out of what the policy says. Needs tool_parser."""
    tool_parser: str | None = None
    """vLLM's name of the parser of calls, such as hermes. null: calls stay text."""
    reasoning_parser: str | None = None
    """vLLM's name of the parser of thoughts, such as deepseek_r1. null: thoughts stay text."""


class VllmConfig(Section):
    """`policy.generation.vllm_cfg`: one vLLM engine. Read by generation/."""

    tensor_parallel_size: Positive = 1
    """Ranks of one engine (TP). On GPUs a part of one node, or all of several: cluster.gpus_per_node times as many."""
    pipeline_parallel_size: Positive = 1
    """Pipeline stages of one engine. Above 1: not supported yet."""
    expert_parallel_size: Positive = 1
    """Ranks that share the experts of one engine, each with whole ones: all of tensor_parallel_size. 1: each rank has a
    slice of every expert."""
    gpu_memory_utilization: PositiveShare = 0.6
    """Share of a GPU's memory that an engine may take. No effect on CPU."""
    kv_cache_memory_gb: PositiveFloat | None = None
    """Size of one engine rank's KV cache in GiB. null: what gpu_memory_utilization leaves; on CPU 1."""
    max_model_len: Positive | None = None
    """Longest sequence of an engine, in tokens. null: policy.max_total_sequence_length."""
    precision: Literal["bfloat16", "float32"] | None = None
    """Number format of the engine's weights and activations. null: policy.precision."""
    kv_cache_dtype: str = "auto"
    """Number format of the KV cache. Anything but auto: not supported yet."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs and do not compile. No effect on CPU."""
    load_format: Literal["auto", "dummy"] = "auto"
    """How an engine gets its first weights: auto reads the model's files, dummy waits for the first refit."""
    expose_http_server: bool = False
    """Serve the policy through an OpenAI-compatible endpoint, as NeMo Gym's agents need it."""
    http_server_host: str | None = None
    """Address at which the endpoint listens. null: the driver's, on the cluster's network."""
    http_server_port: Positive | None = None
    """Port of the endpoint. null: a free one."""
    http_server_api_key_env_var: str | None = None
    """Variable of the driver's environment that holds the token which the endpoint asks for. null: one is made up; it
    is in endpoint.json of the run's logs."""
    http_server_serving_chat_kwargs: Annotated[ServingChatConfig, OffWhenNull] = Field(
        default_factory=ServingChatConfig
    )
    """How the endpoint reads what the policy says."""
    tool_parser_plugin: str | None = None
    """Python file that registers more tool parsers with vLLM. null: none."""
    reasoning_parser_plugin: str | None = None
    """Python file that registers more reasoning parsers with vLLM. null: none."""
    enable_return_routed_experts: bool = False
    """Record the experts chosen for each token; policy.router_replay.enabled does so too."""


class GenerationConfig(Section):
    """`policy.generation`. Read by generation/ and rollout/."""

    backend: Literal["vllm"] = "vllm"
    """The inference engine."""
    num_engines: Positive | None = None
    """Number of engines. null: as many as their accelerators hold; on CPU 1, or as many as their own pool holds."""
    max_new_tokens: Positive | None = None
    """Longest answer, in tokens. null: policy.max_total_sequence_length."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature in training; the policy's logits are divided by it too. Also read by parallel/."""
    top_p: PositiveShare = 1.0
    """Sample from the smallest set of tokens with this probability. Below 1: not supported yet in
    training."""
    top_k: Positive | None = None
    """Sample from this many likeliest tokens. null: from all. Otherwise not supported yet in training."""
    val_temperature: NonNegativeFloat | None = None
    """Sampling temperature in validation; 0 takes the likeliest token. null: temperature."""
    val_top_p: PositiveShare | None = None
    """top_p in validation. null: top_p."""
    val_top_k: Positive | None = None
    """top_k in validation. null: top_k."""
    stop_token_ids: list[int] | None = None
    """Tokens that end an answer. null: the tokenizer's end-of-sequence token."""
    stop_strings: list[str] | None = None
    """Texts that end an answer. null: none."""
    colocated: ColocatedConfig = Field(default_factory=ColocatedConfig)
    """Where the engines live."""
    vllm_cfg: VllmConfig = Field(default_factory=VllmConfig)
    """The engines."""
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further engine arguments, passed to vLLM as they are."""
