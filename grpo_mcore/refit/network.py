"""The wire between policy ranks and engines that share no memory: send and receive, from one rank to one node, by Gloo
where the weights are in host memory and by NCCL where they are on GPUs.

The policy's ranks are the first members, and send. One member receives for each node with engines: a policy rank there,
where policy and engines share nodes, else an engine, a member after them. Two members exchange messages in the order of
the blocks; where both send to each other, the lower one sends first, so they cannot wait for each other.
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
    def host(
        cls,
        members: int,
        receivers: Sequence[int],
        homes: Sequence[int],
        readers: Sequence[Sequence[int]],
        timeout_s: float,
        device: torch.device,
    ) -> Link:
        """Member 0, at whose address the others meet. `receivers`: the member that receives for each node with engines.
        `homes`: the node of each policy rank among these, or -1. `readers`: the engine ranks on each. `device`: where
        the weights are. Waits on the link end after `timeout_s`."""
        address = _address()
        store = TCPStore(address, 0, members, True, timedelta(seconds=timeout_s), wait_for_workers=False)
        (kind,) = (kind for kind, type_ in DEVICES.items() if type_ == device.type)
        description = {
            "kind": kind, "host": address, "port": store.port, "members": members, "receivers": list(receivers),
            "homes": list(homes), "readers": [list(ranks) for ranks in readers], "timeout_s": timeout_s,
        }  # fmt: skip
        return cls(description, 0, store)

    def exchange(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
        """Sends each (contiguous tensor, to member) and fills each (contiguous tensor, from member), in the order in
        which the other sends or fills; returns when all is done. Places may be in host memory though messages are not.
        """
        group = self._joined()
        landed = [
            (place if place.device.type == self.device.type else torch.empty_like(place, device=self.device), member)
            for place, member in received
        ]
        first = [(group.send, part) for part in sent if self._member < part[1]]
        first += [(group.recv, part) for part in landed if self._member > part[1]]
        last = [(group.send, part) for part in sent if self._member > part[1]]
        last += [(group.recv, part) for part in landed if self._member < part[1]]
        self._wait([call([tensor], member, 0) for call, (tensor, member) in first + last])
        for (place, _), (tensor, _) in zip(received, landed, strict=True):
            if place is not tensor:
                place.copy_(tensor)

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


def _address() -> str:
    """Where other machines reach this one; Gloo itself listens at the host's name."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
