"""Environment variables of the policy's ranks: what the platform needs, and the recipe's."""

import pytest

from grpo_mcore.driver.run.setup import rank_environment
from grpo_mcore.recipe import load_recipe

ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"
MEGATRON = "policy.megatron_cfg"


@pytest.mark.parametrize(
    ("overrides", "gpu", "expected"),
    [
        ([], True, "1"),  # TP 2
        ([], False, None),
        ([f"{MEGATRON}.tensor_model_parallel_size=1", f"{MEGATRON}.sequence_parallel=false"], True, None),
        ([f"{MEGATRON}.env_vars={{{ONE_QUEUE}: '8', NVTE_FLASH_ATTN: '0'}}"], True, "8"),
        ([f"{MEGATRON}.env_vars={{NVTE_FLASH_ATTN: '0'}}"], False, None),
    ],
)
def test_the_platform_the_layout_and_the_recipe_decide(overrides: list[str], gpu: bool, expected: str | None) -> None:
    config = load_recipe("grpo-math-8B", overrides).config
    found = rank_environment(config, 8, gpu=gpu)
    assert found.get(ONE_QUEUE) == expected
    assert int(found["OMP_NUM_THREADS"]) >= 1
    assert {
        name: found.get(name) for name in config.policy.megatron_cfg.env_vars
    } == config.policy.megatron_cfg.env_vars


def test_null_is_none_of_them() -> None:
    config = load_recipe("grpo-math-8B", [f"{MEGATRON}.env_vars=null"]).config
    assert config.policy.megatron_cfg.env_vars == {}


@pytest.mark.parametrize(("nodes", "gpu", "threads"), [(1, True, "14"), (32, True, "14"), (32, False, "1")])
def test_ranks_on_gpus_share_the_cores_of_their_own_node(
    nodes: int, gpu: bool, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 256 ranks each had one of a node's 112 cores, and the optimizer on the host took 14 times as long."""
    monkeypatch.setattr("grpo_mcore.parallel.platform.available_cores", lambda: 112.0)
    config = load_recipe("grpo-math-8B", [f"cluster.num_nodes={nodes}", "cluster.gpus_per_node=8"]).config
    assert rank_environment(config, 8 * nodes, gpu=gpu)["OMP_NUM_THREADS"] == threads
