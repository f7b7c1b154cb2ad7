"""Nemotron-H and Nemotron 3: each layer is a Mamba2 mixer, attention without positions, an MLP or experts; networks
have squared ReLU and no gate. Experts of Nemotron 3 Super and Ultra compute on a projection of the hidden states."""

from typing import Any

from grpo_mcore.families.dense import Layer
from grpo_mcore.families.experts import expert_count
from grpo_mcore.families.spec import (
    STATE_BYTES,
    Block,
    EngineForm,
    ExpertShape,
    FamilyError,
    HfTensor,
    MambaShape,
    ModelShape,
    Param,
    Split,
    Stage,
    require,
)

_BLOCKS = {
    **{"M": Block.MAMBA, "mamba": Block.MAMBA, "linear_attention": Block.MAMBA},
    **{"*": Block.ATTENTION, "attention": Block.ATTENTION, "full_attention": Block.ATTENTION},
    **{"-": Block.MLP, "mlp": Block.MLP},
    **{"E": Block.EXPERTS, "moe": Block.EXPERTS},
}


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`."""
    require(
        config, attention_bias=False, mlp_bias=False, use_bias=False, mamba_proj_bias=False, use_conv_bias=True,
        mlp_hidden_act="relu2", mamba_hidden_act="silu", sliding_window=None,
        residual_in_fp32=False, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    kinds = config.get("layers_block_type") or config["hybrid_override_pattern"]
    if unknown := sorted(set(kinds) - set(_BLOCKS)):
        raise FamilyError(f"config.json: layers of {', '.join(unknown)} are not supported for nemotron_h models")
    blocks = tuple(_BLOCKS[kind] for kind in kinds)
    if (layers := config.get("num_hidden_layers") or len(blocks)) != len(blocks):
        raise FamilyError(
            f"config.json: num_hidden_layers {layers} of a nemotron_h model, whose layers_block_type or "
            f"hybrid_override_pattern has {len(blocks)} layers; all of these are computed: set it to {len(blocks)}"
        )
    heads = config["num_attention_heads"]
    return ModelShape(
        family="nemotron_h",
        hidden_size=config["hidden_size"],
        num_layers=len(blocks),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config.get("attention_head_dim") or 128,  # Nemotron-H has the second
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 4096),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        rope_theta=None,
        root="backbone",
        rope_scaling_factor=None,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        experts=_experts(config, blocks) if Block.EXPERTS in blocks else None,
        blocks=blocks,
        carried=("mtp.",) if config.get("num_nextn_predict_layers") else (),
        mamba=MambaShape(
            heads=config["mamba_num_heads"],
            head_dim=config["mamba_head_dim"],
            groups=config.get("n_groups", config.get("mamba_n_groups", 8)),
            state_size=config["ssm_state_size"],
            kernel=config.get("conv_kernel", 4),
            chunk=config.get("chunk_size", 128),
            state_bytes=STATE_BYTES[config.get("mamba_ssm_cache_dtype", "float32")],
        ),
    )


def _experts(config: dict[str, Any], blocks: tuple[Block, ...]) -> ExpertShape:
    require(config, n_shared_experts=1)  # vLLM multiplies their size by it, transformers does not
    if (config.get("n_group") or 1) > 1:
        raise FamilyError("config.json: n_group above 1 is not supported for nemotron_h models")
    return ExpertShape(
        count=expert_count(config),
        active=config["num_experts_per_tok"],
        ffn_hidden_size=config["moe_intermediate_size"],
        dense_layers=tuple(i for i, block in enumerate(blocks) if block is not Block.EXPERTS),
        shared_ffn_hidden_size=config.get("moe_shared_expert_intermediate_size") or 0,
        sigmoid=True,
        scaling=config.get("routed_scaling_factor", 1.0),
        latent_size=config.get("moe_latent_size") or 0,
    )


def params(shape: ModelShape) -> tuple[Param, ...]:
    """Declare every parameter of the model, in the order of the forward pass."""
    h, v = shape.hidden_size, shape.vocab_size
    embedding = HfTensor("backbone.embeddings.weight", (v, h))
    word_embeddings, engine = "embedding.word_embeddings.weight", "model.embed_tokens.weight"
    declared = [Param(word_embeddings, (embedding,), Split.VOCAB, Stage.FIRST, engine=engine)]
    for index, block in enumerate(shape.blocks):
        declared += _block_params(Layer(shape, index), block)
    norm = HfTensor("backbone.norm_f.weight", (h,))
    head = HfTensor("lm_head.weight", (v, h))
    return (
        *declared,
        Param("decoder.final_layernorm.weight", (norm,), Split.REPLICATED, Stage.LAST, engine="model.norm_f.weight"),
        Param("output_layer.weight", (head,), Split.VOCAB, Stage.LAST, engine=head.name),
    )


def _block_params(layer: Layer, block: Block) -> list[Param]:
    shape, hf, param = layer.shape, layer.hf, layer.param
    h = shape.hidden_size

    def network(
        megatron: str, name: str, size: int, expert: tuple[int, int] | None = None, width: int = h
    ) -> list[Param]:
        up, down = hf(f"{name}up_proj.weight", size, width), hf(f"{name}down_proj.weight", width, size)
        # vLLM fuses all experts.
        fused = [f"mixer.experts.routed_experts.{part}_weight" if expert else None for part in ("w13", "w2")]
        return [
            param(f"{megatron}.linear_fc1.weight", Split.ROWS, up, fused=fused[0], expert=expert),
            param(f"{megatron}.linear_fc2.weight", Split.COLUMNS, down, fused=fused[1], expert=expert),
        ]

    attends = block in (Block.MAMBA, Block.ATTENTION)
    norm = param(
        "input_layernorm.weight" if attends else "pre_mlp_layernorm.weight", Split.REPLICATED, hf("norm.weight", h)
    )
    match block:
        case Block.MAMBA:
            mamba = shape.mamba
            assert mamba is not None

            def part(name: str, split: Split, *size: int, float32: bool = False, **how: Any) -> Param:
                return param(f"self_attention.{name}", split, hf(f"mixer.{name}", *size, float32=float32), **how)

            # Split by heads, and by groups with their B and C.
            convolved, projected = mamba.convolved_parts, mamba.projected_parts
            mixer = [
                part("in_proj.weight", Split.PARTS, sum(projected), h, parts=projected),
                part("conv1d.weight", Split.PARTS, mamba.convolved, 1, mamba.kernel, parts=convolved),
                part("conv1d.bias", Split.PARTS, mamba.convolved, parts=convolved),
                part("dt_bias", Split.ROWS, mamba.heads),
                part(
                    "A_log", Split.ROWS, mamba.heads, float32=True, fused="mixer.A", form=EngineForm(negative_exp=True)
                ),
                part("D", Split.ROWS, mamba.heads),
                part("norm.weight", Split.ROWS, mamba.inner),
                part("out_proj.weight", Split.COLUMNS, h, mamba.inner),
            ]
        case Block.ATTENTION:
            query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
            sizes = {"q": query, "k": key_value, "v": key_value}
            qkv = [hf(f"mixer.{part}_proj.weight", size, h) for part, size in sizes.items()]
            mixer = [
                param("self_attention.linear_qkv.weight", Split.QKV, *qkv, fused="mixer.qkv_proj.weight"),
                param("self_attention.linear_proj.weight", Split.COLUMNS, hf("mixer.o_proj.weight", h, query)),
            ]
        case Block.MLP:
            mixer = network("mlp", "mixer.", shape.ffn_hidden_size)
        case Block.EXPERTS:
            experts = shape.experts
            assert experts is not None
            bias = hf("mixer.gate.e_score_correction_bias", experts.count, float32=True)
            mixer = [
                param("mlp.router.weight", Split.REPLICATED, hf("mixer.gate.weight", experts.count, h)),
                param("mlp.router.expert_bias", Split.REPLICATED, bias, buffer=True),
            ]
            latent = experts.latent_size
            for name, *size in (("fc1_latent_proj.weight", latent, h), ("fc2_latent_proj.weight", h, latent)):
                if latent:
                    mixer.append(param(f"mlp.{name}", Split.REPLICATED, hf(f"mixer.{name}", *size)))
            for i in range(experts.count):
                expert_path, expert = "mlp.experts.local_experts.{expert}", (i, experts.count)
                mixer += network(expert_path, f"mixer.experts.{i}.", experts.ffn_hidden_size, expert, latent or h)
            if experts.shared_ffn_hidden_size:
                mixer += network("mlp.shared_experts", "mixer.shared_experts.", experts.shared_ffn_hidden_size)
    return [norm, *mixer]


def flops(shape: ModelShape, tokens: int, sum_of_squared_lengths: int) -> float:
    """Count the multiply-add FLOPs of one forward pass; a Mamba2 scan counts its state updates and readouts."""
    h, query = shape.hidden_size, shape.num_heads * shape.head_dim
    mamba, experts = shape.mamba, shape.experts
    assert mamba is not None
    weights = {
        Block.MAMBA: h * (mamba.inner + mamba.convolved + mamba.heads) + mamba.inner * (h + 2 * mamba.state_size),
        Block.ATTENTION: h * (2 * query + 2 * shape.num_kv_heads * shape.head_dim),
        Block.MLP: 2 * h * shape.ffn_hidden_size,
        Block.EXPERTS: 0,
    }
    if experts is not None:
        latent, routed = experts.latent_size, 2 * experts.active * experts.ffn_hidden_size
        weights[Block.EXPERTS] = h * (2 * experts.shared_ffn_hidden_size + experts.count)
        weights[Block.EXPERTS] += latent * (routed + 2 * h) if latent else h * routed
    per_token = sum(weights[block] for block in shape.blocks) + shape.vocab_size * h
    attention = shape.blocks.count(Block.ATTENTION) * query
    return 2.0 * per_token * tokens + 2.0 * attention * sum_of_squared_lengths
