"""Parameters that mixture-of-experts families share: a router and experts in place of a layer's MLP."""

from __future__ import annotations

from typing import Any

from grpo_mcore.families.dense import Layer, LayerPart, mlp_params
from grpo_mcore.families.spec import FamilyError, Param, Split


def expert_count(config: dict[str, Any]) -> int:
    """Return the number of experts, under any of the names that configs use for it."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if name in config:
            return config[name]
    raise FamilyError(f"config.json of a {config['model_type']} model lacks num_experts")


def expert_params(
    *, block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> LayerPart:
    """Return a function that declares a layer's experts, or its MLP if it has none, by these checkpoint names."""

    def declare(layer: Layer) -> list[Param]:
        shape = layer.shape
        if not shape.is_expert_layer(layer.index):
            return mlp_params(layer)
        experts = shape.experts
        assert experts is not None
        h, f = shape.hidden_size, experts.ffn_hidden_size
        router = layer.hf(f"{block}.gate.weight", experts.count, h)
        found = [layer.param("mlp.router.weight", Split.REPLICATED, router)]
        if experts.sigmoid:
            bias = layer.hf(f"{block}.gate.e_score_correction_bias", experts.count, float32=True)
            found.append(layer.param("mlp.router.expert_bias", Split.REPLICATED, bias, buffer=True))
        fused = f"{block}.experts.routed_experts"  # vLLM fuses all experts
        for index in range(experts.count):
            expert = (index, experts.count)
            hf, megatron = f"{block}.experts.{index}", "mlp.experts.local_experts.{expert}"
            gate_up = layer.hf(f"{hf}.{gate}.weight", f, h), layer.hf(f"{hf}.{up}.weight", f, h)
            out = layer.hf(f"{hf}.{down}.weight", h, f)
            for part, split, tensors, theirs in (
                ("linear_fc1", Split.GATE_UP, gate_up, "w13_weight"),
                ("linear_fc2", Split.COLUMNS, (out,), "w2_weight"),
            ):
                name = f"{megatron}.{part}.weight"
                found.append(layer.param(name, split, *tensors, fused=f"{fused}.{theirs}", expert=expert))
        if experts.shared_ffn_hidden_size:
            size = experts.shared_ffn_hidden_size
            found += mlp_params(layer, f"{block}.shared_experts", "mlp.shared_experts", size)
        return found

    return declare
