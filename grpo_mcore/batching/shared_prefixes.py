"""Shared prefixes: which tokens of a row have to be computed when samples begin with the same tokens.

A token's hidden state depends on the tokens before it alone. Where a sample begins like an earlier one of its row, it
uses that one's hidden states, keys and values, and only the rest of it is computed. Samples share whole blocks of
tokens; samples of a group share their prompt this way, branches of a conversation all turns before they part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mcore.batching.packing import round_up
from grpo_mcore.batching.prefix_trees import BLOCK_TOKENS


@dataclass(frozen=True)
class SharedPrefixes:
    """The U computed tokens of a row of T tokens: what is new of each sample, side by side, and padding at the end."""

    source: Tensor
    """int64 [U]: row position that each computed token is taken from. If several samples share it, one that continues;
    0 for padding."""
    places: Tensor
    """int64 [T]: place of each token of the row among the computed ones; 0 for the row's padding."""
    new_tokens: tuple[int, ...]
    """Tokens of each sample after the prefix that it shares with an earlier one, on the host."""

    @property
    def padding(self) -> int:
        """Tokens of padding at the end of the computed tokens."""
        return len(self.source) - sum(self.new_tokens)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Computed tokens of each sample, and of the padding if there is any."""
        return (*self.new_tokens, self.padding) if self.padding else self.new_tokens

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [n + 1], or [n + 2] with padding: start of each sample's new tokens among the computed ones, and U."""
        return torch.tensor([0, *self.lengths]).cumsum(0).to(self.places.device, torch.int32)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SharedPrefixes:
        """Return the same on a device."""
        source, places = (part.to(device, non_blocking=non_blocking) for part in (self.source, self.places))
        return SharedPrefixes(source, places, self.new_tokens)


def find_shared_prefixes(
    tokens: Tensor, lengths: Sequence[int], multiple: int = 1, block: int = BLOCK_TOKENS
) -> SharedPrefixes | None:
    """Compare the samples of a row, int64 [T], block by block. Return None if no two share one.

    lengths: tokens of each sample. multiple: the computed tokens are padded to a multiple of it.
    """
    first_places: dict[tuple[int, tuple[int, ...]], int] = {}  # (its place, tokens) of a block; -1 before the first
    in_block = torch.arange(block)
    places, source, new_tokens = [], [], []
    computed = start = 0
    for length in lengths:
        ids = tokens[start : start + length].tolist()
        shared: list[int] = []
        before, position = -1, 0
        while position + block <= length:
            earlier = first_places.get((before, tuple(ids[position : position + block])))
            if earlier is None:
                break
            shared.append(earlier)
            before, position = earlier, position + block
        new, new_start = length - position, computed - position
        for first in range(position, length - block + 1, block):
            first_places[before, tuple(ids[first : first + block])] = new_start + first
            before = new_start + first
        places += [(torch.tensor(shared, dtype=torch.int64)[:, None] + in_block).flatten()]
        places += [torch.arange(computed, computed + new)]
        source.append(torch.arange(start + position, start + length))
        new_tokens.append(new)
        computed, start = computed + new, start + length
    if computed == start:
        return None
    places_of_tokens, computed_from = torch.cat(places), torch.cat(source)
    goes_on = torch.ones(start, dtype=torch.bool)
    goes_on[torch.tensor(lengths).cumsum(0) - 1] = False  # a sample's last token has no routes to replay
    computed_from.scatter_reduce_(0, places_of_tokens[goes_on], torch.arange(start)[goes_on], "amax")
    padding = torch.zeros(round_up(computed, multiple) - computed, dtype=torch.int64)
    rest = torch.zeros(len(tokens) - start, dtype=torch.int64)
    return SharedPrefixes(
        torch.cat([computed_from, padding]).to(tokens.device),
        torch.cat([places_of_tokens, rest]).to(tokens.device),
        tuple(new_tokens),
    )
