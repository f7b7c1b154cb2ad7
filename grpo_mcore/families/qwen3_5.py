"""Qwen3-Next, Qwen3.5, 3.6 and 3.8: three of four layers are Gated DeltaNet mixers, the fourth has attention with an
output gate and partial rotary embeddings; norms scale by 1 + weight; with or without experts. Of vision models the text
part is trained; exports copy the rest."""

from dataclasses import replace
from typing import Any

from grpo_mcore.families.dense import Layer, attention_params, decoder_params, dense_shape, mlp_params
from grpo_mcore.families.experts import dense_layers, expert_params
from grpo_mcore.families.images import with_vision
from grpo_mcore.families.spec import STATE_BYTES, DeltaShape, EngineForm, ExpertShape, ModelShape, Param, Split, require


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`, of a vision model that of its text part."""
    if "text_config" in config:
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
        tower = "Qwen3_5MoeVisionModel" if "num_experts" in config["text_config"] else "Qwen3_5VisionModel"
        return with_vision(
            shape(config["text_config"] | tied),
            config, tower, root="model.visual", text_root="model.language_model", interleaved=True,
        )  # fmt: skip
    require(config, attention_bias=False, norm_topk_prob=True, attn_output_gate=True, output_gate_type="swish")
    require(config, qkv_bias=False)  # only vLLM reads it
    layers, every = range(config["num_hidden_layers"]), config.get("full_attention_interval", 4)
    kinds = config.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in layers
    ]
    experts = None
    if "num_experts" in config:
        experts = ExpertShape(
            count=config["num_experts"],
            active=config["num_experts_per_tok"],
            ffn_hidden_size=config["moe_intermediate_size"],
            dense_layers=dense_layers(config),
            shared_ffn_hidden_size=config["shared_expert_intermediate_size"],
            shared_gate=True,
        )
    attends = [kind for kind in kinds if kind != "linear_attention"]
    dense = {"partial_rotary_factor": 0.25, "intermediate_size": config.get("moe_intermediate_size")}
    model = dense_shape(
        dense | config | {"layer_types": attends},
        family="qwen3_5_text", qkv_bias=False, qk_norm=True, partial_rotary=True, experts=experts,
    )  # fmt: skip
    delta = DeltaShape(
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        kernel=config["linear_conv_kernel_dim"],
        inputs_by_head=config["model_type"] == "qwen3_next",
        state_bytes=STATE_BYTES[config.get("mamba_ssm_dtype")],
    )
    return replace(model, delta=delta, output_gate=True, centered_norms=True, carried=("mtp.",))


def params(shape: ModelShape) -> tuple[Param, ...]:
    """Declare every parameter of the model, in the order of the forward pass."""
    network = expert_params(shared="shared_expert") if shape.experts else mlp_params
    return decoder_params(shape, _mixer, network)


def _mixer(layer: Layer) -> list[Param]:
    shape, delta = layer.shape, layer.shape.delta
    assert delta is not None
    if not shape.is_delta_layer(layer.index):
        return attention_params(layer)
    h, heads, convolved = shape.hidden_size, delta.value_heads, sum(delta.convolved_parts)

    def part(name: str, split: Split, *size: int, float32: bool = False, **how: Any) -> Param:
        tensor = layer.hf(f"linear_attn.{name}", *size, float32=float32)
        return layer.param(f"self_attention.{name}", split, tensor, **how)

    def fused(name: str, rows: dict[str, int], parts: tuple[int, ...]) -> Param:
        if delta.inputs_by_head:  # vLLM reorders what they return
            form = EngineForm(Split.ROWS)
            return part(f"{name}.weight", Split.PARTS, sum(parts), h, parts=parts, groups=delta.key_heads, form=form)
        tensors = [layer.hf(f"linear_attn.in_proj_{kind}.weight", count, h) for kind, count in rows.items()]
        megatron_name = f"self_attention.{name}.weight"
        return layer.param(megatron_name, Split.PARTS, *tensors, fused=f"linear_attn.{name}.weight", parts=parts)

    return [
        fused("in_proj_qkvz", {"qkv": convolved, "z": delta.values}, (*delta.convolved_parts, delta.values)),
        fused("in_proj_ba", {"b": heads, "a": heads}, (heads, heads)),
        part("conv1d.weight", Split.PARTS, convolved, 1, delta.kernel, parts=delta.convolved_parts),
        part("A_log", Split.ROWS, heads, float32=True),
        part("dt_bias", Split.ROWS, heads),
        part("norm.weight", Split.REPLICATED, delta.value_dim),
        part("out_proj.weight", Split.COLUMNS, h, delta.values),
    ]
