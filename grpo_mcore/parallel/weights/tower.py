"""The frozen tower of a vision model on a rank whose layers take its features."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from grpo_mcore.families import VisionShape
from grpo_mcore.families.images import image_digest, image_settings, pixels
from grpo_mcore.parallel.weights.hf_folder import SafetensorsFolder


class FrozenTower:
    """A vision model's tower, and the features of the images of this step.

    It is transformers' module with the checkpoint's weights. No step changes it and it is no part of the network, so
    that optimizer, gradient norm, checkpoints and refits do not see it, and an image's features are computed once.
    Between steps its weights are on the host."""

    def __init__(self, folder: Path, vision: VisionShape, dtype: torch.dtype, device: torch.device) -> None:
        """`folder`: of the model. Raises FamilyError without an image processor, WeightsError without weights."""
        import transformers

        self.settings, self.device, self.dtype = image_settings(folder, vision), device, dtype
        config = transformers.AutoConfig.from_pretrained(folder).vision_config
        self.module = getattr(transformers, vision.tower)(config)
        for parameter in self.module.parameters():  # not the buffers: the rotary frequencies stay float32
            parameter.data = parameter.data.to(dtype)
        reader = SafetensorsFolder(folder)
        with torch.no_grad():
            for name, tensor in self.module.state_dict().items():
                tensor.copy_(reader.read(f"{vision.root}.{name}", tuple((0, size) for size in tensor.shape)))
        self.module.requires_grad_(False).eval()
        self.features: dict[str, Tensor] = {}
        """By digest: [tokens, 1 + levels of the deepstack, hidden size], the embeddings first."""

    @torch.no_grad()
    def see(self, images: Mapping[str, bytes]) -> None:
        """Compute the features of these images, by digest, that are not known yet, and forget all others. Raises
        ValueError for one that cannot be read, or whose digest is not that of its bytes and the processor here."""
        for digest in self.features.keys() - images.keys():
            del self.features[digest]
        new = {digest: data for digest, data in images.items() if digest not in self.features}
        if new:
            self.module.to(self.device)
        for digest, data in new.items():
            if (own := image_digest(data, self.settings)) != digest:
                raise ValueError(
                    f"image {digest}: its bytes with this model's image processor are {own}: whoever made the prompt "
                    "read another preprocessor_config.json, or the bytes of another image"
                )
            patches, grid = pixels(data, self.settings)
            seen = self.module(patches.to(self.device, self.dtype), grid_thw=torch.tensor([grid], device=self.device))
            levels = [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]
            self.features[digest] = torch.stack(levels, 1)
        self.module.to("cpu")
