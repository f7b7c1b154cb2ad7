"""Nodes of an engine that receive a refit, each rank a thread."""

from collections.abc import Iterator
from typing import Any

import torch

from grpo_mcore.refit.engine_side.receiver import RefitReceiver
from grpo_mcore.refit.plan.parts import Part
from grpo_mcore.refit.plan.plan import Block, RefitPlan
from grpo_mcore.refit.transport.board import Mapped, Seat
from grpo_mcore.refit.transport.buffer import block_view
from tests.unit.refit.shards import in_a_thread

RANKS = 2
"""The calls of an engine."""


class Node(RefitReceiver):
    """A node of an engine; the engine's first keeps what the ranks of each of its nodes read."""

    def __init__(self, plan: RefitPlan) -> None:
        super().__init__()
        self.plan = plan
        self.seen: dict[tuple[int, int, int], torch.Tensor] = {}  # by node of the engine, bucket and block
        self.aborted = 0
        self.version = 0

    def start_refit(self, manifest: dict[str, Any]) -> dict[str, Any]:
        transport = None
        self.receives = "receiver" in manifest
        if self.receives:
            transport = self.open_receiver(*manifest["receiver"])["transport"]
        places = [one or transport for one in manifest["transports"]]
        self.taking = []
        for rank in range(RANKS):
            place = rank * len(places) // RANKS
            reader = Mapped.attach(places[place], torch.device("cpu"))
            reader.board.sit(Seat(*manifest["seats"][rank]), f"engine rank {rank}")
            self.taking.append(in_a_thread(self.take, rank, place, reader, Part.unpacked(manifest["parts"][rank])))
        answer = {"digest": manifest["digest"], "in_place": False, "dtype": "float32", "verify": "off"}
        return answer | {"transport": transport}

    def take(self, rank: int, place: int, reader: Mapped, part: Part) -> None:
        try:
            for index, loads in enumerate(part.loads):
                reader.board.wait(reader.board.writers, index + 1, f"fill bucket {index}")
                self.take_bucket(index)
                for load in loads:
                    self.seen[place, index, load.number] = block_view(reader.buffer, part, index, load).clone()
                reader.board.finished(index + 1)
        except Exception as error:
            reader.board.fail(str(error))
            raise

    def take_bucket(self, index: int) -> None: ...

    def stage_refit(self) -> dict[str, Any]:
        if self.receives:
            self.receive_refit()
        for taking in self.taking:
            taking.result()
        return {"seconds": 0.0, "sums": {}}

    def arrived(self) -> Iterator[tuple[Block, torch.Tensor]]:
        """Yield each block with its values."""
        for (_, number, at), values in self.seen.items():
            block = self.plan.buckets[number].blocks[at]
            yield block, values.view([stop - start for start, stop in block.box])

    def commit_refit(self, version: int, recompute_kv: bool) -> dict[str, Any]:
        self.version = version
        return {"version": version, "fallbacks": 0, "quantized": []}

    def finish_refit(self) -> None: ...

    def abort_refit(self) -> None:
        self.aborted += 1
