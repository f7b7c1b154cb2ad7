"""Small pictures for tests, and transformers as the reference for samples that have some."""

import io
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from grpo_mcore.families import read_hf_config, shape_of
from grpo_mcore.families.images import image_settings, pixels
from grpo_mcore.rollout.images import ImageReader
from grpo_mcore.rollout.trajectory import Trajectory


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def noise(width: int, height: int, seed: int = 0) -> bytes:
    return png(Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)))


def reader_of(folder: Path) -> ImageReader:
    vision = shape_of(read_hf_config(folder)).vision
    assert vision is not None
    return ImageReader(vision, image_settings(folder, vision))


def load_vision_reference(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def vision_logits(reference: Any, sample: Trajectory, images: Mapping[str, bytes], reader: ImageReader) -> Tensor:
    """float32 [length, vocabulary]. An image's token elsewhere than in an image counts as the word that it is."""
    ids, spans = sample.token_ids(), sample.images()
    of_image = torch.zeros(len(ids), dtype=torch.bool)
    for span in spans:
        of_image[span.offset : span.offset + span.length] = True
    embedded, more = reference.get_input_embeddings()(ids), dict[str, Any]()
    grids = torch.tensor([span.grid for span in spans])
    if spans:
        made = reference.model.visual(
            torch.cat([pixels(images[span.digest], reader.settings)[0] for span in spans]), grid_thw=grids
        )
        embedded[of_image] = made.pooler_output
        if getattr(made, "deepstack_features", None) is not None:
            more = {"visual_pos_masks": of_image[None], "deepstack_visual_embeds": made.deepstack_features}
    words = ids.where(of_image | (ids != reader.vision.image_token), 11)
    positions, _ = reference.model.get_rope_index(
        words[None], mm_token_type_ids=of_image[None].int(), image_grid_thw=grids if spans else None
    )
    out = reference.model.language_model(inputs_embeds=embedded[None], position_ids=positions, **more)
    return reference.lm_head(out.last_hidden_state)[0].float()


def worst_vision_difference(reference: Any, sample: Trajectory, images: Mapping[str, bytes], reader: Any) -> float:
    """Largest difference of the generated tokens' log-probs, over all turns."""
    ids, mask = sample.token_ids(), sample.loss_mask()
    scores = vision_logits(reference, sample, images, reader).log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    return (scores - sample.logprobs()[1:])[mask[1:]].abs().max().item()
