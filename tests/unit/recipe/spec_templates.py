"""Recipes of the specification (spec/), as users of NeMo RL write them."""

from pathlib import Path

GYM_GRPO, GRPO_TEMPLATE, SFT_TEMPLATE, DPO_TEMPLATE = (
    Path(__file__).with_name("spec").joinpath(f"{name}.yaml").read_text() for name in ("gym_grpo", "grpo", "sft", "dpo")
)
