"""One data loader per dataset, and the function that combines their batches into the prompts of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from grpo_mcore.base.imports import import_by_path
from grpo_mcore.data.batched_data_dict import BatchedDataDict
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.data.loader import build_dataloader
from grpo_mcore.data.task_datasets import AllTaskProcessedDataset
from grpo_mcore.recipe import DataConfig
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.pass_rates import PassRates

Iterators = dict[str, Iterator[BatchedDataDict]]
CustomDataloader = Callable[..., tuple[BatchedDataDict, Iterators]]
"""(data_iterators, dataloaders, **records) -> (the prompts of one step, the iterators to continue with). Iterators and
loaders are dicts by task name; their batches are by column.

`records` holds the values of `set_records` (`reward`, 0 before the first step, and the step's other metrics),
`expected_num_prompts`, and `pass_rates`, the PassRates of the run (rollout/pass_rates.py). The function replaces an
exhausted iterator by
`iter(dataloaders[name])`. It must keep no state besides these: nothing else is in a checkpoint.
"""

_FIELDS = ("message_log", "length", "extra_env_info", "loss_multiplier", "idx", "task_name", "uid", "stop_strings")


def example_custom_dataloader(
    data_iterators: Iterators, dataloaders: Mapping[str, StatefulDataLoader], **_records: Any
) -> tuple[BatchedDataDict, Iterators]:
    """Return a batch of each data loader, in the order of `data.train`."""
    batches = []
    for name in data_iterators:
        batch = next(data_iterators[name], None)
        if batch is None:  # the dataset has ended: start it again
            data_iterators[name] = iter(dataloaders[name])
            batch = next(data_iterators[name])
        batches.append(batch)
    return BatchedDataDict.from_batches(batches), data_iterators


def build_train_dataloader(
    dataset: AllTaskProcessedDataset | Mapping[str, AllTaskProcessedDataset],
    settings: DataConfig,
    num_prompts_per_step: int,
    seed: int,
) -> StatefulDataLoader | MultipleDataloaderWrapper:
    """Return one loader over all of `dataset`, or one per dataset where `settings` says so. Raises DataError."""
    if not settings.use_multiple_dataloader:
        if isinstance(dataset, Mapping):
            raise DataError("separate training datasets need data.use_multiple_dataloader: true")
        return build_dataloader(dataset, num_prompts_per_step, settings.shuffle, seed)
    if not isinstance(dataset, Mapping):
        raise DataError(
            "data.use_multiple_dataloader needs the training datasets by task name: build_task_data(..., separate=True)"
        )
    size = settings.num_prompts_per_dataloader
    if size is None or num_prompts_per_step % size:
        raise DataError(
            f"data.num_prompts_per_dataloader {size} must be a number that divides grpo.num_prompts_per_step "
            f"{num_prompts_per_step}"
        )
    custom = settings.custom_dataloader
    function = import_by_path(custom, "custom_dataloader", DataError) if custom else example_custom_dataloader
    loaders = {
        name: build_dataloader(rows, size, settings.shuffle, seed, collate=by_column) for name, rows in dataset.items()
    }
    return MultipleDataloaderWrapper(num_prompts_per_step, function, loaders)


class MultipleDataloaderWrapper:
    """An endless iterator of batches, as `list[DatumSpec]`. A prompt's uid gets `@2`, `@3`, ... with every further pass
    over its dataset.

    Raises DataError where the function lets a loader run out, or returns another number of prompts than expected.
    """

    def __init__(
        self,
        expected_num_prompts: int,
        custom_dataloader: CustomDataloader,
        dataloaders: Mapping[str, StatefulDataLoader],
    ) -> None:
        """`dataloaders` are loaders with batches by column, by task name."""
        self.expected_num_prompts = expected_num_prompts
        self.custom_dataloader = custom_dataloader
        self.dataloaders = dict(dataloaders)
        self.records: dict[str, Any] = {"reward": 0.0}  # until the first step
        self.pass_rates = PassRates()
        """Pass rates of the run that reads the data."""
        self._iterators: Iterators | None = None

    def __iter__(self) -> MultipleDataloaderWrapper:
        return self

    def __next__(self) -> list[DatumSpec]:
        if self._iterators is None:
            self._iterators = {name: iter(loader) for name, loader in self.dataloaders.items()}
        try:
            values = {"expected_num_prompts": self.expected_num_prompts, "pass_rates": self.pass_rates}
            records = values | self.records
            batch, self._iterators = self.custom_dataloader(self._iterators, self.dataloaders, **records)
        except StopIteration as error:
            raise DataError(
                f"{self._name} let a data loader run out: it must continue with iter(dataloaders[name]), as "
                "grpo_mcore.data.multiple_loaders.example_custom_dataloader does"
            ) from error
        prompts = _by_prompt(batch, self._name)
        if len(prompts) != self.expected_num_prompts:
            raise DataError(
                f"{self._name} returned {len(prompts)} prompts where grpo.num_prompts_per_step is "
                f"{self.expected_num_prompts}; there are {len(self.dataloaders)} data loaders, whose batches have "
                "data.num_prompts_per_dataloader prompts"
            )
        return prompts

    def set_records(self, records: Mapping[str, Any]) -> None:
        """Add values that the function gets by name from its next call on, such as the metrics of the last step."""
        self.records.update(records)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every loader, and the records."""
        loaders = {name: loader.state_dict() for name, loader in self.dataloaders.items()}
        return {"loaders": loaders, "records": dict(self.records)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises DataError where the datasets differ from those of the state."""
        if "loaders" not in state:
            raise DataError(
                "cannot continue with this data: the checkpoint comes from a run with data.use_multiple_dataloader: "
                "false; restore it, or start a new run"
            )
        if set(state["loaders"]) != set(self.dataloaders):
            raise DataError(
                f"cannot continue with this data: the datasets are {sorted(self.dataloaders)}, at the checkpoint they "
                f"were {sorted(state['loaders'])}; restore them, or start a new run"
            )
        for name, loader in self.dataloaders.items():
            loader.load_state_dict(state["loaders"][name])
        self.records = dict(state["records"])
        self._iterators = None

    @property
    def _name(self) -> str:
        function = self.custom_dataloader
        return f"the custom_dataloader {getattr(function, '__module__', '')}.{getattr(function, '__name__', function)}"


def by_column(batch: list[DatumSpec], epoch: int) -> BatchedDataDict:
    """Return a column for each field of DatumSpec; a processor's extra fields are in the column `others`."""
    suffix = f"@{epoch + 1}" if epoch else ""
    columns: dict[str, list[Any]] = {name: [datum.get(name) for datum in batch] for name in _FIELDS}
    columns["uid"] = [datum["uid"] + suffix for datum in batch]
    columns["others"] = [{name: value for name, value in datum.items() if name not in _FIELDS} for datum in batch]
    return BatchedDataDict(columns)


def _by_prompt(batch: Any, name: str) -> list[DatumSpec]:
    """Return the rows of a batch that was made of `by_column`'s batches."""
    if not isinstance(batch, BatchedDataDict) or not {*_FIELDS, "others"} <= set(batch):
        raise DataError(
            f"{name} must return (BatchedDataDict.from_batches(batches of the data loaders), data_iterators), "
            f"got {type(batch).__name__}"
        )
    rows = []
    for index in range(batch.size):
        fields = {field: batch[field][index] for field in _FIELDS}
        if fields["stop_strings"] is None:
            del fields["stop_strings"]
        rows.append({**fields, **batch["others"][index]})
    return rows  # type: ignore[return-value]
