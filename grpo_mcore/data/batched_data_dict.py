"""A batch of samples by column, for scripts that work on whole batches: a dict of tensors and lists of one length."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad


class BatchedDataDict(dict[str, Any]):
    """A dict whose entries are tensors [N, ...] or lists of N items. Entries may be set one after the other.

    Every method that needs N raises ValueError where lengths differ, and TypeError for an entry of another type.
    """

    @property
    def size(self) -> int:
        """The number of samples N; 0 without any entry."""
        lengths = {name: _length(name, values) for name, values in self.items()}
        if len(set(lengths.values())) > 1:
            sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"the entries of a batch must be of one length, not: {sizes}")
        return next(iter(lengths.values()), 0)

    def slice(self, start: int, end: int) -> Self:
        """Return samples start .. end - 1. Raises ValueError where the batch has no such samples."""
        if not 0 <= start <= end <= self.size:
            raise ValueError(f"samples {start} .. {end} of a batch of {self.size}")
        return type(self)({name: values[start:end] for name, values in self.items()})

    def select_indices(self, indices: Sequence[int] | Tensor) -> Self:
        """Return the samples with these integer indices, in this order."""
        index = torch.as_tensor(indices)
        if index.dtype == torch.bool:
            raise TypeError("select_indices takes indices, not a mask: use mask.nonzero().reshape(-1)")
        _ = self.size
        numbers = [int(i) for i in index]

        def chosen(values: Any) -> Any:
            if isinstance(values, Tensor):
                return values[torch.tensor(numbers, dtype=torch.int64, device=values.device)]
            return [values[i] for i in numbers]

        return type(self)({name: chosen(values) for name, values in self.items()})

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Return each sample `num_repeats` times in a row. Items of lists are copied deeply."""
        _ = self.size

        def repeated(values: Any) -> Any:
            if isinstance(values, Tensor):
                return values.repeat_interleave(num_repeats, dim=0)
            return [deepcopy(item) for item in values for _ in range(num_repeats)]

        return type(self)({name: repeated(values) for name, values in self.items()})

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Concatenate batches.

        Tensors with two or more dimensions are padded at the end of dimension 1 to the widest, with 0 or with the
        entry's value in pad_value_dict. Raises ValueError without a batch, and where the batches' entries differ.
        """
        if not batches:
            raise ValueError("from_batches needs at least one batch")
        for batch in batches:
            if set(batch) != set(batches[0]):
                odd = ", ".join(sorted(set(batch) ^ set(batches[0])))
                raise ValueError(f"batches cannot be joined, some have and some lack: {odd}")
            _ = cls(batch).size
        values = pad_value_dict or {}
        return cls({name: _joined([batch[name] for batch in batches], values.get(name, 0)) for name in batches[0]})

    def get_dict(self) -> dict[str, Any]:
        """Return the entries as a plain dict."""
        return dict(self)


def _joined(parts: Sequence[Any], fill: float) -> Any:
    if not isinstance(parts[0], Tensor):
        return [item for part in parts for item in part]
    if parts[0].ndim > 1:
        width = max(part.shape[1] for part in parts)
        parts = [pad(part, (0, 0) * (part.ndim - 2) + (0, width - part.shape[1]), value=fill) for part in parts]
    return torch.cat(list(parts))


def _length(name: str, values: Any) -> int:
    if isinstance(values, Tensor) and values.ndim:
        return values.shape[0]
    if isinstance(values, list):
        return len(values)
    raise TypeError(f"the batch's entry {name!r} is a {type(values).__name__}; want a tensor [N, ...] or a list")
