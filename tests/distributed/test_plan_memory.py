"""`plan` predicts what a policy really allocates, rank by rank: weights, gradients, optimizer state and refit buffer
within 2 %, activations within 15 %."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_mcore.algorithms.parity_rank import LayoutCase, policy_config
from grpo_mcore.algorithms.plan.memory import activation_bytes, gradient_bytes, optimizer_bytes, weight_bytes
from grpo_mcore.algorithms.plan.refit_traffic import refit_traffic
from grpo_mcore.algorithms.plan.workload import workload_of
from grpo_mcore.data.tiny_models import make_tiny_model
from grpo_mcore.families import read_hf_config, shape_of
from grpo_mcore.parallel.rank_pool import RankPool
from grpo_mcore.recipe import MasterConfig
from tests.distributed.plan_cases import LENGTHS, MICRO_BATCHES, TOKENS

CASES = [
    (LayoutCase("TP1"), {}),
    (LayoutCase("TP1-recompute", recompute=True), {}),
    (LayoutCase("TP2", tensor=2), {}),
    (LayoutCase("TP2-SP-bf16", tensor=2, sequence_parallel=True), {"precision": "bfloat16"}),
    (LayoutCase("PP2-bf16", pipeline=2), {"precision": "bfloat16"}),
    (LayoutCase("PP4", pipeline=4), {}),
    (LayoutCase("DP2-bf16", data=2), {"precision": "bfloat16"}),
    (LayoutCase("TP2xPP2-recompute", tensor=2, pipeline=2, recompute=True), {}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tied and untied embeddings, with and without norms of the heads."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "qwen3": str(make_tiny_model("qwen3", folder / "qwen3", tie_word_embeddings=True)),
        "llama": str(make_tiny_model("llama", folder / "llama")),
    }


@pytest.mark.parametrize(
    ("family", "case", "changes"),
    [("qwen3" if i % 2 else "llama", *each) for i, each in enumerate(CASES)],
    ids=[case.name for case, _ in CASES],
)
def test_predicted_bytes_are_those_of_every_rank(
    ranks: RankPool, models: dict[str, str], family: str, case: LayoutCase, changes: dict[str, Any]
) -> None:
    policy = policy_config(models[family], case, **changes)
    measured = ranks.run(case.world_size, "tests.distributed.plan_cases:measured_bytes", policy)
    config = MasterConfig(
        policy=policy.model_copy(update={"train_global_batch_size": len(LENGTHS) * MICRO_BATCHES * case.data}),
        data={"train": []},
        cluster={"gpus_per_node": case.world_size},
    )
    shape = shape_of(read_hf_config(models[family]))
    load = workload_of(config, shape, kernels="cpu", mean_length=TOKENS // len(LENGTHS))
    load = replace(load, bin_tokens=TOKENS)
    for rank, found in enumerate(measured):
        here = load.layout.coordinates(rank)
        stage = here.pipeline
        predicted = {
            "weights": weight_bytes(load, stage),
            "gradients": gradient_bytes(load, stage),
            "optimizer": optimizer_bytes(load, stage, here.data),
            "activations": activation_bytes(load, stage, TOKENS, padding=(48 + 61 + 2 * 77) / TOKENS),
        }
        if rank == 0:
            predicted["refit buffer"] = refit_traffic(load).buffer
        print(f"{case.name} {family} rank {rank}: " + ", ".join(f"{k} {predicted[k]:,} / {found[k]:,}" for k in found))
        assert predicted.keys() == found.keys()
        for name in found:
            bound = 0.15 if name == "activations" else 0.02
            assert predicted[name] == pytest.approx(found[name], rel=bound), f"{name} of rank {rank}"
