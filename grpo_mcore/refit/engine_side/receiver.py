"""The receiving side on a node without policy ranks: blocks arrive in a buffer that the engine ranks have mapped."""

import time
import uuid
from typing import Any

from grpo_mcore.refit.plan.parts import Part
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.policy_side.sender import places_of
from grpo_mcore.refit.transport.board import Mapped, Seat, next_bucket
from grpo_mcore.refit.transport.network import Network


class RefitReceiver:
    """Receives the weights for one node whose engines share no memory with the policy.

    Each refit calls `open_receiver`, then `receive_refit`. Network and buffer are kept over refits."""

    def __init__(self) -> None:
        self._part: Part | None = None
        self._mapped: Mapped | None = None
        self._network: Network | None = None
        self._node = 0

    def open_receiver(self, network: dict[str, Any], part: bytes, node: int, seat: Seat) -> dict[str, Any]:
        """`node`: index of this node among those with engines. Returns {digest, transport for the node's engines}."""
        new = Part.unpacked(part)
        if self._part is None or self._part.digest != new.digest:
            self.close_receiver()
        self._part = new
        if self._network is None or self._network.description != network:
            self._network = Network(network, network["receivers"][node])
        if self._mapped is None:
            # Each engine of the node may see GPUs of its own only, and none of them this one's memory.
            self._mapped = Mapped.create(
                new.buffer_bytes, self._network.device, uuid.uuid4().hex[:12], through_host=True
            )
        self._node = node
        self._mapped.board.sit(seat, f"the receiver of node {node}")
        return {"digest": new.digest, "transport": self._mapped.transport}

    def receive_refit(self) -> dict[str, Any]:
        """Receive every block that this node needs, a bucket as soon as the engine ranks have taken the one before the
        last. Returns {bytes, seconds (without waiting for them)}. If it fails, all others leave the refit too."""
        if self._part is None or self._mapped is None or self._network is None:
            raise RefitError(f"no refit is open on node {self._node}")
        part, board, seconds = self._part, self._mapped.board, 0.0
        following = next_bucket(map(bool, part.arrivals))
        index = following[0]
        try:
            self._network.join()
            board.finished(index)
            while index < part.buckets:
                board.wait(board.readers, index - 1, f"take bucket {index - 2}")
                started_at = time.perf_counter()
                try:
                    self._network.exchange((), places_of(part.arrivals[index], part, index, self._mapped))
                except RuntimeError as error:
                    raise RefitError(f"node {self._node}: receiving bucket {index} failed: {error}") from error
                self._mapped.buffer.synchronize()
                seconds += time.perf_counter() - started_at
                index = following[index + 1]
                board.finished(index)
        except Exception as error:
            board.fail(str(error))
            self._network.close(failed=True)
            self._network = None
            raise
        return {"bytes": sum(arrival.nbytes for arrivals in part.arrivals for arrival in arrivals), "seconds": seconds}

    def close_receiver(self) -> None:
        """Leave the network and free the buffer. Idempotent."""
        if self._network is not None:
            self._network.close()
        if self._mapped is not None:
            self._mapped.close()
        self._part = self._mapped = self._network = None
