"""Images: grids, pixels and refusals against transformers' processor, towers against transformers' modules."""

import io
import json
import random
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from grpo_mcore.families import FamilyError, check_images, parameter_count, read_hf_config, shape_of
from grpo_mcore.families.images import (
    ImageSettings,
    image_digest,
    image_grid,
    image_settings,
    image_tokens,
    pixels,
    read_image,
)
from grpo_mcore.families.known import known_configs
from grpo_mcore.parallel.weights.tower import FrozenTower
from grpo_mcore.tools.demo.tiny_models import make_tiny_model

SETTINGS = ImageSettings(16, 2, 2, 65536, 16777216, (0.5,) * 3, (0.5,) * 3, 1 / 255, 3)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int, height: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), random.Random(width).randbytes(3 * width * height))


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp(request.param), words=True)


def test_a_vision_shape_is_that_of_its_checkpoint(folder: Path) -> None:
    vision = shape_of(read_hf_config(folder)).vision
    assert vision is not None and (vision.start_token, vision.image_token, vision.end_token) == (4, 6, 5)
    tensors = load_file(folder / "model.safetensors")
    assert vision.parameters == sum(t.numel() for name, t in tensors.items() if name.startswith(f"{vision.root}."))
    assert vision.deepstack == (2 if "deepstack_merger_list" in " ".join(tensors) else 0)
    settings = image_settings(folder, vision)
    patches, grid = pixels(encoded(noise(90, 50)), settings)
    assert len(patches) == image_tokens(grid, 1) and patches.size(1) == 6 * vision.patch_size**2
    assert grid == image_grid(90, 50, settings)


def test_a_flat_config_is_the_nested_one(tmp_path: Path) -> None:
    """Qwen2.5-VL is published with the text's keys at the top."""
    config = read_hf_config(make_tiny_model("qwen2_5_vl", tmp_path))
    text = config.pop("text_config")
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}, "rope_parameters": None}
    assert shape_of(text | config | rope) == shape_of(config | {"text_config": text})


