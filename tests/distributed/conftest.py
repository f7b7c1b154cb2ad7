from __future__ import annotations

from collections.abc import Iterator

import pytest

from grpo_mcore.parallel.rank_pool import RankPool


@pytest.fixture(scope="package")
def ranks() -> Iterator[RankPool]:
    """Four processes with torch and Megatron-Core loaded, shared by all tests of this folder and ended after them."""
    pool = RankPool(4)
    yield pool
    pool.close()
