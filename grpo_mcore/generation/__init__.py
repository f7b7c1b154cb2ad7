"""vLLM engines: start, generate, take new weights, release. Knows nothing of Megatron-Core or rewards."""

from grpo_mcore.generation.config import EngineConfig, engine_environment
from grpo_mcore.generation.engine import Engine, EngineError

__all__ = ["Engine", "EngineConfig", "EngineError", "engine_environment"]
