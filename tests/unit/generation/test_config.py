import os
from importlib.metadata import entry_points

import pytest

from grpo_mcore.generation.config import (
    EngineConfig,
    drop_addresses,
    engine_arguments,
    engine_environment,
    set_engine_environment,
)


def test_the_environment_is_a_pure_function_of_the_config() -> None:
    before = dict(os.environ)
    config = EngineConfig("model", threads=3, log_level="INFO")
    environment = engine_environment(config)
    assert os.environ == before
    assert environment == engine_environment(config)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_LOGGING_LEVEL"] == "INFO"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_a_gpu_engine_keeps_its_compiler_and_threads() -> None:
    environment = engine_environment(EngineConfig("model", platform="gpu"))
    compiler = {"TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"}
    assert not {*compiler, "OMP_NUM_THREADS", "OMP_WAIT_POLICY"} & environment.keys()


def test_arguments_on_cpu_and_gpu() -> None:
    cpu = engine_arguments(EngineConfig("model", gpu_memory_utilization=0.5))
    assert cpu["enforce_eager"] and cpu["kv_cache_memory_bytes"] == 2**30
    assert "gpu_memory_utilization" not in cpu and "distributed_executor_backend" not in cpu
    assert cpu["logprobs_mode"] == "processed_logprobs"
    assert cpu["enable_chunked_prefill"] is False
    assert "enable_lora" not in cpu and engine_arguments(EngineConfig("model", adapter_rank=9))["max_lora_rank"] == 16
    with pytest.raises(ValueError, match="adapters need load_format auto and a rank of at most 512, not dummy and 4"):
        EngineConfig("model", adapter_rank=4, load_format="dummy")
    assert cpu["weight_transfer_config"] == {"backend": "grpo_mcore"}
    gpu = engine_arguments(EngineConfig("model", platform="gpu", tensor_parallel_size=2, sleep_between_phases=True))
    assert not gpu["enforce_eager"] and gpu["gpu_memory_utilization"] == 0.6 and gpu["enable_sleep_mode"]
    assert "enable_chunked_prefill" not in gpu
    assert "kv_cache_memory_bytes" not in gpu and gpu["distributed_executor_backend"] == "mp"
    small = engine_arguments(EngineConfig("model", kv_cache_memory_gb=0.25, vllm_kwargs={"max_num_seqs": 3}))
    assert small["kv_cache_memory_bytes"] == 2**28 and small["max_num_seqs"] == 3
    assert "attention_backend" not in cpu and not cpu["enable_expert_parallel"]
    exact = engine_arguments(EngineConfig("model", dtype="float32", tensor_parallel_size=2, expert_parallel=True))
    assert exact["attention_backend"] == "CPU_MLA" and exact["enable_expert_parallel"]


def test_invalid_configurations() -> None:
    with pytest.raises(ValueError, match="engine-3: an engine on CPU cannot sleep"):
        EngineConfig("model", name="engine-3", sleep_between_phases=True)
    with pytest.raises(ValueError, match="threads 0 must be at least 1"):
        EngineConfig("model", threads=0)


def test_a_quantised_engine_keeps_its_layers_and_its_bytes() -> None:
    config = EngineConfig("model", quantization="mxfp8", unquantized=(r"re:.*\.gate$",), deep_gemm=True)
    arguments, environment = engine_arguments(config), engine_environment(config)
    assert arguments["quantization"] == "online" and arguments["dtype"] == "bfloat16"
    assert arguments["quantization_config"] == {"linear": "mxfp8", "moe": "mxfp8", "ignore": [r"re:.*\.gate$"]}
    assert environment["VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD"] == "0" and environment["VLLM_USE_DEEP_GEMM"] == "1"
    assert "quantization" not in engine_arguments(EngineConfig("model"))
    with pytest.raises(ValueError, match="fp8_per_block weights need bfloat16 activations, not float32"):
        EngineConfig("model", dtype="float32", quantization="fp8_per_block")


def test_a_list_of_vllms_plugins_gets_ours() -> None:
    """Without them an engine on CPU has no kernels, and no engine can be refitted."""
    ours = {entry.name for entry in entry_points(group="vllm.general_plugins") if entry.value.startswith("grpo_mcore.")}
    for given, expected in ((None, None), ("", ours), ("theirs,grpo_mcore_refit", {"theirs", *ours})):
        environ = {} if given is None else {"VLLM_PLUGINS": given}
        set_engine_environment(EngineConfig("model"), environ)
        names = environ.get("VLLM_PLUGINS")
        assert (names if names is None else set(names.split(","))) == expected


def test_an_address_of_a_kubernetes_service_is_no_port(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM raises ValueError for it at its start."""
    service = {"VLLM_SERVICE_HOST": "10.0.0.7", "VLLM_PORT_8000_TCP": "tcp://10.0.0.7:8000", "REDIS_PORT": "tcp://r:1"}
    environ = service | {"VLLM_PORT": "tcp://10.0.0.7:8000", "VLLM_DP_MASTER_PORT": "29500"}
    set_engine_environment(EngineConfig("model"), environ)
    assert "VLLM_PORT" not in environ
    assert {**environ, **service, "VLLM_DP_MASTER_PORT": "29500"} == environ
    assert "VLLM_PORT=tcp://10.0.0.7:8000 is ignored" in caplog.text and "enableServiceLinks: false" in caplog.text
    caplog.clear()
    drop_addresses(environ)
    assert not caplog.text
