"""Where the network of a vision model takes the features of its tower: at the embedding, and after the first layers
if there is a deepstack."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.transformer import TransformerLayer
from torch import Tensor

from grpo_mcore.parallel.layers.packed_row import ImagesHere, PackedRow


def features_of(images: Iterable[tuple[str, int]], known: Mapping[str, Tensor]) -> Tensor:
    """Return the features of a row's images side by side. Raises KeyError for an image that the tower has not seen."""
    return torch.cat([known[digest] for digest, _ in images])


def spliced(embedded: Tensor, images: ImagesHere) -> Tensor:
    """Return embeddings [t, 1, H] with the tower's in place of those of image tokens."""
    seen = _by_token(images, 0)
    return torch.where((images.feature >= 0)[:, None, None], seen.to(embedded.dtype), embedded)


def _by_token(images: ImagesHere, level: int) -> Tensor:
    """Return a level's feature of each token, [t, 1, H]; any one for text."""
    assert images.features is not None
    return images.features[:, level].index_select(0, images.feature.clamp(min=0))[:, None]


class DeepstackLayer(TransformerLayer):
    """A layer to whose output the tower's features of a further level are added, at image tokens.

    It takes them from the row that it is called with: a recomputed pass comes after those of other micro-batches."""

    def __init__(self, *args: Any, level: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.level = level

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, context = super().forward(*args, **kwargs)
        row: PackedRow = kwargs["packed_seq_params"]
        if row.images is not None:
            seen = _by_token(row.images, self.level).to(hidden.dtype)
            hidden = hidden + seen * (row.images.feature >= 0)[:, None, None]
        return hidden, context
