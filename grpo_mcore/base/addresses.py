"""Network addresses: where other machines reach this one, how an address stands in a URL, and what listens there.

A worker's address comes from its cluster (Ray's node address), never from the machine's own name: on Debian and Ubuntu
/etc/hosts maps that to 127.0.1.1, and on machines with several networks it may belong to any of them. Standard library
and psutil only; torch where a store is made.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch.distributed import TCPStore

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


def outward_address() -> str:
    """Return the address from which packets of this machine go to the world; the loopback without such a route."""
    try:
        return address_towards("192.0.2.1")  # of a network for documentation: nothing is sent
    except OSError:
        return LOOPBACK


def interface_of(address: str) -> str | None:
    """Return the name of the network interface of this machine that has `address`; None if it has none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == address for known in addresses):
            return name
    return None


def is_address(host: str) -> bool:
    """Return whether a host is given by its address. A name may lead elsewhere on its own machine, as to 127.0.1.1."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def gloo_towards(host: str) -> None:
    """Make the Gloo groups of this process, and of its children, listen where `host` reaches this machine: by default
    they listen at the machine's own name. A GLOO_SOCKET_IFNAME that is set already stays."""
    address = address_towards(host)
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback and (name := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def hosted_store(address: str, port: int, members: int, timeout_s: float, *, wait: bool) -> TCPStore:
    """Return a new store that listens at `address` and `port` (0: the kernel's choice) alone. torch's own listens at
    all addresses of the machine, where anybody may read and write it: it asks for no token. `wait`: until all members
    are connected. Raises OSError if it cannot listen there, and torch's DistError."""
    from torch.distributed import TCPStore

    listening = socket.create_server((address, port), family=family_of(address), backlog=4096)
    return TCPStore(
        address, listening.getsockname()[1], members, True, timedelta(seconds=timeout_s),
        wait_for_workers=wait, master_listen_fd=listening.detach(),
    )  # fmt: skip


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
