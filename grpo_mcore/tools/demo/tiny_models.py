"""Tiny random models of every family, as Hugging Face folders, for tests and `grpo-mcore parity tiny:FAMILY`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

EOS = 1
_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SIZES: dict[str, Any] = _DATA["sizes"]
FAMILIES: dict[str, dict[str, Any]] = _DATA["families"]
ENGINE_SIZES: dict[str, dict[str, Any]] = {n: family["engine"] for n, family in FAMILIES.items() if "engine" in family}
"""Sizes that vLLM's CPU kernels support, by family."""


class UnknownFamily(ValueError):
    """There is no tiny model of the family."""


def make_tiny_model(family: str, folder: Path, *, seed: int = 0, words: bool = False, **overrides: Any) -> Path:
    """Write a model of `family` (of FAMILIES) with weights far from the usual small initial ones. With `words`, also
    write a tokenizer, in which token 1 ends a sequence and every other token is a word. Raises UnknownFamily."""
    import transformers

    if family not in FAMILIES:
        raise UnknownFamily(f"no tiny model of {family!r}; there are {', '.join(FAMILIES)}")
    if words:
        overrides = {"eos_token_id": EOS, "bos_token_id": None} | overrides
        _write_words(folder, (SIZES | overrides)["vocab_size"])
    tiny = FAMILIES[family]
    sizes, vision = SIZES | tiny.get("config", {}) | overrides, tiny.get("vision")
    network = getattr(transformers, f"{tiny['class']}For{'ConditionalGeneration' if vision else 'CausalLM'}")
    parts = {"text_config": sizes, "vision_config": vision} if vision else sizes
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
    return folder


NOT_OF_A_MODEL = ("architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config", "auto_map")
"""Keys of a Hugging Face config that a small model of the same form does without."""


def tiny_like(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the tiny model (of FAMILIES) that is most like a Hugging Face config, and the config's values that give it
    the same form: switches, names and rotary settings. Sizes stay tiny. Raises UnknownFamily."""
    (architecture,) = config.get("architectures") or [""]
    name = architecture.replace("ForCausalLM", "").replace("ForConditionalGeneration", "")
    text = config.get("text_config", config)
    alike = [family for family, tiny in FAMILIES.items() if tiny["class"] == name and "vision" not in tiny]
    if not alike:
        raise UnknownFamily(f"no tiny model of {architecture!r}; there are {', '.join(FAMILIES)}")
    family = max(alike, key=lambda name: sum(text.get(key) is not None for key in FAMILIES[name].get("config", {})))
    tiny = SIZES | FAMILIES[family].get("config", {})
    values = {}
    for key, value in text.items():
        size = isinstance(tiny.get(key), int | list) and not isinstance(tiny[key], bool) and value is not None
        if not (size or key in NOT_OF_A_MODEL or key.endswith("_token_id") or key in ("model_type", "layer_types")):
            values[key] = value
    if tiny.get("num_hidden_layers") is None:  # the layers of a hybrid model are a list
        values = {key: value for key, value in values.items() if "pattern" not in key and key != "num_hidden_layers"}
    if "mrope_section" in (values.get("rope_parameters") or {}):
        del values["rope_parameters"]  # its sections are sizes
    return family, values


def _write_words(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer whose token n is the word "wn"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": EOS} | {f"w{number}": number for number in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
