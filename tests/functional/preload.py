"""Import once what runs in this process need, and exclude it from garbage collection.

vLLM collects garbage four times in the life of an engine, and a policy once at its end. Each collection takes half a
second over the imported modules alone.
"""

import functools
import gc
import importlib
import os
import warnings

from grpo_mcore.generation import EngineConfig, engine_environment
from grpo_mcore.generation.cpu_kernels import import_vllm_without_compiler
from grpo_mcore.parallel.mesh import prepare_megatron
from grpo_mcore.parallel.platform import Platform
from tests.functional.rank_server import CONTEXT

_MODULES = (
    "grpo_mcore.driver.policy.policy_worker",
    "grpo_mcore.parallel.weights.checkpoint",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)


@functools.cache
def preload() -> None:
    """Import in the order and the environment of a run."""
    gc.collect()
    gc.disable()
    prepare_megatron(Platform("cpu"))
    for name, value in engine_environment(EngineConfig("")).items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_vllm_without_compiler()
        for module in _MODULES:
            importlib.import_module(module)
        multiproc_executor = importlib.import_module("vllm.v1.executor.multiproc_executor")
    multiproc_executor.get_mp_context = lambda: CONTEXT  # type: ignore[attr-defined]
    gc.freeze()
    gc.enable()
    gc.freeze = gc.unfreeze = lambda: None  # vLLM would freeze policies too, and unfreeze all
