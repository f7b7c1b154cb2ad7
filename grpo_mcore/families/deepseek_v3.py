"""DeepSeek-V3, Kimi-K2, Moonlight, GLM-4.7-Flash, GLM-5: latent attention, a shared expert, experts chosen within
groups by sigmoid scores and a correction bias.

The norms of both latents add `rms_norm_eps`, as vLLM's and Megatron-Core's do; transformers always adds 1e-6 there.
GLM-5's queries see all keys of a sequence of up to `index_topk` tokens. Longer ones, for which its indexer would choose
keys, are refused; the indexer is not trained, and exports copy it.
Layers for multi-token prediction, which a checkpoint may have after the last layer, are not trained; exports copy them.
"""

from dataclasses import replace
from typing import Any

from grpo_mcore.families.dense import Layer, decoder_params, dense_shape, rope_settings, yarn_shape
from grpo_mcore.families.experts import expert_params, sigmoid_experts
from grpo_mcore.families.spec import EngineForm, FamilyError, LatentShape, ModelShape, Param, Split, YarnShape, require

ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""The only supported routing of experts, by keys of published configs; those that transformers writes lack them."""


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`."""
    require(config, attention_bias=False, rope_interleave=True)
    require(config, **ROUTING, moe_layer_freq=1)
    latent = LatentShape(
        query_rank=config.get("q_lora_rank"),
        key_value_rank=config["kv_lora_rank"],
        plain_dim=config["qk_nope_head_dim"],
        rotary_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
        yarn=_yarn(config),
    )
    indexed = "index_topk" in config
    model = dense_shape(
        config | {"layer_types": None} if indexed else config,
        family="deepseek_v3", qkv_bias=False, qk_norm=False, experts=sigmoid_experts(config), latent=latent,
    )  # fmt: skip
    if not indexed:
        return model
    return replace(model, longest_sequence=config["index_topk"], carried=(*model.carried, ".self_attn.indexer."))


def _yarn(config: dict[str, Any]) -> YarnShape | None:
    rope = rope_settings(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn" or not rope.get("truncate", True):
        raise FamilyError(
            f"config.json: RoPE scaling {rope} is not supported for {config['model_type']} models; YaRN that rounds is"
        )
    return yarn_shape(rope, latent=True)


def params(shape: ModelShape) -> tuple[Param, ...]:
    """Declare every parameter of the model, in the order of the forward pass."""
    return decoder_params(shape, _attention, expert_params())


def _attention(layer: Layer) -> list[Param]:
    shape, latent = layer.shape, layer.shape.latent
    assert latent is not None
    h, heads, rank = shape.hidden_size, shape.num_heads, latent.key_value_rank

    def param(megatron: str, split: Split, hf: str, *size: int, fused_at: int | None = None) -> Param:
        """`fused_at`: first row in vLLM's parameter that fuses both down projections."""
        tensor = layer.hf(f"self_attn.{hf}.weight", *size)
        if fused_at is None:
            return layer.param(f"self_attention.{megatron}.weight", split, tensor)
        form, fused = EngineForm(start=fused_at), "self_attn.fused_qkv_a_proj.weight"
        return layer.param(f"self_attention.{megatron}.weight", split, tensor, fused=fused, form=form)

    if latent.query_rank is None:
        query = [param("linear_q_proj", Split.ROWS, "q_proj", heads * shape.head_dim, h)]
    else:
        query = [
            param("linear_q_down_proj", Split.REPLICATED, "q_a_proj", latent.query_rank, h, fused_at=0),
            param("q_layernorm", Split.REPLICATED, "q_a_layernorm", latent.query_rank),
            param("linear_q_up_proj", Split.ROWS, "q_b_proj", heads * shape.head_dim, latent.query_rank),
        ]
    down, width = "kv_a_proj_with_mqa", rank + latent.rotary_dim
    return [
        *query,
        param("linear_kv_down_proj", Split.REPLICATED, down, width, h, fused_at=latent.query_rank),
        param("kv_layernorm", Split.REPLICATED, "kv_a_layernorm", rank),
        param("linear_kv_up_proj", Split.ROWS, "kv_b_proj", heads * (latent.plain_dim + latent.value_dim), rank),
        param("linear_proj", Split.COLUMNS, "o_proj", h, heads * latent.value_dim),
    ]
