"""A refit plan from real Megatron-Core ranks gives every engine rank its part of the checkpoint, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from grpo_mcore.families import params_of, read_hf_config, shape_of
from grpo_mcore.layout import EngineLayout
from grpo_mcore.recipe import policy_layout
from grpo_mcore.refit.plan.plan import plan_refit
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.rank import LayoutCase, policy_config
from grpo_mcore.tools.parity.rank_pool import RankPool
from tests.unit.refit.whole_split import PADDING, Case, in_the_engine

PAIRS: list[tuple[str, LayoutCase, int]] = [
    ("qwen2", LayoutCase("TP2", tensor=2), 1),
    ("qwen3", LayoutCase("TP2xPP2", tensor=2, pipeline=2), 2),
    ("llama", LayoutCase("PP2", pipeline=2), 1),
    ("llama", LayoutCase("TP4", tensor=4), 2),
    ("qwen3", LayoutCase("DP2", data=2), 2),
    ("qwen2", LayoutCase("PP2-2+4", pipeline=2, first_stage=2), 4),
    ("qwen2", LayoutCase("CP2", context=2), 1),
    ("qwen3", LayoutCase("VPP2-2+4", pipeline=2, virtual=2, first_stage=2), 2),
    ("qwen3_moe", LayoutCase("EP2xPP2", pipeline=2, data=2, expert=2), 1),
    ("qwen3_moe", LayoutCase("EP2xETP2", tensor=2, data=2, sequence_parallel=True, expert=2, expert_tensor=2), 2),
    ("mixtral", LayoutCase("ETP2", tensor=2, sequence_parallel=True, expert_tensor=2), 1),
]


@pytest.mark.parametrize(("family", "case", "engine"), PAIRS, ids=lambda value: getattr(value, "name", None))
def test_the_engines_receive_the_checkpoint(
    ranks: RankPool, tmp_path: Path, family: str, case: LayoutCase, engine: int
) -> None:
    folder = make_tiny_model(family, tmp_path, tie_word_embeddings=family == "qwen3", num_hidden_layers=6)
    shape = shape_of(read_hf_config(folder))
    config = policy_config(folder, case)
    trainer = policy_layout(config.megatron_cfg, case.world_size)
    experts = shape.experts.count if shape.experts else 0
    whole = Case(shape, params_of(shape), trainer, EngineLayout(engine), experts)
    whole.__dict__["whole"] = load_file(folder / "model.safetensors")
    held = ranks.run(case.world_size, "tests.distributed.refit_cases:parameters", str(folder), case)
    plan = plan_refit(params_of(shape), shape, trainer, EngineLayout(engine), dtype="float32", buffer_bytes=2 * 20_000)
    expected = [in_the_engine(whole, rank) for rank in range(engine)]
    found = [{name: np.full_like(values, PADDING) for name, values in rank.items()} for rank in expected]
    for block in plan.blocks():
        values = held[block.source][block.param][tuple(slice(*span) for span in block.box)]
        for read in block.reads:
            place = found[read.rank][read.param][tuple(slice(*span) for span in read.box)]
            assert (place == PADDING).all()
            place[...] = values.reshape(place.shape)
    for rank in range(engine):
        for name, values in expected[rank].items():
            assert np.array_equal(found[rank][name], values), f"{name} on engine rank {rank}"
    assert plan.block_bytes == sum(values.nbytes for values in whole.whole.values())
