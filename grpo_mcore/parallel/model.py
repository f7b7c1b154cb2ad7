"""The policy's network: Megatron-Core's GPT with our norm and attention, whose output is token log-probs."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset
from torch import Tensor

from grpo_mcore.batching.packed_batch import PackedBatch
from grpo_mcore.families import Block, ModelShape, frozen_parts, params_of
from grpo_mcore.families.activations import TILES
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.parallel.divergence import divergences
from grpo_mcore.parallel.layers.attention import (
    GatedAttention,
    LatentAttention,
    PackedAttention,
    RotaryByPosition,
    WindowAttention,
)
from grpo_mcore.parallel.layers.context import computed_here, share_of_row, take
from grpo_mcore.parallel.layers.delta import DeltaMixer
from grpo_mcore.parallel.layers.experts import (
    ClampedExperts,
    ExpertLayer,
    Experts,
    GroupedExperts,
    LatentMoELayer,
    OneExpertRouter,
)
from grpo_mcore.parallel.layers.mamba import MambaMixer
from grpo_mcore.parallel.layers.norm import CpuRMSNorm, NormedAdd, RMSNorm, WideHeadNorm
from grpo_mcore.parallel.layers.packed_row import ImagesHere, describe_row
from grpo_mcore.parallel.layers.router_replay import RoutersOfChunk
from grpo_mcore.parallel.layers.vision import DeepstackLayer, features_of, spliced
from grpo_mcore.parallel.logprobs import Cut, token_scores
from grpo_mcore.parallel.platform import Platform, require
from grpo_mcore.parallel.settings import transformer_config
from grpo_mcore.recipe import MegatronConfig

Wanted = Literal["logprobs", "entropies", "divergences", "hidden"]
"""What a pass computes at the positions of trained tokens."""


class ValueHead(torch.nn.Linear):
    """An output layer with one output, in float32: [n, H] -> [n, 1]. Whole on every tensor-parallel rank."""

    def forward(self, states: Tensor) -> Tensor:
        return torch.nn.functional.linear(states.float(), self.weight.float())


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns token log-probs, computed in chunks, instead of logits; or, with a ValueHead,
    the value before each token in their place."""

    logprob_temperature: float = 1.0
    logprob_cut: Cut | None = None
    logprob_chunk: int = 1024
    unpadded_vocab_size: int
    has_tower: bool
    platform: Platform
    routers: RoutersOfChunk | None = None  # with routing replay
    teacher_head: Tensor | None = None  # this rank's rows of the teacher's output layer, [rows, its hidden size]
    teacher_vocab = 0
    tower_features: Mapping[str, Tensor] | None = None  # by digest; None: no layer here takes any
    _images: ImagesHere | None = None  # of this pass, for the embedding
    _wanted: Wanted = "logprobs"
    _batch: PackedBatch | None = None  # of this pass, for the divergence
    _loss: Any = None
    _places: Tensor | None = None  # int64 [T], see `computed_here`

    def score(
        self, batch: PackedBatch, length: int | None = None, *, wanted: Wanted = "logprobs", loss: Any = None
    ) -> Tensor:
        """Run the stage. The last one returns the log-prob of every next token, float32 [1, T]; other stages return
        hidden states for the next one.

        `wanted`: with "entropies" [2, T], the second row being the entropy of the distribution at each position; with
        "divergences" [3, T], see `parallel.divergence`, for `loss`, a DistillationLossFn. Position t belongs to token
        t + 1; positions whose next token is not trained on hold 0. With "hidden" the states that the output layer gets
        at these positions, [trained tokens, H]. `length`: pad the row to this many tokens (a multiple of what the
        layout needs).
        """
        tokens, positions, routes = batch.tokens, batch.positions[None], batch.routes
        share, group = None, parallel_state.get_context_parallel_group()
        if group.size() > 1 or length is not None:
            multiple = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
            share = share_of_row(batch.computed_cu_seqlens, group.rank(), group.size(), multiple, length or 0)
        # Targets and masks stay by token of the row, whatever this rank computes of it. The last stage's rows hold 0
        # for tokens of other context-parallel ranks and are added up: every rank then computes the same loss, and gets
        # the gradient of its own tokens only. Summed over the ranks, the weights' gradients count each token once.
        index, self._places = computed_here(batch.shared, share, tokens.size(1))
        self._images = self._images_here(batch, index)
        if index is not None:
            tokens, positions = take(tokens, index), take(positions, index)
            if routes is not None:
                routes = torch.cat([routes, routes.new_full((1, *routes.shape[1:]), -1)]).index_select(0, index)
        if routes is not None and self.config.sequence_parallel:
            rank = parallel_state.get_tensor_model_parallel_rank()
            routes = routes.chunk(self.config.tensor_model_parallel_size)[rank]
        if self.routers is not None:
            self.routers.replay(routes)
        self._wanted, self._batch, self._loss = wanted, batch, loss
        output = self(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=None,
            labels=batch.targets(),
            loss_mask=batch.next_token_counts(),
            packed_seq_params=describe_row(
                batch.cu_seqlens,
                self.platform,
                share,
                group,
                positions=positions[0],
                shared=batch.shared,
                index=index,
                images=self._images,
            ),
        )
        self._batch = self._loss = self._images = None
        return tensor_parallel.reduce_from_tensor_model_parallel_region(output, group) if self.post_process else output

    def _images_here(self, batch: PackedBatch, index: Tensor | None) -> ImagesHere | None:
        """Return the images of the tokens `index` (None: all) of a row, as this stage needs them."""
        if (images := batch.images) is None:
            return None
        axes, feature = images.axes, images.feature
        if index is not None:
            axes, feature = take(axes, index), take(1 + feature[None], index)[0] - 1  # padding is no image
        if self.config.sequence_parallel:
            rank = parallel_state.get_tensor_model_parallel_rank()
            feature = feature.chunk(self.config.tensor_model_parallel_size)[rank]
        known = self.tower_features
        return ImagesHere(axes, feature, None if known is None else features_of(images.images, known))

    @property
    def takes_features(self) -> bool:
        """Whether this stage has the embedding or a layer of the deepstack, of a model with a tower."""
        return self.has_tower and (
            self.pre_process or any(isinstance(layer, DeepstackLayer) for layer in self.decoder.layers)
        )

    def by_token(self, values: Tensor) -> Tensor:
        """Return values [k, t] of the tokens that this rank computes in this pass, with those of the other
        context-parallel ranks, by token of the row: [k, T]. Collective among these ranks."""
        if self._places is None:
            return values
        rows = values.index_select(1, self._places.clamp(min=0)) * (self._places >= 0)
        torch.distributed.all_reduce(rows, group=parallel_state.get_context_parallel_group())
        return rows

    def _postprocess(self, hidden_states: Tensor, labels: Tensor, loss_mask: Tensor, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        one_output = self.output_layer is not None and isinstance(self.output_layer, ValueHead)
        if one_output:  # every tensor-parallel rank computes it, with the whole gradient
            hidden = hidden_states
            if self.config.sequence_parallel:
                hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        elif self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden_states)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        trained = loss_mask[0] if self._places is None else loss_mask[0] & (self._places >= 0)
        indices = trained.nonzero().squeeze(1)  # prompts and padding need no log-prob
        places = indices if self._places is None else self._places.index_select(0, indices)
        states, targets = hidden[:, 0].index_select(0, places), labels[0].index_select(0, indices)
        # The teacher's states are by trained token of the whole row.
        order = self._batch.next_token_trained()[0].cumsum(0) - 1 if self._batch is not None else indices
        if self._wanted == "hidden":
            every = states.new_zeros(int(order[-1]) + 1, states.size(1))
            return every.index_copy(0, order.index_select(0, indices), states)
        if one_output:
            values = self.output_layer(states).T
            return values.new_zeros(1, labels.size(1)).index_copy(1, indices, values)
        split: dict[str, Any] = {
            "group": parallel_state.get_tensor_model_parallel_group(),
            "vocab_start": parallel_state.get_tensor_model_parallel_rank() * weight.size(0),
            "chunk": self.logprob_chunk,
            "tile": TILES[self.platform.device],
        }
        if self._wanted == "divergences":
            assert self._batch is not None and self._batch.teacher_hidden is not None and self.teacher_head is not None
            scores = divergences(
                states,
                weight,
                self._batch.teacher_hidden.index_select(0, order.index_select(0, indices)),
                self.teacher_head,
                targets,
                divergence=self._loss.divergence,
                vocab_size=min(self.unpadded_vocab_size, self.teacher_vocab),
                temperature=self._loss.temperature,
                **split,
            )
        else:
            scores = token_scores(
                states,
                weight,
                targets,
                vocab_size=self.unpadded_vocab_size,
                temperature=self.logprob_temperature,
                entropy=self._wanted == "entropies",
                cut=self.logprob_cut,
                **split,
            )
        return scores.new_zeros(len(scores), labels.size(1)).index_copy(1, indices, scores)


