"""A store is reached at its address, and at no other of the machine."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from grpo_mcore.base.stores import hosted_store, is_address


def test_a_store_listens_at_its_address_alone() -> None:
    store = hosted_store("127.0.0.1", 0, 2, 60.0, wait=False)
    TCPStore("127.0.0.1", store.port, 2, False, timedelta(seconds=60)).set("a", "b")
    assert store.get("a") == b"b"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), 60)
    with pytest.raises(OSError, match="in use"):
        hosted_store("127.0.0.1", store.port, 2, 1.0, wait=False)


def test_names_are_told_from_addresses() -> None:
    assert [is_address(host) for host in ("10.0.0.1", "fe80::1%eth0", "node-1", "localhost")] == [
        True,
        True,
        False,
        False,
    ]
