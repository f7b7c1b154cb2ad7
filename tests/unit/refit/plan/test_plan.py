import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grpo_mcore.families import Param, Split, Stage, params_of, shape_of
from grpo_mcore.families.spec import HfTensor
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.plan import GIB, RefitError, RefitPlan, count_refit, plan_model_refit, plan_refit
from tests.unit.refit.whole_split import (
    PADDING,
    QWEN,
    Case,
    Weights,
    in_the_engine,
    index,
    make_shape,
    on_the_policy,
    plan_of,
    random_case,
    with_experts,
)


def carry_out(plan: RefitPlan, case: Case, shaped: Sequence[Weights]) -> list[Weights]:
    """The plan on real arrays, through a real buffer: parameters of every engine rank, PADDING where nothing came.
    `shaped`: arrays with the shapes of each engine rank's parameters."""
    policy = {rank: on_the_policy(case, rank) for rank in {block.source for block in plan.blocks()}}
    engine = [{name: np.full_like(array, PADDING) for name, array in arrays.items()} for arrays in shaped]
    buffer = np.zeros(plan.buffer_bytes // 4, dtype=np.int32)
    for number, bucket in enumerate(plan.buckets):
        views = []
        buffer[:] = PADDING - 1
        for block in bucket.blocks:
            values = policy[block.source][block.param][index(block.box)]
            start = (plan.start(number) + block.offset) // 4
            view = buffer[start : start + values.size]
            assert values.nbytes == block.nbytes and (view == PADDING - 1).all(), "blocks overlap"
            assert block.offset + block.nbytes <= plan.half_bytes
            view[:] = values.ravel()
            views.append(view.reshape(values.shape))
        for block, view in zip(bucket.blocks, views, strict=True):
            for read in block.reads:
                place = engine[read.rank][read.param][index(read.box)]
                assert (place == PADDING).all(), "written twice"
                place[...] = view.reshape(place.shape)
    return engine


@pytest.mark.parametrize(
    ("start", "end"),
    [(0, 50), pytest.param(50, 200, marks=pytest.mark.slow)]
    + [pytest.param(start, start + 200, marks=pytest.mark.every_state) for start in range(200, 800, 200)],
)
def test_the_plan_gives_what_splitting_the_whole_tensors_gives(start: int, end: int) -> None:
    for seed in range(start, end):
        case = random_case(seed)
        small = 2 * max(64, 8 * 6 * max(tensor.shape[-1] for param in case.params for tensor in param.hf))
        plan = plan_of(case, GIB if seed % 3 else small)
        right = [in_the_engine(case, rank) for rank in range(case.engine.ranks)]
        for rank, (found, wanted) in enumerate(zip(carry_out(plan, case, right), right, strict=True)):
            for name, expected in wanted.items():
                assert np.array_equal(found[name], expected), f"seed {seed}, rank {rank}, {name}"
        # Every element moves once, whoever holds or reads copies of it.
        assert plan.block_bytes == sum(array.nbytes for array in case.whole.values()), f"seed {seed}"


def test_a_slice_that_several_ranks_hold_is_sent_by_the_least_loaded() -> None:
    shape = shape_of(QWEN)
    plan = plan_model_refit(shape, PolicyLayout(2, 1, 4), EngineLayout(2), dtype="bfloat16", buffer_bytes=GIB)
    loads = [0] * 8
    for block in plan.blocks():
        assert block.source in plan.holders[block.holders]
        loads[block.source] += block.nbytes
    largest = shape.vocab_size * shape.hidden_size * 2 // 2  # one slice of the embedding
    assert max(loads) - min(loads) <= largest and min(loads) > 0


def test_pieces_are_as_few_as_possible() -> None:
    shape = shape_of(QWEN)
    plan = plan_model_refit(shape, PolicyLayout(2), EngineLayout(2), dtype="bfloat16", buffer_bytes=GIB)
    for block in plan.blocks():
        fused = {"linear_qkv": 3}  # q, k and v: one group on each rank, of whose parts vLLM makes three
        most = 1 if "linear_qkv" not in block.param else fused["linear_qkv"]
        for rank in (0, 1):
            # q, k, v of one group lie in vLLM's order, so even they are one copy.
            assert sum(read.rank == rank for read in block.reads) <= most
    qkv = [block for block in plan.blocks() if "linear_qkv.weight" in block.param]
    assert all(len(block.reads) == 1 for block in qkv)
    # Two groups on one rank: q, q, k, k, v, v of [q k v | q k v]; the queries' and the keys' copies cannot touch.
    one = plan_model_refit(shape, PolicyLayout(1), EngineLayout(1), dtype="bfloat16", buffer_bytes=GIB)
    pieces = Counter(block.param for block in one.blocks())
    assert {count for name, count in pieces.items() if "layers.5.self_attention.linear_qkv.weight" in name} == {6}
    assert {len(block.reads) for block in one.blocks()} == {1}
    assert one.block_bytes == plan.block_bytes


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [
        (PolicyLayout(2, 4, 2), EngineLayout(4)),
        (PolicyLayout(1, 8, 1), EngineLayout(2, 4)),
        (PolicyLayout(2, 1, 4), EngineLayout(8, nodes=2)),
    ],
)
def test_all_ranks_are_at_work_in_every_bucket(trainer: PolicyLayout, engine: EngineLayout) -> None:
    """Equal shares: the busiest rank's bytes, summed over the buckets, are hardly more than its part of all bytes."""
    shape = shape_of(QWEN | {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000})
    plan = plan_model_refit(shape, trainer, engine, dtype="bfloat16", buffer_bytes=64 * 2**20)
    assert len(plan.buckets) > 20 and all(bucket.nbytes <= 32 * 2**20 for bucket in plan.buckets)
    written, read = Counter[int](), Counter[int]()
    serial_written = serial_read = 0
    for bucket in plan.buckets:
        ours, theirs = Counter[int](), Counter[int]()
        for block in bucket.blocks:
            nodes = {read.rank * engine.nodes // engine.ranks for read in block.reads}
            ours[block.source] += block.nbytes * len(nodes)
            for copy in block.reads:
                theirs[copy.rank] += block.nbytes
        serial_written, serial_read = serial_written + max(ours.values()), serial_read + max(theirs.values())
        written, read = written + ours, read + theirs
    assert serial_written <= 1.15 * max(written.values())
    assert serial_read <= 1.7 * max(read.values()), "a block goes to one reader"


def test_whoever_reads_a_block_reads_all_of_it_without_gaps() -> None:
    """Row-parallel weights: a reader's columns lie in a block of their own, and no byte is read in vain."""
    shape = shape_of(QWEN)
    plan = plan_model_refit(shape, PolicyLayout(1), EngineLayout(2), dtype="bfloat16", buffer_bytes=GIB)
    down = [block for block in plan.blocks() if "layers.0.mlp.linear_fc2" in block.param]
    assert {block.box[1] for block in down} == {(0, 2432), (2432, 4864)}
    read = Counter[int]()
    for block in plan.blocks():
        for copy in block.reads:
            read[copy.rank] += block.nbytes
            assert math.prod(stop - start for start, stop in copy.box) * 2 == block.nbytes
    needed = EngineLayout(2).bytes_by_rank([p for p in params_of(shape) if not p.copy], shape, lambda _: 2)
    assert [read[0], read[1]] == needed


def test_a_large_parameter_is_cut_by_rows() -> None:
    shape = shape_of(QWEN)
    plan = plan_model_refit(shape, PolicyLayout(2), EngineLayout(1), dtype="bfloat16", buffer_bytes=100 * 2**20)
    assert plan.buffer_bytes <= 100 * 2**20
    parts = [block for block in plan.blocks() if block.reads[0].param == "model.embed_tokens.weight"]
    assert len(parts) > 2 and all(block.nbytes <= plan.half_bytes <= 50 * 2**20 for block in parts)
    assert {block.box[1] for block in parts} == {(0, 896)}


def test_the_digest_of_a_plan_sees_every_change() -> None:
    case = random_case(7)
    plan = plan_of(case)
    again = plan_of(random_case(7))
    assert again == plan and again.digest == plan.digest
    others = [
        plan_of(replace(case, engine=replace(case.engine, tensor=2 * case.engine.tensor, expert_parallel=False))),
        plan_of(replace(case, trainer=replace(case.trainer, data=2 * case.trainer.data))),
        plan_refit(case.params, case.shape, case.trainer, case.engine, dtype="int32", buffer_bytes=GIB, alignment=16),
        plan_refit(case.params[:-1], case.shape, case.trainer, case.engine, dtype="int32", buffer_bytes=GIB),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 5


def test_parameters_that_the_engine_must_place_travel_whole() -> None:
    shape = make_shape(num_layers=1)
    params = [replace(param, engine=None) if "qkv" in param.megatron else param for param in params_of(shape)]
    case = Case(shape, tuple(params), PolicyLayout(2), EngineLayout(2), 0)
    plan = plan_of(case)
    names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "kqv"]
    assert plan.fallbacks == tuple(names)
    for rank in (0, 1):
        whole = {name: np.full_like(case.whole[name], PADDING) for name in names}
        for block in plan.blocks():
            for read in block.reads:
                if read.rank == rank and read.param.startswith("hf:"):
                    values = on_the_policy(case, block.source)[block.param][index(block.box)]
                    whole[read.param[3:]][index(read.box)] = values
        for name in names:
            assert np.array_equal(whole[name], case.whole[name])


def test_errors() -> None:
    shape = make_shape(hidden_size=1000)
    with pytest.raises(RefitError, match=r"one row of 'embedding.word_embeddings.weight' has 4,000 bytes and does"):
        plan_refit(params_of(shape), shape, PolicyLayout(), EngineLayout(), dtype="float32", buffer_bytes=4000)
    with pytest.raises(RefitError, match="no parameters"):
        plan_refit([], shape, PolicyLayout(), EngineLayout(), dtype="float32", buffer_bytes=GIB)
    with pytest.raises(RefitError, match="'int7'"):
        plan_refit(params_of(shape), shape, PolicyLayout(), EngineLayout(), dtype="int7", buffer_bytes=GIB)


def test_the_size_that_the_message_names_is_enough() -> None:
    shape = make_shape(hidden_size=1000)

    def plan(gib: float) -> RefitPlan:
        return plan_refit(
            params_of(shape), shape, PolicyLayout(), EngineLayout(), dtype="float32", buffer_bytes=int(gib * GIB)
        )

    with pytest.raises(RefitError) as caught:
        plan(1e-6)
    named = float(str(caught.value).split("that holds it is ")[1].split(" ")[0])
    assert plan(named).buckets


def test_parameters_of_equal_sizes_but_other_parts_are_cut_differently() -> None:
    def param(name: str, *parts: int) -> Param:
        tensor = HfTensor(name, (8, 4))
        return Param(name, (tensor,), Split.PARTS, Stage.LAYER, layer=0, engine=name, parts=parts)

    def blocks(*params: Param) -> set[tuple[Any, ...]]:
        settings = {"dtype": "float32", "buffer_bytes": GIB}
        plan = plan_refit(params, make_shape(), PolicyLayout(tensor=2), EngineLayout(), **settings)
        return {(block.param, block.box, read.box) for block in plan.blocks() for read in block.reads}

    one, other = param("one", 4, 4), param("other", 2, 6)
    assert blocks(one, other) == blocks(one) | blocks(other)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("deliveries", [1, 16])
def test_counted_bytes_are_those_of_the_plan(seed: int, deliveries: int) -> None:
    case = random_case(seed)
    layout = (case.params, case.shape, case.trainer, case.engine)
    settings = {"dtype": "bfloat16", "buffer_bytes": GIB, "deliveries": deliveries}
    plan, counted = plan_refit(*layout, **settings), count_refit(*layout, **settings)
    held: Counter[object] = Counter()
    written = [0] * case.trainer.world_size
    for block in plan.blocks():
        nodes = frozenset(read.rank * case.engine.nodes // case.engine.ranks for read in block.reads)
        held[plan.holders[block.holders], nodes] += block.nbytes
        written[block.source] += block.nbytes
    assert counted.written == tuple(written) and counted.held == held


@pytest.mark.slow
def test_1024_ranks_and_a_235b_model_are_planned_in_seconds() -> None:
    shape = make_shape(
        hidden_size=4096, num_layers=94, num_heads=64, num_kv_heads=4, head_dim=128, ffn_hidden_size=12288,
        vocab_size=151936, qk_norm=True,
    )  # fmt: skip
    params = with_experts(shape, experts=128, ffn=1536)
    assert 234e9 < sum(tensor.numel for param in params for tensor in param.hf) < 236e9
    trainer = PolicyLayout(tensor=4, pipeline=2, data=64, expert=32, expert_tensor=1)
    began = time.process_time()
    plan = plan_refit(params, shape, trainer, EngineLayout(8, 1, True), dtype="bfloat16", buffer_bytes=4 * GIB)
    seconds = time.process_time() - began
    assert trainer.world_size == 512 and seconds < 10
    assert plan.block_bytes == 2 * sum(tensor.numel for param in params for tensor in param.hf)


@pytest.mark.slow
def test_rooms_load_without_vllm_and_megatron() -> None:
    code = (
        "import sys, grpo_mcore.refit, grpo_mcore.generation\n"
        "print([name for name in ('vllm', 'megatron', 'ray') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
