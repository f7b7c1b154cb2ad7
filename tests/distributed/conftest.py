from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from grpo_mcore.tools.parity.rank_pool import RankPool

if TYPE_CHECKING:
    from grpo_mcore.cluster.ray_cluster import RayCluster

WANTED = "a-secret-that-workers-need"


@pytest.fixture(scope="package")
def ranks() -> Iterator[RankPool]:
    """Four processes with torch and Megatron-Core loaded, shared by all tests of this folder and ended after them."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A Ray of 4 CPUs and 2 GPUs, which it only counts, that is enough to test which worker sees which. It takes
    seconds to start and to end, so test_ray_cluster.py and test_rollouts_ray.py share it; the files before them may
    have another one."""
    from grpo_mcore.cluster.ray_cluster import RayCluster

    os.environ["GRPO_TEST_SECRET"] = "hunter2"
    os.environ["GRPO_TEST_WANTED"] = WANTED
    try:
        with RayCluster(
            tmp_path_factory.mktemp("logs"),
            address="local",
            env_vars=["GRPO_TEST_WANTED"],
            num_cpus=4,
            num_gpus=2,
            start_timeout_s=150,  # Ray replaces a worker process that has not registered after 60 s
            call_timeout_s=60,
        ) as cluster:
            yield cluster
    finally:
        del os.environ["GRPO_TEST_SECRET"], os.environ["GRPO_TEST_WANTED"]
