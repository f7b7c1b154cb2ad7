"""The receiving side on a node without policy ranks: blocks arrive in a buffer that the engine ranks have mapped."""

from __future__ import annotations

import time
import uuid
from typing import Any

import torch

from grpo_mcore.refit.buffer import RefitBuffer, block_view, create_buffer
from grpo_mcore.refit.delivery import Deliveries
from grpo_mcore.refit.network import Network
from grpo_mcore.refit.plan import RefitError, RefitPlan


class RefitReceiver:
    """Receives the weights for one node whose engines share no memory with the policy.

    Each refit calls `open_receiver`, then `receive_bucket` for each bucket. Network and buffer are kept over refits."""

    def __init__(self) -> None:
        self._plan: RefitPlan | None = None
        self._buffer: RefitBuffer | None = None
        self._network: Network | None = None
        self._node = 0

    def open_receiver(self, network: dict[str, Any], plan: str, node: int) -> dict[str, Any]:
        """`node`: index of this node among those with engines. Returns {digest, transport for the node's engines}."""
        new = RefitPlan.from_json(plan)
        if self._plan is None or self._plan.digest != new.digest:
            self.close_receiver()
            self._plan = new
        if self._network is None or self._network.description != network:
            self._network = Network(network, network["receivers"][node])
        if self._buffer is None:
            # Each engine of the node may see GPUs of its own only, and none of them this one's memory.
            self._buffer = create_buffer(
                new.buffer_bytes, self._network.device, uuid.uuid4().hex[:12], through_host=True
            )
        self._node = node
        self._deliveries = Deliveries(new, network["node_of_rank"], network["readers"])
        return {"digest": new.digest, "transport": self._buffer.description}

    def receive_bucket(self, index: int) -> dict[str, Any]:
        """Receive every block of one bucket that this node needs. Returns {bytes, seconds}."""
        if self._plan is None or self._buffer is None or self._network is None:
            raise RefitError(f"cannot receive bucket {index}: no refit is open on node {self._node}")
        began = time.perf_counter()
        places, nbytes = [], 0
        for block in self._plan.buckets[index].blocks:
            for node, sender in self._deliveries.of(block):
                if node == self._node:
                    place = block_view(self._buffer, self._plan, index, block)
                    places.append((place.view(-1).view(torch.uint8), sender))
                    nbytes += block.nbytes
        try:
            self._network.exchange((), places)
            self._buffer.synchronize()
        except RuntimeError as error:
            raise RefitError(f"node {self._node}: receiving bucket {index} failed: {error}") from error
        return {"bytes": nbytes, "seconds": time.perf_counter() - began}

    def close_receiver(self) -> None:
        """Leave the network and free the buffer. Idempotent."""
        if self._network is not None:
            self._network.close()
        if self._buffer is not None:
            self._buffer.close()
        self._plan = self._buffer = self._network = None
