"""vLLM engines: start, generate, take new weights, release. Does not know Megatron-Core or rewards."""

from grpo_mcore.generation.config import EngineConfig, EngineNode, LoadFormat, engine_environment
from grpo_mcore.generation.engine import Engine, EngineError
from grpo_mcore.generation.engine_follower import EngineFollower
