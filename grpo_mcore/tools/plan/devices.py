"""Accelerators by name: memory, peak speeds, links. Figures of the vendors' data sheets, dense bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30


class PlanError(ValueError):
    """A plan that cannot be made: says what is missing and how to give it."""


@dataclass(frozen=True)
class Device:
    """One accelerator. Bytes; FLOP/s; bytes/s in one direction: memory, to its peers in the node, to other nodes,
    to the host. `reserved`: what driver, NCCL and sleeping engines keep of the memory."""

    name: str
    memory: int | None
    flops: float
    memory_bandwidth: float
    peer_bandwidth: float
    node_bandwidth: float
    host_bandwidth: float
    reserved: int = 3 * GIB


DEVICES = {
    device.name: device
    for device in (
        Device("A100-40GB", 40 * 10**9, 312e12, 1.555e12, 300e9, 25e9, 25e9),
        Device("A100", 80 * 10**9, 312e12, 2.0e12, 300e9, 25e9, 25e9),
        Device("H100", 80 * 10**9, 989e12, 3.35e12, 450e9, 50e9, 55e9),
        Device("H200", 141 * 10**9, 989e12, 4.8e12, 450e9, 50e9, 55e9),
        Device("B200", 180 * 10**9, 2250e12, 8.0e12, 900e9, 50e9, 55e9),
        # One rank of a shared host: a core or two. Its memory is the host's, so there is nothing to compare with.
        Device("cpu", None, 5e10, 1e10, 5e9, 1e9, 1e10, reserved=0),
    )
}


def device_named(name: str, memory_gb: float | None = None) -> Device:
    """The device, with another memory where `memory_gb` (10^9 bytes) says so. Raises PlanError for an unknown name."""
    by_name = {known.lower(): device for known, device in DEVICES.items()}
    device = by_name.get(name.lower())
    if device is None:
        raise PlanError(f"--device {name}: known are {', '.join(DEVICES)}; for another, the nearest with --memory-gb")
    return device if memory_gb is None else replace(device, memory=int(memory_gb * 1e9))
