"""One bin as tensors: its samples side by side in one row, and the indices that tell them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.batching.packing import round_up
from grpo_mcore.batching.prefix_trees import BLOCK_TOKENS
from grpo_mcore.batching.row_images import RowImages, join_images
from grpo_mcore.batching.shared_prefixes import SharedPrefixes, find_shared_prefixes


@dataclass(frozen=True)
class PackedBatch:
    """n samples in a row of T tokens. A sample is a sequence, or several where it has branches. Padding at the end of
    the row is a sequence of its own: segment n, all masks 0."""

    tokens: Tensor
    """int64 [1, T]."""
    positions: Tensor
    """int64 [T]: position in the sequence, from 0."""
    cu_seqlens: Tensor
    """int32 [sequences + 1], padding among them: start of each sequence, and T."""
    segments: Tensor
    """int64 [T]: the sample (0 .. n - 1) of each token; n for padding."""
    columns: dict[str, Tensor]
    """Per-token values, each [1, T], 0 in the padding."""
    lengths: tuple[int, ...]
    """Tokens of each sample, on the host."""
    sequences: tuple[int, ...]
    """Tokens of each sequence of the samples, on the host."""
    names: tuple[str, ...] = ()
    """Names of the samples in messages; may be empty."""
    routes: Tensor | None = None
    """int16 [T, layers, experts per token]: the experts that each token goes to; -1 where the choice does not matter or
    the layer has no experts. None: the routers choose."""
    teacher_hidden: Tensor | None = None
    """[trained tokens, teacher's hidden size]: what the teacher's output layer gets at the positions of
    `next_token_trained`, in their order. None without a teacher, or where its log-probs are enough."""
    shared: SharedPrefixes | None = None
    """The tokens that are computed, if samples share prefixes. None: all. Everything else here stays by sample."""
    images: RowImages | None = None
    """The images of the samples. None: there are none."""

    @property
    def num_segments(self) -> int:
        """n: samples in the row."""
        return len(self.lengths)

    @property
    def computed_cu_seqlens(self) -> Tensor:
        """int32: `cu_seqlens` of the tokens that are computed, which are fewer where samples share prefixes."""
        return self.cu_seqlens if self.shared is None else self.shared.cu_seqlens

    @property
    def padding(self) -> int:
        """Tokens of padding at the end of the row."""
        return self.tokens.shape[1] - sum(self.lengths)

    def targets(self) -> Tensor:
        """int64 [1, T]: the token that position t predicts: t + 1 of the same sequence, 0 at its end."""
        return torch.where(self._has_next(), self.tokens.roll(-1, dims=1), 0)

    def next_token_counts(self) -> Tensor:
        """bool [1, T]: positions whose next token is trained on (columns token_mask and sample_mask)."""
        counts = self.columns["token_mask"] * self.columns["sample_mask"] > 0
        return self._has_next() & counts.roll(-1, dims=1)

    def next_token_trained(self) -> Tensor:
        """bool [1, T]: positions whose next token has a token_mask, whatever the sample_mask."""
        return self._has_next() & (self.columns["token_mask"] > 0).roll(-1, dims=1)

    def to_token_aligned(self, next_token_scores: Tensor) -> Tensor:
        """Return [k, T]: for token t the score at position t - 1, 0 for the first token of each sequence.

        next_token_scores [k, T] belong to `targets()`. Keeps dtype and gradient.
        """
        self._check(next_token_scores[:1], "next_token_scores")
        return torch.where(self._has_next(), next_token_scores, 0.0).roll(1, dims=1)

    def split(self, per_token: Tensor) -> list[Tensor]:
        """Split a per-token row [1, T] into one tensor [length] per sample, without the padding."""
        self._check(per_token, "per_token")
        row = per_token[0, : sum(self.lengths)]
        return list(torch.split(row, list(self.lengths)))

    def per_token(self, values: Tensor) -> Tensor:
        """Expand one value per sample, [n], to one per token, [1, T]; 0 in the padding."""
        if values.shape != (self.num_segments,):
            raise ValueError(f"{tuple(values.shape)} values for the {self.num_segments} samples of the row")
        return torch.cat([values, values.new_zeros(1)])[self.segments][None]

    def loss_inputs(self) -> dict[str, Any]:
        """Return the mapping that the loss functions take: columns, segments, num_segments."""
        return {**self.columns, "segments": self.segments, "num_segments": self.num_segments}

    def empty_like(self, multiple: int) -> PackedBatch:
        """Return a row of `multiple` padding tokens with the same columns, to run when a rank's bin is empty."""
        values = {name: column.new_zeros(0) for name, column in self.columns.items()}
        routes = None if self.routes is None else self.routes[:0]
        empty = _assemble(self.tokens.new_zeros(0), values, (), (), multiple, routes=routes)
        hidden = None if self.teacher_hidden is None else self.teacher_hidden[:0]
        return replace(empty, teacher_hidden=hidden)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        """Return the same row on a device."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return replace(
            self,
            tokens=move(self.tokens),
            positions=move(self.positions),
            cu_seqlens=move(self.cu_seqlens),
            segments=move(self.segments),
            columns={name: move(column) for name, column in self.columns.items()},
            routes=None if self.routes is None else move(self.routes),
            teacher_hidden=None if self.teacher_hidden is None else move(self.teacher_hidden),
            shared=None if self.shared is None else self.shared.to(device, non_blocking=non_blocking),
            images=None if self.images is None else self.images.to(device, non_blocking=non_blocking),
        )

    def _has_next(self) -> Tensor:
        last = torch.zeros(1, dtype=torch.bool, device=self.positions.device)
        return torch.cat([self.positions[1:] > 0, last])[None]

    def _check(self, row: Tensor, name: str) -> None:
        if row.shape != self.tokens.shape:
            raise ValueError(f"{name} has shape {tuple(row.shape)}, the row {tuple(self.tokens.shape)}")


def pack_rows(
    token_ids: Sequence[Tensor],
    columns: Sequence[Mapping[str, Tensor]],
    multiple: int = 1,
    *,
    names: Sequence[str] = (),
    routes: Sequence[Tensor] | None = None,
    branches: Sequence[Sequence[int]] | None = None,
    images: RowImages | None = None,
) -> PackedBatch:
    """Put samples side by side and pad the row to a multiple of `multiple`.

    token_ids: int64 [length] of each sample. columns: the same keys for each sample, each value [length] or a scalar
    tensor, such as sample_mask, that every token of the sample gets. names: of the samples, for messages; one each, or
    none. routes: int16 [length - 1, layers, experts per token] of each sample. branches: tokens of each sequence of
    each sample; None: every sample is one. images: those of the row without its padding.
    Raises ValueError, naming the sample and the column, if keys or shapes do not fit, and if there is no sample
    (`empty_like` makes a row without samples).
    """
    count = len(token_ids)
    if not count or len(columns) != count or len(names) not in (0, count):
        raise ValueError(
            f"{count} samples, {len(columns)} sets of columns and {len(names)} names; need equally many of each, "
            "and at least one sample"
        )
    keys = list(columns[0])
    expanded: dict[str, list[Tensor]] = {key: [] for key in keys}
    for sample, (ids, values) in enumerate(zip(token_ids, columns, strict=True)):
        if ids.ndim != 1 or ids.numel() == 0:
            raise ValueError(f"sample {sample}: token ids have shape {tuple(ids.shape)}; must be 1-d and not empty")
        if set(values) != set(keys):
            odd = ", ".join(sorted(set(values) ^ set(keys)))
            raise ValueError(f"sample {sample}: its columns differ from those of sample 0 in: {odd}")
        for key in keys:
            value = values[key].expand(ids.shape) if values[key].ndim == 0 else values[key]
            if value.shape != ids.shape:
                raise ValueError(f"sample {sample}: {key} has shape {tuple(value.shape)} for {ids.numel()} tokens")
            expanded[key].append(value)
    lengths = tuple(ids.shape[0] for ids in token_ids)
    joined = {key: torch.cat(values) for key, values in expanded.items()}
    row = None if routes is None else torch.cat([_with_last(sample) for sample in routes])
    sequences = lengths if branches is None else tuple(length for of_sample in branches for length in of_sample)
    return _assemble(
        torch.cat(list(token_ids)).to(torch.int64), joined, lengths, sequences, multiple, tuple(names), row, images
    )


def share_prefixes(row: PackedBatch, multiple: int = 1, block: int = BLOCK_TOKENS) -> PackedBatch:
    """Let sequences of the row that begin alike share what is computed of their prefixes, in whole blocks of tokens.
    Images are alike by their content."""
    content = row.tokens[0] if row.images is None else row.images.content(row.tokens[0])
    return replace(row, shared=find_shared_prefixes(content, row.sequences, multiple, block))


def join_rows(rows: Sequence[PackedBatch], multiple: int = 1, block: int = BLOCK_TOKENS) -> PackedBatch:
    """Put the samples of several rows into one, without the padding between them. If one of the rows shares prefixes,
    all samples do, in blocks of `block` tokens."""
    used = [sum(row.lengths) for row in rows]
    ids = torch.cat([row.tokens[0, :size] for row, size in zip(rows, used, strict=True)])
    columns = {
        name: torch.cat([row.columns[name][0, :size] for row, size in zip(rows, used, strict=True)])
        for name in rows[0].columns
    }
    routes = [row.routes[:size] for row, size in zip(rows, used, strict=True) if row.routes is not None]
    lengths = tuple(length for row in rows for length in row.lengths)
    sequences = tuple(length for row in rows for length in row.sequences)
    names = tuple(name for row in rows for name in row.names)
    images = join_images([(row.positions, row.images, size) for row, size in zip(rows, used, strict=True)])
    every_route = torch.cat(routes) if routes else None
    joined = _assemble(ids, columns, lengths, sequences, multiple, names, every_route, images)
    return share_prefixes(joined, multiple, block) if any(row.shared for row in rows) else joined


def cut_row(values: Tensor, rows: Sequence[PackedBatch]) -> list[Tensor]:
    """Undo `join_rows` for per-token values [1, T] of the joined row: one [1, T] per row, 0 in its padding."""
    parts = values[0, : sum(sum(row.lengths) for row in rows)].split([sum(row.lengths) for row in rows])
    return [torch.cat([part, part.new_zeros(row.padding)])[None] for part, row in zip(parts, rows, strict=True)]


def _with_last(routes: Tensor) -> Tensor:
    """Append a row for the last token, which predicts nothing."""
    return torch.cat([routes, routes.new_full((1, *routes.shape[1:]), -1)])


def _assemble(
    ids: Tensor,
    columns: Mapping[str, Tensor],
    lengths: tuple[int, ...],
    sequences: tuple[int, ...],
    multiple: int,
    names: tuple[str, ...] = (),
    routes: Tensor | None = None,
    images: RowImages | None = None,
) -> PackedBatch:
    used = sum(lengths)
    total = max(round_up(used, multiple), multiple)
    device, padding = ids.device, [total - used] if total > used else []
    segments, _ = _numbered([*lengths, *padding])
    sequence, starts = _numbered([*sequences, *padding])
    positions = torch.arange(total) - starts[sequence]

    def padded(row: Tensor) -> Tensor:
        return torch.cat([row, row.new_zeros(total - used)])[None]

    return PackedBatch(
        tokens=padded(ids),
        positions=positions.to(device),
        cu_seqlens=starts.to(torch.int32).to(device),
        segments=segments.to(device),
        columns={name: padded(column) for name, column in columns.items()},
        lengths=lengths,
        sequences=sequences,
        names=names,
        routes=None if routes is None else torch.cat([routes, routes.new_full((total - used, *routes.shape[1:]), -1)]),
        images=None if images is None else images.padded(total - used),
    )


def _numbered(sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return two tensors: for each of T tokens the number of its part, int64 [T], and the start of each part followed
    by T."""
    tokens = torch.tensor(sizes, dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(len(sizes)), tokens), torch.cat([tokens.new_zeros(1), tokens.cumsum(0)])