def test_grids_are_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    draw = random.Random(0)
    for _ in range(2000):
        width, height = draw.randint(1, 3000), draw.randint(1, 3000)
        least = draw.choice([1, 3136, 65536])
        settings = ImageSettings(14, 2, 2, least, draw.choice([least, 200704, 1 << 22]), (), (), 1.0, 3)
        try:
            sides = smart_resize(height, width, 28, settings.least_pixels, settings.most_pixels)
        except ValueError:
            with pytest.raises(ValueError, match="more than 200 times the other"):
                image_grid(width, height, settings)
            continue
        assert image_grid(width, height, settings) == (1, sides[0] // 14, sides[1] // 14)


def test_an_image_that_is_too_thin_once_resized_is_refused() -> None:
    """vLLM's processor gets it in the size of its grid, and would refuse it in the middle of a run."""
    settings = ImageSettings(14, 2, 2, 3136, 1003520, (), (), 1.0, 3)
    with pytest.raises(ValueError, match="an image of 5864 x 30 becomes 5852 x 28, over 200 to 1"):
        image_grid(5864, 30, settings)
    assert image_grid(5600, 28, settings) == (1, 2, 400)


def test_settings_of_both_generations_of_files(tmp_path: Path) -> None:
    vision = shape_of(read_hf_config(make_tiny_model("qwen3_vl", tmp_path))).vision
    assert vision is not None
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    first = image_settings(tmp_path, vision)
    old = {key: value for key, value in written.items() if key != "size"} | {"min_pixels": 1024, "max_pixels": 16384}
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": old}))
    assert image_settings(tmp_path, vision) == first and image_settings(tmp_path, vision).digest == first.digest
    for change, message in (
        ({"patch_size": 14}, "patch_size 14 is not the tower's, 16"),
        ({"image_processor_type": "SiglipImageProcessor"}, "SiglipImageProcessor is not supported"),
        ({"do_resize": False}, "do_resize false is not supported"),
        ({"min_pixels": 20000}, "size {'shortest_edge': 20000, 'longest_edge': 16384}"),
    ):
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": old | change}))
        with pytest.raises(FamilyError, match=message):
            image_settings(tmp_path, vision)
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(FamilyError, match="has no image processor that can be read"):
        image_settings(tmp_path, vision)


def test_a_digest_tells_content_and_settings() -> None:
    small = ImageSettings(16, 2, 2, 1024, 4096, (0.5,) * 3, (0.5,) * 3, 1 / 255, 3)
    names = {image_digest(data, settings) for data in (b"a", b"b") for settings in (SETTINGS, small)}
    assert len(names) == 4 and image_digest(b"a", SETTINGS) in names


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "an image has no bytes"),
        (b"<html>no image</html>", "is no PNG, JPEG, WEBP; it begins with b'<html>no'"),
        (encoded(Image.new("P", (40, 40)), "GIF"), "is no PNG, JPEG, WEBP; it begins with b'GIF8"),
        (encoded(Image.new("CMYK", (40, 40)), "JPEG"), "pixels of kind CMYK"),
        (encoded(Image.new("I;16", (40, 40))), "pixels of kind I;16"),
        (encoded(noise(40, 40))[:900], "cannot be decoded"),
        (encoded(noise(40, 40), "JPEG")[:900], "cannot be decoded"),
        (encoded(Image.new("1", (9000, 9000))), "an image of 9000 x 9000 has more than"),
        (encoded(Image.new("1", (20000, 20000))), "has more than 67108864 pixels"),
        (encoded(noise(8, 8), "WEBP", save_all=True, append_images=[noise(9, 8).crop((0, 0, 8, 8))]), "has 2 frames"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused_by_one_message(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_image(data)


def test_kinds_of_pixels_become_rgb_on_white_and_upright() -> None:
    clear = Image.new("RGBA", (2, 1), (9, 9, 9, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    assert list(read_image(encoded(clear)).get_flattened_data()) == [(255, 255, 255), (10, 20, 30)]
    for mode in ("1", "L", "LA", "P", "RGB"):
        assert read_image(encoded(Image.new(mode, (3, 4)))).mode == "RGB"
    turned = Image.Exif()
    turned[0x0112] = 6
    assert read_image(encoded(noise(30, 20), "JPEG", exif=turned)).size == (20, 30)


def test_pixels_are_those_of_transformers_processor(folder: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    vision = shape_of(read_hf_config(folder)).vision
    assert vision is not None
    image = noise(75, 110)
    expected = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=[image], return_tensors="pt")
    patches, grid = pixels(encoded(image), image_settings(folder, vision))
    assert torch.equal(patches, expected["pixel_values"]) and list(grid) == expected["image_grid_thw"][0].tolist()


def test_a_tower_in_bfloat16_is_transformers(folder: Path) -> None:
    """Its weights are rounded, its rotary frequencies are not."""
    from transformers import AutoModelForImageTextToText

    vision = shape_of(read_hf_config(folder)).vision
    assert vision is not None
    own = FrozenTower(folder, vision, torch.bfloat16, torch.device("cpu")).module
    expected = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).model.visual
    assert {buffer.dtype for buffer in own.buffers()} == {torch.float32}
    ours, theirs = ({**dict(tower.named_parameters()), **dict(tower.named_buffers())} for tower in (own, expected))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("name", "parameters"),  # the totals of the published files
    [
        ("Qwen2.5-VL-3B", 3_754_622_976),
        ("Qwen2.5-VL-7B", 8_292_166_656),
        ("Qwen3-VL-4B", 4_437_815_808),
        ("Qwen3-VL-8B", 8_767_123_696),
        ("Qwen3-VL-30B-A3B", 31_070_754_032),
    ],
)
def test_known_models_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    shape = shape_of(known_configs()[name])
    assert shape.vision is not None and parameter_count(shape) + shape.vision.parameters == parameters


def test_images_of_models_without_a_known_tower_are_refused_by_name() -> None:
    check_images(shape_of(known_configs()["Qwen3-VL-4B"]))
    for name, reason in (("gemma-3-12b", "attend to each other both ways"), ("Qwen3-8B", "has no tower")):
        with pytest.raises(FamilyError, match=f"images for a .* model are not supported: .*{reason}"):
            check_images(shape_of(known_configs()[name]))
