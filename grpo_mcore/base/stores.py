"""Stores at which processes meet, listening at one address of this machine. torch's own listens at all of them, where
anybody may read and write it: it asks for no token."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from grpo_mcore.base.addresses import family_of


def hosted_store(address: str, port: int, members: int, timeout_s: float, *, wait: bool) -> TCPStore:
    """Return a new store that listens at `address` and `port` (0: the kernel's choice). `wait`: until all members are
    connected. Raises OSError if it cannot listen there, and torch's DistError."""
    listening = socket.create_server((address, port), family=family_of(address), backlog=4096)
    return TCPStore(
        address, listening.getsockname()[1], members, True, timedelta(seconds=timeout_s),
        wait_for_workers=wait, master_listen_fd=listening.detach(),
    )  # fmt: skip


def is_address(host: str) -> bool:
    """Return whether a host is given by its address. A name may lead elsewhere on its own machine, as to 127.0.1.1."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
