"""Tiny random models of every family, as Hugging Face folders, for tests and `grpo-mcore parity tiny:FAMILY`."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

EOS = 1
_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SIZES: dict[str, Any] = _DATA["sizes"]
FAMILIES: dict[str, dict[str, Any]] = _DATA["families"]
_IMAGES: dict[str, int] = _DATA["images"]
ENGINE_SIZES: dict[str, dict[str, Any]] = {n: family["engine"] for n, family in FAMILIES.items() if "engine" in family}
"""Sizes that vLLM's CPU kernels support, by family."""


class UnknownFamily(ValueError):
    """There is no tiny model of the family."""


def make_tiny_model(
    family: str, folder: Path, *, seed: int = 0, words: bool = False, value: bool = False, **overrides: Any
) -> Path:
    """Write a model of `family` (of FAMILIES) with weights far from the usual small initial ones. With `words`, also
    write a tokenizer, in which token 1 ends a sequence and every other token is a word. `value`: a sequence classifier
    with one output. Raises UnknownFamily."""
    import transformers

    if family not in FAMILIES:
        raise UnknownFamily(f"no tiny model of {family!r}; there are {', '.join(FAMILIES)}")
    if words:
        overrides = {"eos_token_id": EOS, "bos_token_id": None} | overrides
        _write_words(
            folder, (SIZES | overrides)["vocab_size"], _IMAGES if "processor_class" in FAMILIES[family] else {}
        )
    tiny = FAMILIES[family]
    overrides |= {"num_labels": 1} if value else {}
    sizes, vision = SIZES | tiny.get("config", {}) | overrides, tiny.get("vision")
    kind = "SequenceClassification" if value else "ConditionalGeneration" if vision else "CausalLM"
    network = getattr(transformers, f"{tiny['class']}For{kind}")
    parts = {"text_config": sizes, "vision_config": vision} if vision else sizes
    if "processor_class" in tiny:
        parts |= _IMAGES
    torch.manual_seed(seed)
    model = network(network.config_class(**parts)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))  # those of centred norms start at 0
            elif name.endswith(("gate.weight", "router.weight", "sinks")):
                parameter.normal_(0, 0.5)  # so that the router's choice is clear
            elif "conv1d" in name:
                parameter.normal_(0, 0.4)
            else:
                parameter.normal_(0, 0.08)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":
        _write_stacks_as_published(folder)
    if "processor_class" in tiny:
        processor = _DATA["processor"] | {
            key: (tiny | tiny["vision"])[key] for key in ("processor_class", "patch_size")
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return folder


def _write_stacks_as_published(folder: Path) -> None:
    """Transpose the stacks of experts: transformers reads both forms and writes the one that vLLM does not read."""
    path = folder / "model.safetensors"
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def _write_words(folder: Path, vocabulary: int, images: dict[str, int]) -> None:
    """Write a tokenizer whose token n is the word "wn". `images`: ids of the special tokens of images, by their keys in
    a config."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = {
        id: f"<|{key.removesuffix('_token_id').replace('image', 'image_pad').replace('video', 'video_pad')}|>"
        for key, id in images.items()
    }
    words = {"<pad>": 0, "<eos>": EOS} | {marks.get(number, f"w{number}"): number for number in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", additional_special_tokens=[*marks.values()]
    ).save_pretrained(folder)
