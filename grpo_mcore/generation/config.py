"""Configuration of an engine and the environment of its process: plain values, no vLLM."""

import logging
import sysconfig
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_mcore.generation.cpu_kernels import PRIORITY
from grpo_mcore.rollout.trajectory import Sampling

logger = logging.getLogger(__name__)

GIB = 2**30

LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["fp8_per_block", "fp8_per_channel", "mxfp8"]

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM reserves memory (`max_lora_rank`)."""


@dataclass(frozen=True)
class ChatConfig:
    """Chat settings for the OpenAI-compatible endpoint. `model`: the name under which the policy is served.

    `samplings`: allowed sampling settings; the first is the default. `chat_template`: text that replaces the
    tokenizer's. Parsers have vLLM's names; `plugins`: (file that registers more tool parsers, more reasoning parsers).
    `tool_parser` None: tool calls stay text.
    """

    model: str
    samplings: tuple[Sampling, ...]
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    plugins: tuple[str | None, str | None] = (None, None)


@dataclass(frozen=True)
class EngineNode:
    """Node number `rank` of the `count` nodes of an engine, each with as many of its ranks. The first node waits at
    `address`:`port` for the others, which present `token`."""

    rank: int = 0
    count: int = 1
    address: str = ""
    port: int = 0
    token: str = ""


@dataclass(frozen=True)
class EngineConfig:
    """One engine. Paths are local folders or names on the Hugging Face hub.

    `load_format`: "auto" reads the model's weights; "dummy" leaves them random, and the engine generates
    nothing before the first refit. `threads`: CPU threads of each rank. `vllm_kwargs`:
    more arguments of `vllm.EngineArgs`, which win over the ones set here.
    """

    model: str
    name: str = "engine-0"
    tokenizer: str | None = None  # None: the model's
    platform: Literal["cpu", "gpu"] = "cpu"
    dtype: str = "bfloat16"
    quantization: Quantization | None = None  # of linear layers and experts, when weights are loaded and in each refit
    deep_gemm: bool = False  # GPU: multiply blocks by DeepGEMM
    unquantized: tuple[str, ...] = ()  # patterns of vLLM's names of the linear layers that stay in dtype
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel: bool = False  # each rank has whole experts instead of a slice of every one
    max_model_len: int = 512
    load_format: LoadFormat = "auto"
    prefix_caching: bool = True  # not with Mamba2 and DeltaNet mixers
    text_only: bool = False  # leave out the parts of a vision model that read images
    images: int = 0  # most images of a prompt; 0: prompts are text
    kept: tuple[str, ...] = ()  # first parts of the names of parameters that no refit fills: a frozen tower
    torch_rotary: bool = False  # CPU: rotate in PyTorch; vLLM 0.32's kernel is wrong for latent attention
    record_routes: bool = False  # which experts each token went to; on CPU without prefix caching
    enforce_eager: bool = False  # on CPU always eager
    gpu_memory_utilization: float = 0.6  # read on GPU only
    kv_cache_memory_gb: float | None = None  # GiB a rank; None: 1 on CPU, what the utilization leaves on GPU
    max_num_seqs: int | None = None  # requests that run together; None: vLLM's choice
    sleep_between_phases: bool = False  # GPU: give the memory to the policy in `release`
    threads: int = 1
    log_level: str = "ERROR"
    logit_temperature: float = 1.0  # divides all logits; vLLM has no temperature for those of a prompt
    vllm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    adapter_rank: int | None = None  # of the LoRA adapters that a refit brings; None: it brings merged weights
    chat: ChatConfig | None = None  # None: the engine serves no endpoint
    node: EngineNode = EngineNode()

    def __post_init__(self) -> None:
        if self.sleep_between_phases and self.platform == "cpu":
            raise ValueError(f"{self.name}: an engine on CPU cannot sleep")
        if min(self.tensor_parallel_size, self.pipeline_parallel_size, self.max_model_len, self.threads) < 1:
            raise ValueError(
                f"{self.name}: tensor_parallel_size {self.tensor_parallel_size}, pipeline_parallel_size "
                f"{self.pipeline_parallel_size}, max_model_len {self.max_model_len} and threads {self.threads} must be "
                "at least 1"
            )
        if self.adapter_rank is not None and (self.adapter_rank > ADAPTER_RANKS[-1] or self.load_format != "auto"):
            raise ValueError(
                f"{self.name}: adapters need load_format auto and a rank of at most {ADAPTER_RANKS[-1]}, not "
                f"{self.load_format} and {self.adapter_rank}"
            )
        if self.quantization is not None and self.dtype != "bfloat16":
            raise ValueError(f"{self.name}: {self.quantization} weights need bfloat16 activations, not {self.dtype}")
        if self.ranks % self.node.count:
            raise ValueError(f"{self.name}: its {self.ranks} ranks do not divide over {self.node.count} nodes")

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


def pips_cuda() -> str | None:
    """Return the folder of the CUDA compiler that pip has installed, with which FlashInfer compiles what set-up did not
    prefetch; None if there is none. Without one vLLM leaves out FlashInfer, and with it the fused all-reduce."""
    folder = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
    return str(folder) if (folder / "bin" / "nvcc").is_file() else None


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """Return environment variables for the engine's process, to be set before it starts Python."""
    environment = {
        # The engine steps in the caller's process; only several ranks are processes of their own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": config.log_level,
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning:vllm.triton_utils.dispatcher",
    }
    if config.platform == "gpu" and (toolkit := pips_cuda()) is not None:
        environment["CUDA_HOME"] = toolkit  # of the same CUDA as torch
    if config.quantization == "mxfp8":
        # Else vLLM's emulation keeps bfloat16 weights in place of the bytes, which a refit could not fill.
        environment["VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD"] = "0"
    if config.deep_gemm:
        environment |= {"VLLM_USE_DEEP_GEMM": "1", "VLLM_USE_DEEP_GEMM_E8M0": "0"}
    if config.platform == "cpu":
        environment |= {
            # vLLM would bind threads to cores of its own choice; here several processes share the cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.threads),
            # Threads that spin while they wait starve the other processes: 5 times fewer tokens/s on shared
            # cores.
            "OMP_WAIT_POLICY": "PASSIVE",
            # vLLM compiles a sampling helper even in eager mode: 3 to 24 s of C++ compiler at the first
            # request.
            "TORCH_COMPILE_DISABLE": "1",
            # Else `@torch.compile` imports the compiler, although it is disabled.
            "TORCHDYNAMO_DISABLE": "1",
            # Do not wait long for ranks to exit: they hold nothing to save.
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "2",
        }
    return environment


