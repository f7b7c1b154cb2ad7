"""Make the engines' weights equal the policy's: layouts -> plan -> buffer -> stage -> proof -> commit.

This package does not know GRPO or Megatron-Core; vLLM appears only in `vllm_backend` and the `engine_*` modules."""
