"""The policy rank's side of a refit: it copies blocks of its own parameters into the buffer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from grpo_mcore.addresses import LOOPBACK
from grpo_mcore.refit.buffer import RefitBuffer, attach_buffer, block_view, create_buffer
from grpo_mcore.refit.delivery import Deliveries
from grpo_mcore.refit.network import Network
from grpo_mcore.refit.plan import Block, RefitError, RefitPlan
from grpo_mcore.refit.proof import Sums, Verify, checked_parameters, checksum, sum_dtype

_DELIVERY = ("node_of_rank", "receivers", "readers")
"""Keys of a network's description that say who sends what to whom."""


class WeightSource(Protocol):
    """A policy rank's weights, as its model family declares them. A base and an adapter may come merged."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Return every parameter of this rank by its Megatron-Core name, with stage-local indices."""


class Sent(NamedTuple):
    """A block that this rank brings to the nodes `to`. `number`: index of the block in its bucket."""

    number: int
    block: Block
    to: list[int]


class RefitSender:
    """Sends one policy rank's blocks. Each refit calls `open_refit`, then `fill_bucket` for each bucket; `close_refit`
    comes at the end of the run. The buffer stays mapped over all refits."""

    def __init__(
        self,
        source: WeightSource,
        rank: int,
        run_id: str | None = None,
        *,
        through_host: bool = False,
        address: str = LOOPBACK,
    ) -> None:
        """`rank`: number of this policy rank in the plan. `through_host`: put the buffer into host memory, pinned on
        GPUs, because not all processes see one common accelerator. `address`: where other machines reach rank 0."""
        self._address = address
        self._source = source
        self._rank = rank
        self._through_host = through_host
        self._run_id = run_id or uuid.uuid4().hex[:12]
        self._plan: RefitPlan | None = None
        self._buffer: RefitBuffer | None = None
        self._network: Network | None = None
        self._parameters: Mapping[str, Tensor] = {}
        self._here = 0  # number of this rank's node among those with engines, or -1
        self._blocks: list[list[Sent]] = []  # by bucket
        self._from: list[list[tuple[Block, int]]] = []  # by bucket: what this rank receives for its node, from whom

    @property
    def buffer_bytes(self) -> int:
        """Size of the mapped buffer; 0 without one."""
        return self._buffer.flat.numel() if self._buffer is not None else 0

    def host_network(
        self,
        members: int,
        receivers: Sequence[int],
        node_of_rank: Sequence[int],
        readers: Sequence[Sequence[int]],
        timeout_s: float,
    ) -> dict[str, Any]:
        """Create the network once and return its description for all members; see `Network.host`."""
        if self._network is None:
            device = next(iter(self._source.parameters().values())).device
            self._network = Network.host(members, receivers, node_of_rank, readers, timeout_s, device, self._address)
        return self._network.description

    def open_refit(
        self, transport: dict[str, Any] | None, plan: str, network: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Take the plan (JSON), map this node's buffer, prepare the network, look up the parameters.

        `transport`: description of the buffer to attach; None: create it here, unless `network` shows that this node
        has no engines. `network`: None if all engines and policy ranks share one node. Returns {digest, transport,
        bytes (that this rank brings to all nodes)}. Raises RefitError if a parameter is missing or has another shape.
        """
        new = _parsed(plan)
        if unseen := self._plan is not new:
            self._close_buffer()
            self._plan = new
        self._parameters = self._source.parameters()
        node_of_rank, receivers, readers = ((), (), ()) if network is None else (network[key] for key in _DELIVERY)
        deliveries = Deliveries(new, node_of_rank, readers)
        if network is None:
            self._leave_network()
        elif self._network is None or self._network.description != network:
            self._network = Network(network, self._rank)
        self._here = node_of_rank[self._rank] if node_of_rank else 0
        if self._here >= 0 and (self._buffer is None or transport not in (None, self._buffer.description)):
            self._map(transport, self._parameters)
        self._blocks, self._from, nbytes = [], [], 0
        for bucket in new.buckets:
            self._blocks.append([])
            self._from.append([])
            for number, block in enumerate(bucket.blocks):
                if to := [node for node, sender in deliveries.of(block) if sender == self._rank]:
                    if unseen:
                        self._values(block)  # raises if it is missing
                    self._blocks[-1].append(Sent(number, block, to))
                    nbytes += block.nbytes * len(to)
                for node, sender in deliveries.of(block) if receivers else ():
                    if receivers[node] == self._rank and node_of_rank[sender] != node:
                        self._from[-1].append((block, sender))
        found = None if self._buffer is None else self._buffer.description
        return {"digest": new.digest, "transport": found, "bytes": nbytes}

    def _map(self, transport: dict[str, Any] | None, parameters: Mapping[str, Tensor]) -> None:
        assert self._plan is not None
        if self._buffer is not None:
            self._buffer.close()
        device = next(iter(parameters.values())).device
        if transport is not None:
            self._buffer = attach_buffer(transport, device)
        else:
            self._buffer = create_buffer(self._plan.buffer_bytes, device, self._run_id, through_host=self._through_host)

    def _values(self, block: Block) -> Tensor:
        """Look up the values of a block. What a source merges for it is freed after the bucket."""
        name, box = block.param, block.box
        if name not in self._parameters:
            raise RefitError(f"policy rank {self._rank} holds no {name!r}, which the refit plan takes from it")
        values = self._parameters[name]
        if len(box) != values.dim() or any(stop > size for (_, stop), size in zip(box, values.shape, strict=True)):
            raise RefitError(f"policy rank {self._rank} holds {name!r} as {tuple(values.shape)}, the plan needs {box}")
        return values.detach()[tuple(slice(*span) for span in box)]

    @torch.no_grad()
    def fill_bucket(
        self, index: int, verify: Verify = "off", version: int = 0, engine_dtype: str | None = None
    ) -> dict[str, Any]:
        """Copy this rank's blocks of one bucket into the buffer of its node and send them to the other nodes.

        Returns {bytes, seconds, sums: of the checked copies, as the engines will hold them in `engine_dtype`}.
        """
        if self._plan is None or (self._buffer is None and self._network is None):
            raise RefitError(f"cannot fill bucket {index}: no refit is open on policy rank {self._rank}")
        began, nbytes = time.perf_counter(), 0
        checked = checked_parameters(self._plan, verify, version)
        sums: Sums = {}
        blocks = [(sent, self._values(sent.block)) for sent in self._blocks[index]]
        for (number, block, to), values in blocks:
            if self._buffer is not None and self._here in to:
                try:
                    place = block_view(self._buffer, self._plan, index, block)
                    place.copy_(as_engine_holds(values, block), non_blocking=True)
                except Exception as error:
                    what = f"filling bucket {index} with {block.param!r} {block.box}"
                    raise RefitError(f"policy rank {self._rank}: {what} failed: {error}") from error
            nbytes += block.nbytes
            sums |= self._sums((index, number), block, values, checked, engine_dtype or self._plan.dtype)
        if self._network is not None:
            self._exchange(index, blocks)
        if self._buffer is not None:
            self._buffer.synchronize()
        return {"bytes": nbytes, "seconds": time.perf_counter() - began, "sums": sums}

    def _exchange(self, index: int, blocks: list[tuple[Sent, Tensor]]) -> None:
        """Send this rank's blocks of one bucket to the other nodes, and receive those for this node."""
        assert self._network is not None and self._plan is not None
        messages = []
        for (_, block, nodes), values in blocks:
            if away := [node for node in nodes if node != self._here]:
                message = self._network.message(as_engine_holds(values, block), getattr(torch, block.dtype))
                messages += [(message, self._network.description["receivers"][node]) for node in away]
        places = []
        for block, sender in self._from[index]:
            assert self._buffer is not None
            place = block_view(self._buffer, self._plan, index, block)
            places.append((place.view(-1).view(torch.uint8), sender))
        try:
            self._network.exchange(messages, places)
        except RuntimeError as error:
            raise RefitError(f"policy rank {self._rank}: exchanging bucket {index} failed: {error}") from error

    def _sums(self, key: tuple[int, int], block: Block, values: Tensor, checked: set[str], engine_dtype: str) -> Sums:
        assert self._plan is not None
        moved, dtype = getattr(torch, block.dtype), sum_dtype(self._plan, block, engine_dtype)
        copies = [copy for copy, read in enumerate(block.reads) if read.param in checked]
        if not copies:
            return {}
        return dict.fromkeys(
            [(*key, copy) for copy in copies], checksum(as_engine_holds(values, block).to(moved), dtype)
        )

    def close_refit(self) -> None:
        """Unmap the buffer and leave the network; the rank that created the buffer frees it. Idempotent."""
        self._blocks, self._from, self._parameters = [], [], {}
        self._plan = None
        self._close_buffer()
        self._leave_network()

    def _leave_network(self) -> None:
        if self._network is not None:
            self._network.close()
            self._network = None

    def _close_buffer(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


def as_engine_holds(values: Tensor, block: Block) -> Tensor:
    """Return the values that the engine computes with, not yet in its dtype."""
    return values.float().exp().neg() if block.negative_exp else values


@lru_cache(maxsize=2)
def _parsed(text: str) -> RefitPlan:
    return RefitPlan.from_json(text)
