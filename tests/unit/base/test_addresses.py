"""Addresses of a machine whose own name leads elsewhere, and of IPv6."""

from __future__ import annotations

import socket

import pytest

from grpo_mcore.base.addresses import address_towards, family_of, interface_of, split_port, with_port
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
