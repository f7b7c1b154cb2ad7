"""Images in the comparison with transformers: always the same noise, as files, in places that a workload names."""

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.families import VisionShape
from grpo_mcore.families.images import ImageSettings, image_digest, pixels
from grpo_mcore.rollout.trajectory import ImageSpan


@dataclass(frozen=True)
class ParityImage:
    """An image of rows x columns tokens from `offset` of a sequence, between the marks of its start and end. `seed`:
    images with one seed and size have one content."""

    sequence: int
    offset: int
    rows: int
    columns: int
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    def file(self, settings: ImageSettings) -> bytes:
        """Return the image as a PNG file, of a size that the processor leaves as it is."""
        from PIL import Image

        side = settings.patch_size * settings.merge_size
        size = self.columns * side, self.rows * side
        noise = random.Random(f"{self.seed} {size}").randbytes(3 * size[0] * size[1])
        Image.frombytes("RGB", size, noise).save(file := io.BytesIO(), "PNG")
        return file.getvalue()

    def span(self, settings: ImageSettings) -> ImageSpan:
        """Return where the image stands in its sequence."""
        grid = (1, self.rows * settings.merge_size, self.columns * settings.merge_size)
        return ImageSpan(self.offset, self.tokens, image_digest(self.file(settings), settings), grid)


STANDARD_IMAGES = (
    ParityImage(1, 2, 2, 3),
    ParityImage(3, 3, 2, 2, seed=1),
    ParityImage(3, 15, 1, 3, seed=2),
    ParityImage(6, 4, 3, 2, seed=3),
)
"""Images of each standard sequence: none, one or two; one bin has sequences of all three kinds."""


def put_in(sequences: Sequence[Tensor], images: Sequence[ParityImage], vision: VisionShape) -> None:
    """Write the tokens of images into their sequences, and take those that stand for images out of the rest of them: in
    a sequence with images transformers takes each for one. In others they stay."""
    for number in {image.sequence for image in images}:
        ids = sequences[number]
        ids[(ids >= vision.start_token) & (ids <= vision.image_token + 1)] = 0  # videos' id comes last
    for image in images:
        ids, end = sequences[image.sequence], image.offset + image.tokens
        ids[image.offset - 1], ids[image.offset : end], ids[end] = (
            vision.start_token,
            vision.image_token,
            vision.end_token,
        )


def network_inputs(tokens: Tensor, images: Sequence[ParityImage], settings: ImageSettings | None) -> dict[str, Any]:
    """Return what transformers' network takes of a sequence and its images."""
    if not images or settings is None:
        return {"input_ids": tokens[None]}
    seen = [pixels(image.file(settings), settings) for image in images]
    kinds = torch.zeros_like(tokens)
    for image in images:
        kinds[image.offset : image.offset + image.tokens] = 1
    return {
        "input_ids": tokens[None],
        "pixel_values": torch.cat([patches for patches, _ in seen]),
        "image_grid_thw": torch.tensor([grid for _, grid in seen]),
        "mm_token_type_ids": kinds[None],
    }
