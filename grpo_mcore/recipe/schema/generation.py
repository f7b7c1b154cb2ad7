"""`policy.generation`: sampling and the vLLM engines."""

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_mcore.recipe.schema.section import (
    NULL,
    Derived,
    NonNegative,
    NonNegativeFloat,
    OffWhenNull,
    Positive,
    PositiveFloat,
    PositiveShare,
    Section,
    VariableText,
)


class ColocatedResourcesConfig(Section):
    """`policy.generation.colocated.resources`: devices of the engines' own. No effect while colocated.enabled is
    true."""

    gpus_per_node: Positive | None = None
    """Accelerators (on CPU: processes) of each node that belong to engines. Without num_nodes, or with the num_nodes of
    the cluster, they are taken from cluster.gpus_per_node on every node. null: all of the engines' nodes."""
    num_nodes: Positive | None = None
    """Nodes of cluster.num_nodes that belong to engines; all of them are divided by gpus_per_node."""


class ColocatedConfig(Section):
    """`policy.generation.colocated`: whether engines and policy share accelerators."""

    enabled: bool = True
    """Engines and policy share the same accelerators. false: each has its own, and refits go over the network."""
    resources: ColocatedResourcesConfig = Field(default_factory=ColocatedResourcesConfig)
    """The engines' own devices when enabled is false."""


class ServingChatConfig(Section):
    """`policy.generation.vllm_cfg.http_server_serving_chat_kwargs`: how the endpoint parses answers."""

    enable_auto_tools: bool = False
    """Parse tool calls in the policy's answers. Needs tool_parser."""
    tool_parser: str | None = None
    """vLLM's name of the tool-call parser, such as hermes. null: tool calls stay text."""
    reasoning_parser: str | None = None
    """vLLM's name of the reasoning parser, such as deepseek_r1. null: reasoning stays text."""


class ImageLimits(Section):
    """`policy.generation.vllm_cfg.limit_mm_per_prompt`."""

    image: Positive = 8
    """Maximum number of images of a prompt, and of an answer of the environment."""
    video: Literal[0] = 0
    """Videos are not supported."""
    audio: Literal[0] = 0
    """Audio is not supported."""


