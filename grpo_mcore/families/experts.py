"""Parameters that mixture-of-experts families share: a router and experts in place of a layer's MLP."""

from dataclasses import replace
from typing import Any

from grpo_mcore.families.dense import Layer, LayerPart, mlp_params
from grpo_mcore.families.spec import ExpertShape, FamilyError, HfTensor, Param, Split, require, require_words


def expert_count(config: dict[str, Any]) -> int:
    """Return the number of experts, under any of the names that configs use for it."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if name in config:
            return config[name]
    raise FamilyError(f"config.json of a {config['model_type']} model lacks num_experts")


def dense_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the layers without experts of a Qwen config."""
    every = config.get("decoder_sparse_step") or 1
    layers = range(config["num_hidden_layers"])
    listed = config.get("mlp_only_layers") or ()
    return tuple(layer for layer in layers if (layer + 1) % every or layer in listed)


def sigmoid_experts(config: dict[str, Any]) -> ExpertShape:
    """Read the experts of DeepSeek-V3 and its successors: sigmoid scores with a correction bias, groups of experts, a
    shared expert, dense first layers."""
    require(config, norm_topk_prob=True)
    groups, active = config.get("n_group") or 1, config["num_experts_per_tok"]
    active_groups = config.get("topk_group") or 1
    if groups > 1 and active != 2 * active_groups:
        raise FamilyError(
            f"config.json: num_experts_per_tok {active} must be twice topk_group {active_groups}: groups are chosen by "
            "their best two experts"
        )
    require_words(config, "mlp_layer_types", "dense", "sparse")
    kinds = config.get("mlp_layer_types") or ["dense"] * (config.get("first_k_dense_replace") or 0)
    return ExpertShape(
        count=expert_count(config),
        active=active,
        ffn_hidden_size=config["moe_intermediate_size"],
        dense_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "dense"),
        shared_ffn_hidden_size=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
        sigmoid=True,
        groups=groups,
        active_groups=active_groups,
        scaling=config.get("routed_scaling_factor", 1.0),
    )


def expert_params(
    *,
    block: str = "mlp",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    shared: str = "shared_experts",
    bias: str = "gate.e_score_correction_bias",
    float32_router: bool = False,
) -> LayerPart:
    """Return a function that declares a layer's experts, or its MLP if it has none, by these checkpoint names.
    `float32_router`: vLLM keeps the router's weight in float32."""

    def declare(layer: Layer) -> list[Param]:
        shape = layer.shape
        if not shape.is_expert_layer(layer.index):
            return mlp_params(layer)
        experts = shape.experts
        assert experts is not None
        h, f = shape.hidden_size, experts.ffn_hidden_size
        router = layer.hf(f"{block}.gate.weight", experts.count, h, float32=float32_router)
        params = [layer.param("mlp.router.weight", Split.REPLICATED, router)]
        if experts.sigmoid:
            correction = layer.hf(f"{block}.{bias}", experts.count, float32=True)
            params.append(layer.param("mlp.router.expert_bias", Split.REPLICATED, correction, buffer=True))
        fused = f"{block}.experts.routed_experts"  # vLLM fuses all experts
        for index in range(experts.count):
            expert = (index, experts.count)
            hf, megatron = f"{block}.experts.{index}", "mlp.experts.local_experts.{expert}"
            gate_up: tuple[HfTensor, ...] = layer.hf(f"{hf}.{gate}.weight", f, h), layer.hf(f"{hf}.{up}.weight", f, h)
            out, first, parts = layer.hf(f"{hf}.{down}.weight", h, f), Split.GATE_UP, tuple[int, ...]()
            if shape.stacked_experts:
                both, out = (layer.hf(f"{hf}.gate_up_proj", 2 * f, h), layer.hf(f"{hf}.{down}", h, f))
                gate_up, out = (replace(both, stack=expert),), replace(out, stack=expert)
                first, parts = Split.PARTS, (f, f)
            for part, split, tensors, theirs, blocks in (
                ("linear_fc1", first, gate_up, "w13_weight", parts),
                ("linear_fc2", Split.COLUMNS, (out,), "w2_weight", ()),
            ):
                name, theirs = f"{megatron}.{part}.weight", f"{fused}.{theirs}"
                params.append(layer.param(name, split, *tensors, fused=theirs, expert=expert, parts=blocks))
        if experts.shared_ffn_hidden_size:
            size = experts.shared_ffn_hidden_size
            params += mlp_params(layer, f"{block}.{shared}", "mlp.shared_experts", size)
        if experts.shared_gate:
            scale = layer.hf(f"{block}.{shared}_gate.weight", 1, h)
            params.append(layer.param("mlp.shared_experts.gate_weight", Split.REPLICATED, scale))
        return params

    return declare
