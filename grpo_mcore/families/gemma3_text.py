"""Gemma 3, the text model: most layers see a window of keys and have a rotary base of their own; attention and network
are normed before and after; norms scale by 1 + weight, embeddings by the root of the hidden size. Of vision models the
text part is trained; exports copy the rest."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from grpo_mcore.families.dense import dense_params, dense_shape
from grpo_mcore.families.spec import FamilyError, ModelShape, require, require_words

params = dense_params

_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072,
}
"""Values of transformers that the configs of vision models leave out."""


def rope_by_kind(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rotary settings of layers without and with a window from either form of a `config.json`, in the form
    of transformers 5."""
    rope, scaling = config.get("rope_parameters") or {}, dict(config.get("rope_scaling") or {})
    everywhere = {"rope_theta": config.get("rope_theta", 1e6), "rope_type": scaling.pop("type", "default")} | scaling
    inside = {"rope_theta": config.get("rope_local_base_freq", 1e4), "rope_type": "default"}
    return {
        "full_attention": everywhere | (rope.get("full_attention") or {}),
        "sliding_attention": inside | (rope.get("sliding_attention") or {}),
    }


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`, of a vision model that of its text part."""
    if "text_config" in config:
        text = _DEFAULTS | config["text_config"]
        for part in (config, text):
            require(part, tie_word_embeddings=True)
        return replace(
            shape(text),
            root="language_model.model",
            engine_root="language_model.model",
            carried=("vision_tower.", "multi_modal_projector."),
        )
    require(config, attention_bias=False, hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False)
    require(config, final_logit_softcapping=None, attn_logit_softcapping=None)
    everywhere, inside = rope_by_kind(config).values()
    kinds = everywhere["rope_type"], inside["rope_type"]
    if kinds not in (("default", "default"), ("linear", "default")):
        raise FamilyError(
            f"config.json: RoPE {everywhere}, {inside} in windows is not supported for gemma3_text models"
        )
    plain = {"rope_parameters": None, "rope_scaling": None, "layer_types": None, "rope_theta": everywhere["rope_theta"]}
    model = dense_shape(
        {"tie_word_embeddings": True} | config | plain, family="gemma3_text", qkv_bias=False, qk_norm=True
    )
    require_words(config, "layer_types", "full_attention", "sliding_attention")
    every = config.get("sliding_window_pattern") or 6
    layers = config.get("layer_types") or [
        "full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(model.num_layers)
    ]
    return replace(
        model,
        attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        windows=tuple(config["sliding_window"] if kind == "sliding_attention" else 0 for kind in layers),
        window_rope_theta=float(inside["rope_theta"]),
        rope_interpolation=float(everywhere["factor"]) if kinds[0] == "linear" else None,
        activation="gelu_tanh",
        centered_norms=True,
        sandwich_norms=True,
        embedding_scale=model.hidden_size**0.5,
    )