class VllmConfig(Section):
    """`policy.generation.vllm_cfg`: one vLLM engine."""

    tensor_parallel_size: Positive = 1
    """Ranks among which each layer of an engine is split (TP)."""
    pipeline_parallel_size: Positive = 1
    """Stages into which the layers of an engine are divided (PP). On GPUs the TP x PP ranks of one engine are part of
    one node, or all GPUs of several nodes."""
    expert_parallel_size: Positive = 1
    """Ranks among which the whole experts of a layer are divided: 1 or tensor_parallel_size. 1: each rank holds a
    slice of every expert."""
    gpu_memory_utilization: PositiveShare = 0.6
    """Share of a GPU's memory that an engine may take. No effect on CPU."""
    kv_cache_memory_gb: PositiveFloat | None = None
    """Size of one engine rank's KV cache in GiB. null: what gpu_memory_utilization leaves; on CPU 1 GiB."""
    max_num_seqs: Positive | None = None
    """Maximum number of requests that an engine runs together. vLLM keeps state for so many on each GPU. null: 256."""
    max_model_len: Derived[Positive] = NULL
    """Maximum length of a sequence in an engine, in tokens. null: policy.max_total_sequence_length."""
    precision: Derived[Literal["bfloat16", "float32", "fp8"]] = NULL
    """Number format of the engine's weights and activations. fp8: linear layers and experts are quantised to e4m3 with
    a scale for each 128 x 128 weights, at the start and in every refit; the rest is bfloat16, and so is what chooses
    experts, kv_b_proj and what the keys below name. null: policy.precision."""
    is_mx: bool = False
    """With precision fp8: MXFP8, a power of two for each 32 weights, in place of blocks."""
    fp8_per_channel: bool = False
    """With precision fp8: a scale for each row of a weight (output channel) in place of blocks. vLLM needs GPUs of
    compute capability 8.9 for it."""
    num_first_layers_in_bf16: NonNegative = 0
    """With precision fp8: number of layers at the start of the model that stay in bfloat16."""
    num_last_layers_in_bf16: NonNegative = 0
    """With precision fp8: number of layers at the end of the model that stay in bfloat16."""
    quantization_ignored_layer_kws: list[str] = Field(default_factory=list)
    """With precision fp8: parts of the names of weights that stay in bfloat16, such as o_proj. One that no weight of
    the model has is an error."""
    quantization_ignore_patterns: list[str] = Field(default_factory=list)
    """With precision fp8: patterns of the full names of layers that stay in bfloat16, such as
    model.layers.*.self_attn.*. One that matches no layer of the model is an error, unless it is of MTP layers."""
    use_deep_gemm: bool = False
    """With precision fp8, on GPUs: let vLLM multiply blocks by DeepGEMM (VLLM_USE_DEEP_GEMM). No effect on CPU."""
    kv_cache_dtype: str = "auto"
    """Number format of the KV cache. Only auto is supported yet."""
    enforce_eager: bool = False
    """Run without CUDA graphs and without compilation. No effect on CPU."""
    load_format: Literal["auto", "dummy"] | None = None
    """First weights of an engine: auto reads the model's files, dummy waits for the first refit. null: dummy where a
    refit brings all weights before the first request, else auto (evaluation, refits of adapters alone)."""
    expose_http_server: bool = False
    """Serve the policy through an OpenAI-compatible endpoint. Agents of NeMo Gym need it."""
    http_server_host: str | None = None
    """Address at which the endpoint listens. null: the driver's address on the cluster's network."""
    http_server_port: Positive | None = None
    """Port of the endpoint. null: a free port."""
    http_server_api_key_env_var: str | None = None
    """Environment variable of the driver that holds the endpoint's access token. null: a random token, written to
    endpoint.json in the run's logs."""
    http_server_serving_chat_kwargs: Annotated[ServingChatConfig, OffWhenNull] = Field(
        default_factory=ServingChatConfig
    )
    """How the endpoint parses the policy's answers."""
    tool_parser_plugin: str | None = None
    """Python file that registers more tool parsers with vLLM. null: none."""
    reasoning_parser_plugin: str | None = None
    """Python file that registers more reasoning parsers with vLLM. null: none."""
    limit_mm_per_prompt: Annotated[ImageLimits, OffWhenNull] = Field(default_factory=ImageLimits)
    """Maximum number of images of a prompt, all its turns together."""
    env_vars: Annotated[dict[str, VariableText], OffWhenNull] = Field(default_factory=dict)
    """Environment variables of the engines, with their values."""
    enable_return_routed_experts: bool = False
    """Record the experts chosen for each token. policy.router_replay.enabled implies it."""

    @property
    def ranks(self) -> int:
        """Number of ranks of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def sequences(self) -> int:
        """Number of requests that an engine runs together."""
        return self.max_num_seqs or 256

    @property
    def quantization(self) -> Literal["fp8_per_block", "fp8_per_channel", "mxfp8"] | None:
        """vLLM's name of the format of quantised layers; None without."""
        if self.precision != "fp8":
            return None
        return "mxfp8" if self.is_mx else "fp8_per_channel" if self.fp8_per_channel else "fp8_per_block"

    @property
    def activations(self) -> str:
        """Number format of the activations, and of what is not quantised."""
        return "bfloat16" if self.precision == "fp8" else self.precision


class GenerationConfig(Section):
    """`policy.generation`."""

    backend: Literal["vllm"] = "vllm"
    """The inference engine."""
    num_engines: Positive | None = None
    """Number of engines. null: as many as fit their accelerators; on CPU 1, or as many as fit their own pool."""
    max_running: Positive | None = None
    """Maximum number of samples that an engine is given at a time, with `grpo.turns: free`. The others wait in the
    driver: next turns go first, then samples of prompts whose answers have been long so far. null:
    vllm_cfg.max_num_seqs; without that all samples are sent, and wait in vLLM in the order of their arrival."""
    max_new_tokens: Derived[Positive] = NULL
    """Maximum length of an answer, in tokens. null: policy.max_total_sequence_length."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature in training. The policy's logits are divided by it too."""
    top_p: PositiveShare = 1.0
    """Sample from the smallest set of tokens with this total probability. Below 1, log-probs of the policy and of its
    reference are of that part of their distributions too."""
    top_k: Positive | None = None
    """Sample from this many most likely tokens, and take log-probs of these only. null: from all."""
    val_temperature: Derived[NonNegativeFloat] = NULL
    """Sampling temperature in validation. 0 takes the most likely token. null: temperature."""
    val_top_p: Derived[PositiveShare] = NULL
    """top_p in validation. null: top_p."""
    val_top_k: Positive | None = None
    """top_k in validation. null: top_k."""
    stop_token_ids: list[NonNegative] | None = None
    """Tokens that end an answer. null: the tokenizer's end-of-sequence token, and what ends an answer in its chat
    template."""
    stop_strings: list[Annotated[str, Field(min_length=1)]] | None = None
    """Strings that end an answer. null: none."""
    colocated: ColocatedConfig = Field(default_factory=ColocatedConfig)
    """Devices of the engines."""
    vllm_cfg: VllmConfig = Field(default_factory=VllmConfig)
    """Settings of each engine."""
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further engine arguments, passed on unchanged: those that leave weights, sampling and placement as they are."""
