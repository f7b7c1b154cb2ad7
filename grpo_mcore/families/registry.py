"""The registered families, and the functions that look one up."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from grpo_mcore.families import (
    deepseek_v3,
    gemma3_text,
    glm4_moe,
    gpt_oss,
    llama,
    minimax_m2,
    mixtral,
    nemotron_h,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
)
from grpo_mcore.families.dense import dense_flops
from grpo_mcore.families.spec import HEAD, VALUE_HEAD, FamilyError, HfTensor, ModelShape, Param, Split, Stage, require

MODULES = (qwen2, qwen3, llama, qwen3_moe, mixtral, deepseek_v3, glm4_moe, minimax_m2, nemotron_h, gemma3_text, gpt_oss)
FAMILIES: dict[str, ModuleType] = {module.__name__.rpartition(".")[2]: module for module in MODULES}
"""Modules by name, which is the `model_type` of `config.json`."""
# Architectures with other names, or several.
FAMILIES |= dict.fromkeys(("kimi_k2", "glm4_moe_lite", "glm_moe_dsa"), deepseek_v3)
FAMILIES |= {"gemma3": gemma3_text, "qwen2_5_vl": qwen2, "qwen3_vl": qwen3, "qwen3_vl_moe": qwen3_moe}
FAMILIES |= dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), qwen3_5)

OVERRIDES_KEY = "policy.hf_config_overrides"
"""Recipe key of the overrides, for messages."""

OPTIONAL = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings", "sliding_window")
"""Keys of a Hugging Face config that many models leave at their default."""

BY_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")
"""Lists with an entry for each layer; `with_overrides` cuts them where it lowers the number of layers."""

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
ROPE_SETTINGS = (
    *("rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "truncate"),
    *("partial_rotary_factor", "mscale", "mscale_all_dim", "mrope_section", "mrope_interleaved", "attn_factor"),
)
"""Rotary settings that transformers knows, and one that it did not take over from DeepSeek (`dense.yarn_shape`)."""


def read_hf_config(folder: str | Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Read `config.json` of a local Hugging Face folder, or that file, with `overrides` (policy.hf_config_overrides).
    Raises FamilyError if it is missing, or for an override of a key that it does not have."""
    path = Path(folder) if Path(folder).is_file() else Path(folder) / "config.json"
    if not path.is_file():
        raise FamilyError(f"{folder} holds no config.json; {_instead_of(Path(folder))}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FamilyError(f"{path} is no JSON ({error}); copy or download the model again") from error
    if not isinstance(config, dict):
        raise FamilyError(f"{path} must hold an object, got {type(config).__name__}")
    return with_overrides(config, overrides)


def _instead_of(folder: Path) -> str:
    """Return what to give instead of a folder without a config.json."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        return "it is an adapter: merge it into its base model first (peft: merge_and_unload), and give that folder"
    inside = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    deeper = sorted(folder.glob("*/*/config.json"), key=lambda path: path.stat().st_mtime)
    whole = [path.parent for path in (*deeper, *inside) if next(path.parent.glob("*.safetensors"), None)]
    ends = [path.parent for depth in ("", "step_*/") for path in folder.glob(f"{depth}training_info.json")]
    if not whole and any(not (end / "policy" / "weights").exists() for end in ends):  # there are NeMo RL's
        return f"it is a checkpoint of a run: `grpo-mcore export {folder} --output DIR` makes a model of it"
    if not whole and (made_by := other_trainers_checkpoint(folder)) is not None:
        return made_by
    if snapshots := sorted(folder.glob("snapshots/*/config.json")):
        return f"it is a model of the hub's cache; give {snapshots[0].parent}"
    if next(folder.glob("*.gguf"), None) is not None:
        return "its weights are GGUF, which is not read; give the Hugging Face folder that they were made of"
    if whole or inside:
        return f"give a model in it, such as {[*(path.parent for path in inside), *whole][-1]}"
    if (folder / "latest_checkpointed_iteration.txt").is_file():
        return "it is a checkpoint of Megatron; convert it to Hugging Face's format first"
    return "give a Hugging Face folder, or a name of the hub"


_CHECKPOINTS = {
    "model_world_size_*_rank_*.pt": "FSDP in verl's form: `python -m verl.model_merger merge --backend fsdp "
    "--local_dir {at} --target_dir DIR` makes a model of it",
    "dist_ckpt": "Megatron in verl's form: `python -m verl.model_merger merge --backend megatron --local_dir {at} "
    "--target_dir DIR` makes a model of it",
    "*mp_rank_*_model_states.pt": "DeepSpeed: `zero_to_fp32.py`, which lies beside it, makes a model of it (with "
    "--safe_serialization)",
    "*.distcp": "torch's distributed form: convert it with its trainer's own tool first (accelerate merge-weights, "
    "NeMo RL's convert_dcp_to_hf.py)",
}
"""Patterns of files and folders in checkpoints of other trainers, and how a model is made of each."""


def other_trainers_checkpoint(folder: Path) -> str | None:
    """Return what a folder without a model's weights is, if another trainer has written its own format of weights into
    it, beside it or into sub-folders. None: there are no such files."""
    for pattern, form in _CHECKPOINTS.items():
        for deeper in (pattern, f"*/{pattern}", f"*/*/{pattern}", f"*/*/*/{pattern}"):
            if path := next(iter(sorted(folder.glob(deeper))), None):
                return f"it is a checkpoint of {form.format(at=path.parent)}"
        if folder.name == "huggingface" and next(folder.parent.glob(pattern), None):  # config and tokenizer alone
            return f"the weights are beside it, in a checkpoint of {form.format(at=folder.parent)}"
    return None


def with_overrides(
    config: Mapping[str, Any], overrides: Mapping[str, Any], overrides_key: str = OVERRIDES_KEY
) -> dict[str, Any]:
    """Return a Hugging Face config with values replaced; mappings are merged, and with fewer layers their lists cut.
    Raises FamilyError for a key that it does not have, except one of OPTIONAL. `overrides_key`: the key of the
    overrides, for messages."""
    replaced, text = dict(config), config.get("text_config")
    if isinstance(text, Mapping):  # of a vision model: the rest of its config says nothing of the text's layers
        if stray := [key for key in overrides if key in OPTIONAL and key not in config]:
            raise FamilyError(
                f"{overrides_key}.{stray[0]}: this model has its layers in text_config; set text_config.{stray[0]}"
            )
        if isinstance(overrides.get("text_config"), Mapping):
            replaced["text_config"] = with_overrides(text, overrides["text_config"], f"{overrides_key}.text_config")
            overrides = {key: value for key, value in overrides.items() if key != "text_config"}
    for key, value in _in_the_form_of(config, overrides, overrides_key).items():
        if key not in config and key not in OPTIONAL:
            near = get_close_matches(key, [*config, *OPTIONAL], n=1)
            hint = f"; nearest: {near[0]}" if near else ""
            raise FamilyError(f"{overrides_key}.{key}: the model's config.json has no such key{hint}")
        before = config.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            value = _merged(_with_type(before) if key in ROPE_KEYS else before, value)
        replaced[key] = value
    if type(layers := overrides.get("num_hidden_layers")) is int and layers > 0:
        lists = {key: value for key in BY_LAYER if isinstance(value := config.get(key), list) and key not in overrides}
        replaced |= {key: value[:layers] for key, value in lists.items()}
    return replaced


def _merged(before: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with values replaced, and mappings in it merged, as rotary settings by kind of layer are."""
    return {
        **before,
        **{
            key: _merged(before[key], value)
            if isinstance(value, Mapping) and isinstance(before.get(key), Mapping)
            else value
            for key, value in changes.items()
        },
    }


def _in_the_form_of(config: Mapping[str, Any], overrides: Mapping[str, Any], overrides_key: str) -> dict[str, Any]:
    """Return the overrides with rotary settings in the form that the config has them in.

    A config has `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before). Whoever reads one form
    does not see an override in the other, so policy and engine would be two models. Raises FamilyError for settings
    that are not known, and where a config has them by kind of layer and the override does not.
    """
    rope = {
        key: _with_type(value) if isinstance(value, Mapping) else value
        for key, value in overrides.items()
        if key in ROPE_KEYS
    }
    others = {key: value for key, value in overrides.items() if key not in ROPE_KEYS}
    if not rope:
        return others
    parts = {key: value for key, value in rope.items() if isinstance(value, Mapping)}
    for key, value in parts.items():
        inner = [kind for kind in value.values() if isinstance(kind, Mapping)]
        for name in (name for part in inner or [value] for name in part):
            if name not in ROPE_SETTINGS:
                near = get_close_matches(name, ROPE_SETTINGS, n=1)
                hint = f"; nearest: {near[0]}" if near else f"; known are {', '.join(ROPE_SETTINGS)}"
                raise FamilyError(f"{overrides_key}.{key}: there is no rotary setting {name!r}{hint}")
    new = config.get("rope_parameters")
    if isinstance(new, Mapping):
        by_kind = [kind for kind, value in new.items() if isinstance(value, Mapping)]
        flat = {key: value for key, value in rope.items() if key != "rope_parameters"}
        if by_kind and (flat or any(name not in by_kind for name in parts.get("rope_parameters", {}))):
            raise FamilyError(
                f"{overrides_key}: the model's config.json has rope_parameters by kind of layer "
                f"({', '.join(by_kind)}); override rope_parameters.{by_kind[0]}, and so on"
            )
        settings = dict(rope.get("rope_parameters") or {})
        if "rope_theta" in rope:
            settings["rope_theta"] = rope["rope_theta"]
        if "rope_scaling" in rope:
            scaling = rope["rope_scaling"]
            settings |= {"rope_type": "default"} if scaling is None else scaling
        return others | {"rope_parameters": settings}
    if "rope_parameters" not in rope:
        return others | rope
    settings = dict(rope["rope_parameters"] or {})
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise FamilyError(
            f"{overrides_key}.rope_parameters: the model's config.json has rope_theta and rope_scaling; override these"
        )
    old = {key: settings.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in settings}
    if settings.get("rope_type") == "default":
        return others | _old_form(rope) | old | {"rope_scaling": None}
    return others | _old_form(rope) | old | ({"rope_scaling": settings} if settings else {})


def _old_form(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings of the old form alone."""
    return {key: value for key, value in rope.items() if key != "rope_parameters"}


def _with_type(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings whose type has its new name, also those by kind of layer."""
    rope_type = {"rope_type": settings["type"]} if "type" in settings else {}
    return rope_type | {
        key: _with_type(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key != "type"
    }


def engine_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides for vLLM with which it sees the config that `with_overrides` returns. `config` is the
    content of config.json. vLLM replaces attributes of transformers' config object, which always holds rotary settings
    as `rope_parameters`: these are given whole."""
    result = with_overrides(config, overrides)
    changed = {key: value for key, value in result.items() if key not in config or value != config[key]}
    if FAMILIES.get(str(config.get("model_type"))) is deepseek_v3:  # transformers takes these, vLLM others
        changed |= {key: value for key, value in deepseek_v3.ROUTING.items() if key not in config}
    if isinstance(config.get("text_config"), Mapping) and "text_config" in changed:
        changed["text_config"] = engine_overrides(config["text_config"], overrides["text_config"])
    if not any(key in changed for key in ROPE_KEYS):
        return changed
    others = {key: value for key, value in changed.items() if key not in ROPE_KEYS}
    if result.get("model_type") == "gemma3_text":
        return others | {"rope_parameters": gemma3_text.rope_by_kind(result)}
    settings = result.get("rope_parameters") or {
        "rope_theta": result.get("rope_theta", DEFAULTS.get(result["model_type"], {}).get("rope_theta", 10000.0)),
        "rope_type": "default",
        **({} if (factor := result.get("partial_rotary_factor")) is None else {"partial_rotary_factor": factor}),
        **_with_type(result.get("rope_scaling") or {}),
    }
    return others | {"rope_parameters": settings}


_GLM = {"rms_norm_eps": 1e-5, "n_shared_experts": 1}
_DEEPSEEK = {"n_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": _GLM,
    "glm4_moe_lite": _GLM | {"routed_scaling_factor": 1.8},
    "glm_moe_dsa": _GLM | {"routed_scaling_factor": 2.5, "index_topk": 2048},
    "minimax_m2": {"rope_theta": 5e6},
    "qwen2_5_vl": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "gpt_oss": {"rms_norm_eps": 1e-5, "rope_theta": 150000.0},
}
"""Defaults by model type for keys that a config.json lacks: those of transformers, which vLLM takes too. Only values
that differ between families, and that change no tensor's size."""
OF_ENGINES: dict[str, Any] = {
    "is_causal": True,
    "logit_scale": 1,
    **dict.fromkeys(("dual_chunk_attention_config", "llama_4_scaling", "layer_scale", "block_configs")),
}
"""Keys that vLLM acts on in models of these families, and transformers and the policy do not, with the only values that
are supported."""
WINDOWLESS = (llama, deepseek_v3, glm4_moe, minimax_m2, nemotron_h)
"""Families whose layers see all keys in transformers, whatever `sliding_window` says; vLLM gives them all a window."""
NO_POLICY = re.compile("Classification|Reward|Bidirectional")
"""Parts of architectures' names of which vLLM makes no engine that generates."""
QUANTIZED = ("quantization_config", "compression_config")
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def shape_of(config: dict[str, Any], head: Literal["tokens", "value"] = "tokens") -> ModelShape:
    """Return the shape that a Hugging Face config describes. `head`: "value" for a model with one output in place of
    the logits, whatever the config's own head. Raises FamilyError if its model type is not supported, or it lacks a
    key, or has a value that cannot be meant."""
    family = FAMILIES.get(str(config.get("model_type", "")))
    if family is None:
        raise FamilyError(f"model_type {config.get('model_type')!r} is not supported; choose one of {sorted(FAMILIES)}")
    text = config.get("text_config", config)
    wrong = [name for name in config.get("architectures") or () if NO_POLICY.search(str(name))]
    if wrong and head == "tokens":
        raise FamilyError(f"config.json: architectures: {wrong[0]} has no head for tokens, so it cannot be a policy")
    if isinstance(text, dict) and _two_ropes(text):
        raise FamilyError(
            "config.json has rope_scaling and other rope_parameters: engines and policy would read one each; delete "
            "the one that is not meant"
        )
    for part in (config, text):
        if isinstance(part, dict) and (quantized := [key for key in QUANTIZED if part.get(key)]):
            raise FamilyError(
                f"config.json: {quantized[0]} of a {config['model_type']} model; convert the checkpoint to bfloat16 "
                "first"
            )
    if isinstance(text, dict):
        require({"model_type": config["model_type"]} | text, **OF_ENGINES)
        if family in WINDOWLESS and text.get("sliding_window"):
            raise FamilyError(
                f"config.json: sliding_window {text['sliding_window']} of a {config['model_type']} model: vLLM would "
                f"let each token see that many, and transformers lets it see all; set {OVERRIDES_KEY}.sliding_window: "
                "null if all are meant"
            )
    for key in SIZES if isinstance(text, dict) else ():
        if key in text and (type(text[key]) is not int or text[key] < 1):
            raise FamilyError(f"config.json of a {config['model_type']} model: {key} is {text[key]!r}")
    for key in BY_LAYER if isinstance(text, dict) else ():
        if isinstance(text.get(key), list) and text[key] and len(text[key]) != text.get("num_hidden_layers"):
            raise FamilyError(
                f"config.json of a {config['model_type']} model: {key} has {len(text[key])} entries for "
                f"{text.get('num_hidden_layers')} layers (num_hidden_layers)"
            )
    try:
        shape: ModelShape = family.shape(DEFAULTS.get(config["model_type"], {}) | config)
        return shape if head == "tokens" else replace(shape, head=head, tied_embeddings=False)
    except FamilyError:
        raise
    except KeyError as error:
        raise FamilyError(f"config.json of a {config['model_type']} model lacks {error.args[0]}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise FamilyError(
            f"config.json of a {config['model_type']} model has a value that cannot be meant: {error}"
        ) from error


def _two_ropes(config: Mapping[str, Any]) -> bool:
    """Return whether a config has rotary settings in both forms and they differ, also by a setting that only one of
    them has: transformers takes the older one, which rope_theta of the config belongs to."""
    older, newer = config.get("rope_scaling"), config.get("rope_parameters")
    if not isinstance(older, Mapping) or not isinstance(newer, Mapping) or not older:
        return False
    beside = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    of_both = {"rope_type": "default"} | {key: beside[key] for key in ("partial_rotary_factor",) if key in beside}
    first, second = (
        {key: value for key, value in settings.items() if value is not None}
        for settings in (of_both | beside | _with_type(older), of_both | _with_type(newer))
    )
    return first != second


@lru_cache(maxsize=8)  # DeepSeek-V3 has 45,000
def params_of(shape: ModelShape) -> tuple[Param, ...]:
    """Return every parameter of the model, in the order of the forward pass."""
    params: tuple[Param, ...] = tuple(FAMILIES[shape.family].params(shape))
    if shape.head == "tokens":
        return params
    head = Param(HEAD, (HfTensor(VALUE_HEAD, (1, shape.hidden_size)),), Split.REPLICATED, Stage.LAST)
    return (*(param for param in params if param.megatron != HEAD), head)


def head_of(config: Mapping[str, Any]) -> Literal["tokens", "value"]:
    """Return the head that a Hugging Face config names: a value's for a classifier's, else tokens'."""
    return "value" if any("Classification" in str(name) for name in config.get("architectures") or ()) else "tokens"


def forward_flops(shape: ModelShape, lengths: list[int]) -> float:
    """Return the FLOPs of one forward pass over sequences of these lengths."""
    flops: Callable[[ModelShape, int, int], float] = getattr(FAMILIES[shape.family], "flops", dense_flops)
    total = flops(shape, sum(lengths), sum(length * length for length in lengths))
    if shape.head == "value":
        total -= 2.0 * (shape.vocab_size - 1) * shape.hidden_size * sum(lengths)
    unseen = sum(max(0, length - window) ** 2 for window in shape.windows if window for length in lengths)
    return total - 2.0 * shape.num_heads * shape.head_dim * unseen


def parameter_count(shape: ModelShape) -> int:
    """Return the number of parameters, tied embeddings counted once."""
    return sum(param.numel for param in params_of(shape) if not param.copy)
