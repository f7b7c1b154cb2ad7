"""Config reading, parameters and FLOPs that the decoder families share; dense families (Qwen2, Qwen3, Llama) need
nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_mcore.families.spec import (
    SAME_FORM,
    EngineForm,
    ExpertShape,
    FamilyError,
    HfTensor,
    LatentShape,
    ModelShape,
    Param,
    Split,
    Stage,
    YarnShape,
    require,
    require_words,
)


def dense_shape(
    config: dict[str, Any],
    *,
    family: str,
    qkv_bias: bool,
    qk_norm: bool,
    partial_rotary: bool = False,
    experts: ExpertShape | None = None,
    latent: LatentShape | None = None,
) -> ModelShape:
    """Read a ModelShape from a Hugging Face `config.json`. `partial_rotary`: the family can rotate a part of each head.
    Raises FamilyError for unsupported values."""
    require(config, hidden_act="silu", use_sliding_window=False)
    require_words(config, "layer_types", "full_attention")
    fraction = float(rope_settings(config).get("partial_rotary_factor") or 1.0)
    if fraction != 1.0 and not partial_rotary:
        raise FamilyError(
            f"config.json: partial_rotary_factor {fraction} is not supported for {config['model_type']} models; only 1"
        )
    heads = config["num_attention_heads"]
    # Latent attention has its own scaling (YaRN), and one head size for queries and keys.
    rope = _Rope(float(rope_settings(config)["rope_theta"])) if latent is not None else _rope(config)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    layers = config["num_hidden_layers"]  # layers for multi-token prediction come after them
    return ModelShape(
        family=family,
        hidden_size=config["hidden_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim if latent is None else latent.plain_dim + latent.rotary_dim,
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 32768),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling_factor=rope.llama3_factor,
        tied_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        rotary_fraction=fraction,
        experts=experts,
        latent=latent,
        yarn=rope.yarn,
        carried=tuple(f"model.layers.{layers + i}." for i in range(config.get("num_nextn_predict_layers") or 0)),
    )


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings from either form (`rope_parameters` since transformers 5.0)."""
    rope = {
        "rope_theta": config.get("rope_theta", 10000.0),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
    }
    rope |= (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
    if (positions := config.get("original_max_position_embeddings")) is not None:  # transformers puts it first
        rope["original_max_position_embeddings"] = positions
    return rope


@dataclass(frozen=True)
class _Rope:
    theta: float
    llama3_factor: float | None = None
    yarn: YarnShape | None = None


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The only values with which Megatron-Core scales as Llama 3 does."""


def _rope(config: dict[str, Any]) -> _Rope:
    rope = rope_settings(config)
    theta, kind = float(rope["rope_theta"]), rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "mrope"):  # text has one position on all axes
        return _Rope(theta)
    if kind == "llama3" and all(rope.get(key) == value for key, value in _LLAMA3.items()):
        return _Rope(theta, llama3_factor=float(rope["factor"]))
    if kind == "yarn" and not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return _Rope(theta, yarn=yarn_shape(rope))
    raise FamilyError(
        f"config.json: RoPE scaling {rope} is not supported; known are plain RoPE, YaRN without mscale, and Llama 3's "
        f"scaling with {', '.join(f'{key} {value}' for key, value in _LLAMA3.items())}"
    )


def yarn_shape(rope: dict[str, Any], *, latent: bool = False) -> YarnShape:
    """Read a YarnShape from rotary settings. Raises FamilyError for settings that Megatron-Core's YaRN lacks.

    With one of mscale and mscale_all_dim alone (the other null or 0) transformers scales as without both. vLLM's latent
    attention (`latent`) does so only where mscale is 1, its default, and mscale_all_dim is the one that is missing.
    """
    mscale, mscale_all_dim = (rope.get(key) or None for key in ("mscale", "mscale_all_dim"))
    both = mscale is not None and mscale_all_dim is not None
    differs = latent and not both and (mscale_all_dim is not None or mscale not in (None, 1))
    if rope.get("attention_factor") is not None or differs:
        raise FamilyError(
            f"config.json: RoPE scaling {rope}: YaRN with attention_factor, or with one of mscale and mscale_all_dim "
            "alone in latent attention, is not supported"
        )
    if rope.get("attn_factor") not in (None, 1):
        raise FamilyError(
            f"config.json: RoPE scaling: attn_factor {rope['attn_factor']}: vLLM once scaled attention by it, and "
            "neither transformers nor today's vLLM does; set hf_config_overrides.rope_scaling.attn_factor: 1 to "
            "train the model as they compute it"
        )
    if wanting := [key for key in ("factor", "original_max_position_embeddings") if not rope.get(key)]:
        raise FamilyError(f"config.json: RoPE scaling {rope}: YaRN needs {' and '.join(wanting)}")
    return YarnShape(
        factor=float(rope["factor"]),
        original_positions=rope["original_max_position_embeddings"],
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        mscale=float(rope["mscale"]) if both else 1.0,
        mscale_all_dim=float(rope["mscale_all_dim"]) if both else 0.0,
        truncate=bool(rope.get("truncate", True)),
    )


class Layer:
    """Declares the parameters of one layer."""

    def __init__(self, shape: ModelShape, index: int) -> None:
        self.shape, self.index = shape, index

    def hf(self, name: str, *size: int, float32: bool = False) -> HfTensor:
        return HfTensor(f"{self.shape.root}.layers.{self.index}.{name}", size, float32)

    def param(
        self,
        name: str,
        split: Split,
        *tensors: HfTensor,
        fused: str | None = None,
        form: EngineForm = SAME_FORM,
        expert: tuple[int, int] | None = None,
        buffer: bool = False,
        parts: tuple[int, ...] = (),
        groups: int = 1,
    ) -> Param:
        """`fused`: vLLM's name within the layer if it fuses tensors or experts, or differs; else the tensor's name."""
        root = self.shape.engine_root
        engine = f"{root}.layers.{self.index}.{fused}" if fused else tensors[0].name.replace(self.shape.root, root, 1)
        name = "decoder.layers.{layer}." + name
        return Param(
            name, tensors, split, Stage.LAYER, self.index,
            expert=expert, engine=engine, engine_form=form, buffer=buffer, parts=parts, groups=groups,
        )  # fmt: skip


LayerPart = Callable[[Layer], list[Param]]


def decoder_params(shape: ModelShape, attention: LayerPart, mlp: LayerPart) -> tuple[Param, ...]:
    """Declare every parameter of the model, in the order of the forward pass."""
    h, v = shape.hidden_size, shape.vocab_size
    root, engine = shape.root, shape.engine_root
    embedding = HfTensor(f"{root}.embed_tokens.weight", (v, h))
    words = f"{engine}.embed_tokens.weight"
    params = [Param("embedding.word_embeddings.weight", (embedding,), Split.VOCAB, Stage.FIRST, engine=words)]
    for index in range(shape.num_layers):
        layer = Layer(shape, index)
        params.append(layer.param("input_layernorm.weight", Split.REPLICATED, layer.hf("input_layernorm.weight", h)))
        params += attention(layer)
        before = "post_attention_layernorm"
        if shape.sandwich_norms:
            after, before = layer.hf("post_attention_layernorm.weight", h), "pre_feedforward_layernorm"
            params.append(layer.param("self_attn_bda.norm.weight", Split.REPLICATED, after))
        params.append(layer.param("pre_mlp_layernorm.weight", Split.REPLICATED, layer.hf(f"{before}.weight", h)))
        params += mlp(layer)
        if shape.sandwich_norms:
            after = layer.hf("post_feedforward_layernorm.weight", h)
            params.append(layer.param("mlp_bda.norm.weight", Split.REPLICATED, after))
    norm, final = HfTensor(f"{root}.norm.weight", (h,)), f"{engine}.norm.weight"
    params.append(Param("decoder.final_layernorm.weight", (norm,), Split.REPLICATED, Stage.LAST, engine=final))
    tied = shape.tied_embeddings
    head = embedding if tied else HfTensor("lm_head.weight", (v, h))
    logits = words if tied else f"{engine.removesuffix('model')}lm_head.weight"
    params.append(Param("output_layer.weight", (head,), Split.VOCAB, Stage.LAST, copy=tied, engine=logits))
    return tuple(params)


def dense_params(shape: ModelShape) -> tuple[Param, ...]:
    """Declare every parameter of a dense model, in the order of the forward pass."""
    return decoder_params(shape, attention_params, mlp_params)


def attention_params(layer: Layer) -> list[Param]:
    """Declare the parameters of grouped-query attention."""
    shape = layer.shape
    h, d = shape.hidden_size, shape.head_dim
    query, key_value = shape.num_heads * d, shape.num_kv_heads * d
    split, form = (Split.GATED_QKV, EngineForm(Split.QKV)) if shape.output_gate else (Split.QKV, SAME_FORM)

    def qkv(kind: str, *tail: int) -> tuple[HfTensor, HfTensor, HfTensor]:
        return (
            layer.hf(f"self_attn.q_proj.{kind}", 2 * query if shape.output_gate else query, *tail),
            layer.hf(f"self_attn.k_proj.{kind}", key_value, *tail),
            layer.hf(f"self_attn.v_proj.{kind}", key_value, *tail),
        )

    params = []
    for kind, *tail in (("weight", h), ("bias",)) if shape.qkv_bias else (("weight", h),):
        name, fused = f"self_attention.linear_qkv.{kind}", f"self_attn.qkv_proj.{kind}"
        params.append(layer.param(name, split, *qkv(kind, *tail), fused=fused, form=form))
    if shape.qk_norm:
        for part in ("q", "k"):
            norm = layer.hf(f"self_attn.{part}_norm.weight", d)
            params.append(layer.param(f"self_attention.{part}_layernorm.weight", Split.REPLICATED, norm))
    for part, width in (("q", query), ("k", key_value)) if shape.wide_qk_norm else ():
        norm = layer.hf(f"self_attn.{part}_norm.weight", width)
        params.append(layer.param(f"self_attention.{part}_layernorm.weight", Split.ROWS, norm))
    output = layer.hf("self_attn.o_proj.weight", h, query)
    return [*params, layer.param("self_attention.linear_proj.weight", Split.COLUMNS, output)]


def mlp_params(layer: Layer, hf: str = "mlp", megatron: str = "mlp", size: int | None = None) -> list[Param]:
    """Declare the parameters of one gated feed-forward network."""
    h, f = layer.shape.hidden_size, size or layer.shape.ffn_hidden_size
    gate, up = layer.hf(f"{hf}.gate_proj.weight", f, h), layer.hf(f"{hf}.up_proj.weight", f, h)
    down, fused = layer.hf(f"{hf}.down_proj.weight", h, f), f"{hf}.gate_up_proj.weight"
    return [
        layer.param(f"{megatron}.linear_fc1.weight", Split.GATE_UP, gate, up, fused=fused),
        layer.param(f"{megatron}.linear_fc2.weight", Split.COLUMNS, down),
    ]


def dense_flops(shape: ModelShape, tokens: int, sum_of_squared_lengths: int) -> float:
    """Count the multiply-add FLOPs of one forward pass: 2 x weights that a token passes x tokens, plus causal
    attention's 2 x 2 x L²/2 x width."""
    attention, width_of_heads = _attention_weights(shape)
    expert_layers = sum(shape.is_expert_layer(layer) for layer in range(shape.num_layers))
    linear_layers = len(shape.delta.layers) if shape.delta else 0
    attention_layers = shape.num_layers - linear_layers
    weights = attention_layers * attention + shape.vocab_size * shape.hidden_size
    if (delta := shape.delta) is not None:  # projections, and a state's update and readout
        projected = 2 * delta.keys + 3 * delta.values + 2 * delta.value_heads
        weights += linear_layers * (shape.hidden_size * projected + 2 * delta.values * delta.key_dim)
    weights += (shape.num_layers - expert_layers) * 3 * shape.hidden_size * shape.ffn_hidden_size
    if shape.experts is not None:
        width = shape.experts.active * shape.experts.ffn_hidden_size + shape.experts.shared_ffn_hidden_size
        weights += expert_layers * shape.hidden_size * (3 * width + shape.experts.count)
    return 2.0 * weights * tokens + 2.0 * attention_layers * width_of_heads * sum_of_squared_lengths


def _attention_weights(shape: ModelShape) -> tuple[int, float]:
    """Return the number of weights of one attention layer, and the mean width of all heads' queries and values."""
    heads, h, latent = shape.num_heads, shape.hidden_size, shape.latent
    if latent is None:
        query, key_value = heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return h * ((3 if shape.output_gate else 2) * query + 2 * key_value), query
    query = heads * shape.head_dim
    weights = h * query if latent.query_rank is None else latent.query_rank * (h + query)
    weights += h * (latent.key_value_rank + latent.rotary_dim)
    weights += latent.key_value_rank * heads * (latent.plain_dim + latent.value_dim) + heads * latent.value_dim * h
    return weights, (query + heads * latent.value_dim) / 2