def build_model(
    shape: ModelShape,
    layout: PolicyLayout,
    settings: MegatronConfig,
    dtype: torch.dtype,
    platform: Platform,
    *,
    replay: bool = False,
) -> list[PolicyModel]:
    """Build this rank's part of the network, with uninitialised weights: one model chunk, or `layout.virtual` of them.

    `replay`: let routers replay the engine's choices of experts.
    """
    mixers = ((shape.mamba, platform.mamba_kernels), (shape.delta, platform.delta_kernels))
    for mixer, fused in mixers:
        for package in mixer.gpu_packages if mixer and fused and dtype is not torch.float32 else ():
            require(package)  # here, not in the first pass, minutes later
    config = transformer_config(shape, layout, settings, dtype, platform)
    config.moe_enable_routing_replay = replay
    chunks = range(layout.virtual) if layout.virtual > 1 else (None,)
    with without_unfused_attention(config):
        return [_build_chunk(shape, layout, config, chunk, settings, platform) for chunk in chunks]


@contextlib.contextmanager
def without_unfused_attention(config: TransformerConfig) -> Iterator[None]:
    """Let TransformerEngine fail, with its reasons, where neither flash attention nor cuDNN takes a row. By default it
    then computes all T x T scores, which for a row of 16,384 tokens takes gigabytes per layer and many times as long.

    The variable is TransformerEngine's; Megatron-Core sets it while it builds each model, and refuses another value.
    """
    unfused = "NVTE_UNFUSED_ATTN"
    if config.attention_backend is not AttnBackend.auto:  # chosen in model_overrides
        yield
        return
    before = os.environ.pop(unfused, None)
    yield
    os.environ[unfused] = "1" if before == "1" else "0"


def _build_chunk(
    shape: ModelShape,
    layout: PolicyLayout,
    config: TransformerConfig,
    chunk: int | None,
    settings: MegatronConfig,
    platform: Platform,
) -> PolicyModel:
    model = PolicyModel(
        config=config,
        transformer_layer_spec=block_spec(shape, config, chunk, platform),
        vocab_size=shape.padded_vocab_size(layout.tensor),
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        vp_stage=chunk,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="none" if shape.rope_theta is None else "yarn" if shape.yarn else "rope",
        rotary_base=shape.rope_theta or 10000,
        rotary_percent=shape.rotary_fraction,
        seq_len_interpolation_factor=shape.rope_interpolation,
        rope_scaling=shape.rope_scaling_factor is not None,
        rope_scaling_factor=shape.rope_scaling_factor or 1.0,
    )
    if shape.yarn is not None and shape.rotary_fraction != 1.0:
        model.rotary_pos_emb = _yarn_of_a_part(shape, config)
    model.unpadded_vocab_size, model.platform = shape.vocab_size, platform
    if model.post_process and shape.head == "value":
        model.output_layer = ValueHead(shape.hidden_size, 1, bias=False, dtype=config.params_dtype)
    if model.position_embedding_type != "none" and not config.multi_latent_attention and not platform.fused_attention:
        model.rotary_pos_emb = RotaryByPosition(model.rotary_pos_emb, shape.vision)
    model.has_tower = shape.vision is not None
    if model.pre_process and model.has_tower:
        model.embedding.register_forward_hook(
            lambda _, __, embedded: embedded if model._images is None else spliced(embedded, model._images)
        )
    if model.pre_process and shape.embedding_scale != 1.0:
        scale = torch.tensor(shape.embedding_scale, dtype=config.params_dtype, device="cpu").item()
        model.embedding.register_forward_hook(lambda _, __, embedded: embedded * scale)
    if config.moe_enable_routing_replay:
        model.routers = RoutersOfChunk(model.decoder.layers)
    in_float32 = {param.megatron for param in params_of(shape) if any(tensor.float32 for tensor in param.hf)}
    frozen = frozen_parts(settings)
    for name, parameter in model.named_parameters():
        if re.sub(r"(?<=layers\.)\d+", "{layer}", name) in in_float32:  # as the engine keeps it
            parameter.data = parameter.data.float()
        if name.endswith("softmax_offset"):
            # TransformerEngine makes its sinks in float32: they would get a gradient buffer of their own, and another
            # dtype in checkpoints than without it. Its kernel reads them in float32 all the same.
            parameter.data = parameter.data.to(config.params_dtype)
        if any(part in name for part in frozen):
            parameter.requires_grad_(False)
    for module in model.modules() if settings.gradient_accumulation_fusion else ():
        if hasattr(module, "fuse_wgrad_accumulation"):
            # TransformerEngine's products add a weight's gradient to its buffer. By Megatron-Core's setting its output
            # layer, whose product we compute ourselves, would want APEX.
            module.fuse_wgrad_accumulation = True
    return model


def _yarn_of_a_part(shape: ModelShape, config: TransformerConfig) -> YarnRotaryEmbedding:
    """Return YaRN's rotation of the first part of each head. Megatron-Core's model makes one for whole heads only."""
    yarn = shape.yarn
    assert yarn is not None and shape.rope_theta is not None
    return YarnRotaryEmbedding(
        int(shape.head_dim * shape.rotary_fraction),
        rotary_base=shape.rope_theta,
        use_cpu_initialization=config.use_cpu_initialization,
        scaling_factor=yarn.factor,
        original_max_position_embeddings=yarn.original_positions,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
        mscale=yarn.mscale,
        mscale_all_dim=yarn.mscale_all_dim,
        correction_range_round_to_int=yarn.truncate,
    )


def block_spec(
    shape: ModelShape, config: TransformerConfig, chunk: int | None, platform: Platform
) -> TransformerBlockSubmodules:
    """Specify the layers. Submodule names are the same with and without TransformerEngine, for one map of weights."""
    if platform.transformer_engine:
        from megatron.core.extensions import transformer_engine as te

        norm, column, row, down = te.TENorm, te.TEColumnParallelLinear, te.TERowParallelLinear, te.TELinear
        core: Any = te.TEDotProductAttention
    else:
        norm, column, row = RMSNorm if platform.on_gpu else CpuRMSNorm, ColumnParallelLinear, RowParallelLinear
        down = ColumnParallelLinear
    if not platform.fused_attention:
        core = ModuleSpec(module=PackedAttention, params={"platform": platform})
    if shape.latent is None:
        of_query = of_key = norm if shape.qk_norm else IdentityOp
        if shape.wide_qk_norm:
            heads = (shape.num_heads, shape.num_kv_heads)
            of_query, of_key = (ModuleSpec(module=WideHeadNorm, params={"heads": count}) for count in heads)
        attention_class: type = GatedAttention if shape.output_gate else SelfAttention
        attention: Any = SelfAttentionSubmodules(
            linear_qkv=column, core_attention=core, linear_proj=row, q_layernorm=of_query, k_layernorm=of_key
        )
    else:
        attention_class = MLASelfAttention if platform.fused_attention else LatentAttention
        attention = MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=down,
            linear_q_up_proj=column,
            linear_kv_down_proj=down,
            linear_kv_up_proj=column,
            core_attention=core,
            linear_proj=row,
            q_layernorm=norm,
            kv_layernorm=norm,
        )
    mlp = MLPSubmodules(linear_fc1=column, linear_fc2=row)
    latent = shape.experts.latent_size if shape.experts else 0
    width = latent or shape.hidden_size
    kind: type[Experts] = GroupedExperts if config.moe_grouped_gemm else Experts
    how: dict[str, Any] = {"width": width}
    if config.moe_grouped_gemm:
        how["fused"] = platform.transformer_engine
    if shape.experts and shape.experts.clamp:
        kind, how["clamp"] = ClampedExperts, shape.experts.clamp
    experts = MoESubmodules(
        experts=ModuleSpec(module=kind, params=how, submodules=mlp),
        shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=mlp),
        router=OneExpertRouter if shape.experts and shape.experts.one_of_weight_1 else TopKRouter,
    )

    core_part = ModuleSpec(
        module=attention_class, params={"attn_mask_type": AttnMaskType.padding_causal}, submodules=attention
    )

    window_part = core_part
    if shape.window_rope_theta is not None:
        options = {"rotary_base": shape.window_rope_theta, "platform": platform}
        window_part = ModuleSpec(module=WindowAttention, params=core_part.params | options, submodules=attention)
    add: Any = get_bias_dropout_add
    if shape.sandwich_norms:
        add = ModuleSpec(module=NormedAdd, params={"norm": norm, "config": config})

    def layer(index: int) -> ModuleSpec:
        network = ModuleSpec(module=MLP, submodules=mlp)
        if shape.is_expert_layer(index):
            network = ModuleSpec(module=ExpertLayer, submodules=experts)
            if latent:
                network = ModuleSpec(module=LatentMoELayer, params={"width": width}, submodules=experts)
        mixer = window_part if shape.window(index) else core_part
        block = shape.blocks[index] if shape.blocks else None
        linear, half = {"column": column, "row": row}, config.params_dtype is not torch.float32
        if block is Block.MAMBA:
            fused = half and platform.mamba_kernels
            mixer = ModuleSpec(module=MambaMixer, params={"mamba": shape.mamba, "fused": fused, **linear})
        elif shape.is_delta_layer(index):
            fused = half and platform.delta_kernels
            mixer = ModuleSpec(module=DeltaMixer, params={"delta": shape.delta, "fused": fused, **linear})
        first = {"input_layernorm": norm, "self_attention": mixer, "self_attn_bda": add}
        second = {"pre_mlp_layernorm": norm, "mlp": network, "mlp_bda": add}
        if block is not None:  # a hybrid model's layer is a mixer or a network, not both
            first, second = (first, {}) if block in (Block.MAMBA, Block.ATTENTION) else ({}, second)
        parts = TransformerLayerSubmodules(**first, **second)
        if shape.vision is not None and index < shape.vision.deepstack:
            return ModuleSpec(module=DeepstackLayer, params={"level": 1 + index}, submodules=parts)
        return ModuleSpec(module=TransformerLayer, submodules=parts)

    first = get_transformer_layer_offset(config, vp_stage=chunk)
    count = get_num_layers_to_build(config, vp_stage=chunk)
    return TransformerBlockSubmodules(layer_specs=[layer(first + i) for i in range(count)], layer_norm=norm)
