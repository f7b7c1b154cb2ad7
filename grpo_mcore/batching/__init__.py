"""Batching: planning on lengths, and rows of packed samples. Importing this room does not import torch."""

from grpo_mcore.batching.packing import PACKING_ALGORITHMS, PackingError, pack
from grpo_mcore.batching.plan import BatchPlan, CostModel, StepPlan, plan_step
