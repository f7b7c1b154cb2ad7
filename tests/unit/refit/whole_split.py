"""Whole tensors split by hand, as Megatron-Core and vLLM do it, and models and layouts drawn at random: the independent
side of the tests of layouts and plans. Nothing here reads the declaration's pieces."""

import random
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from grpo_mcore.families import HfTensor, ModelShape, Param, Split, Stage, params_of
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.plan import GIB, RefitPlan, plan_refit

Weights = dict[str, np.ndarray]
PADDING = -1


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    params: tuple[Param, ...]
    trainer: PolicyLayout
    engine: EngineLayout
    experts: int

    @cached_property
    def whole(self) -> Weights:
        """Every element of the model is another number."""
        found, at = {}, 0
        for param in self.params:
            for tensor in param.hf:
                if tensor.name not in found:
                    found[tensor.name] = np.arange(at, at + tensor.numel, dtype=np.int32).reshape(tensor.shape)
                    at += tensor.numel
        return found


def make_shape(**sizes: object) -> ModelShape:
    plain = {
        "family": "qwen3", "hidden_size": 4, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2,
        "ffn_hidden_size": 8, "vocab_size": 11, "max_positions": 32, "norm_eps": 1e-6, "rope_theta": 1e4,
        "rope_scaling_factor": None, "tied_embeddings": False, "qkv_bias": False, "qk_norm": False,
    }  # fmt: skip
    return ModelShape(**(plain | sizes))  # type: ignore[arg-type]


def with_experts(shape: ModelShape, experts: int, ffn: int) -> tuple[Param, ...]:
    """The dense model's parameters, with a router and experts in place of every MLP."""
    found = []
    for param in params_of(shape):
        if ".mlp." not in param.megatron:
            found.append(param)
        if not param.megatron.endswith("pre_mlp_layernorm.weight"):
            continue
        layer, h = param.layer, shape.hidden_size
        mlp, ours = f"model.layers.{layer}.mlp", "decoder.layers.{layer}.mlp"
        router = HfTensor(f"{mlp}.gate.weight", (experts, h))
        found.append(
            Param(f"{ours}.router.weight", (router,), Split.REPLICATED, Stage.LAYER, layer, engine=router.name)
        )
        for expert in range(experts):
            gate, up = (HfTensor(f"{mlp}.experts.{expert}.{name}_proj.weight", (ffn, h)) for name in ("gate", "up"))
            down = HfTensor(f"{mlp}.experts.{expert}.down_proj.weight", (h, ffn))
            local = ours + ".experts.local_experts.{expert}"
            for name, tensors, split, engine in (
                ("linear_fc1", (gate, up), Split.GATE_UP, "w13_weight"),
                ("linear_fc2", (down,), Split.COLUMNS, "w2_weight"),
            ):
                found.append(
                    Param(
                        f"{local}.{name}.weight", tensors, split, Stage.LAYER, layer,
                        expert=(expert, experts), engine=f"{mlp}.experts.{engine}",
                    )
                )  # fmt: skip
    return tuple(found)


