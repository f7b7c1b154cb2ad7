"""Parameters that vLLM holds in another form than Megatron-Core: Mamba2 mixers by heads and groups, -exp(A_log), two
projections in one, float32 among bfloat16. Every engine rank's tensors are split from the checkpoint by hand."""

import numpy as np
import pytest
import torch

from grpo_mcore.families import missing_on_cpu, params_of, shape_of
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.parts import Seat, parts_of
from grpo_mcore.refit.plan.plan import RefitPlan, plan_refit
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.refit.transport.buffer import attach_buffer, block_view
from tests.unit.refit.shards import index
from tests.unit.refit.whole_split import PADDING, Case, Weights, on_the_policy

NEMOTRON = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M-*E", "hidden_size": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 12, "vocab_size": 70, "mamba_num_heads": 4,
    "mamba_head_dim": 2, "n_groups": 2, "ssm_state_size": 3, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 6, "moe_shared_expert_intermediate_size": 10,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 12, "vocab_size": 70, "q_lora_rank": 5, "kv_lora_rank": 6,
    "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 6, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
}  # fmt: skip
TRAINERS = [
    PolicyLayout(),
    PolicyLayout(pipeline=2, data=2, expert=2, expert_tensor=1),
    PolicyLayout(data=4, context=2, expert=4, expert_tensor=1),
    PolicyLayout(tensor=2, data=2, expert=2, expert_tensor=2),
]


def case_of(config: dict[str, object], trainer: PolicyLayout, engine: EngineLayout) -> Case:
    shape = shape_of(config)
    assert shape.experts is not None
    return Case(shape, params_of(shape), trainer, engine, shape.experts.count)


def by_heads(tensor: np.ndarray, rank: int, size: int, *parts: int) -> np.ndarray:
    """Each of the blocks of rows is shared out by itself."""
    blocks = np.split(tensor, np.cumsum(parts)[:-1])
    return np.concatenate([np.split(block, size)[rank] for block in blocks])


def nemotron_mixer(whole: Weights, rank: int, size: int) -> Weights:
    hf = {name.removeprefix("backbone.layers.0.mixer."): values for name, values in whole.items() if ".0.mixer" in name}
    inner, states = 8, 6
    found = {
        "in_proj.weight": by_heads(hf["in_proj.weight"], rank, size, inner, inner, states, states, 4),
        "conv1d.weight": by_heads(hf["conv1d.weight"], rank, size, inner, states, states),
        "conv1d.bias": by_heads(hf["conv1d.bias"], rank, size, inner, states, states),
        "A": np.split(hf["A_log"], size)[rank],  # how -exp is taken, another test says
        "out_proj.weight": np.split(hf["out_proj.weight"], size, axis=1)[rank],
    }
    found |= {name: np.split(hf[name], size)[rank] for name in ("D", "dt_bias", "norm.weight")}
    return {f"model.layers.0.mixer.{name}": values for name, values in found.items()}


def experts(whole: Weights, prefix: str, up: tuple[str, ...], rank: int, engine: EngineLayout) -> Weights:
    """vLLM's tensors of all experts: whole ones of a rank, or a slice of each."""
    size = engine.tensor
    mine = np.split(np.arange(4), size)[rank] if engine.expert_parallel else range(4)

    def part(name: str, axis: int) -> np.ndarray:
        return whole[name] if engine.expert_parallel else np.split(whole[name], size, axis)[rank]

    w13 = [np.concatenate([part(f"{prefix}.{i}.{name}.weight", 0) for name in up]) for i in mine]
    w2 = [part(f"{prefix}.{i}.down_proj.weight", 1) for i in mine]
    target = prefix.replace("backbone", "model") + ".routed_experts."
    return {f"{target}w13_weight": np.stack(w13), f"{target}w2_weight": np.stack(w2)}


def nemotron(whole: Weights, rank: int, engine: EngineLayout) -> Weights:
    size, shared = engine.tensor, "layers.3.mixer.shared_experts."
    found = nemotron_mixer(whole, rank, size)
    found |= experts(whole, "backbone.layers.3.mixer.experts", ("up_proj",), rank, engine)
    for name, axis in (("up_proj.weight", 0), ("down_proj.weight", 1)):
        for at in ("layers.1.mixer.", shared):
            found[f"model.{at}{name}"] = np.split(whole[f"backbone.{at}{name}"], size, axis)[rank]
    q, k, v = (np.split(whole[f"backbone.layers.2.mixer.{kind}_proj.weight"], size)[rank] for kind in "qkv")
    found["model.layers.2.mixer.qkv_proj.weight"] = np.concatenate([q, k, v])
    for name in ("gate.weight", "gate.e_score_correction_bias"):
        found[f"model.layers.3.mixer.{name}"] = whole[f"backbone.layers.3.mixer.{name}"]
    return found


def deepseek(whole: Weights, rank: int, engine: EngineLayout) -> Weights:
    size, found = engine.tensor, {}
    for layer in ("model.layers.0.", "model.layers.1."):
        attention = f"{layer}self_attn."
        down = [whole[f"{attention}{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        found[f"{attention}fused_qkv_a_proj.weight"] = np.concatenate(down)
        for name in ("q_b_proj.weight", "kv_b_proj.weight"):
            found[attention + name] = np.split(whole[attention + name], size)[rank]
        found[f"{attention}o_proj.weight"] = np.split(whole[f"{attention}o_proj.weight"], size, 1)[rank]
        for name in ("q_a_layernorm.weight", "kv_a_layernorm.weight"):
            found[attention + name] = whole[attention + name]
    shared, mlp = "model.layers.1.mlp.shared_experts.", "model.layers.1.mlp."
    halves = [np.split(whole[f"{shared}{name}_proj.weight"], size)[rank] for name in ("gate", "up")]
    found[f"{shared}gate_up_proj.weight"] = np.concatenate(halves)
    found[f"{mlp}gate.e_score_correction_bias"] = whole[f"{mlp}gate.e_score_correction_bias"]
    return found | experts(whole, f"{mlp}experts", ("gate_proj", "up_proj"), rank, engine)


@pytest.mark.parametrize("engine", [EngineLayout(1), EngineLayout(2), EngineLayout(2, expert_parallel=True)])
@pytest.mark.parametrize("trainer", TRAINERS, ids=PolicyLayout.describe)
@pytest.mark.parametrize(("config", "by_hand"), [(NEMOTRON, nemotron), (DEEPSEEK, deepseek)])
def test_the_plan_gives_what_splitting_by_hand_gives(
    config: dict[str, object], by_hand: object, trainer: PolicyLayout, engine: EngineLayout
) -> None:
    case = case_of(config, trainer, engine)
    plan = plan_refit(case.params, case.shape, trainer, engine, dtype="int32", buffer_bytes=2 * 640, alignment=8)
    assert not plan.fallbacks and plan.block_bytes == sum(values.nbytes for values in case.whole.values())
    assert len(plan.buckets) > 5
    held = {rank: on_the_policy(case, rank) for rank in range(trainer.world_size)}
    for rank in range(engine.ranks):
        expected = by_hand(case.whole, rank, engine)
        found = {name: np.full_like(values, PADDING) for name, values in expected.items()}
        for block in plan.blocks():
            values = held[block.source][block.param][index(block.box)]
            for read in block.reads:
                if read.rank == rank and read.param in found:
                    found[read.param][index(read.box)] = values
        for name, values in expected.items():
            assert np.array_equal(found[name], values), f"{name} on engine rank {rank}"


class Source:
    """A policy rank that holds everything, in bfloat16 but for the router's bias."""

    def __init__(self, config: dict[str, object]) -> None:
        torch.manual_seed(0)
        self.shape = shape_of(config)
        self.held = {}
        for param in params_of(self.shape):
            kind = torch.float32 if param.buffer else torch.bfloat16
            shape = (sum(tensor.shape[0] for tensor in param.hf), *param.hf[0].shape[1:])
            count = param.expert[0] if param.expert else 0
            self.held[param.megatron.format(layer=param.layer, expert=count)] = torch.randn(shape).to(kind)

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.held

    def plan(self) -> RefitPlan:
        layout = PolicyLayout(), EngineLayout()
        return plan_refit(params_of(self.shape), self.shape, *layout, dtype="bfloat16", buffer_bytes=1 << 16)


def test_float32_stays_float32_in_a_refit_in_bfloat16() -> None:
    source = Source(NEMOTRON)
    plan, sender = source.plan(), RefitSender(source, 0, run_id="forms")
    (part,) = parts_of(plan, 1, (), (), ()).senders
    buffer = attach_buffer(sender.open_refit(part, Seat(1, 0, 1, 1, 30.0))["transport"]["buffer"])
    bias, rates = "decoder.layers.3.mlp.router.expert_bias", "decoder.layers.0.self_attention.A_log"
    for number, bucket in enumerate(plan.buckets):
        sender.fill_bucket(number)
        for block in bucket.blocks:
            values, view = source.held[block.param][index(block.box)], block_view(buffer, plan, number, block)
            if block.param == rates:
                assert torch.equal(view, -values.float().exp())
            else:
                assert torch.equal(view, values)
            assert (view.dtype == torch.float32) == (block.param in (bias, rates))
    sender.close_refit()
    assert sum(block.dtype == "float32" for block in plan.blocks()) == 2


def test_what_engines_cannot_do_is_said() -> None:
    shape = shape_of(NEMOTRON)
    assert missing_on_cpu(shape) is None
    assert "expert_parallel_size to 1" in str(missing_on_cpu(shape, expert_parallel=True))
    assert "576; here it is 8" in str(missing_on_cpu(shape_of(DEEPSEEK)))
    assert missing_on_cpu(shape_of(DEEPSEEK | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})) is None
