"""Addresses of a machine whose own name leads elsewhere, and of IPv6."""

import os
import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from grpo_mcore.base.addresses import (
    address_towards,
    family_of,
    gloo_towards,
    hosted_store,
    interface_of,
    is_address,
    split_port,
    with_port,
)
from grpo_mcore.base.processes import free_port


def test_an_address_stands_in_a_url_and_comes_out_of_it() -> None:
    for host, text in (("10.0.0.1", "10.0.0.1:80"), ("fd00::1", "[fd00::1]:80"), ("node-1", "node-1:80")):
        assert with_port(host, 80) == text and split_port(text) == (host, "80")
    for text in ("auto", "10.0.0.1", "fd00::1", "[fd00::1]"):
        assert split_port(text) == (text.strip("[]"), "")


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_this_machine_as_another_one_reaches_it(host: str, family: int) -> None:
    assert family_of(host) == family
    if family == socket.AF_INET6 and not has_ipv6():
        pytest.skip("no IPv6 on this machine")
    assert address_towards(host) == host and interface_of(host) == "lo"
    with socket.create_server((host, free_port(host)), family=family):
        pass
    assert interface_of("192.0.2.1") is None


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_gloo_listens_where_the_others_reach_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that what the code sets is taken back at the end
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    gloo_towards("127.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "on one machine any address will do"
    monkeypatch.setattr("grpo_mcore.base.addresses.address_towards", lambda host: "10.1.2.3")
    monkeypatch.setattr("grpo_mcore.base.addresses.interface_of", {"10.1.2.3": "eth7"}.get)
    gloo_towards("10.1.2.9")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "the user's")
    gloo_towards("10.1.2.9")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "the user's"


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
