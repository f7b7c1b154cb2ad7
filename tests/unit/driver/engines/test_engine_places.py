"""Next to which policy ranks each engine runs."""

from typing import Any

import pytest

from grpo_mcore.driver.run.setup import engine_ranks
from grpo_mcore.recipe import MasterConfig, num_engines
from tests.recipes import small_recipe


def config(nodes: int, gpus: int, tensor: int, **cluster: Any) -> MasterConfig:
    policy = {"generation": {"vllm_cfg": {"tensor_parallel_size": tensor}}}
    return small_recipe(nodes * gpus, policy=policy, cluster={"num_nodes": nodes, "gpus_per_node": gpus, **cluster})


def ranks(found: list[slice]) -> list[list[int]]:
    return [list(range(part.start or 0, part.stop)) for part in found]


@pytest.mark.parametrize(("nodes", "gpus", "tensor"), [(2, 8, 1), (2, 8, 4), (2, 8, 8), (4, 8, 16), (8, 4, 32)])
def test_engines_on_gpus_have_devices_of_their_own_node_by_node(nodes: int, gpus: int, tensor: int) -> None:
    recipe = config(nodes, gpus, tensor)
    found = [ranks(engine_ranks(index, recipe, gpu=True)) for index in range(num_engines(recipe, gpu=True))]
    assert [rank for engine in found for part in engine for rank in part] == list(range(nodes * gpus))
    for engine in found:
        assert len(engine) == max(1, tensor // gpus)
        assert all(len({rank // gpus for rank in part}) == 1 for part in engine), "a part lies on one node"


def test_engines_on_cpu_take_the_nodes_in_turns() -> None:
    recipe = config(4, 2, 2, platform="cpu")
    assert [ranks(engine_ranks(index, recipe, gpu=False)) for index in range(5)] == [
        [[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[0, 1]],
    ]  # fmt: skip
    over = config(4, 2, 4, platform="cpu")
    assert [ranks(engine_ranks(index, over, gpu=False)) for index in range(3)] == [
        [[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [2, 3]],
    ]  # fmt: skip
    assert ranks(engine_ranks(3, config(1, 2, 4, platform="cpu"), gpu=False)) == [[]]
