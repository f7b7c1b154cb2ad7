"""The network between policy ranks and engines that share no memory: messages from one rank to one node, by Gloo for
weights in host memory and by NCCL for weights on GPUs.

The policy's ranks are the first members, and send. One member receives for each node with engines: a policy rank on
that node if there is one, otherwise an engine, which is a member after them. See `call_order` for why members never
wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from grpo_mcore.base.addresses import address_towards, hosted_store, with_port
from grpo_mcore.refit.plan.plan import RefitError

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Device type of the messages of each kind of network."""


class Network:
    """A process group of its own, next to torch's default one.

    All members meet in `join`. After that a member waits only for members with which it exchanges data."""

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
        node_of_rank: Sequence[int],
        timeout_s: float,
        device: torch.device,
        address: str,
    ) -> Network:
        """Create the network as member 0, at whose `address` the others meet.

        `receivers`: the member that receives for each node with engines. `node_of_rank`: the node of each policy rank
        among these, or -1. `device`: where the weights are. `timeout_s`: longest wait for another member."""
        store = hosted_store(address, 0, members, timeout_s, wait=False)
        (kind,) = (kind for kind, type_ in DEVICES.items() if type_ == device.type)
        description = {
            "kind": kind, "host": address, "port": store.port, "members": members, "receivers": list(receivers),
            "node_of_rank": list(node_of_rank), "timeout_s": timeout_s,
        }  # fmt: skip
        return cls(description, 0, store)

    def exchange(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
        """Send each (contiguous tensor, to member) and fill each (contiguous tensor, from member); return when all is
        done. Two members must list the tensors between them in the same order. Places may be in host memory even if
        messages are on a GPU."""
        group = self.join()
        landed = [
            (target if target.device.type == self.device.type else torch.empty_like(target, device=self.device), member)
            for target, member in received
        ]
        work: list[Any] = []
        try:
            for is_send, index in call_order(self._member, [to for _, to in sent], [sender for _, sender in received]):
                tensor, other = sent[index] if is_send else landed[index]
                work.append((group.send if is_send else group.recv)([tensor], other, 0))
            for number in range(len(work)):
                # With a timeout, NCCL's wait blocks the host and not only the stream.
                work[number].wait() if self.device.type == "cpu" else work[number].wait(self._timeout)
        finally:  # an error's traceback must not keep the group alive: only its end disconnects the others
            del group, work
        for (target, _), (tensor, _) in zip(received, landed, strict=True):
            if target is not tensor:
                target.copy_(tensor)

    def message(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a slice as bytes on the network's device. Does not copy values that already are contiguous, in
        `dtype` and on the device."""
        return values.to(dtype).contiguous().to(self.device).view(-1).view(torch.uint8)

    def close(self, *, failed: bool = False) -> None:
        """Leave the group, which frees what it holds on the device and disconnects the other members. Idempotent.
        `failed`: do not wait for messages under way."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.abort() if failed else group.shutdown()

    def join(self) -> Any:
        """Meet the other members, all of them; later calls return the group."""
        if self._group is None:
            network = self.description
            try:
                if self._store is None:
                    self._store = TCPStore(network["host"], network["port"], network["members"], False, self._timeout)
                store = PrefixStore("refit", self._store)
                self._group = self._make_group(store)
            except Exception as error:
                raise RefitError(
                    f"member {self._member} of the refit network waited {network['timeout_s']:g} s at "
                    f"{with_port(network['host'], network['port'])} for the other {network['members'] - 1}: {error}"
                ) from error
        return self._group

    def _make_group(self, store: PrefixStore) -> Any:
        members = self.description["members"]
        if self.description["kind"] == "gloo":
            options = ProcessGroupGloo._Options()
            host = address_towards(self.description["host"])  # by default Gloo listens at the machine's own name
            options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname=host)], self._timeout
            return ProcessGroupGloo(store, self._member, members, options)
        from torch.distributed import ProcessGroupNCCL  # only in torch for CUDA

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return ProcessGroupNCCL(store, self._member, members, options)


def call_order(member: int, receivers: Sequence[int], senders: Sequence[int]) -> list[tuple[bool, int]]:
    """Return the order in which `member` starts its sends to `receivers` and receives from `senders`, as
    (is a send, index).

    Pairs of members follow one global order, (lower, higher) ascending; within a pair the lower member sends first. So
    no set of members can wait for each other in a circle, even if starting a call blocks until the other side starts
    its own: NCCL does that when it connects a pair for the first time.
    """
    calls = [((min(member, to), max(member, to), member > to), (True, index)) for index, to in enumerate(receivers)] + [
        ((min(member, sender), max(member, sender), sender > member), (False, index))
        for index, sender in enumerate(senders)
    ]
    return [call for _, call in sorted(calls, key=lambda entry: entry[0])]
