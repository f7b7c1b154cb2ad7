"""Images in conversations: their bytes, whatever form a row or a request has them in, and their place in a prompt.

A message in the normal form has an image as the part {"type": "image", "image": bytes}: the file as it was given, never
its pixels. The chat template writes one mark for each; `ImageReader.expand` is the only place where a mark becomes the
run of tokens that the image takes. From there on images are found by their spans, never by a token.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mcore.families import FamilyError, read_hf_config, shape_of
from grpo_mcore.families.images import (
    ImageSettings,
    image_digest,
    image_grid,
    image_settings,
    image_size,
    image_tokens,
)
from grpo_mcore.families.spec import VisionShape

if TYPE_CHECKING:
    from grpo_mcore.rollout.trajectory import ImageSpan  # which imports torch

ReadImage = Callable[[Any], bytes | str]
"""An image as it was given -> its bytes, or their data URL. Raises ValueError, a sentence that says what is wrong."""

_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
IMAGE_MARK = "<image>"
_KEYS = ("image", "image_url", "url", "path", "source", "bytes", "base64")


def given_image(value: Any) -> bytes:
    """Return the bytes of an image in a data row: bytes, a file's path, a data URL, base64, a record of a table, or an
    image of Pillow. Nothing is fetched over a network."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, dict):
        inside = next((value[key] for key in ("bytes", "url", "data", "path") if value.get(key) is not None), None)
        if inside is None:
            raise ValueError(f"an image must have bytes, a path or a url; it has {sorted(value)}")
        return given_image(inside)
    if callable(getattr(value, "save", None)):
        file = BytesIO()
        value.save(file, format="PNG")
        return file.getvalue()
    if not isinstance(value, str):
        raise ValueError(f"an image must be bytes, a path, a data URL or base64, got {type(value).__name__}")
    if _DATA_URL.match(value):
        return inline_image(value)
    if "://" in value and not value.startswith("file://"):
        raise ValueError(f"an image at {value:.80}: images are not fetched; download it and name the file")
    path = Path(value.removeprefix("file://"))
    if len(value) < 1024 and path.is_file():
        return path.read_bytes()
    if len(value) < 64 or path.suffix:
        raise ValueError(f"no file {value:.200} for an image" + ("" if path.is_absolute() else f" in {Path.cwd()}"))
    return _decoded(value)


def inline_image(value: Any) -> bytes:
    """Return the bytes of an image in a request: a data URL, also as the chat API or Anthropic's has it. A server reads
    neither files nor addresses for a client."""
    if isinstance(value, dict):
        if value.get("type") == "base64" and isinstance(value.get("data"), str):
            return _decoded(value["data"])
        value = value.get("url")
    if not isinstance(value, str) or not (head := _DATA_URL.match(value)):
        raise ValueError("an image must be a data URL (data:image/png;base64,...); others are not fetched")
    return _decoded(value[head.end() :])


def data_url(value: Any) -> str:
    """Return an image in a request, or its bytes, as a data URL, which JSON can hold; equal images as equal ones.
    Raises ValueError as `inline_image` does."""
    data = value if isinstance(value, bytes) else inline_image(value)
    kind = "jpeg" if data.startswith(b"\xff\xd8") else "webp" if data.startswith(b"RIFF") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)  # mail and Python break its lines
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"an image is text that is no base64 ({error})") from error


def image_of_part(part: Mapping[str, Any]) -> Any:
    """Return the image of a part of a message, None if its image is elsewhere in the row."""
    return next((part[key] for key in _KEYS if part.get(key) is not None), None)


def is_image(part: Any) -> bool:
    """Return whether a part of a message, in whatever form, is an image."""
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    return kind in ("image", "image_url", "input_image") or (kind is None and part.get("image") is not None)


def with_images(messages: Sequence[Mapping[str, Any]], images: Sequence[bytes], name: str) -> list[dict[str, Any]]:
    """Return messages with the images of a row's field `name` where <image> stands in a question, or a part for an
    image without one; in front of the first question if no place is named. Raises ValueError for another number, and
    for messages that have images already."""
    if any("image" in part for message in messages for part in _parts(message["content"])):
        raise ValueError(f"{name!r} has images, and a message has one of its own; leave one of them out")
    cut = [[piece for part in _parts(m["content"]) for piece in _pieces(part, m["role"] == "user")] for m in messages]
    places = [part for parts in cut for part in parts if part["type"] == "image"]
    if not places:
        if (first := next((i for i, message in enumerate(messages) if message["role"] == "user"), None)) is None:
            raise ValueError(f"{name!r} has images, and there is no question that they could belong to")
        places = [{"type": "image"} for _ in images]
        cut[first] = [*places, *_parts(messages[first]["content"])]
    if len(places) != len(images):
        raise ValueError(f"{name!r} has {len(images)} images, and the messages have places for {len(places)}")
    for place, image in zip(places, images, strict=True):
        place["image"] = image
    has_image = [any(part["type"] == "image" for part in parts) for parts in cut]
    return [
        {**message, "content": parts} if has else dict(message)
        for message, parts, has in zip(messages, cut, has_image, strict=True)
    ]


