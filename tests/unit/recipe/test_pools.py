"""Devices of the policy and of the engines, and divisions that are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_mcore.recipe import (
    DevicePool,
    MasterConfig,
    RecipeError,
    data_parallel_size,
    engine_nodes,
    engine_pool,
    num_engines,
    policy_pool,
)


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
    ("pool", "changes", "message"),
    [
        ({}, {}, "say what the engines get"),
        ({"num_nodes": 3}, {}, "takes all of cluster.num_nodes 3: none is left to train"),
        ({"gpus_per_node": 8}, {}, "takes all of cluster.gpus_per_node 8: none is left to train"),
        (
            {"gpus_per_node": 4},
            {"tensor": 6},
            "are neither a divisor nor a multiple of the 4 devices",
        ),
        ({"num_nodes": 1}, {"tensor": 16}, "1 engines of 16 ranks do not fit 1 nodes x 8 devices"),
        ({"num_nodes": 1}, {"num_engines": 9}, "9 engines of 1 ranks do not fit 1 nodes x 8 devices"),
    ],
)
def test_impossible_pools(pool: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        config(3, 8, pool, **changes)


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


def test_the_local_backend_has_no_engine_pool() -> None:
    plain = config(1, 1, None).model_dump()
    plain["cluster"]["backend"] = "local"
    plain["policy"]["generation"]["colocated"] = {"enabled": False, "resources": {"gpus_per_node": 1}}
    with pytest.raises(RecipeError, match="the local backend has one; set cluster.backend: ray"):
        MasterConfig.model_validate(plain)


def test_engines_with_their_own_devices_need_not_pause() -> None:
    plain = config(1, 4, {"gpus_per_node": 1}).model_dump()
    plain["loss_fn"]["use_importance_sampling_correction"] = True
    plain["grpo"]["async_grpo"] |= {"enabled": True, "in_flight_weight_updates": True, "partial_rollouts": True}
    with pytest.raises(RecipeError, match="partial_rollouts: engines with their own devices need not pause"):
        MasterConfig.model_validate(plain)
