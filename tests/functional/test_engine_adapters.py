"""Refits that bring adapters alone: a real vLLM engine applies them, against transformers on merged weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mcore.families import DOWN, UP, AdapterShape, adapter_params, params_of
from grpo_mcore.generation import Engine
from grpo_mcore.refit.plan.plan import RefitError, RefitPlan
from grpo_mcore.refit.policy_side.sender import RefitSender
from tests.functional.engine_cases import Policy, config, generate, make_model, request, worst_difference
from tests.unit.refit.shards import Handle, ShardedModel

SHAPE = AdapterShape(3, 6.0, excluded=("*.layers.0.*linear_proj",))
REQUESTS = [request(number) for number in range(8)]


class AdapterPolicy(Policy):
    """Two tensor-parallel ranks with adapters; `reference` has them merged."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.params = adapter_params(params_of(self.shape), SHAPE)
        self.base = {name: tensor.clone() for name, tensor in self.reference.state_dict().items()}
        self.whole: dict[str, Tensor] = {}

    def source(self, rank: int) -> Any:
        class Source:
            def parameters(_) -> Any:
                return ShardedModel(self.whole, self.shape, rank, self.size, self.params).parameters()

        return Source()

    @torch.no_grad()
    def change(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.whole = {tensor.name: 0.2 * torch.randn(tensor.shape) for param in self.params for tensor in param.hf}
        merged = dict(self.base)
        for part in self.params:
            layers = [tensor.name.removesuffix(UP) for tensor in part.hf]
            if part.hf[0].name.endswith(UP):
                for layer in layers:  # query, key and value share the first one's `down`
                    merged[f"{layer}.weight"] = self.base[f"{layer}.weight"] + (
                        self.whole[layer + UP] @ self.whole[layers[0] + DOWN]
                    )
        self.reference.load_state_dict(merged)

    def plan(self, engine: Engine, **params: Any) -> RefitPlan:
        return super().plan(engine, buffer_bytes=16_384, **({"params": self.params} | params))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(config(folder, adapter_rank=SHAPE.rank, tensor_parallel_size=2))
    yield engine
    engine.shutdown()


def test_the_adapters_alone_move_and_the_engine_applies_them(engine: Engine, folder: Path) -> None:
    policy = AdapterPolicy(folder)
    assert worst_difference(policy.reference, generate(engine, REQUESTS)) < 1e-5, "the model itself, before a refit"
    for version in (1, 2):
        policy.change(seed=version)
        report = policy.refit(engine, version, verify="full")
        assert report.bytes == sum(4 * tensor.numel() for tensor in policy.whole.values())
        assert report.buckets > 2 and not report.in_place and not report.fallbacks
        assert report.checked == sum(len(block.reads) for block in policy.plan(engine).blocks())
        found = generate(engine, REQUESTS)
        assert worst_difference(policy.reference, found) < 1e-4
        assert all(one.weight_versions == ((version, 0, one.length),) for one in found.values())

    class Sick(RefitSender):
        def fill_bucket(self, index: int, *checked: Any) -> dict[str, Any]:
            if index == 2:
                raise RuntimeError("out of luck")
            return super().fill_bucket(index, *checked)

    healthy = policy.handles[0]
    policy.handles[0] = Handle("policy-0", Sick(policy.source(0), 0))
    with pytest.raises(RefitError, match="out of luck"):
        policy.refit(engine, 3)
    assert worst_difference(policy.reference, generate(engine, REQUESTS)) < 1e-4, "those of version 2"
    policy.handles[0].target.close_refit()
    policy.handles[0] = healthy
    down, *others = policy.params
    unknown = replace(down, hf=(replace(down.hf[0], name=f"model.layers.9.mlp.gate_proj{DOWN}"),))
    plan = policy.plan(engine, params=[unknown, *others])
    with pytest.raises(RefitError, match="vLLM applies no adapter to model.layers.9.mlp.gate_proj.weight.down; leave"):
        policy.refit(engine, 3, plan)
    full = Policy(folder)
    with pytest.raises(RefitError, match="the engine serves adapters, and the refit plan brings the weights lm_head"):
        full.refit(engine, 3)
    full.close()
    policy.change(seed=4)
    policy.refit(engine, 4)
    assert worst_difference(policy.reference, generate(engine, REQUESTS)) < 1e-4
    policy.close()
