"""Images of vision models: the tower of a model, how many tokens an image takes, and its pixels as the tower gets them.

Policy and engine must see the same pixels: whoever needs an image's content takes it from `read_image` or `pixels`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mcore.families.dense import rope_settings
from grpo_mcore.families.spec import FamilyError, ModelShape, VisionShape

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Grid = tuple[int, int, int]
"""Patches of an image: times, rows, columns."""

FORMATS = ("PNG", "JPEG", "WEBP")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
"""Kinds of pixels, in Pillow's names, that become RGB without a loss that somebody would have to choose."""
MOST_PIXELS = 1 << 26
"""Pixels of an image beyond which it is refused before it is decoded."""
_ORIENTATION = 0x0112  # EXIF's number of the tag
MOST_ASPECT = 200
"""Largest ratio of an image's sides that the processor takes."""


QWEN3_VL_DEFAULTS = {"rope_theta": 500000.0}
"""Values of transformers that text_config may leave out."""


def with_vision(
    shape: ModelShape, config: Mapping[str, Any], tower: str, *, root: str, text_root: str, interleaved: bool
) -> ModelShape:
    """Return the shape of a vision model's text part, with its tower.

    `config`: of the whole model. `tower`: transformers' class. `root`, `text_root`: first parts of the tensors' names
    in the checkpoint. `interleaved`: the rotary sections alternate."""
    model = replace(shape, root=text_root, engine_root="language_model.model", carried=(*shape.carried, f"{root}."))
    rope = rope_settings(config.get("text_config", config))
    if "vision_config" not in config or not (sections := tuple(rope.get("mrope_section") or ())):
        return model  # enough for text
    vision = config["vision_config"]
    rotated = int(shape.head_dim * shape.rotary_fraction) // 2
    if len(sections) != 3 or sum(sections) != rotated or interleaved != bool(rope.get("mrope_interleaved")):
        raise FamilyError(
            f"config.json: RoPE of a {config['model_type']} model needs mrope_section, three numbers whose sum is "
            f"{rotated}, {'and' if interleaved else 'without'} mrope_interleaved; it has {rope}"
        )
    if vision["out_hidden_size"] != shape.hidden_size:
        raise FamilyError(
            f"config.json: vision_config.out_hidden_size {vision['out_hidden_size']} is not the text's hidden_size "
            f"{shape.hidden_size}"
        )
    shape_of_tower = VisionShape(
        tower=tower,
        patch_size=vision["patch_size"],
        merge_size=vision["spatial_merge_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        rotary_sections=sections,
        rotary_interleaved=interleaved,
        deepstack=len(vision.get("deepstack_visual_indexes") or ()),
        image_token=config["image_token_id"],
        start_token=config["vision_start_token_id"],
        end_token=config["vision_end_token_id"],
        root=root,
        engine_root="visual",
        parameters=_tower_parameters(vision),
    )
    return replace(model, vision=shape_of_tower)


def _tower_parameters(vision: Mapping[str, Any]) -> int:
    """Return the number of parameters of a Qwen tower: Qwen2.5's blocks have gated networks and norms without biases,
    later ones learned positions and, with deepstack, a merger for each of its levels."""
    h, inner = vision["hidden_size"], vision["intermediate_size"]
    wide = h * vision["spatial_merge_size"] ** 2
    patches = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2 * h
    attention, merger = 4 * h * h + 4 * h, wide * wide + wide + (wide + 1) * vision["out_hidden_size"]
    if "num_position_embeddings" not in vision:
        block = attention + 3 * h * inner + 2 * inner + 3 * h
        return patches + vision["depth"] * block + merger + h
    block = attention + 2 * h * inner + inner + 5 * h
    levels = len(vision.get("deepstack_visual_indexes") or ())
    embeddings = h + vision["num_position_embeddings"] * h
    return patches + embeddings + vision["depth"] * block + merger + 2 * h + levels * (merger + 2 * wide)


@dataclass(frozen=True)
class ImageSettings:
    """How the processor of a model makes patches of an image. Pixels are resized to sides that are multiples of
    patch_size * merge_size, and to a number of pixels between `least_pixels` and `most_pixels`."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    least_pixels: int
    most_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float
    resample: int  # Pillow's number of the filter

    @cached_property
    def digest(self) -> str:
        """Digest of all settings: two processors with one digest make the same pixels."""
        return blake2b(repr(astuple(self)).encode(), digest_size=8).hexdigest()


_CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")


def image_settings(folder: str | Path, vision: VisionShape) -> ImageSettings:
    """Read the settings of the image processor in a model's folder. Raises FamilyError if there is none, if it is not
    the one of these models, or does not fit the tower."""
    path = Path(folder) / "preprocessor_config.json"
    nested = Path(folder) / "processor_config.json"  # transformers 5 writes this one
    try:
        if path.is_file():
            read = json.loads(path.read_text(encoding="utf-8"))
        else:
            read = json.loads(nested.read_text(encoding="utf-8"))["image_processor"]
    except (OSError, ValueError, KeyError) as error:
        raise FamilyError(
            f"{folder} has no image processor that can be read ({error!r}); copy preprocessor_config.json of the model "
            "there"
        ) from error
    return settings_of(read, vision, str(path))


def settings_of(read: Mapping[str, Any], vision: VisionShape, source: str) -> ImageSettings:
    """Return the settings that a preprocessor_config.json, or an image processor's `to_dict`, holds. `source`: where
    they come from, for messages. Raises FamilyError as `image_settings` does."""
    if (kind := read.get("image_processor_type", PROCESSORS[0])) not in PROCESSORS:
        raise FamilyError(f"{source}: image_processor_type {kind} is not supported; only {PROCESSORS[0]}")
    size, pixels = read.get("size") or {}, {}
    for key, old_key, default in (
        ("shortest_edge", "min_pixels", 56 * 56),
        ("longest_edge", "max_pixels", 28 * 28 * 1280),
    ):
        pixels[key] = read.get(old_key) or size.get(key) or default
    off = [key for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb") if read.get(key) is False]
    if off or pixels["shortest_edge"] > pixels["longest_edge"]:
        raise FamilyError(f"{source}: {off[0]} false is not supported" if off else f"{source}: size {pixels}")
    settings = ImageSettings(
        patch_size=read.get("patch_size", 14),
        merge_size=read.get("merge_size", 2),
        temporal_patch_size=read.get("temporal_patch_size", 2),
        least_pixels=pixels["shortest_edge"],
        most_pixels=pixels["longest_edge"],
        mean=tuple(read.get("image_mean") or _CLIP["mean"]),
        std=tuple(read.get("image_std") or _CLIP["std"]),
        rescale_factor=read.get("rescale_factor") or 1 / 255,
        resample=read.get("resample", 3),
    )
    for key in ("patch_size", "merge_size", "temporal_patch_size"):
        if (value := getattr(settings, key)) != getattr(vision, key):
            raise FamilyError(f"{source}: {key} {value} is not the tower's, {getattr(vision, key)} (config.json)")
    return settings


def image_grid(width: int, height: int, settings: ImageSettings) -> Grid:
    """Return the patches that the processor makes of an image of this size. Raises ValueError if one side is more than
    MOST_ASPECT times the other, before or after the processor resizes it."""
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise ValueError(f"one side of an image of {width} x {height} is more than {MOST_ASPECT} times the other")
    factor = settings.patch_size * settings.merge_size

    sides = [round(side / factor) * factor for side in (height, width)]
    if math.prod(sides) > settings.most_pixels:
        scale = math.sqrt(height * width / settings.most_pixels)
        sides = [max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)]
    elif math.prod(sides) < settings.least_pixels:
        scale = math.sqrt(settings.least_pixels / (height * width))
        sides = [math.ceil(side * scale / factor) * factor for side in (height, width)]
    if max(sides) > MOST_ASPECT * min(sides):  # which the engine's processor is given
        raise ValueError(f"an image of {width} x {height} becomes {sides[1]} x {sides[0]}, over {MOST_ASPECT} to 1")
    return 1, sides[0] // settings.patch_size, sides[1] // settings.patch_size


def image_tokens(grid: Grid, merge_size: int) -> int:
    return math.prod(grid) // merge_size**2


def image_digest(data: bytes, settings: ImageSettings) -> str:
    """Return the name of an image as the tower sees it: a digest of its bytes and of the processor's settings."""
    return blake2b(data, digest_size=16, key=settings.digest.encode()).hexdigest()


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Open an image without decoding it. Raises ValueError as `read_image`, also for what is raised inside."""
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise ValueError("an image has no bytes")
    try:
        image: Any = Image.open(BytesIO(data), formats=FORMATS)
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"an image of {image.width} x {image.height} has more than {MOST_PIXELS} pixels")
        if image.mode not in MODES:
            raise ValueError(f"an image has pixels of kind {image.mode} (Pillow's name); convert it to 8-bit RGB")
        if getattr(image, "n_frames", 1) > 1:
            raise ValueError(f"an image has {image.n_frames} frames; give one of them")
        yield image
    except Image.DecompressionBombError as error:
        raise ValueError(f"an image has more than {MOST_PIXELS} pixels") from error
    except UnidentifiedImageError as error:
        raise ValueError(f"an image is no {', '.join(FORMATS)}; it begins with {data[:8]!r}") from error
    except (OSError, SyntaxError, EOFError, MemoryError) as error:
        raise ValueError(f"an image cannot be decoded: {error}") from error


def image_size(data: bytes) -> tuple[int, int]:
    """Return width and height of an image as `read_image` gives it, of its head alone, which takes a fraction of a
    millisecond. Raises ValueError as that does, but for damage behind the head."""
    with _opened(data) as image:
        in_head = image.format != "PNG" or "exif" in image.info  # else Pillow would decode it to look behind the pixels
        turned = in_head and image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
        return (image.height, image.width) if turned else image.size


def read_image(data: bytes) -> Image:
    """Decode an image: upright (EXIF), RGB, what is transparent on white. Raises ValueError, a sentence that says what
    is wrong, for bytes that are not wholly a PNG, JPEG or WebP image, for pixels of other kinds (CMYK, 16 bit), and for
    more than MOST_PIXELS pixels."""
    from PIL import Image, ImageOps

    with _opened(data) as opened:
        image = ImageOps.exif_transpose(opened)
        if "A" in image.getbands() or "transparency" in image.info:
            white = Image.new("RGBA", image.size, "white")
            return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
        return image.convert("RGB")


def pixels(data: bytes, settings: ImageSettings) -> tuple[Tensor, Grid]:
    """Return the patches of an image as the tower gets them, float32 [patches, values of a patch], and its grid. Raises
    ValueError as `read_image` and `image_grid` do."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = read_image(data)
    grid = image_grid(*image.size, settings)
    processor = Qwen2VLImageProcessorPil(
        patch_size=settings.patch_size,
        merge_size=settings.merge_size,
        temporal_patch_size=settings.temporal_patch_size,
        size={"shortest_edge": settings.least_pixels, "longest_edge": settings.most_pixels},
        image_mean=settings.mean,
        image_std=settings.std,
        rescale_factor=settings.rescale_factor,
        resample=settings.resample,
    )
    made = processor(images=[image], return_tensors="pt")
    if tuple(made["image_grid_thw"][0].tolist()) != grid:
        raise ValueError(f"an image of {image.size} makes {made['image_grid_thw'].tolist()} patches, expected {grid}")
    return made["pixel_values"].float(), grid
