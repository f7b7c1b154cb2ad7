"""A policy of two tensor-parallel ranks under Ray, and the recipe of the engines that take its weights."""

from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_mcore.cluster.ray_cluster import RayCluster
from grpo_mcore.driver.policy.policy_group import PolicyGroup
from grpo_mcore.driver.policy.refit_settings import RefitSettings
from grpo_mcore.families import read_hf_config, shape_of
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.recipe import MasterConfig, load_recipe
from tests.functional.engine_cases import CONTEXT, Policy, PolicyRank
from tests.functional.runs import write_recipe


def policy_group(cluster: RayCluster, folder: Path, rank: type = PolicyRank, **how: Any) -> PolicyGroup:
    how |= {"cpus": 0.1, "env": {"OMP_NUM_THREADS": "1"}}
    return PolicyGroup(
        cluster, cluster.spawn_group("policy", rank, [(str(folder),)] * 2, **how), PolicyLayout(2, 1, 1),
        shape_of(read_hf_config(folder)), str(folder), "float32", RefitSettings(2 * 34_304 / 2**30, "full"),
    )  # fmt: skip


def recipe_of(folder: Path, vllm: dict[str, Any], cluster: dict[str, Any], **generation: Any) -> MasterConfig:
    generation |= {"vllm_cfg": {"kv_cache_memory_gb": 0.1} | vllm}
    sizes = {"precision": "float32", "max_total_sequence_length": CONTEXT}
    recipe = {
        "policy": {"model_name": str(folder), "generation": generation} | sizes,
        "data": {"train": {"data_path": "train.jsonl"}},  # never read
        "cluster": {"platform": "cpu"} | cluster,
    }
    return load_recipe(write_recipe(folder.parent, recipe), []).config


def change(policy: PolicyGroup, twin: Policy, seed: int) -> dict[str, Tensor]:
    """New weights, the same on the ranks and in the twin. Returns them; the policy's next version is `seed`."""
    calls = [worker.call("change", seed) for worker in policy.workers]
    twin.change(seed)
    for call in calls:
        call.result()
    policy.updates = seed - 1
    return {name: parameter.detach().clone() for name, parameter in twin.reference.named_parameters()}
