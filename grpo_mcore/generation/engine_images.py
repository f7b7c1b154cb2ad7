"""Prompts with images in vLLM's form. The tokens stay ours: vLLM would expand the mark of an image, and also one that
is expanded already, without a word; so each image is rendered by itself, and its place is told."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_mcore.families.images import image_size, read_image
from grpo_mcore.rollout.images import ImageReader
from grpo_mcore.rollout.trajectory import ImageSpan

logger = logging.getLogger(__name__)

KEPT_BYTES = 1 << 30
"""Bytes of rendered images that an engine keeps for further samples and turns."""


Rendered = tuple[ImageSpan, Any]
"""An image in vLLM's form, and its place in the prompt."""


def prompt_with_images(ids: list[int], images: Sequence[Rendered], cache_salt: str) -> Any:
    """Return vLLM's input for a prompt whose images are in their places already."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import PlaceholderRange

    return mm_input(
        ids,
        {"image": [item for _, item in images]},
        {"image": [span.digest for span, _ in images]},
        {"image": [PlaceholderRange(offset=span.offset, length=span.length) for span, _ in images]},
        cache_salt=cache_salt,
    )


class EngineImages:
    """The rendered images of one engine, by digest. A digest stands for the bytes and the processor's settings, so that
    equal ones are equal images: vLLM's caches are keyed by it, too.

    `unreadable`: digests of images that cannot be decoded. A white image stands for each, and the engine gives its
    samples up.
    """

    def __init__(self, renderer: Any, reader: ImageReader) -> None:
        self._renderer, self._reader = renderer, reader
        self._items: OrderedDict[str, tuple[Any, int]] = OrderedDict()  # item, its bytes
        self._bytes, self._lock = 0, threading.Lock()
        self.unreadable: set[str] = set()

    def rendered(self, spans: Sequence[ImageSpan], images: Mapping[str, bytes]) -> list[Rendered]:
        """Return each image of a prompt. `images`: their files by digest. Raises ValueError for one that is missing, or
        that vLLM's processor cuts into another grid."""
        with self._lock:
            return [(span, self._item(span, images)) for span in spans]

    def _item(self, span: ImageSpan, images: Mapping[str, bytes]) -> Any:
        from vllm.inputs import TokensPrompt

        if (known := self._items.get(span.digest)) is not None:
            self._items.move_to_end(span.digest)
            return known[0]
        if span.digest not in images:
            raise ValueError(f"the image {span.digest} of a prompt did not come with it")
        ids, image = [self._reader.vision.image_token], self._resized(span, images[span.digest])
        mark = TokensPrompt(prompt_token_ids=ids, multi_modal_data={"image": [image]})
        item = self._renderer.render_cmpl([mark])[0]["mm_kwargs"]["image"][0]
        grid = tuple(item["image_grid_thw"].data.tolist())
        if grid != span.grid:
            raise ValueError(
                f"vLLM cuts an image into {grid} patches, and the prompt has room for {span.grid}: the engine's "
                "processor has other settings than the model's folder; remove mm_processor_kwargs from vllm_kwargs"
            )
        size = sum(field.data.nbytes for field in item.values())
        self._items[span.digest] = item, size
        self._bytes += size
        while self._bytes > KEPT_BYTES and len(self._items) > 1:
            self._bytes -= self._items.popitem(last=False)[1][1]
        return item

    def _resized(self, span: ImageSpan, data: bytes) -> Any:
        """Decode an image in the size of its grid, by Pillow as the policy does, so that torchvision, which vLLM's
        processor takes where it is installed, has no pixels of its own to make."""
        from PIL import Image

        _, rows, columns = span.grid
        size = columns * self._reader.settings.patch_size, rows * self._reader.settings.patch_size
        try:
            image = read_image(data)
            if image.size != (head := image_size(data)):
                raise ValueError(f"an image of {image.size} has a head that says {head}")
            return image.resize(size, self._reader.settings.resample)
        except ValueError as error:
            logger.warning("%s: the samples of its prompt are given up", error)
            self.unreadable.add(span.digest)
            return Image.new("RGB", size, "white")
