"""The policy rank's side of a refit: it copies its own shards to their place in the shared whole tensors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_mcore.families.spec import Box
from grpo_mcore.refit.buffer import RefitBuffer, attach_buffer, create_buffer, slot_view
from grpo_mcore.refit.plan import RefitError, RefitPlan


class WeightSource(Protocol):
    """A policy rank's weights, as slices of Hugging Face tensors."""

    def pieces(self) -> Iterable[tuple[str, Box, Tensor]]:
        """(Hugging Face name, box in the whole tensor, the local values: a view of the box's shape).

        Only what this rank is to write: of data-parallel replicas, one.
        """


class RefitSender:
    """Called by the driver in this order: `open_refit`, `fill_bucket` for each bucket; `close_refit` at the
    end of the run. The buffer stays mapped from the first refit to the last."""

    def __init__(self, source: WeightSource, run_id: str | None = None, *, through_host: bool = False) -> None:
        """`through_host`: the sides do not all see one accelerator, so the buffer lies in host memory."""
        self._source = source
        self._through_host = through_host
        self._run_id = run_id or uuid.uuid4().hex[:12]
        self._plan: RefitPlan | None = None
        self._buffer: RefitBuffer | None = None
        self._by_bucket: list[list[tuple[str, Box, Tensor]]] = []

    def open_refit(self, transport: dict[str, Any] | None, plan: str) -> dict[str, Any]:
        """Take the plan (JSON), map the buffer, look up the source's pieces.

        `transport`: the description of the buffer to attach, or None to create it here and describe it in the
        answer: {digest, transport, held: [(tensor, box), ...]}.
        """
        new = RefitPlan.from_json(plan)
        if self._plan is None or new.digest != self._plan.digest:
            self.close_refit()
            self._plan = new
        pieces = list(self._source.pieces())
        if self._buffer is None or (transport is not None and transport != self._buffer.description):
            self._map(transport, pieces)
        assert self._buffer is not None
        self._by_bucket = [[] for _ in new.buckets]
        for name, box, values in pieces:
            self._check(new, name, box, values)
            self._by_bucket[new.slots[name][0]].append((name, box, values))
        return {
            "digest": new.digest,
            "transport": self._buffer.description,
            "held": [(name, box) for name, box, _ in pieces],
        }

    def _map(self, transport: dict[str, Any] | None, pieces: list[tuple[str, Box, Tensor]]) -> None:
        assert self._plan is not None
        if self._buffer is not None:
            self._buffer.close()
        if transport is not None:
            self._buffer = attach_buffer(transport)
        elif pieces:
            self._buffer = create_buffer(self._plan.buffer_bytes, self._buffer_device(pieces), self._run_id)
        else:
            raise RefitError("the policy rank that should create the refit buffer holds no weights")

    def _buffer_device(self, pieces: list[tuple[str, Box, Tensor]]) -> torch.device:
        return torch.device("cpu") if self._through_host else pieces[0][2].device

    @staticmethod
    def _check(plan: RefitPlan, name: str, box: Box, values: Tensor) -> None:
        if name not in plan.slots:
            raise RefitError(f"this policy rank holds {name!r}, which the refit plan does not have")
        if tuple(values.shape) != tuple(stop - start for start, stop in box):
            raise RefitError(f"this policy rank gives {name!r} {box} in the shape {tuple(values.shape)}")

    @torch.no_grad()
    def fill_bucket(self, index: int) -> dict[str, Any]:
        """Copy this rank's pieces of one bucket into the buffer. Returns {bytes, seconds}."""
        if self._plan is None or self._buffer is None:
            raise RefitError(f"bucket {index} is to be filled, but no refit is open on this policy rank")
        began, nbytes = time.perf_counter(), 0
        for name, box, values in self._by_bucket[index]:
            try:
                whole = slot_view(self._buffer, self._plan, index, self._plan.slots[name][1])
                place = whole[tuple(slice(start, stop) for start, stop in box)]
                place.copy_(values)
            except Exception as error:
                raise RefitError(f"filling bucket {index} with {name!r} {box} failed: {error}") from error
            nbytes += place.numel() * place.element_size()
        self._buffer.synchronize()
        return {"bytes": nbytes, "seconds": time.perf_counter() - began}

    def close_refit(self) -> None:
        """Unmap the buffer; the rank that created it frees it. Idempotent."""
        self._by_bucket = []
        self._plan = None
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
