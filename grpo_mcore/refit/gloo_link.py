"""The wire between policy ranks and engines that share no memory: Gloo send and receive, from one rank to one node.

Members 0..policy ranks - 1 send, the members after them receive, one for each node with engines.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work

from grpo_mcore.refit.plan import RefitError


class GlooLink:
    """A group beside torch's default one. It forms at the first bucket, when every member has to be there; from then on
    nobody waits for anyone with whom it exchanges nothing."""

    def __init__(self, description: dict[str, Any], member: int, store: TCPStore | None = None) -> None:
        self.description = description
        self._member = member
        self._store = store
        self._group: ProcessGroupGloo | None = None

    @classmethod
    def host(cls, members: int, timeout_s: float) -> GlooLink:
        """Member 0, at whose address the others meet. Waits on the link end after `timeout_s`."""
        address = _address()
        store = TCPStore(address, 0, members, True, timedelta(seconds=timeout_s), wait_for_workers=False)
        description = {
            "kind": "gloo", "host": address, "port": store.port, "members": members, "timeout_s": timeout_s,
        }  # fmt: skip
        return cls(description, 0, store)

    def send(self, values: Sequence[tuple[Tensor, int]]) -> None:
        """Each (contiguous tensor, member), in order; returns when all have gone."""
        group = self._joined()
        _wait([group.send([tensor], member, 0) for tensor, member in values])

    def receive(self, places: Sequence[tuple[Tensor, int]]) -> None:
        """Into each (contiguous tensor, from member), in the order in which that member sends."""
        group = self._joined()
        _wait([group.recv([tensor], member, 0) for tensor, member in places])

    def close(self) -> None:
        self._group = self._store = None

    def _joined(self) -> ProcessGroupGloo:
        if self._group is None:
            found, timeout = self.description, timedelta(seconds=self.description["timeout_s"])
            try:
                if self._store is None:
                    self._store = TCPStore(found["host"], found["port"], found["members"], False, timeout)
                store = PrefixStore("refit", self._store)
                self._group = ProcessGroupGloo(store, self._member, found["members"], timeout)
            except Exception as error:
                raise RefitError(
                    f"member {self._member} of the refit link waited {timeout.total_seconds():g} s at {found['host']}:"
                    f"{found['port']} for the other {found['members'] - 1}: {error}"
                ) from error
        return self._group


def _wait(work: Sequence[Work]) -> None:
    for one in work:
        one.wait()


def _address() -> str:
    """Where other machines reach this one; Gloo itself listens at the host's name."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def wire_view(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What travels of a slice: the values themselves where they are contiguous, in the wire's format, on the host."""
    return values.to(dtype).contiguous().cpu().view(-1).view(torch.uint8)