def random_case(seed: int) -> Case:
    pick = random.Random(seed)
    tp, engine_tp = pick.choice([1, 2, 4]), pick.choice([1, 2, 4])
    pipeline, virtual = pick.choice([1, 1, 2, 3]), pick.choice([1, 1, 1, 2])
    context, data, engine_pp = pick.choice([1, 1, 2]), pick.choice([1, 2, 4]), pick.choice([1, 1, 2, 3])
    experts = pick.choice([0, 0, 4, 8])
    expert_tensor = pick.choice([1, tp]) if experts else 1
    room = tp * context * data // expert_tensor
    expert = pick.choice([size for size in (1, 2, 4) if room % size == 0 and experts % size == 0]) if experts else 1
    both = (tp, engine_tp)
    kv_heads = pick.choice([k for k in (1, 2, 4, 8) if all(k % size == 0 or size % k == 0 for size in both)])
    sharing = max(1, tp // kv_heads)  # ranks with one key-value head, whose rows they divide
    wide = np.lcm(tp, engine_tp)
    heads = int(np.lcm.reduce([kv_heads, wide])) * pick.choice([1, 2])
    shape = make_shape(
        hidden_size=pick.randint(1, 5), num_layers=pipeline * virtual * pick.randint(1, 2), num_heads=heads,
        num_kv_heads=kv_heads, head_dim=sharing * pick.randint(1, 3), ffn_hidden_size=int(wide) * pick.randint(1, 3),
        vocab_size=pick.choice([tp, pick.randint(4, 70), pick.randint(60, 200)]),
        tied_embeddings=pick.random() < 0.5, qkv_bias=pick.random() < 0.5, qk_norm=pick.random() < 0.5,
    )  # fmt: skip
    params = params_of(shape)
    if experts:
        params = with_experts(shape, experts, expert_tensor * engine_tp * pick.randint(1, 2))
    trainer = PolicyLayout(tp, pipeline, data, context, expert, expert_tensor, virtual)
    whole_experts = experts > 0 and experts % engine_tp == 0 and pick.random() < 0.5
    engine = EngineLayout(engine_tp, engine_pp, whole_experts)
    return Case(shape, params, trainer, engine, experts)


def on_the_policy(case: Case, rank: int) -> Weights:
    """The parameters of one policy rank, by name; the vocabulary's padding is zero."""
    layout, shape = case.trainer, case.shape
    stages = np.arange(layout.world_size).reshape(layout.pipeline, layout.data, layout.context, layout.tensor)
    stage, _, _, tp = (int(found[0]) for found in np.nonzero(stages == rank))
    inside = np.arange(layout.stage_size).reshape(-1, layout.expert, layout.expert_tensor)
    _, ep, etp = (int(found[0]) for found in np.nonzero(inside == rank % layout.stage_size))
    chunks = [
        layers.tolist() for layers in np.array_split(np.arange(shape.num_layers), layout.pipeline * layout.virtual)
    ]
    experts = np.split(np.arange(case.experts), layout.expert)[ep].tolist()
    mine = {f"{v}:" if layout.virtual > 1 else "": v * layout.pipeline + stage for v in range(layout.virtual)}
    found: Weights = {}
    for prefix, chunk in mine.items():
        for param in case.params:
            here = {
                Stage.FIRST: chunk == 0,
                Stage.LAST: chunk == len(chunks) - 1,
                Stage.LAYER: param.layer in chunks[chunk],
            }[param.stage]
            expert = 0
            if here and param.expert:
                here = param.expert[0] in experts
                expert = experts.index(param.expert[0]) if here else 0
            if not here:
                continue
            layer = chunks[chunk].index(param.layer) if param.layer is not None else 0
            name = prefix + param.megatron.format(layer=layer, expert=expert)
            index, size = (etp, layout.expert_tensor) if param.expert else (tp, layout.tensor)
            found[name] = _megatron(param, shape, [case.whole[t.name] for t in param.hf], index, size)
    return found


def _megatron(param: Param, shape: ModelShape, tensors: list[np.ndarray], rank: int, size: int) -> np.ndarray:
    match param.split:
        case Split.REPLICATED:
            return tensors[0]
        case Split.ROWS:
            return np.split(tensors[0], size)[rank]
        case Split.COLUMNS:
            return np.split(tensors[0], size, axis=1)[rank]
        case Split.GATE_UP:
            return np.concatenate([np.split(tensor, size)[rank] for tensor in tensors])
        case Split.PARTS:
            blocks = np.split(tensors[0], np.cumsum(param.parts)[:-1])
            return np.concatenate([np.split(block, size)[rank] for block in blocks])
        case Split.VOCAB:
            rows = -len(tensors[0]) % size
            return np.split(np.pad(tensors[0], ((0, rows), (0, 0))), size)[rank]
        case Split.QKV:
            groups = [tensor.reshape(shape.num_kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
            fused = np.concatenate(groups, axis=1)  # [group, q of the group | k | v, ...]
            return np.split(np.concatenate(list(fused)), size)[rank]


def in_the_engine(case: Case, rank: int) -> Weights:
    """The parameters of one engine rank, by vLLM's name; rows of padding are PADDING. Stages: those of a model that has
    embedding, last norm and head on all of them."""
    layout, shape, whole = case.engine, case.shape, case.whole
    stage, tp = divmod(rank, layout.tensor)
    size = layout.tensor
    layers = vllm_stages(shape.num_layers, layout.pipeline)[stage]
    found: Weights = {}
    experts: dict[str, list[np.ndarray]] = {}
    for param in case.params:
        if param.copy or (param.layer is not None and param.layer not in layers):
            continue
        tensors = [whole[tensor.name] for tensor in param.hf]
        assert param.engine is not None
        if param.expert is None:
            found[param.engine] = _vllm(param, shape, tensors, tp, size)
        elif layout.expert_parallel:
            bounds = np.linspace(0, case.experts, size + 1).astype(int).tolist()
            start, stop = list(pairwise(bounds))[tp]
            if start <= param.expert[0] < stop:
                experts.setdefault(param.engine, []).append(_vllm(param, shape, tensors, 0, 1))
        else:
            experts.setdefault(param.engine, []).append(_vllm(param, shape, tensors, tp, size))
    return found | {name: np.stack(slices) for name, slices in experts.items()}


def vllm_stages(num_layers: int, stages: int) -> list[range]:
    """The layers of each stage, as vLLM divides them: it adds what remains to the stages before the last, backwards."""
    counts = [num_layers // stages] * stages
    for number in range(2, num_layers % stages + 2):
        counts[-number] += 1
    ends = np.cumsum([0, *counts]).tolist()
    return [range(start, stop) for start, stop in pairwise(ends)]


def _vllm(param: Param, shape: ModelShape, tensors: list[np.ndarray], rank: int, size: int) -> np.ndarray:
    match param.split:
        case Split.VOCAB:
            rows = -len(tensors[0]) % 64
            return np.split(np.pad(tensors[0], ((0, rows), (0, 0)), constant_values=PADDING), size)[rank]
        case Split.QKV:
            q, *kv = (tensor.reshape(-1, shape.head_dim, *tensor.shape[1:]) for tensor in tensors)  # by head
            if size > shape.num_kv_heads:
                kv = [np.repeat(tensor, size // shape.num_kv_heads, axis=0) for tensor in kv]
            heads = np.concatenate([np.split(tensor, size)[rank] for tensor in (q, *kv)])
            return heads.reshape(-1, *tensors[0].shape[1:])
        case _:
            return _megatron(param, shape, tensors, rank, size)


QWEN = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


def plan_of(case: Case, buffer_bytes: int = GIB) -> RefitPlan:
    return plan_refit(
        case.params, case.shape, case.trainer, case.engine, dtype="int32", buffer_bytes=buffer_bytes, alignment=8
    )


def index(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)


def random_nodes(case: Case, seed: int) -> tuple[list[list[int]], list[int]]:
    """(the nodes of each engine, the node of each policy rank): engines in one node or over several, which may share
    nodes; policy ranks on those nodes, on others, or on none of them."""
    pick = random.Random(seed)
    span = pick.choice([size for size in (1, 2, 4) if case.engine.ranks % size == 0])
    count = pick.randint(1, 3)
    engines = [[engine * span + place for place in range(span)] for engine in range(count)]
    if span == 1 and pick.random() < 0.5:
        engines = [[engine // 2] for engine in range(count)]  # two on a node
    nodes = 1 + max(node for places in engines for node in places)
    world = case.trainer.world_size
    node_of_rank = [] if pick.random() < 0.3 else [pick.randint(-1, nodes - 1) for _ in range(world)]
    return engines, node_of_rank
