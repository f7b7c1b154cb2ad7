"""Network addresses: the one at which other machines reach this one, its interface, and how it stands in a URL.

A worker's address comes from its cluster (Ray's node address), never from the machine's own name: on Debian and Ubuntu
/etc/hosts maps that to 127.0.1.1, and on machines with several networks it may belong to any of them. Standard library
and psutil only.
"""

from __future__ import annotations

import socket

import psutil

LOOPBACK = "127.0.0.1"


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of a name or address ("": IPv4). Raises OSError if the name is unknown."""
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0] if host else socket.AF_INET


def address_towards(host: str) -> str:
    """Return the address of this machine from which packets go to `host`: the one at which `host` reaches it.

    Sends nothing. Raises OSError if the name is unknown or there is no route."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the network interface of this machine that has `address`; None if it has none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None


def with_port(host: str, port: int) -> str:
    """Return host:port as a URL has it, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_port(address: str) -> tuple[str, str]:
    """Split host:port into the host, an IPv6 address without its brackets, and the port as text ("" without one). An
    IPv6 address without brackets has no port."""
    host, colon, port = address.rpartition(":")
    if not colon or port.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = address, ""
    return host.removeprefix("[").removesuffix("]"), port


def running_ray(address: str | None) -> str | None:
    """Return the address if it names a running Ray. With an empty one and with "local" a run starts its own."""
    address = (address or "").strip()
    return None if address in ("", "local") else address
