"""The policy rank's side of a refit: it copies blocks of its own parameters to their places in the buffer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_mcore.families import Box
from grpo_mcore.refit.buffer import RefitBuffer, attach_buffer, block_view, create_buffer
from grpo_mcore.refit.link import Link, is_link
from grpo_mcore.refit.plan import Block, RefitError, RefitPlan, sender_of
from grpo_mcore.refit.proof import Sums, Verify, checked_parameters, checksum, sum_dtype


class WeightSource(Protocol):
    """A policy rank's weights as its family declares them. They may be merged ones, base and adapter: the plan moves
    what it is given."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Every parameter of this rank by its Megatron-Core name, with stage-local indices."""


class RefitSender:
    """Called by the driver in this order: `open_refit`, `fill_bucket` for each bucket; `close_refit` at the end of the
    run. The buffer stays mapped from the first refit to the last."""

    def __init__(
        self, source: WeightSource, rank: int, run_id: str | None = None, *, through_host: bool = False
    ) -> None:
        """`rank`: of the policy, as the plan counts. `through_host`: the sides do not all see one accelerator, so the
        buffer lies in host memory."""
        self._source = source
        self._rank = rank
        self._through_host = through_host
        self._run_id = run_id or uuid.uuid4().hex[:12]
        self._plan: RefitPlan | None = None
        self._buffer: RefitBuffer | None = None
        self._link: Link | None = None
        self._parameters: Mapping[str, Tensor] = {}
        self._blocks: list[list[tuple[int, Block]]] = []  # by bucket: number in it, block
        self._to: list[list[list[int]]] = []  # and to which nodes each goes, where there is a link

    @property
    def buffer_bytes(self) -> int:
        """Of the buffer that is mapped; 0 without one."""
        return self._buffer.flat.numel() if self._buffer is not None else 0

    def host_link(self, policy_ranks: int, nodes: int, timeout_s: float) -> dict[str, Any]:
        """The link's description, for every policy rank and one receiver on each node. Made once."""
        if self._link is None:
            device = next(iter(self._source.parameters().values())).device
            self._link = Link.host(policy_ranks + nodes, timeout_s, device)
            self._link.description["nodes"] = nodes
        return self._link.description

    def open_refit(self, transport: dict[str, Any] | None, plan: str) -> dict[str, Any]:
        """Take the plan (JSON), map the buffer or join the link, look up the parameters.

        `transport`: the description of the buffer to attach or of the link, or None to create a buffer here and
        describe it in the answer: {digest, transport, bytes (that this rank sends)}. Raises RefitError for a parameter
        that this rank does not hold as the plan says.
        """
        new = _parsed(plan)
        if self._plan is not new:
            self._close_buffer()
            self._plan = new
        self._parameters = self._source.parameters()
        nodes = 1
        if transport is not None and is_link(transport):
            nodes = transport["nodes"]
            if self._link is None or self._link.description != transport:
                self._link = Link(transport, self._rank)
        elif self._buffer is None or (transport is not None and transport != self._buffer.description):
            self._map(transport, self._parameters)
        self._blocks, sent = [], 0
        self._to = []
        for bucket in new.buckets:
            self._blocks.append([])
            self._to.append([])
            for number, block in enumerate(bucket.blocks):
                to = [node for node in range(nodes) if sender_of(new, block, node) == self._rank]
                if to:
                    self._values(block)  # must be there
                    self._blocks[-1].append((number, block))
                    self._to[-1].append(to)
                    sent += block.nbytes * len(to)
        found = transport if self._buffer is None else self._buffer.description
        return {"digest": new.digest, "transport": found, "bytes": sent}

    def _map(self, transport: dict[str, Any] | None, parameters: Mapping[str, Tensor]) -> None:
        assert self._plan is not None
        if self._buffer is not None:
            self._buffer.close()
        if transport is not None:
            self._buffer = attach_buffer(transport)
        else:
            device = torch.device("cpu") if self._through_host else next(iter(parameters.values())).device
            self._buffer = create_buffer(self._plan.buffer_bytes, device, self._run_id)

    def _values(self, block: Block) -> Tensor:
        """Looked up when they are needed: what a source merges for it lives no longer than its bucket."""
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
        """Copy this rank's blocks of one bucket into the buffer.

        Returns {bytes, seconds, sums: of the checked copies, as the engines will hold them in `engine_dtype`}.
        """
        if self._plan is None or (self._buffer is None and self._link is None):
            raise RefitError(f"bucket {index} is to be filled, but no refit is open on policy rank {self._rank}")
        began, nbytes = time.perf_counter(), 0
        checked = checked_parameters(self._plan, verify, version)
        sums: Sums = {}
        blocks = [(number, block, self._values(block)) for number, block in self._blocks[index]]
        for number, block, values in blocks:
            if self._buffer is not None:
                try:
                    block_view(self._buffer, self._plan, index, block).copy_(as_engine_holds(values, block))
                except Exception as error:
                    what = f"filling bucket {index} with {block.param!r} {block.box}"
                    raise RefitError(f"policy rank {self._rank}: {what} failed: {error}") from error
            nbytes += block.nbytes
            sums |= self._sums((index, number), block, values, checked, engine_dtype or self._plan.dtype)
        if self._buffer is not None:
            self._buffer.synchronize()
        else:
            self._send(index, blocks)
        return {"bytes": nbytes, "seconds": time.perf_counter() - began, "sums": sums}

    def _send(self, index: int, blocks: list[tuple[int, Block, Tensor]]) -> None:
        """The blocks of one bucket to every node that gets them from here. Each node receives in the plan's order."""
        assert self._link is not None and self._plan is not None
        found = self._link.description
        first = found["members"] - found["nodes"]
        messages = []
        for (_, block, values), nodes in zip(blocks, self._to[index], strict=True):
            message = self._link.message(as_engine_holds(values, block), getattr(torch, block.dtype))
            messages += [(message, first + node) for node in nodes]
        try:
            self._link.send(messages)
        except RuntimeError as error:
            raise RefitError(f"policy rank {self._rank}: sending bucket {index} failed: {error}") from error

    def _sums(self, key: tuple[int, int], block: Block, values: Tensor, checked: set[str], engine_dtype: str) -> Sums:
        assert self._plan is not None
        moved, dtype = getattr(torch, block.dtype), sum_dtype(self._plan, block, engine_dtype)
        by_box: dict[Box, int] = {}  # several engine ranks may read the same
        found: Sums = {}
        for copy, read in enumerate(block.reads):
            if read.param in checked:
                if read.at not in by_box:
                    part = as_engine_holds(values[tuple(slice(*span) for span in read.at)], block)
                    by_box[read.at] = checksum(part.to(moved), dtype)
                found[(*key, copy)] = by_box[read.at]
        return found

    def close_refit(self) -> None:
        """Unmap the buffer, leave the link; the rank that created one frees it. Idempotent."""
        self._blocks, self._parameters = [], {}
        self._plan = None
        self._close_buffer()
        if self._link is not None:
            self._link.close()
            self._link = None

    def _close_buffer(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


def as_engine_holds(values: Tensor, block: Block) -> Tensor:
    """The values that the engine computes with, not yet in its number format."""
    return values.float().exp().neg() if block.negative_exp else values


@lru_cache(maxsize=2)
def _parsed(text: str) -> RefitPlan:
    return RefitPlan.from_json(text)
