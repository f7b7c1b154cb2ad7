"""grpo_mcore: GRPO with Megatron-Core policies, vLLM engines and Ray."""

from grpo_mcore.base import former_paths

__version__ = "0.3.0"

former_paths.install()
