"""The images of a row: where each token stands on three axes, and which feature of the tower each image token takes.

Image tokens are found by the spans that travel with a sample, never by their id, which a policy may sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor


class ImageTokens(Protocol):
    """The tokens of an image in a sample (`rollout.trajectory.ImageSpan`)."""

    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def grid(self) -> tuple[int, int, int]: ...


@dataclass(frozen=True)
class RowImages:
    """The images of a row of T tokens."""

    axes: Tensor
    """int64 [3, T]: position of each token by time, row and column. Those of text are equal."""
    feature: Tensor
    """int64 [T]: place of each token's feature among those of `images` side by side; -1 for text and padding."""
    images: tuple[tuple[str, int], ...]
    """Digest and number of tokens of each image, once each, however many samples have it."""

    def content(self, tokens: Tensor) -> Tensor:
        """Return `tokens`, int64 [T], with a negative number for each token of an image: equal where samples show the
        same part of the same image."""
        return torch.where(self.feature >= 0, -1 - self.feature, tokens)

    def padded(self, padding: int) -> RowImages:
        """Return the images of the row with `padding` more tokens, a sequence of their own."""
        positions = torch.arange(padding).expand(3, -1)
        feature = torch.cat([self.feature, self.feature.new_full((padding,), -1)])
        return replace(self, axes=torch.cat([self.axes, positions], 1), feature=feature)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> RowImages:
        """Return the same on a device."""
        axes, feature = (part.to(device, non_blocking=non_blocking) for part in (self.axes, self.feature))
        return replace(self, axes=axes, feature=feature)


def token_axes(length: int, images: Sequence[ImageTokens], merge_size: int) -> Tensor:
    """Return int64 [3, length]: the positions of a sequence's tokens by time, row and column.

    Text counts on, equally on all axes. An image's tokens count from there by their place in its grid, of which
    `merge_size` patches a side are one token; the text after it goes on behind its longer side. Raises ValueError for
    an image with more or fewer tokens than its grid."""
    parts, start, position = [torch.empty(3, 0, dtype=torch.int64)], 0, 0
    for image in images:
        times, rows, columns = image.grid[0], image.grid[1] // merge_size, image.grid[2] // merge_size
        if image.length != times * rows * columns:
            raise ValueError(f"an image of grid {image.grid} has {image.length} tokens, not {times * rows * columns}")
        before = image.offset - start
        parts.append((position + torch.arange(before)).expand(3, -1))
        position += before
        parts.append(position + torch.cartesian_prod(*map(torch.arange, (times, rows, columns))).T)
        start, position = image.offset + image.length, position + max(rows, columns)
    parts.append((position + torch.arange(length - start)).expand(3, -1))
    return torch.cat(parts, 1)


def row_images(sequences: Sequence[int], images: Sequence[Sequence[ImageTokens]], merge_size: int) -> RowImages | None:
    """Return the images of sequences side by side; None if there is none. `sequences`: tokens of each. `images`: those
    of each, with offsets from its start."""
    if not any(images):
        return None
    sizes = {image.digest: image.length for of_sequence in images for image in of_sequence}
    firsts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    feature, start = torch.full((sum(sequences),), -1), 0
    for length, of_sequence in zip(sequences, images, strict=True):
        for image in of_sequence:
            begin, first = start + image.offset, firsts[image.digest]
            feature[begin : begin + image.length] = torch.arange(first, first + image.length)
        start += length
    axes = [token_axes(length, few, merge_size) for length, few in zip(sequences, images, strict=True)]
    return RowImages(torch.cat(axes, 1), feature, tuple(sizes.items()))


def join_images(rows: Sequence[tuple[Tensor, RowImages | None, int]]) -> RowImages | None:
    """Put the images of several rows, given by (positions, images, tokens without padding), into one row."""
    if not any(images for _, images, _ in rows):
        return None
    sizes = dict(image for _, images, _ in rows if images for image in images.images)
    firsts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    axes, features = [], []
    for positions, images, used in rows:
        axes.append((positions.expand(3, -1) if images is None else images.axes)[:, :used])
        if images is None:
            features.append(torch.full((used,), -1))
            continue
        moved = torch.cat([firsts[digest] + torch.arange(size) for digest, size in images.images])
        feature = images.feature[:used]
        features.append(torch.where(feature >= 0, moved[feature.clamp(min=0)], -1))
    return RowImages(torch.cat(axes, 1), torch.cat(features), tuple(sizes.items()))
