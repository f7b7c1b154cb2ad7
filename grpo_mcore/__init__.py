"""grpo_mcore: GRPO with Megatron-Core policies, vLLM engines and Ray."""

__version__ = "0.2.0"
