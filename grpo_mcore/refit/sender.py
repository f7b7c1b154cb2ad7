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
from grpo_mcore.refit.plan import Block, RefitError, RefitPlan
from grpo_mcore.refit.proof import Sums, Verify, checked_parameters, checksum


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
        self._blocks: list[list[tuple[int, Block, Tensor]]] = []  # by bucket: number in it, block, the values

    def open_refit(self, transport: dict[str, Any] | None, plan: str) -> dict[str, Any]:
        """Take the plan (JSON), map the buffer, look up the parameters.

        `transport`: the description of the buffer to attach, or None to create it here and describe it in the
        answer: {digest, transport, bytes (that this rank sends)}. Raises RefitError for a parameter that this rank
        does not hold as the plan says.
        """
        new = _parsed(plan)
        if self._plan is not new:
            self.close_refit()
            self._plan = new
        parameters = self._source.parameters()
        if self._buffer is None or (transport is not None and transport != self._buffer.description):
            self._map(transport, parameters)
        assert self._buffer is not None
        self._blocks = [
            [
                (number, block, self._values(parameters, block.param, block.box))
                for number, block in enumerate(bucket.blocks)
                if block.source == self._rank
            ]
            for bucket in new.buckets
        ]
        sent = sum(block.nbytes for blocks in self._blocks for _, block, _ in blocks)
        return {"digest": new.digest, "transport": self._buffer.description, "bytes": sent}

    def _map(self, transport: dict[str, Any] | None, parameters: Mapping[str, Tensor]) -> None:
        assert self._plan is not None
        if self._buffer is not None:
            self._buffer.close()
        if transport is not None:
            self._buffer = attach_buffer(transport)
        else:
            device = torch.device("cpu") if self._through_host else next(iter(parameters.values())).device
            self._buffer = create_buffer(self._plan.buffer_bytes, device, self._run_id)

    def _values(self, parameters: Mapping[str, Tensor], name: str, box: Box) -> Tensor:
        if name not in parameters:
            raise RefitError(f"policy rank {self._rank} holds no {name!r}, which the refit plan takes from it")
        values = parameters[name]
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
        if self._plan is None or self._buffer is None:
            raise RefitError(f"bucket {index} is to be filled, but no refit is open on policy rank {self._rank}")
        began, nbytes = time.perf_counter(), 0
        checked = checked_parameters(self._plan, verify, version)
        dtype = getattr(torch, engine_dtype or self._plan.dtype)
        sums: Sums = {}
        for number, block, values in self._blocks[index]:
            try:
                block_view(self._buffer, self._plan, index, block).copy_(values)
            except Exception as error:
                raise RefitError(
                    f"policy rank {self._rank}: filling bucket {index} with {block.param!r} {block.box} failed: {error}"
                ) from error
            nbytes += block.nbytes
            sums |= self._sums((index, number), block, values, checked, dtype)
        self._buffer.synchronize()
        return {"bytes": nbytes, "seconds": time.perf_counter() - began, "sums": sums}

    def _sums(self, key: tuple[int, int], block: Block, values: Tensor, checked: set[str], dtype: torch.dtype) -> Sums:
        assert self._plan is not None
        moved = getattr(torch, self._plan.dtype)
        by_box: dict[Box, int] = {}  # several engine ranks may read the same
        found: Sums = {}
        for copy, read in enumerate(block.reads):
            if read.param in checked:
                if read.at not in by_box:
                    by_box[read.at] = checksum(values[tuple(slice(*span) for span in read.at)].to(moved), dtype)
                found[(*key, copy)] = by_box[read.at]
        return found

    def close_refit(self) -> None:
        """Unmap the buffer; the rank that created it frees it. Idempotent."""
        self._blocks = []
        self._plan = None
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


@lru_cache(maxsize=2)
def _parsed(text: str) -> RefitPlan:
    return RefitPlan.from_json(text)
