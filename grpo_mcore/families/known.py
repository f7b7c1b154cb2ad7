"""Published Hugging Face configs of well-known models (known.yaml), for planning without the model on disk."""

from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_VARIANTS = ("-Instruct", "-Thinking", "-Base", "-Math", "-Coder", "-Chat", "-it", "-pt", "-2507", "-0324-BF16")


@cache
def known_configs(table: Literal["models", "folders"] = "models") -> dict[str, dict[str, Any]]:
    """Return the known configs by the model's name on the hub, without its organisation, or those by folder."""
    configs = {}
    for name, config in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))[table].items():
        more = {key: value for key, value in config.items() if key != "sizes"}
        sizes = dict(zip(_SIZES, config["sizes"], strict=True))
        text = {"text_config": sizes | config["text_config"]} if "text_config" in config else sizes
        configs[name] = more | text
    return configs


def known_config(name: str) -> dict[str, Any] | None:
    """Return the config of a hub name such as "Qwen/Qwen2.5-1.5B-Instruct", or None. Suffixes of variants of the same
    shape (-Instruct, -Base) are ignored."""
    if (created := known_configs("folders").get(name)) is not None:
        return created
    base = PurePosixPath(name).name
    for variant in _VARIANTS:
        base = base.replace(variant, "")
    if base.startswith("Meta-Llama-3.1"):
        base = base.removeprefix("Meta-")
    return known_configs().get(base)
