"""Refits that bring adapters alone: a real vLLM engine applies them, against transformers on merged weights."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_mcore.families import (
    DOWN,
    UP,
    AdapterShape,
    adapter_params,
    engine_options,
    params_of,
    read_hf_config,
    shape_of,
)
from grpo_mcore.generation import Engine
from grpo_mcore.refit.plan.plan import RefitError, RefitPlan
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.tools.demo.tiny_models import ENGINE_SIZES, make_tiny_model
from grpo_mcore.tools.parity.parity import unstacked
from tests.functional.engine_cases import (
    Policy,
    config,
    generate,
    load_reference,
    make_model,
    request,
    worst_difference,
)
from tests.unit.refit.shards import Handle, ShardedModel

SHAPE = AdapterShape(3, 6.0, excluded=("*.layers.0.*linear_proj",))
REQUESTS = [request(number) for number in range(8)]


class AdapterPolicy(Policy):
    """Two tensor-parallel ranks with adapters; `reference` has them merged."""

    def __init__(self, folder: Path, adapters: AdapterShape = SHAPE) -> None:
        super().__init__(folder)
        self.folder = folder
        self.params = adapter_params(params_of(self.shape), adapters)
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
        tensors = load_file(self.folder / "model.safetensors")
        weights = unstacked(tensors, self.shape)  # views
        for part in self.params:
            layers = [tensor.name.removesuffix(UP) for tensor in part.hf]
            if part.hf[0].name.endswith(UP):
                for layer in layers:  # query, key and value share the first one's `down`
                    name = layer if layer in weights else f"{layer}.weight"  # stacks are no weights of layers
                    weights[name] += self.whole[layer + UP] @ self.whole[layers[0] + DOWN]
        with tempfile.TemporaryDirectory() as merged:
            shutil.copy(self.folder / "config.json", merged)
            save_file(tensors, Path(merged, "model.safetensors"), metadata={"format": "pt"})
            self.reference = load_reference(Path(merged))

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
    with pytest.raises(RefitError, match="no adapter to .*model.layers.9.mlp.gate_proj.weight.down; leave"):
        policy.refit(engine, 3, plan)
    full = Policy(folder)
    with pytest.raises(RefitError, match="the engine serves adapters, and the refit plan brings the weights lm_head"):
        full.refit(engine, 3)
    full.close()
    policy.change(seed=4)
    policy.refit(engine, 4)
    assert worst_difference(policy.reference, generate(engine, REQUESTS)) < 1e-4
    policy.close()


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("qwen3_moe", 1),
        *(
            pytest.param(*case, marks=pytest.mark.every_state)
            for case in (("qwen3_moe", 2), ("deepseek_v3", 1), ("nemotron_h_moe", 1), ("qwen3_5_moe_text", 1))
        ),
    ],
)
def test_adapters_of_experts(tmp_path: Path, family: str, ranks: int) -> None:
    """Mixers of Qwen3.5 normalise outputs that may be next to 0. With an epsilon of 1e-6 that makes up to 1e-4 of
    float32's rounding, also in transformers against float64."""
    sizes = {"rms_norm_eps": 1e-2} if family == "qwen3_5_moe_text" else {}
    folder = make_tiny_model(family, tmp_path, words=True, **ENGINE_SIZES.get(family, {}), **sizes)
    adapters = AdapterShape(3, 6.0, excluded=("linear_kv_up_proj",) if family == "deepseek_v3" else ())
    options = engine_options(shape_of(read_hf_config(folder)))
    engine = Engine(config(folder, adapter_rank=3, tensor_parallel_size=ranks, **options))
    policy = AdapterPolicy(folder, adapters)
    try:
        assert worst_difference(policy.reference, generate(engine, REQUESTS)) < 1e-5
        for version in (1, 2):
            policy.change(seed=version)
            policy.refit(engine, version, verify="full")
            assert worst_difference(policy.reference, generate(engine, REQUESTS)) < 1e-5
    finally:
        policy.close()
        engine.shutdown()
