"""The wire between policy ranks and engines that share no memory: send and receive, from one rank to one node, by Gloo
where the weights are in host memory and by NCCL where they are on GPUs.

Members 0..policy ranks - 1 send, the members after them receive, one for each node with engines. Every member goes
through its messages in the order of (block, node), so no two of them can wait for each other.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from grpo_mcore.refit.plan import RefitError

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Where the messages of each kind of link lie."""


class Link:
    """A group beside torch's default one. It forms at the first bucket, when every member has to be there; from then on
    nobody waits for anyone with whom it exchanges nothing."""

    def __init__(self, description: dict[str, Any], member: int, store: TCPStore | None = None) -> None:
        self.description = description
        self.device = torch.device(DEVICES[description["kind"]])
        self._member = member
        self._store = store
        self._group: Any = None
        self._timeout = timedelta(seconds=description["timeout_s"])

    @classmethod
    def host(cls, members: int, timeout_s: float, device: torch.device) -> Link:
        """Member 0, at whose address the others meet. `device`: where the weights are. Waits on the link end after
        `timeout_s`."""
        address = _address()
        store = TCPStore(address, 0, members, True, timedelta(seconds=timeout_s), wait_for_workers=False)
        (kind,) = (kind for kind, type_ in DEVICES.items() if type_ == device.type)
        description = {
            "kind": kind, "host": address, "port": store.port, "members": members, "timeout_s": timeout_s,
        }  # fmt: skip
        return cls(description, 0, store)

    def send(self, values: Sequence[tuple[Tensor, int]]) -> None:
        """Each (contiguous tensor, member), in order; returns when all have gone."""
        group = self._joined()
        self._wait([group.send([tensor], member, 0) for tensor, member in values])

    def receive(self, places: Sequence[tuple[Tensor, int]]) -> None:
        """Into each (contiguous tensor, from member), in the order in which that member sends."""
        group = self._joined()
        self._wait([group.recv([tensor], member, 0) for tensor, member in places])

    def message(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """What travels of a slice, as bytes: the values themselves where they are contiguous, in the wire's format and
        on its device."""
        return values.to(dtype).contiguous().to(self.device).view(-1).view(torch.uint8)

    def close(self) -> None:
        self._group = self._store = None

    def _joined(self) -> Any:
        if self._group is None:
            found = self.description
            try:
                if self._store is None:
                    self._store = TCPStore(found["host"], found["port"], found["members"], False, self._timeout)
                store = PrefixStore("refit", self._store)
                self._group = self._make_group(store)
            except Exception as error:
                raise RefitError(
                    f"member {self._member} of the refit link waited {found['timeout_s']:g} s at {found['host']}:"
                    f"{found['port']} for the other {found['members'] - 1}: {error}"
                ) from error
        return self._group

    def _make_group(self, store: PrefixStore) -> Any:
        members = self.description["members"]
        if self.description["kind"] == "gloo":
            return ProcessGroupGloo(store, self._member, members, self._timeout)
        from torch.distributed import ProcessGroupNCCL  # only in torch for CUDA

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return ProcessGroupNCCL(store, self._member, members, options)

    def _wait(self, work: Sequence[Any]) -> None:
        for one in work:
            # With a timeout NCCL's wait is one of the host too, not of the stream alone.
            one.wait() if self.device.type == "cpu" else one.wait(self._timeout)


def is_link(transport: dict[str, Any]) -> bool:
    """Whether the description is of a link, not of a buffer."""
    return transport["kind"] in DEVICES


def _address() -> str:
    """Where other machines reach this one; Gloo itself listens at the host's name."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
