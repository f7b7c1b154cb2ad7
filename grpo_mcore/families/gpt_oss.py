"""gpt-oss: attention with sinks, every other layer with a window of keys; biases everywhere; experts whose clamped gate
and up rows alternate, and which the checkpoint stacks, transposed. Released weights are converted to bfloat16 first."""

from dataclasses import replace
from typing import Any

from grpo_mcore.families.dense import Layer, attention_params, decoder_params, dense_shape, rope_settings, yarn_shape
from grpo_mcore.families.experts import expert_count
from grpo_mcore.families.spec import ExpertShape, FamilyError, HfTensor, ModelShape, Param, Split, require


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`. vLLM gives the even layers the window, and always clamps at 7."""
    require(config, attention_bias=True, swiglu_alpha=1.702, swiglu_limit=7.0)
    rope = rope_settings(config)
    if (
        rope.get("rope_type") != "yarn"
        or rope.get("truncate", True)
        or (rope.get("mscale") and rope.get("mscale_all_dim"))
    ):
        raise FamilyError(f"config.json: RoPE {rope} is not supported for gpt_oss models; YaRN without rounding is")
    layers = range(config["num_hidden_layers"])
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in layers]
    if config.get("layer_types", kinds) != kinds:
        raise FamilyError("config.json: layer_types of gpt_oss models must begin with a window and alternate")
    experts = ExpertShape(
        count=expert_count(config),
        active=config["num_experts_per_tok"],
        ffn_hidden_size=config["intermediate_size"],
        clamp=7.0,
    )
    plain = {"rope_parameters": None, "rope_scaling": None, "layer_types": None, "rope_theta": rope["rope_theta"]}
    model = dense_shape(config | plain, family="gpt_oss", qkv_bias=True, qk_norm=False, experts=experts)
    return replace(
        model,
        windows=tuple(0 if layer % 2 else config["sliding_window"] for layer in layers),
        biases=True,
        sinks=True,
        yarn=yarn_shape(rope),
    )


def params(shape: ModelShape) -> tuple[Param, ...]:
    """Declare every parameter of the model, in the order of the forward pass."""
    declared = decoder_params(shape, _attention, _experts)
    renamed = ((param, (param.engine or "").replace(".self_attn.", ".attn.")) for param in declared)
    return tuple(replace(param, engine=name.replace(".embed_tokens.", ".embedding.")) for param, name in renamed)


def _attention(layer: Layer) -> list[Param]:
    shape = layer.shape
    bias, sinks = layer.hf("self_attn.o_proj.bias", shape.hidden_size), layer.hf("self_attn.sinks", shape.num_heads)
    return [
        *attention_params(layer),
        layer.param("self_attention.linear_proj.bias", Split.REPLICATED, bias),
        layer.param("self_attention.core_attention.softmax_offset", Split.ROWS, sinks),
    ]


def _experts(layer: Layer) -> list[Param]:
    shape, experts = layer.shape, layer.shape.experts
    assert experts is not None
    h, f, count = shape.hidden_size, experts.ffn_hidden_size, experts.count
    declared = [
        layer.param("mlp.router.weight", Split.REPLICATED, layer.hf("mlp.router.weight", count, h)),
        layer.param("mlp.router.bias", Split.REPLICATED, layer.hf("mlp.router.bias", count)),
    ]
    for expert in range(count):
        for megatron, split, name, fused, *size in (
            ("linear_fc1.weight", Split.ROWS, "gate_up_proj", "w13_weight", 2 * f, h),
            ("linear_fc1.bias", Split.ROWS, "gate_up_proj_bias", "w13_bias", 2 * f),
            ("linear_fc2.weight", Split.COLUMNS, "down_proj", "w2_weight", h, f),
            ("linear_fc2.bias", Split.REPLICATED, "down_proj_bias", "w2_bias", h),
        ):
            tensor_name = f"{shape.root}.layers.{layer.index}.mlp.experts.{expert}.{name}"
            declared.append(
                layer.param(
                    f"mlp.experts.local_experts.{{expert}}.{megatron}",
                    split,
                    HfTensor(tensor_name, tuple(size), stack=(expert, count)),
                    fused=f"mlp.experts.routed_experts.{fused}",
                    expert=(expert, count),
                )
            )
    return declared
