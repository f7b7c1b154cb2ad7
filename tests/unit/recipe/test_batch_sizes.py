from __future__ import annotations

import pytest

from grpo_mcore.recipe import batch_equation, prompts_per_generation_batch
from tests.unit.recipe.conftest import MINIMAL


@pytest.mark.parametrize(
    ("overrides", "equation"),
    [
        (
            ["cluster.gpus_per_node=8", "policy.megatron_cfg.tensor_model_parallel_size=2"],
            "32 prompts x 16 generations = 512 samples = 1 optimizer step x 512 = DP 4 x 128 samples, "
            "packed into bins of at most 2,048 tokens",
        ),
        (
            ["policy.train_global_batch_size=128", "policy.sequence_packing.enabled=false"],
            "32 prompts x 16 generations = 512 samples = 4 optimizer steps x 128 = 4 x DP 1 x "
            "32 micro-batches x 4 samples",
        ),
        (
            ["policy.sequence_packing.enabled=false", "policy.dynamic_batching.enabled=true"],
            "32 prompts x 16 generations = 512 samples = 1 optimizer step x 512 = DP 1 x 512 samples, "
            "in micro-batches of at most 2,048 tokens",
        ),
        (
            [
                "grpo.num_prompts_per_step=1",
                "grpo.num_generations_per_prompt=2",
                "policy.train_global_batch_size=2",
            ],
            "1 prompt x 2 generations = 2 samples = 1 optimizer step x 2 = DP 1 x 2 samples, "
            "packed into bins of at most 2,048 tokens",
        ),
    ],
)
def test_grpo(load, overrides: list[str], equation: str) -> None:
    assert batch_equation(load(MINIMAL, *overrides).config) == equation


@pytest.mark.parametrize(("prompts", "multiplier", "size"), [(32, 1, 32), (3, 1.5, 5), (10, 1.1, 11), (100, 1.15, 115)])
def test_a_generation_batch_is_rounded_up_in_decimal(load, prompts: int, multiplier: float, size: int) -> None:
    words = [f"grpo.num_prompts_per_step={prompts}", f"policy.train_global_batch_size={prompts * 16}"]
    config = load(MINIMAL, *words, "grpo.use_dynamic_sampling=true", f"grpo.batch_multiplier={multiplier}").config
    assert prompts_per_generation_batch(config) == size


def test_sft(load) -> None:
    config = load(MINIMAL + "sft: {seed: 1}\n", "cluster.num_nodes=2", "policy.train_global_batch_size=32").config
    assert batch_equation(config, "sft") == "32 samples = DP 2 x 16 samples, packed into bins of at most 2,048 tokens"
