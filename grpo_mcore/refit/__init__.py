"""Make the engines' weights equal the policy's: layouts -> plan -> buffer -> stage -> proof -> commit.

This package does not know GRPO or Megatron-Core; vLLM appears only in `vllm_backend` and the `engine_*` modules."""

from grpo_mcore.refit.layout import EngineLayout, LayoutError, TrainerLayout
from grpo_mcore.refit.plan import RefitError, RefitPlan, plan_model_refit, plan_refit
from grpo_mcore.refit.proof import Verify
from grpo_mcore.refit.receiver import RefitReceiver
from grpo_mcore.refit.refit import EngineNodes, Refit, RefitReport, refit
from grpo_mcore.refit.sender import RefitSender, WeightSource
