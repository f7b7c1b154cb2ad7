"""Connections from each further node of an engine to its first node, over which deaths are reported.

If a node is gone or has lost a rank, the ranks of the other nodes wait for it inside a collective. The connection tells
them. Each side has a thread that reads; a closed connection means that the other node is gone.
"""

import hmac
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping

from grpo_mcore.base.addresses import address_towards, family_of, gloo_towards, with_port
from grpo_mcore.base.processes import free_port
from grpo_mcore.generation.config import EngineConfig
from grpo_mcore.rollout.workers import NodeLost

JOIN_TIMEOUT_S = 600.0
"""Longest wait for all nodes of an engine, whose processes start at the same time."""
RETRY_S = 0.1
KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""TCP options by which a host that vanishes silently is noticed after half a minute."""


class Lifeline:
    """One end of the connection to another node, `whom` in errors. After `watch`, a thread calls `on_loss` with the
    other node's report, or with the news that it is gone."""

    def __init__(self, wire: socket.socket, whom: str, on_loss: Callable[[str], None]) -> None:
        self._wire, self._whom, self._on_loss = wire, whom, on_loss
        self._closed = False
        wire.settimeout(None)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            wire.setsockopt(socket.IPPROTO_TCP, option, value)

    def watch(self) -> None:
        threading.Thread(target=self._read, daemon=True, name=f"lifeline to {self._whom}").start()

    def tell(self, message: str) -> None:
        """Send a last report. A closed connection is no error: the other node knows already."""
        try:
            self._wire.sendall(message.encode() + b"\n")
        except OSError:
            pass

    def close(self) -> None:
        """Close the connection, which tells the other node that this one is gone. Idempotent."""
        self._closed = True
        try:
            self._wire.shutdown(socket.SHUT_RDWR)  # wakes the reader
        except OSError:
            pass
        self._wire.close()

    def _read(self) -> None:
        try:
            line = _line(self._wire)
        except OSError:
            line = ""
        if not self._closed:
            self._on_loss(line or f"{self._whom} is gone")


def await_followers(
    config: EngineConfig, on_loss: Callable[[str], None], timeout_s: float = JOIN_TIMEOUT_S
) -> tuple[list[Lifeline], int]:
    """On the first node: wait for the others. Return (a connection to each, the free port here for the ranks to meet).

    Raises NodeLost if not all have come in time.
    """
    node, deadline = config.node, time.monotonic() + timeout_s
    wires: dict[int, socket.socket] = {}
    port = free_port(node.address)
    with socket.create_server((node.address, node.port), family=family_of(node.address)) as server:
        while len(wires) < node.count - 1:
            try:
                server.settimeout(max(0.001, deadline - time.monotonic()))
                wire, _ = server.accept()
                wire.settimeout(max(0.001, deadline - time.monotonic()))
                token, _, rank = _line(wire).partition(" ")
            except TimeoutError:
                missing = sorted(set(range(1, node.count)) - set(wires))
                raise NodeLost(
                    f"{config.name}: of its {node.count} nodes number {', '.join(map(str, missing))} did not come to "
                    f"{with_port(node.address, node.port)} within {timeout_s:g} s"
                ) from None
            if hmac.compare_digest(token, node.token) and rank.isdecimal() and 0 < int(rank) < node.count:
                wires[int(rank)] = wire
            else:
                wire.close()
    for wire in wires.values():
        wire.sendall(f"{port}\n".encode())
    lines = [Lifeline(wire, node_name(config, rank, wire.getpeername()[0]), on_loss) for rank, wire in wires.items()]
    return lines, port


def join_first(
    config: EngineConfig, on_loss: Callable[[str], None], timeout_s: float = JOIN_TIMEOUT_S
) -> tuple[Lifeline, int]:
    """On a further node: return (the connection to the first, its port at which the ranks meet). Raises NodeLost."""
    node, deadline = config.node, time.monotonic() + timeout_s
    wire: socket.socket | None = None
    while True:
        left = max(0.001, deadline - time.monotonic())
        try:
            wire = socket.create_connection((node.address, node.port), timeout=left)
            wire.settimeout(left)
            wire.sendall(f"{node.token} {node.rank}\n".encode())
            port = int(_line(wire))
            return Lifeline(wire, node_name(config, 0, node.address), on_loss), port
        except (OSError, ValueError) as error:  # the first node does not listen yet, or has closed the connection
            if wire is not None:
                wire.close()
            if time.monotonic() + RETRY_S > deadline:
                raise NodeLost(
                    f"{config.name}: its node {node.rank} of {node.count} did not reach the first at "
                    f"{with_port(node.address, node.port)} within {timeout_s:g} s: {error}"
                ) from error
            time.sleep(RETRY_S)


def node_name(config: EngineConfig, rank: int, address: str) -> str:
    per_node = config.ranks // config.node.count
    first = rank * per_node
    return f"its node {rank} of {config.node.count} (ranks {first} to {first + per_node - 1}, at {address})"


def deaths(exit_codes: Mapping[int, int | None], of: int) -> str:
    """Describe dead ranks. `exit_codes`: exit code of each rank, None if it lives. `of`: number of the engine's
    ranks."""
    # Name the ranks that died first: vLLM then terminates the others, which may still exit cleanly.
    dead = [rank for rank, code in exit_codes.items() if code not in (None, 0, -signal.SIGTERM)] or list(exit_codes)
    return "; ".join(f"rank {rank} of {of} has died (exit code {exit_codes[rank]})" for rank in dead)


def bind_vllm_to(address: str) -> None:
    """Make vLLM use the network interface through which this machine reaches `address`, the engine's first node."""
    os.environ["VLLM_HOST_IP"] = address_towards(address)
    gloo_towards(address)


def _line(wire: socket.socket) -> str:
    """Read one line; empty if the connection ends first. The other side sends nothing more before an answer."""
    line = b""
    while not line.endswith(b"\n"):
        if not (part := wire.recv(4096)):
            return ""
        line += part
    return line.decode().strip()
