"""Numbers that follow from a recipe: batch sizes, and the devices of policy and engines."""

from typing import Any

import pytest

from grpo_mcore.recipe import (
    DevicePool,
    MasterConfig,
    batch_equation,
    data_parallel_size,
    engine_nodes,
    engine_pool,
    needs_prev,
    num_engines,
    policy_pool,
    prompts_per_generation_batch,
)
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
            ["grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=2"],
            "1 prompt x 2 generations = 2 samples = 1 optimizer step x 2 = DP 1 x 2 samples, "
            "packed into bins of at most 2,048 tokens",
        ),
    ],
)
def test_the_batch_equation_of_grpo(load, overrides: list[str], equation: str) -> None:
    assert batch_equation(load(MINIMAL, *overrides).config) == equation


@pytest.mark.parametrize(("prompts", "multiplier", "size"), [(32, 1, 32), (3, 1.5, 5), (10, 1.1, 11), (100, 1.15, 115)])
def test_a_generation_batch_is_rounded_up_in_decimal(load, prompts: int, multiplier: float, size: int) -> None:
    words = [f"grpo.num_prompts_per_step={prompts}", f"policy.train_global_batch_size={prompts * 16}"]
    config = load(MINIMAL, *words, "grpo.use_dynamic_sampling=true", f"grpo.batch_multiplier={multiplier}").config
    assert prompts_per_generation_batch(config) == size


def test_passes_of_a_critic_that_is_off_need_no_logprobs_of_before_the_update(load) -> None:
    words = ("ppo.ppo_epochs=2", "loss_fn.reference_policy_kl_penalty=0")
    assert needs_prev(load(MINIMAL, *words, "ppo.enabled=true").config)
    assert not needs_prev(load(MINIMAL, *words, "ppo.enabled=false").config)


def test_the_batch_equation_of_sft(load) -> None:
    config = load(MINIMAL + "sft: {seed: 1}\n", "cluster.num_nodes=2", "policy.train_global_batch_size=32").config
    assert batch_equation(config, "sft") == "32 samples = DP 2 x 16 samples, packed into bins of at most 2,048 tokens"


def test_a_micro_batch_of_dynamic_batching_holds_its_samples_at_their_longest(load) -> None:
    words = ["policy.dynamic_batching.enabled=true", "policy.sequence_packing.enabled=false"]
    policy = load(MINIMAL, "policy.train_micro_batch_size=3", *words).config.policy
    assert policy.dynamic_batching.train_mb_tokens == 3 * policy.max_total_sequence_length


def test_the_overlong_penalty_is_largest_at_the_longest_sequence_by_default(load) -> None:
    assert load(MINIMAL, "policy.max_total_sequence_length=300").config.grpo.reward_shaping.max_response_length == 300


def config(nodes: int, gpus: int, pool: dict[str, Any] | None, tensor: int = 1, **generation: Any) -> MasterConfig:
    colocated = {} if pool is None else {"colocated": {"enabled": False, "resources": pool}}
    generation |= colocated | {"vllm_cfg": {"tensor_parallel_size": tensor}}
    return MasterConfig.model_validate(
        {
            "policy": {"model_name": "m", "train_global_batch_size": 384, "generation": generation},
            "data": {"train": {"data_path": "x.jsonl"}},
            "grpo": {"num_prompts_per_step": 96, "num_generations_per_prompt": 4},
            "cluster": {"num_nodes": nodes, "gpus_per_node": gpus},
        }
    )


@pytest.mark.parametrize(
    ("pool", "policy", "engines", "count"),
    [
        (None, DevicePool(3, 8), None, 12),
        ({"num_nodes": 1}, DevicePool(2, 8), DevicePool(1, 8), 4),
        ({"num_nodes": 1, "gpus_per_node": 4}, DevicePool(2, 8), DevicePool(1, 4), 2),
        ({"gpus_per_node": 4}, DevicePool(3, 4), DevicePool(3, 4), 6),
        ({"num_nodes": 3, "gpus_per_node": 4}, DevicePool(3, 4), DevicePool(3, 4), 6),
    ],
)
def test_pools(pool: dict[str, Any] | None, policy: DevicePool, engines: DevicePool | None, count: int) -> None:
    found = config(3, 8, pool, tensor=2)
    assert policy_pool(found) == policy and engine_pool(found) == engines
    assert data_parallel_size(found) == policy.ranks
    assert num_engines(found, gpu=True) == count
    assert num_engines(found, gpu=False) == (1 if pool is None else count)


@pytest.mark.parametrize(
    ("pool", "tensor", "nodes", "count"),
    [
        (None, 2, 1, 16), (None, 8, 1, 4), (None, 16, 2, 2), (None, 32, 4, 1), ({"num_nodes": 2}, 16, 2, 1),
        ({"gpus_per_node": 4}, 8, 2, 2), ({"gpus_per_node": 4}, 4, 1, 4),
    ],
)  # fmt: skip
def test_nodes_of_an_engine(pool: dict[str, Any] | None, tensor: int, nodes: int, count: int) -> None:
    found = config(4, 8, pool, tensor=tensor)
    assert engine_nodes(found) == nodes and num_engines(found, gpu=True) == count
