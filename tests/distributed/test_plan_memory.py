"""`plan` predicts what a policy really allocates, rank by rank: weights, gradients, optimizer state and refit buffer
within 2 %, activations within 15 %."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
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

BF16 = {"precision": "bfloat16"}
CASES = [
    ("llama", LayoutCase("TP1"), {}),
    ("qwen3", LayoutCase("TP1-recompute", recompute=True), {}),
    ("qwen3", LayoutCase("TP2-SP-bf16", tensor=2, sequence_parallel=True), BF16),
    ("llama", LayoutCase("PP4", pipeline=4), {}),
    ("qwen3", LayoutCase("DP2-bf16", data=2), BF16),
    ("llama", LayoutCase("TP2xPP2-recompute", tensor=2, pipeline=2, recompute=True), {}),
    ("llama", LayoutCase("CP2", context=2), {}),
    ("qwen3", LayoutCase("VPP2-bf16", pipeline=2, virtual=2), BF16),
    ("qwen3_moe", LayoutCase("TP1"), {}),
    ("qwen3_moe", LayoutCase("EP2xTP2-SP-bf16", tensor=2, data=2, sequence_parallel=True, expert=2), BF16),
    ("qwen3_moe", LayoutCase("EP2xCP2", context=2, expert=2), {}),
    ("mixtral", LayoutCase("ETP2", tensor=2, sequence_parallel=True, expert_tensor=2), {}),
    ("mixtral", LayoutCase("EP2xPP2", pipeline=2, data=2, expert=2), {}),
    ("deepseek_v3", LayoutCase("TP1"), {}),
    ("deepseek_v3", LayoutCase("EP2xTP2-SP-bf16", tensor=2, data=2, sequence_parallel=True, expert=2), BF16),
    ("nemotron_h", LayoutCase("TP1-bf16"), BF16),
    ("nemotron_h_moe", LayoutCase("EP2", data=2, expert=2), {}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Tied and untied embeddings, with and without norms of the heads, experts, latent attention, Mamba2 mixers."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def make(family: str) -> str:
        return str(make_tiny_model(family, folder / family, tie_word_embeddings=family == "qwen3"))

    return make


@pytest.mark.parametrize(("family", "case", "changes"), CASES, ids=[f"{each[0]}-{each[1].name}" for each in CASES])
def test_predicted_bytes_are_those_of_every_rank(
    ranks: RankPool, models: Callable[[str], str], family: str, case: LayoutCase, changes: dict[str, Any]
) -> None:
    policy = policy_config(models(family), case, **changes)
    measured = ranks.run(case.world_size, "tests.distributed.plan_cases:measured_bytes", policy)
    config = MasterConfig(
        policy=policy.model_copy(update={"train_global_batch_size": len(LENGTHS) * MICRO_BATCHES * case.data}),
        data={"train": []},
        cluster={"gpus_per_node": case.world_size},
    )
    shape = shape_of(read_hf_config(models(family)))
    load = workload_of(config, shape, kernels="cpu", mean_length=TOKENS // len(LENGTHS))
    load = replace(load, bin_tokens=TOKENS)
    # Sequences of similar length share a batch; under context parallelism each is cut into four.
    padding = (48 + 61 + 2 * 77) / TOKENS
    for rank, found in enumerate(measured):
        here = load.layout.coordinates(rank)
        stage = here.pipeline
        predicted = {
            "weights": weight_bytes(load, stage),
            "gradients": gradient_bytes(load, stage),
            "optimizer": optimizer_bytes(load, stage, here),
            "activations": activation_bytes(load, stage, TOKENS, padding=padding),
        }
        if "refit buffer" in found:
            predicted["refit buffer"] = refit_traffic(load).buffer
        print(f"{case.name} {family} rank {rank}: " + ", ".join(f"{k} {predicted[k]:,} / {found[k]:,}" for k in found))
        assert predicted.keys() == found.keys()
        for name in found:
            bound = 0.15 if name == "activations" else 0.02
            assert predicted[name] == pytest.approx(found[name], rel=bound), f"{name} of rank {rank}"
