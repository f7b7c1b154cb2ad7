"""Prompts one after another, over all epochs, with a place that a checkpoint can hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from grpo_mcore.data import MultipleDataloaderWrapper
from grpo_mcore.rollout.datum import DatumSpec


class PromptStream:
    """Takes batches from a stateful data loader and hands out as many prompts as are asked for.

    A prompt that was taken stays on the books until it is `settled`: it goes into a checkpoint as one that comes next.
    So a resumed run loses none of those that were under way, and repeats none that has had its end.

    From the second epoch on a uid gets `@2`, `@3`, ...: it names one prompt of the run, not one row of the data.
    """

    def __init__(self, dataloader: Any, max_epochs: int, state: dict[str, Any] | None = None) -> None:
        """`state`: what `state_dict` gave in the run that this one goes on with."""
        self.dataloader, self.max_epochs = dataloader, max_epochs
        self.epoch = 0
        self._waiting: deque[DatumSpec] = deque()
        self._taken: dict[str, DatumSpec] = {}
        self._batches: Iterator[list[DatumSpec]] | None = None
        if state is not None:
            self.epoch = state["epoch"]
            self._waiting.extend(state["waiting"])
            self.dataloader.load_state_dict(state["dataloader"])

    def take(self, count: int) -> list[DatumSpec]:
        """The next `count` prompts; fewer only when the last epoch has ended."""
        while len(self._waiting) < count and self.epoch < self.max_epochs:
            if self._batches is None:
                self._batches = iter(self.dataloader)
            batch = next(self._batches, None)
            if batch is None:
                self.epoch += 1
                self._batches = None
                continue
            suffix = f"@{self.epoch + 1}" if self.epoch else ""
            self._waiting.extend({**datum, "uid": datum["uid"] + suffix} for datum in batch)
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        self._taken |= {datum["uid"]: datum for datum in taken}
        return taken

    def mark_done(self, uids: Iterable[str]) -> None:
        """These have had their end: trained on, filtered, or failed. Raises KeyError for one that is not under way."""
        for uid in uids:
            del self._taken[uid]

    def put_back(self, uids: Sequence[str]) -> None:
        """Prompts that were taken and not used: they are the next ones, in this order, as they are. Raises KeyError for
        one that is not under way."""
        self._waiting.extendleft([self._taken.pop(uid) for uid in reversed(uids)])

    def record_step(self, step: int, metrics: dict[str, float]) -> None:
        """Tell a data loader of several datasets what the last step came to; it may choose the next batch by it."""
        if isinstance(self.dataloader, MultipleDataloaderWrapper):
            self.dataloader.set_records({"step": step, **metrics})

    def state_dict(self) -> dict[str, Any]:
        waiting = [*self._taken.values(), *self._waiting]
        return {"epoch": self.epoch, "waiting": waiting, "dataloader": self.dataloader.state_dict()}
