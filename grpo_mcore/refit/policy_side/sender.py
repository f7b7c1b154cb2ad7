"""The policy rank's side of a refit: it copies blocks of its own parameters into the buffer."""

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_mcore.base.addresses import LOOPBACK
from grpo_mcore.refit.plan.parts import Arrival, Fill, Part
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.plan.proof import BlockSums, Verify, checksum, is_checked, sum_dtype
from grpo_mcore.refit.transport.board import Mapped, Seat, next_bucket
from grpo_mcore.refit.transport.buffer import block_view
from grpo_mcore.refit.transport.network import Network


class WeightSource(Protocol):
    """A policy rank's weights, as its model family declares them. A base and an adapter may come merged."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Return every parameter of this rank by its Megatron-Core name, with stage-local indices."""


class RefitSender:
    """Sends one policy rank's blocks. Each refit calls `open_refit`, then `send_refit`; `close_refit` comes at the end
    of the run. The buffer stays mapped over all refits."""

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
        self._part: Part | None = None
        self._mapped: Mapped | None = None
        self._seated = False  # on the board of this node, which has engines
        self._network: Network | None = None
        self._parameters: Mapping[str, Tensor] = {}
        self._here = 0  # number of this rank's node among those with engines, or -1

    @property
    def buffer_bytes(self) -> int:
        """Size of the mapped buffer; 0 without one."""
        return self._mapped.buffer.flat.numel() if self._mapped is not None else 0

    def host_network(
        self, members: int, receivers: Sequence[int], node_of_rank: Sequence[int], timeout_s: float
    ) -> dict[str, Any]:
        """Create the network once and return its description for all members; see `Network.host`."""
        if self._network is None:
            device = next(iter(self._source.parameters().values())).device
            self._network = Network.host(members, receivers, node_of_rank, timeout_s, device, self._address)
        return self._network.description

    def open_refit(
        self,
        part: bytes,
        seat: Seat | None,
        transport: dict[str, Any] | None = None,
        network: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Take this rank's part of the plan, map this node's buffer, prepare the network, look up the parameters.

        `seat`: this rank's seat on the board of its node; None: it has no engines. `transport`: description of the
        buffer to attach; None: create it. `network`: None if all engines and policy ranks share one node. Returns
        {digest, transport, bytes (that this rank brings to all nodes)}. Raises RefitError if a parameter is missing or
        has another shape.
        """
        new = Part.unpacked(part)
        if unseen := self._part is None or self._part.digest != new.digest:
            self._unmap()
        self._part = new
        self._parameters = self._source.parameters()
        if network is None:
            self._leave_network()
        elif self._network is None or self._network.description != network:
            self._leave_network()
            self._network = Network(network, self._rank)
        self._here = network["node_of_rank"][self._rank] if network is not None else 0
        self._seated = seat is not None
        if seat is not None:
            if self._mapped is None or transport not in (None, self._mapped.transport):
                self._map(new, transport)
            assert self._mapped is not None
            self._mapped.board.sit(seat, f"policy rank {self._rank}")
        for fills in new.fills if unseen else ():
            for fill in fills:
                self._values(fill)  # raises if it is missing
        nbytes = sum(fill.nbytes * len(fill.to) for fills in new.fills for fill in fills)
        shared = None if self._mapped is None else self._mapped.transport
        return {"digest": new.digest, "transport": shared, "bytes": nbytes}

    def _map(self, part: Part, transport: dict[str, Any] | None) -> None:
        self._unmap()
        device = next(iter(self._parameters.values())).device
        if transport is not None:
            self._mapped = Mapped.attach(transport, device)
        else:
            self._mapped = Mapped.create(part.buffer_bytes, device, self._run_id, through_host=self._through_host)

    def _values(self, block: Fill) -> Tensor:
        """Look up the values of a block. What a source merges for it is freed after the bucket."""
        name, box = block.param, block.box
        if name not in self._parameters:
            raise RefitError(f"policy rank {self._rank} holds no {name!r}, which the refit plan takes from it")
        values = self._parameters[name]
        if len(box) != values.dim() or any(stop > size for (_, stop), size in zip(box, values.shape, strict=True)):
            raise RefitError(f"policy rank {self._rank} holds {name!r} as {tuple(values.shape)}, the plan needs {box}")
        return values.detach()[tuple(slice(*span) for span in box)]

    def send_refit(self, verify: Verify = "off", version: int = 0, engine_dtype: str | None = None) -> dict[str, Any]:
        """Fill every bucket as soon as the engine ranks of this node have taken the one before the last.

        Returns {bytes, seconds (without waiting), sums: of the checked blocks, as the engines will hold them in
        `engine_dtype`}. If it fails, all others leave the refit too."""
        if self._part is None:
            raise RefitError(f"no refit is open on policy rank {self._rank}")
        part, board = self._part, self._mapped.board if self._mapped is not None and self._seated else None
        arrivals = part.arrivals or [()] * part.buckets
        following = next_bucket(bool(fills or come) for fills, come in zip(part.fills, arrivals, strict=True))
        total: dict[str, Any] = {"bytes": 0, "seconds": 0.0, "sums": {}}
        index = following[0]
        try:
            if self._network is not None:
                self._network.join()
            if board is not None:
                board.finished(index)
            while index < part.buckets:
                if board is not None:
                    board.wait(board.readers, index - 1, f"take bucket {index - 2}")
                filled = self.fill_bucket(index, verify, version, engine_dtype)
                total = {"bytes": total["bytes"] + filled["bytes"], "seconds": total["seconds"] + filled["seconds"],
                         "sums": total["sums"] | filled["sums"]}  # fmt: skip
                index = following[index + 1]
                if board is not None:
                    board.finished(index)
        except Exception as error:
            if board is not None:
                board.fail(str(error))
            self._leave_network(failed=True)
            raise
        return total

    @torch.no_grad()
    def fill_bucket(
        self, index: int, verify: Verify = "off", version: int = 0, engine_dtype: str | None = None
    ) -> dict[str, Any]:
        """Copy this rank's blocks of one bucket into the buffer of its node and send them to the other nodes. Returns
        {bytes, seconds, sums}, as `send_refit`."""
        assert self._part is not None
        started_at, nbytes = time.perf_counter(), 0
        sums: BlockSums = {}
        blocks = [(fill, self._values(fill)) for fill in self._part.fills[index]]
        for fill, values in blocks:
            if self._mapped is not None and self._here in fill.to:
                try:
                    target = block_view(self._mapped.buffer, self._part, index, fill)
                    target.copy_(as_engine_holds(values, fill), non_blocking=True)
                except Exception as error:
                    action = f"filling bucket {index} with {fill.param!r} {fill.box}"
                    raise RefitError(f"policy rank {self._rank}: {action} failed: {error}") from error
            nbytes += fill.nbytes
            if is_checked(verify, version, index, fill.number):
                held = as_engine_holds(values, fill).to(getattr(torch, fill.dtype))
                sums[index, fill.number] = checksum(held, sum_dtype(self._part, fill, engine_dtype or self._part.dtype))
        if self._network is not None:
            self._exchange(index, blocks)
        if self._mapped is not None:
            self._mapped.buffer.synchronize()
        return {"bytes": nbytes, "seconds": time.perf_counter() - started_at, "sums": sums}

    def _exchange(self, index: int, blocks: list[tuple[Fill, Tensor]]) -> None:
        """Send this rank's blocks of one bucket to the other nodes, and receive those for this node."""
        assert self._network is not None and self._part is not None
        messages = []
        for fill, values in blocks:
            if away := [node for node in fill.to if node != self._here]:
                message = self._network.message(as_engine_holds(values, fill), getattr(torch, fill.dtype))
                messages += [(message, self._network.description["receivers"][node]) for node in away]
        arrivals = self._part.arrivals[index] if self._part.arrivals else ()
        try:
            self._network.exchange(messages, places_of(arrivals, self._part, index, self._mapped))
        except RuntimeError as error:
            raise RefitError(f"policy rank {self._rank}: exchanging bucket {index} failed: {error}") from error

    def close_refit(self) -> None:
        """Unmap the buffer and leave the network; the rank that created the buffer frees it. Idempotent."""
        self._part, self._parameters = None, {}
        self._unmap()
        self._leave_network()

    def _leave_network(self, *, failed: bool = False) -> None:
        if self._network is not None:
            self._network.close(failed=failed)
            self._network = None

    def _unmap(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


def places_of(arrivals: Iterable[Arrival], part: Part, index: int, mapped: Mapped | None) -> list[tuple[Tensor, int]]:
    """Return where the blocks that arrive for bucket `index` go in the buffer, each with its sender."""
    places = []
    for offset, nbytes, sender in arrivals:
        assert mapped is not None, "only a node with engines receives"
        first = part.start(index) + offset
        places.append((mapped.buffer.flat[first : first + nbytes], sender))
    return places


def as_engine_holds(values: Tensor, block: Fill) -> Tensor:
    """Return the values that the engine computes with, not yet in its dtype."""
    return values.float().exp().neg() if block.negative_exp else values
