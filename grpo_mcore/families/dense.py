"""The parameters, FLOPs and config reading that the dense decoder families (Qwen2, Qwen3, Llama) share."""

from __future__ import annotations

from typing import Any

from grpo_mcore.families.spec import FamilyError, HfTensor, ModelShape, Param, Split, Stage


def dense_shape(config: dict[str, Any], *, family: str, qkv_bias: bool, qk_norm: bool) -> ModelShape:
    """ModelShape from a Hugging Face `config.json`. Raises FamilyError for what is not modelled here."""
    required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [key for key in required if key not in config]
    if missing:
        raise FamilyError(f"config.json of a {family} model lacks {', '.join(missing)}")
    if config.get("hidden_act", "silu") != "silu":
        raise FamilyError(f"config.json: hidden_act {config['hidden_act']!r} of a {family} model; only silu is built")
    if config.get("use_sliding_window"):
        raise FamilyError("config.json: use_sliding_window true is not supported; full attention only")
    heads = config["num_attention_heads"]
    theta, scaling = _rope(config)
    return ModelShape(
        family=family,
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 32768),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling_factor=scaling,
        tied_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def _rope(config: dict[str, Any]) -> tuple[float, float | None]:
    """(theta, Llama 3 scaling factor or None), from either way of writing it (`rope_parameters` since 5.0)."""
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_scaling") or {}
    rope |= config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(rope["rope_theta"]), None
    built_in = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(rope.get(key) == value for key, value in built_in.items()):
        return float(rope["rope_theta"]), float(rope["factor"])
    raise FamilyError(f"config.json: RoPE scaling {rope} is not supported; plain RoPE or Llama 3's scaling is")


def dense_params(shape: ModelShape) -> tuple[Param, ...]:
    """Every parameter of the model, in the order of the forward pass."""
    h, v = shape.hidden_size, shape.vocab_size
    embedding = HfTensor("model.embed_tokens.weight", (v, h))
    found = [Param("embedding.word_embeddings.weight", (embedding,), Split.VOCAB, Stage.FIRST, engine=embedding.name)]
    for layer in range(shape.num_layers):
        found += _layer(shape, layer)
    norm = HfTensor("model.norm.weight", (h,))
    found.append(Param("decoder.final_layernorm.weight", (norm,), Split.REPLICATED, Stage.LAST, engine=norm.name))
    head = embedding if shape.tied_embeddings else HfTensor("lm_head.weight", (v, h))
    tied = shape.tied_embeddings
    found.append(Param("output_layer.weight", (head,), Split.VOCAB, Stage.LAST, copy=tied, engine=head.name))
    return tuple(found)


def _layer(shape: ModelShape, layer: int) -> list[Param]:
    h, d, f = shape.hidden_size, shape.head_dim, shape.ffn_hidden_size
    query, key_value = shape.num_heads * d, shape.num_kv_heads * d

    def hf(name: str, *size: int) -> HfTensor:
        return HfTensor(f"model.layers.{layer}.{name}", size)

    def param(name: str, split: Split, *tensors: HfTensor, fused: str | None = None) -> Param:
        """`fused`: vLLM's parameter of several tensors; one tensor has its own name there too."""
        engine = tensors[0].name if fused is None else f"model.layers.{layer}.{fused}"
        return Param("decoder.layers.{layer}." + name, tensors, split, Stage.LAYER, layer, engine=engine)

    def qkv(kind: str, *tail: int) -> tuple[HfTensor, HfTensor, HfTensor]:
        return (
            hf(f"self_attn.q_proj.{kind}", query, *tail),
            hf(f"self_attn.k_proj.{kind}", key_value, *tail),
            hf(f"self_attn.v_proj.{kind}", key_value, *tail),
        )

    found = [
        param("input_layernorm.weight", Split.REPLICATED, hf("input_layernorm.weight", h)),
        param("self_attention.linear_qkv.weight", Split.QKV, *qkv("weight", h), fused="self_attn.qkv_proj.weight"),
    ]
    if shape.qkv_bias:
        bias = "self_attention.linear_qkv.bias"
        found.append(param(bias, Split.QKV, *qkv("bias"), fused="self_attn.qkv_proj.bias"))
    if shape.qk_norm:
        found += [
            param("self_attention.q_layernorm.weight", Split.REPLICATED, hf("self_attn.q_norm.weight", d)),
            param("self_attention.k_layernorm.weight", Split.REPLICATED, hf("self_attn.k_norm.weight", d)),
        ]
    return found + [
        param("self_attention.linear_proj.weight", Split.COLUMNS, hf("self_attn.o_proj.weight", h, query)),
        param("pre_mlp_layernorm.weight", Split.REPLICATED, hf("post_attention_layernorm.weight", h)),
        param(
            "mlp.linear_fc1.weight", Split.GATE_UP, hf("mlp.gate_proj.weight", f, h), hf("mlp.up_proj.weight", f, h),
            fused="mlp.gate_up_proj.weight",
        ),
        param("mlp.linear_fc2.weight", Split.COLUMNS, hf("mlp.down_proj.weight", h, f)),
    ]  # fmt: skip


def dense_flops(shape: ModelShape, tokens: int, sum_of_squared_lengths: int) -> float:
    """Multiply-add FLOPs of one forward pass: 2 x weights x tokens, plus causal attention's 2 x 2 x L²/2 x width."""
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * query + 2 * key_value)
    layer = attention + 3 * shape.hidden_size * shape.ffn_hidden_size
    matmuls = shape.num_layers * layer + shape.vocab_size * shape.hidden_size
    return 2.0 * matmuls * tokens + 2.0 * shape.num_layers * query * sum_of_squared_lengths
