"""Megatron-Core's settings for a model on a layout."""

from functools import partial
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig

from grpo_mcore.families import FamilyError, ModelShape
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.parallel.layers.experts import computes_in_groups
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.recipe import MegatronConfig, nearest_hint
from grpo_mcore.recipe.errors import in_yaml

ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh")}

OVERRIDES: dict[str, dict[Any, Any]] = {
    "attention_backend": {name: AttnBackend[name] for name in ("flash", "fused", "unfused")},
    "batch_p2p_sync": {False: False, True: True},
    "deterministic_mode": {False: False, True: True},
}
"""Fields that `model_overrides` may set, and Megatron-Core's value for each of a recipe's. Others do nothing here, or
make it another model than the engines have. A field needs a test that it acts, in test_settings.py."""


def transformer_config(
    shape: ModelShape, layout: PolicyLayout, settings: MegatronConfig, dtype: torch.dtype, platform: Platform
) -> TransformerConfig:
    """Return Megatron-Core's settings for the whole model; all chunks of this rank share the object. Raises
    FamilyError if `model_overrides` has a field that is decided here or is none of OVERRIDES, or another value."""
    fused = platform.transformer_engine
    by_all_gather = shape.experts is not None and settings.gathers_tokens
    values: dict[str, Any] = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        layernorm_zero_centered_gamma=shape.centered_norms,
        attention_output_gate=shape.output_gate,
        add_bias_linear=shape.biases,
        softmax_type="learnable" if shape.sinks else "vanilla",
        add_qkv_bias=shape.qkv_bias,
        gated_linear_unit=not shape.blocks,
        activation_func=squared_relu if shape.blocks else ACTIVATIONS[shape.activation],
        softmax_scale=shape.attention_scale,
        **_window_settings(shape),
        hetereogenous_dist_checkpoint=bool(shape.blocks or shape.delta),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        num_layers_in_first_pipeline_stage=settings.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=settings.num_layers_in_last_pipeline_stage,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        # Megatron-Core has no fused kernels for the others and refuses the setting.
        bias_activation_fusion=fused
        and settings.bias_activation_fusion
        and not shape.blocks
        and shape.activation == "silu"
        and not shape.biases,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # The fused kernel for packed rows has no argument for the factor of sine and cosine that YaRN has.
        apply_rope_fusion=platform.fused_attention
        and settings.apply_rope_fusion
        and shape.latent is None
        and shape.yarn is None,
        perform_initialization=False,
        use_cpu_initialization=not platform.on_gpu,
        calculate_per_token_loss=True,  # the loss is already normalised by global counts: Megatron-Core must not divide
        # Bins differ in length, also under pipeline parallelism. The allgather dispatcher needs rows of one length:
        # `Policy` pads them, and there are no pipeline stages.
        variable_seq_lengths=not by_all_gather,
        moe_token_dispatcher_type="allgather" if by_all_gather else "alltoall",
        # Interleaved stages go on while they send: memory given back then may hold other values before it is sent.
        deallocate_pipeline_outputs=layout.pipeline > 1 and layout.virtual == 1,
        # With two interleaved stages, each is both the next and the previous one of the other: with the messages of
        # both directions in one batch they would confuse activations with gradients.
        batch_p2p_comm=layout.virtual == 1,
        overlap_p2p_comm=layout.virtual > 1,
        moe_grouped_gemm=computes_in_groups(shape, layout, settings, dtype, platform),
        **_expert_settings(shape, layout, settings, platform),
        **_latent_settings(shape),
        **_recompute_settings(settings),
    )
    for name, value in settings.model_overrides.items():
        key = f"policy.megatron_cfg.model_overrides.{name}"
        if name in values:
            raise FamilyError(f"{key}: decided by the model or by another key of the recipe; remove it")
        if name not in OVERRIDES:
            raise FamilyError(
                f"{key}: it would have no effect, or compute another model than the engines; "
                f"{', '.join(OVERRIDES)} can be set{nearest_hint(name, OVERRIDES)}"
            )
        if not isinstance(value, str | bool) or value not in OVERRIDES[name]:
            raise FamilyError(
                f"{key}: expected one of {', '.join(map(in_yaml, OVERRIDES[name]))}, got {in_yaml(value)}"
            )
        values[name] = OVERRIDES[name][value]
    config = (MLATransformerConfig if shape.latent else TransformerConfig)(**values)
    if (yarn := shape.yarn) is not None:  # Megatron-Core reads these, but its class has no such fields
        config.yarn_rotary_scaling_factor = yarn.factor
        config.yarn_original_max_position_embeddings = yarn.original_positions
        config.yarn_beta_fast, config.yarn_beta_slow = yarn.beta_fast, yarn.beta_slow
        config.yarn_mscale, config.yarn_mscale_all_dim = yarn.mscale, yarn.mscale_all_dim
        config.yarn_correction_range_round_to_int = yarn.truncate
    return config


def _recompute_settings(settings: MegatronConfig) -> dict[str, Any]:
    """Return Megatron-Core's settings for what the backward pass recomputes."""
    selective = settings.activation_checkpointing and settings.recompute_granularity == "selective"
    whole = settings.activation_checkpointing and not selective
    return {
        "recompute_granularity": "selective" if selective else "full" if whole else None,
        "recompute_method": "uniform" if whole else None,
        "recompute_num_layers": 1 if whole else None,
        "recompute_modules": settings.recompute_modules if selective else None,
    }


def _window_settings(shape: ModelShape) -> dict[str, Any]:
    """Return Megatron-Core's settings for layers whose queries see a window of keys, of one size."""
    sizes = {window for window in shape.windows if window}
    if not sizes:
        return {}
    (size,) = sizes
    return {"window_size": (size - 1, 0), "window_attn_skip_freq": [int(bool(window)) for window in shape.windows]}


def _latent_settings(shape: ModelShape) -> dict[str, Any]:
    """Return Megatron-Core's settings for latent attention."""
    latent = shape.latent
    if latent is None:
        return {}
    values = {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": shape.rope_theta,
        "rope_type": "yarn" if latent.yarn else "rope",
    }
    if latent.yarn is not None:
        values |= {
            "rotary_scaling_factor": latent.yarn.factor,
            "original_max_position_embeddings": latent.yarn.original_positions,
            "beta_fast": latent.yarn.beta_fast,
            "beta_slow": latent.yarn.beta_slow,
            "mscale": latent.yarn.mscale,
            "mscale_all_dim": latent.yarn.mscale_all_dim,
        }
    return values


def _expert_settings(
    shape: ModelShape, layout: PolicyLayout, settings: MegatronConfig, platform: Platform
) -> dict[str, Any]:
    """Return Megatron-Core's settings for the experts: no auxiliary loss, no dropped tokens."""
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.active,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_layer_freq": [int(shape.is_expert_layer(layer)) for layer in range(shape.num_layers)],
        # Softmax over the chosen ones is the same as normalising; Megatron-Core refuses it for one expert a token.
        "moe_router_pre_softmax": not experts.normalized or experts.active == 1,
        "moe_router_score_function": "sigmoid" if experts.sigmoid else "softmax",
        "moe_router_enable_expert_bias": experts.sigmoid,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "moe_router_group_topk": experts.active_groups if experts.groups > 1 else None,
        "moe_router_topk_scaling_factor": experts.scaling if experts.scaling != 1.0 else None,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_dtype": settings.moe_router_dtype,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        # The fused kernel refuses a rank whose experts get no token, which all-to-all dispatching never asks it for.
        "moe_permute_fusion": platform.transformer_engine
        and settings.moe_permute_fusion
        and not settings.gathers_tokens,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }
