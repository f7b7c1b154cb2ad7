"""Gloo, which carries the messages of process groups on CPU: where a process listens, and one device for all groups.

For every room."""

from __future__ import annotations

import functools
import ipaddress
import os
from datetime import timedelta
from typing import Any

from grpo_mcore.base.addresses import address_towards, interface_of


def gloo_towards(host: str) -> None:
    """Make the Gloo groups of this process, and of its children, listen where `host` reaches this machine: by default
    they listen at the machine's own name. A GLOO_SOCKET_IFNAME that is set already stays."""
    here = address_towards(host)
    if not ipaddress.ip_address(here.partition("%")[0]).is_loopback and (name := interface_of(here)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


@functools.cache
def share_gloo_device() -> None:
    """Let the Gloo groups that this process makes from now on share one device. torch 2.13 makes one for each group,
    with a thread that wakes up 100 times a second also while no message comes; Megatron-Core makes two dozen groups a
    rank, vLLM one dozen. Superfluous once torch shares them itself."""
    from torch.distributed import ProcessGroupGloo

    original = ProcessGroupGloo.__init__

    def __init__(self: Any, store: Any, rank: int, size: int, timeout: Any = timedelta(minutes=30)) -> None:
        options = timeout  # torch takes options in the same place
        if isinstance(timeout, timedelta):
            options = ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid())
        original(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = __init__


@functools.cache
def _devices(interfaces: str, process: int) -> list[Any]:
    """Return a device for each interface of a list with commas, as torch reads GLOO_SOCKET_IFNAME. `process`: whose
    they are, as a fork has none of their threads."""
    from torch.distributed import ProcessGroupGloo

    names = [name for name in interfaces.split(",") if name]
    return [ProcessGroupGloo.create_device(interface=name) for name in names] or [
        ProcessGroupGloo.create_default_device()
    ]
