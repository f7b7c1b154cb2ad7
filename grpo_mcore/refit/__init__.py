"""Making the engines' weights equal the policy's: plan -> buffer -> buckets -> commit. Knows nothing of GRPO
or Megatron-Core, and of vLLM only in `vllm_backend`."""

from grpo_mcore.refit.plan import RefitError, RefitPlan, plan_refit
from grpo_mcore.refit.refit import RefitReport, refit
from grpo_mcore.refit.sender import RefitSender, WeightSource

__all__ = ["RefitError", "RefitPlan", "RefitReport", "RefitSender", "WeightSource", "plan_refit", "refit"]