def _parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _pieces(part: dict[str, Any], is_question: bool) -> list[dict[str, Any]]:
    """Return copies of the texts and the places for images in a part of a message."""
    if part["type"] != "text" or not is_question:
        return [dict(part)]
    pieces = [{"type": "text", "text": text} for text in re.split(f"({IMAGE_MARK})", part["text"]) if text]
    return [{"type": "image"} if piece["text"] == IMAGE_MARK else piece for piece in pieces]


def take_images(messages: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return messages with empty image parts, as the chat template shows them, and the images in their order. Raises
    ValueError for a place without an image, and for an image that is not the user's or a tool's."""
    images, shown = list[bytes](), list[dict[str, Any]]()
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] == "image":
                if "image" not in part:
                    raise ValueError("a place for an image has none: neither the part nor a column holds it")
                if message["role"] == "assistant":
                    raise ValueError("a message of the assistant has an image, and the model writes text alone")
                images.append(part["image"])
        if isinstance(content, list):
            content = [{"type": "image"} if part["type"] == "image" else dict(part) for part in content]
        shown.append({**message, "content": content} if "content" in message else dict(message))
    return shown, images


Expanded = tuple[list[int], "tuple[ImageSpan, ...]"]
"""Tokens of a turn, and the spans of its images."""


@dataclass(frozen=True)
class ImageReader:
    """Reads images for the prompts of one model: their grids, their digests, and the tokens that stand for them."""

    vision: VisionShape
    settings: ImageSettings
    limit: int | None = None  # of the images of a prompt, or of an environment's answer

    def expand(self, turns: Sequence[Sequence[int]], images: Sequence[bytes]) -> list[Expanded]:
        """Return the tokens of consecutive turns with each mark replaced by its image's run of tokens, and the spans of
        the runs in each turn. Raises ValueError for another number of marks than images, for more than the limit, and
        for an image that the model cannot read."""
        if self.limit is not None and len(images) > self.limit:
            raise ValueError(f"it has {len(images)} images, more than limit_mm_per_prompt.image, {self.limit}")
        mark = self.vision.image_token
        marks, left = sum(list(ids).count(mark) for ids in turns), iter(images)
        if marks != len(images):
            raise ValueError(
                f"the chat template writes {marks} marks of an image for {len(images)} images; use the model's own "
                "template, and no text of such a mark"
            )
        expanded = []
        for ids in turns:
            tokens, spans = list[int](), list[Any]()
            for token in ids:
                if token != mark:
                    tokens.append(token)
                    continue
                span = self.span(next(left), len(tokens))
                spans.append(span)
                tokens += [mark] * span.length
            expanded.append((tokens, tuple(spans)))
        return expanded

    def recorded(self, ids: Sequence[int], images: Sequence[bytes]) -> Expanded:
        """Return recorded tokens, among which numbers tell images (`content_ids`), as tokens, and the spans of their
        images: the first of `images`. Raises ValueError where the numbers tell others."""
        from grpo_mcore.rollout.trajectory import content_number

        tokens, spans = list(ids), list[Any]()
        while (offset := next((i for i, token in enumerate(tokens) if token < 0), None)) is not None:
            span = self.span(images[len(spans)], offset) if len(spans) < len(images) else None
            first = 0 if span is None else content_number(span.digest)
            if span is None or tokens[offset : offset + span.length] != [first - i for i in range(span.length)]:
                raise ValueError("the recorded tokens of an answer tell other images than the messages before it")
            tokens[offset : offset + span.length] = [self.vision.image_token] * span.length
            spans.append(span)
        return tokens, tuple(spans)

    def span(self, data: bytes, offset: int = 0) -> ImageSpan:
        """Return the span of an image whose tokens begin at `offset`. Raises ValueError as `expand` does."""
        from grpo_mcore.rollout.trajectory import ImageSpan

        grid = image_grid(*image_size(data), self.settings)
        length = image_tokens(grid, self.settings.merge_size)
        return ImageSpan(offset, length, image_digest(data, self.settings), grid)

    def by_digest(self, images: Iterable[bytes]) -> dict[str, bytes]:
        """Return each image once, by its digest."""
        return {image_digest(data, self.settings): data for data in images}


def images_of(folder: str | Path, limit: int | None = None) -> ImageReader:
    """Return what prompts need of the images of the model in a folder. Raises FamilyError where it reads none."""
    vision = shape_of(read_hf_config(folder)).vision
    if vision is None:
        raise FamilyError(f"the model in {folder} reads no images")
    return ImageReader(vision, image_settings(folder, vision), limit)
