"""Imports of the process from which ranks are forked (`rank_server`), left out of every garbage collection."""

import gc
import os

gc.disable()
from grpo_mcore.generation.config import EngineConfig, engine_environment  # noqa: E402
from grpo_mcore.generation.cpu_kernels import import_vllm_without_compiler  # noqa: E402

os.environ.update(engine_environment(EngineConfig("")))
import_vllm_without_compiler()
import transformers.models.auto.modeling_auto  # noqa: E402, F401
import vllm.v1.engine.llm_engine  # noqa: E402, F401
import vllm.v1.executor.multiproc_executor  # noqa: E402, F401
import vllm.v1.worker.cpu_worker  # noqa: E402, F401

import grpo_mcore.refit.engine_side.vllm_backend  # noqa: E402, F401

gc.freeze()
gc.enable()
