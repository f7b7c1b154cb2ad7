"""Images in messages: every form that a row or a request may have, their places, and the runs of their tokens."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from grpo_mcore.families.images import ImageSettings, image_digest
from grpo_mcore.families.spec import VisionShape
from grpo_mcore.rollout.images import ImageReader, given_image, inline_image, take_images, with_images
from grpo_mcore.rollout.messages import MessageError, read_messages
from tests.pictures import noise

PICTURE, OTHER = noise(64, 96, 1), noise(64, 64, 2)
URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
MARK = 6
VISION = VisionShape("", 16, 2, 2, (6, 5, 5), True, 0, MARK, 4, 5, "visual", "visual", 0)
READER = ImageReader(VISION, ImageSettings(16, 2, 2, 1024, 16384, (0.5,) * 3, (0.5,) * 3, 1 / 255, 3))


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": PICTURE},
        {"type": "image", "image": URL},
        {"type": "image", "image": base64.b64encode(PICTURE).decode()},
        {"type": "image", "image": {"bytes": PICTURE, "path": "a.png"}},  # a table's
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},  # Responses
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}},
        {"image": bytearray(PICTURE)},  # Qwen's own
        {"type": "image", "base64": base64.encodebytes(PICTURE).decode()},  # transformers', in lines
    ],
)
def test_every_form_of_an_image_is_its_bytes(part: dict[str, Any]) -> None:
    (read,) = read_messages(user({"type": "text", "text": "what?"}, part), "messages", given_image)
    assert read["content"] == [{"type": "text", "text": "what?"}, {"type": "image", "image": PICTURE}]
    assert read_messages([read], "messages", given_image) == [read], "the normal form stays as it is"
    with pytest.raises(MessageError, match="which is not text"):
        read_messages(user(part), "messages")


def test_files_and_images_of_pillow(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    assert given_image(str(tmp_path / "a.png")) == given_image(f"file://{tmp_path}/a.png") == PICTURE
    assert (
        Image.open(io.BytesIO(given_image(Image.open(io.BytesIO(PICTURE))))).tobytes()
        == Image.open(io.BytesIO(PICTURE)).tobytes()
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("https://example.org/a.png", "images are not fetched"),
        ("no/such/file.png", "no file no/such/file.png for an image in /"),
        ("%" * 80, "text that is no base64"),
        ({"width": 3}, r"must have bytes, a path or a url; it has \['width'\]"),
        (7, "got int"),
    ],
)
def test_what_is_no_image_in_a_row_is_refused(value: Any, message: str) -> None:
    with pytest.raises(MessageError, match=f"message 0 of 'messages': .*{message}"):
        read_messages(user({"type": "image", "image": value}), "messages", given_image)


def test_a_server_reads_neither_files_nor_addresses(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PICTURE)
    for value in (str(tmp_path / "secret.png"), f"file://{tmp_path}/secret.png", "http://x/a.png", {"url": "/a"}, 3):
        with pytest.raises(ValueError, match="must be a data URL"):
            inline_image(value)
    assert inline_image({"url": URL}) == PICTURE


def test_images_go_to_their_places() -> None:
    system, question = (
        {"role": "system", "content": "<image> is a mark"},
        {"role": "user", "content": "a<image>b<image>"},
    )
    filled = with_images([system, question], [PICTURE, OTHER], "images")
    assert filled[0] == system
    assert filled[1]["content"] == [
        {"type": "text", "text": "a"}, {"type": "image", "image": PICTURE},
        {"type": "text", "text": "b"}, {"type": "image", "image": OTHER},
    ]  # fmt: skip
    empty = user({"type": "image"}, {"type": "text", "text": "?"})
    assert with_images(empty, [OTHER], "images")[0]["content"][0] == {"type": "image", "image": OTHER}
    in_front = with_images([{"role": "user", "content": "what?"}], [PICTURE], "image")
    assert [part["type"] for part in in_front[0]["content"]] == ["image", "text"]
    with pytest.raises(ValueError, match="'images' has 1 images, and the messages have places for 2"):
        with_images([question], [PICTURE], "images")
    with pytest.raises(ValueError, match="there is no question"):
        with_images([{"role": "system", "content": "x"}], [PICTURE], "images")


def test_images_are_taken_out_for_the_template() -> None:
    shown, images = take_images(user({"type": "image", "image": PICTURE}, {"type": "text", "text": "?"}))
    assert images == [PICTURE] and shown[0]["content"] == [{"type": "image"}, {"type": "text", "text": "?"}]
    with pytest.raises(ValueError, match="has none"):
        take_images(user({"type": "image"}))
    with pytest.raises(ValueError, match="the model writes text alone"):
        take_images([{"role": "assistant", "content": [{"type": "image", "image": PICTURE}]}])


def test_each_mark_becomes_its_run_once() -> None:
    first, second = READER.expand([[7, MARK, 8], [MARK, 9]], [PICTURE, OTHER])
    assert first[0] == [7, *[MARK] * 6, 8] and second[0] == [*[MARK] * 4, 9]
    (span,) = first[1]
    assert (span.offset, span.length, span.grid) == (1, 6, (1, 6, 4))
    assert span.digest == image_digest(PICTURE, READER.settings) != second[1][0].digest
    for ids, images in ([[7, MARK]], []), ([[7]], [PICTURE]), ([first[0]], [PICTURE]):
        with pytest.raises(ValueError, match=f"marks of an image for {len(images)} images"):
            READER.expand(ids, images)
    with pytest.raises(ValueError, match="more than 200 times the other"):
        READER.expand([[MARK]], [noise(402, 1)])
    with pytest.raises(ValueError, match="has no bytes"):
        READER.expand([[MARK]], [b""])
