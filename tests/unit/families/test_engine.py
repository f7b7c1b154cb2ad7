"""Engines get the options on a GPU that were tested on CPU, but for named exceptions."""

from __future__ import annotations

import pytest

from grpo_mcore.families import engine_options, shape_of
from grpo_mcore.families.known import known_config, known_configs
from grpo_mcore.families.registry import MODULES
from grpo_mcore.generation.config import EngineConfig, engine_arguments

SHAPES = {(shape := shape_of(known_config(name))).family: shape for name in known_configs()}

OPTIONS = {"torch_rotary": "vLLM 0.32's CPU kernel rotates latent attention wrongly; its CUDA kernel does not run here"}
"""Options of a family that may differ, and why."""

ARGUMENTS = {
    "enforce_eager": "the CPU build compiles nothing",
    "enable_prefix_caching": "with recorded experts: our recorder on CPU misses cached tokens, which are not computed",
    "enable_return_routed_experts": "vLLM records experts on GPUs, our recorder on CPU",
    "enable_chunked_prefill": "after a chunk vLLM rewinds the seeded generator, which torch cannot do on CPU",
    "ir_op_priority": "chooses kernels that only the CPU build lacks",
    "compilation_config": "switches torch_rotary on",
    "attention_backend": "float32 on CPU has one backend for latent attention",
    "gpu_memory_utilization": "on CPU nothing is left to be shared",
    "kv_cache_memory_bytes": "on CPU nothing says how much is free",
}
"""Arguments of vLLM that may differ, and why."""


def test_every_family_has_a_known_model() -> None:
    assert {family.removesuffix("_text") for family in SHAPES} >= {
        module.__name__.rpartition(".")[2].removesuffix("_text") for module in MODULES
    }


@pytest.mark.parametrize("family", SHAPES)
def test_a_familys_engine_on_a_gpu_has_the_options_tested_on_cpu(family: str) -> None:
    shape = SHAPES[family]
    on_cpu, on_gpu = (engine_options(shape, gpu=gpu) for gpu in (False, True))
    assert on_cpu.keys() == on_gpu.keys()
    assert {name for name in on_cpu if on_cpu[name] != on_gpu[name]} <= OPTIONS.keys()
    assert on_gpu["prefix_caching"] == (shape.mamba is None and shape.delta is None)
    for record in (False, True):
        for dtype in ("bfloat16", "float32"):
            cpu, gpu = (
                engine_arguments(EngineConfig("m", platform=platform, dtype=dtype, record_routes=record, **options))
                for platform, options in (("cpu", on_cpu), ("gpu", on_gpu))
            )
            differing = {name for name in cpu | gpu if cpu.get(name) != gpu.get(name)}
            assert differing <= ARGUMENTS.keys(), differing - ARGUMENTS.keys()
