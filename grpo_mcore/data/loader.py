"""The data loader of one dataset. Training batches are always full; only the seed and the epoch decide their order."""

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from grpo_mcore.data.interfaces import DataError
from grpo_mcore.data.task_datasets import AllTaskProcessedDataset
from grpo_mcore.rollout.datum import DatumSpec

log = logging.getLogger(__name__)


def build_dataloader(
    dataset: AllTaskProcessedDataset,
    batch_size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool = True,
    collate: Callable[[list[DatumSpec], int], Any] | None = None,
) -> StatefulDataLoader:
    """Return a loader whose batches are `list[DatumSpec]`; one pass over it is one epoch.

    Unusable prompts are skipped, so they never make a batch smaller. With `drop_last` (training) prompts that do not
    fill the last batch are dropped and counted in `loader.batch_sampler.dropped`; without (validation) they are a
    smaller batch. After `state_dict()` between two batches and `load_state_dict()` in a new loader, exactly the
    following batches come. The driver reads the data itself: a prompt is tokenised in well under a millisecond.

    `collate(batch, epoch)` converts the list of a batch.
    """
    if drop_last and dataset.usable_at_most() < batch_size:
        raise DataError(
            f"the dataset has {dataset.usable_at_most()} usable prompts, fewer than one batch of "
            f"{batch_size}; lower the batch size (grpo.num_prompts_per_step; of sft and dpo "
            f"policy.train_global_batch_size) or add data ({dataset.excluded})"
        )
    sampler = PromptBatchSampler(dataset, batch_size, shuffle, seed, drop_last)

    def collated(batch: list[DatumSpec]) -> Any:
        return batch if collate is None else collate(batch, sampler.epoch)

    with warnings.catch_warnings():  # torchdata 0.11 calls a function that torch 2.13 calls deprecated
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return PromptLoader(dataset, batch_sampler=sampler, collate_fn=collated, num_workers=0)


FINGERPRINT_ROWS = 20_000
"""Rows that a fingerprint reads, evenly spread over a larger dataset: it is computed in a second or two."""


def fingerprint(dataloader: Any) -> str | None:
    """Return a digest of the rows that a loader reads, or all of its loaders; None for a loader of another class. Names
    do not count, so that a file may move. It is computed once for each dataset."""
    datasets = _datasets(dataloader)
    return " ".join(dataset.fingerprint(FINGERPRINT_ROWS) for dataset in datasets) or None


def as_read_now(prompt: DatumSpec, dataloader: Any) -> DatumSpec:
    """Return a prompt of a checkpoint as the loader reads its row now: with the tokenizer, the chat template and the
    task's prompt of this run. One whose row it does not have, or can no longer use, stays as it was."""
    idx, uid = prompt.get("idx"), prompt["uid"]
    for dataset in _datasets(dataloader):
        if isinstance(idx, int) and idx < len(dataset) and dataset.usable(idx):
            now = dataset[idx]
            if now["uid"] in (uid, uid.rpartition("@")[0]):
                return {**now, "uid": uid}
    return prompt


def _datasets(dataloader: Any) -> list[AllTaskProcessedDataset]:
    """Return the datasets that a loader reads, or all of its loaders, by name; none for a loader of another class."""
    loaders = getattr(dataloader, "dataloaders", {"": dataloader})
    datasets = [getattr(loader, "dataset", None) for _, loader in sorted(loaders.items())]
    ours = [dataset for dataset in datasets if isinstance(dataset, AllTaskProcessedDataset)]
    return ours if len(ours) == len(datasets) else []


class PromptLoader(StatefulDataLoader):
    """The loader of a run with one data loader."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state. Raises DataError for the state of several loaders."""
        if "loaders" in state_dict:
            raise DataError(
                "cannot continue with this data: the checkpoint comes from a run with data.use_multiple_dataloader: "
                "true; restore it, or start a new run"
            )
        super().load_state_dict(state_dict)


class PromptBatchSampler(Sampler[list[int]]):
    """Draws the row indices of batches. `epoch` is that of the current pass, or of the next one between passes; a pass
    that is abandoned counts as an epoch. `dropped` is the number of prompts that did not fill a last batch."""

    def __init__(
        self, dataset: AllTaskProcessedDataset, batch_size: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.dropped = 0
        self._pass: _Pass | None = None

    def __iter__(self) -> Iterator[list[int]]:
        if self._pass is not None and self._pass.is_running:
            self.epoch += 1
        self._pass = _Pass(self)
        return self._pass

    def __len__(self) -> int:
        """Number of batches in one epoch; an upper bound while not all prompts are checked."""
        usable = self.dataset.usable_at_most()
        return usable // self.batch_size if self.drop_last else -(-usable // self.batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """Return the row indices in the order of an epoch, int64 [rows]."""
        if not self.shuffle:
            return np.arange(len(self.dataset))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.dataset))


class _Pass(Iterator[list[int]]):
    """The batches of one epoch. Its state is the epoch and `position`, the number of rows of its order already read."""

    def __init__(self, sampler: PromptBatchSampler) -> None:
        self.sampler = sampler
        self.epoch = sampler.epoch
        self.position = 0
        self.batches = 0
        self._order = sampler.order(self.epoch)
        self._finished = False

    @property
    def is_running(self) -> bool:
        return self.batches > 0 and not self._finished

    def __next__(self) -> list[int]:
        sampler = self.sampler
        batch: list[int] = []
        while self.position < len(self._order) and len(batch) < sampler.batch_size:
            index = int(self._order[self.position])
            self.position += 1
            if sampler.dataset.usable(index):
                batch.append(index)
        if len(batch) == sampler.batch_size or (batch and not sampler.drop_last):
            self.batches += 1
            return batch
        self._finish(left_over=len(batch))
        raise StopIteration

    def _finish(self, left_over: int) -> None:
        if self._finished:
            return
        self._finished = True
        self.sampler.epoch = self.epoch + 1
        self.sampler.dropped += left_over
        if self.batches == 0:
            raise DataError(
                f"a whole epoch gave no batch of {self.sampler.batch_size}: {self.sampler.dataset.excluded}"
            )
        if left_over and self.sampler.dropped == left_over:  # every epoch has as many
            log.info("epoch %d: %d rows did not fill a batch and were dropped (said only once)", self.epoch, left_over)
        if len(self._order) != self.sampler.dataset.usable_at_most():
            log.info("epoch %d: %s", self.epoch, self.sampler.dataset.excluded)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "behind": self.position,
            "batches": self.batches,
            "over": self._finished,
            "dropped": self.sampler.dropped,
            "rows": len(self._order),
            "seed": self.sampler.seed,
            "shuffle": self.sampler.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises DataError where the data or its order differs from that of the state."""
        now = {"rows": len(self._order), "seed": self.sampler.seed, "shuffle": self.sampler.shuffle}
        for key, value in now.items():
            if state[key] != value:
                raise DataError(
                    f"cannot continue with this data: {key} is {value}, at the checkpoint it was {state[key]}; "
                    f"restore it, or start a new run"
                )
        self.epoch = state["epoch"]
        self.position = state["behind"]
        self.batches = state["batches"]
        self._finished = state["over"]
        self.sampler.epoch = self.epoch + self._finished
        self.sampler.dropped = state["dropped"]
        self._order = self.sampler.order(self.epoch)