PLUGINS = ("grpo_mcore_refit", "grpo_mcore_cpu_kernels")
"""Entry points of ours that vLLM loads in each of its processes."""


def drop_addresses(environ: MutableMapping[str, str]) -> None:
    """Remove the ports of vLLM that are addresses. Kubernetes sets VLLM_PORT=tcp://IP:PORT in each container of a
    namespace that has a Service named vllm."""
    ports = [name for name in environ if name.startswith("VLLM_") and name.endswith("_PORT")]
    for name in ports:
        if "://" in environ[name]:
            logger.warning(
                "%s=%s is ignored: it is the address of a Kubernetes Service, and vLLM would take it for a port; "
                "enableServiceLinks: false in the pod's spec keeps such variables out",
                *(name, environ.pop(name)),
            )


def set_engine_environment(config: EngineConfig, environ: MutableMapping[str, str]) -> None:
    """Set what an engine's process needs and does not have yet, without addresses in place of ports. A list of plug-ins
    that its user gave gets ours."""
    drop_addresses(environ)
    for key, value in engine_environment(config).items():
        environ.setdefault(key, value)
    if "VLLM_PLUGINS" in environ:
        environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*filter(None, environ["VLLM_PLUGINS"].split(",")), *PLUGINS]))


def engine_arguments(config: EngineConfig, meeting_port: int = 0) -> dict[str, Any]:
    """Return keyword arguments of `vllm.EngineArgs`. `meeting_port`: port at which the ranks of several nodes meet."""
    cpu = config.platform == "cpu"
    kv_cache_gb = config.kv_cache_memory_gb or (1.0 if cpu else None)
    arguments: dict[str, Any] = {
        "model": config.model,
        "tokenizer": config.tokenizer or config.model,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "enable_expert_parallel": config.expert_parallel,
        "max_model_len": config.max_model_len,
        "load_format": config.load_format,
        # Cached tokens are not computed, so on CPU their experts would not be recorded.
        "enable_prefix_caching": config.prefix_caching and not (cpu and config.record_routes),
        "enable_return_routed_experts": config.record_routes and not cpu,
        "enforce_eager": cpu or config.enforce_eager,
        "enable_sleep_mode": config.sleep_between_phases,
        # Log-probs of the distribution that was sampled from: after temperature, top-p and top-k.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,  # not used for sampling: every request brings its own
        "weight_transfer_config": {"backend": "grpo_mcore"},
    }
    if config.quantization is not None:
        kinds = {"linear": config.quantization, "moe": config.quantization, "ignore": list(config.unquantized)}
        arguments |= {"quantization": "online", "quantization_config": kinds}
    if config.text_only:
        arguments["language_model_only"] = True
    if config.images:
        # Each image is rendered once here (engine_images.py); a cache of vLLM's own would hold it twice.
        arguments |= {"limit_mm_per_prompt": {"image": config.images, "video": 0}, "mm_processor_cache_gb": 0}
    if cpu:
        # After a chunk of a prompt vLLM rewinds the request's seeded generator, which torch cannot do on CPU.
        arguments["enable_chunked_prefill"] = False
        arguments["ir_op_priority"] = dict(PRIORITY)
        if config.torch_rotary:
            arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        if config.dtype == "float32":
            # For latent attention: with AMX, vLLM would take its bfloat16 kernel for any dtype. Other models have only
            # one backend.
            arguments["attention_backend"] = "CPU_MLA"
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    if kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gb * GIB)
    if config.adapter_rank is not None:
        room = next(rank for rank in ADAPTER_RANKS if rank >= config.adapter_rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
    if config.max_num_seqs is not None:
        arguments["max_num_seqs"] = config.max_num_seqs
    if config.ranks > 1:
        arguments["distributed_executor_backend"] = "mp"
    if config.node.count > 1:
        arguments |= {
            "nnodes": config.node.count,
            "node_rank": config.node.rank,
            "master_addr": config.node.address,
            "master_port": meeting_port,
        }
    return arguments | dict(config.vllm_kwargs)
