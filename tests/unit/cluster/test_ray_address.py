"""Addresses of a running Ray that a run cannot join are refused at once, in words of this package."""

import pytest

from grpo_mcore.base.processes import free_port
from grpo_mcore.cluster.ray_session import BadRayAddress, RaySession, RayUnreachable


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "http://127.0.0.1:8265", "127.0.0.1", "head:port"])
def test_addresses_that_name_no_cluster(address: str) -> None:
    with pytest.raises(BadRayAddress, match=f"RAY_ADDRESS {address}.*HOST:"):
        RaySession(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_nobody_is_there(host: str) -> None:
    with pytest.raises(RayUnreachable, match="nothing listens at .*unset RAY_ADDRESS"):
        RaySession(f" {host}:{free_port()}")
