"""The section on_policy_distillation: NeMo RL's keys load, teachers get a layout."""

from typing import Any

from grpo_mcore.recipe import (
    MasterConfig,
    engine_pool,
    needs_prev,
    policy_pool,
    teacher_copies,
    teacher_engines,
    teacher_policies,
    teacher_pools,
    teacher_ranks,
    teacher_weight,
)

NEMO_RL = {
    "enabled": True,
    "teacher_model_by_agent_name": {"math": "teachers/math", "code": "teachers/code"},
    "default_teacher_alias": "math",
    "strict_agent_name_match": False,
    "deduplicate_shared_teacher_checkpoints": True,
    "non_colocated_teachers": {
        "enabled": False,
        "default_teacher_cfg": {
            "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "context_parallel_size": 1,
            "expert_model_parallel_size": 1, "num_nodes": 1, "gpus_per_node": 8, "precision": "bf16",
            "micro_batch_size": 2, "megatron_cfg_overrides": {"moe_grouped_gemm": False},
        },
        "teacher_overrides": {
            "code": {
                "tensor_model_parallel_size": 2, "precision": "float32",
                "megatron_cfg_overrides": {"moe_permute_fusion": False},
            },
        },
    },
}  # fmt: skip
LOSS = {
    "disable_ppo_ratio": True, "use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0,
    "truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 5.0,
    "truncated_importance_sampling_ratio_min": 0.2,
}  # fmt: skip


def recipe(
    section: dict[str, Any] | None = None, estimator: dict[str, Any] | None = None, **sections: Any
) -> MasterConfig:
    return MasterConfig.model_validate(
        {
            "policy": {
                "model_name": "student", "train_global_batch_size": 8, "max_total_sequence_length": 64,
                "precision": "float32", "train_micro_batch_size": 1, "logprob_batch_size": 4,
                "megatron_cfg": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            },
            "data": {"train": {"data_path": "x.jsonl"}},
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4}
            | {"adv_estimator": estimator or {"name": "opd"}}
            | sections.pop("grpo", {}),
            "on_policy_distillation": NEMO_RL if section is None else section,
            "cluster": {"gpus_per_node": 4},
        }
        | sections
    )  # fmt: skip


def test_the_section_of_nemo_rl_loads_and_lays_teachers_out() -> None:
    config = recipe(loss_fn=LOSS)
    assert needs_prev(config) and teacher_weight(config) == 1
    teachers = teacher_policies(config)
    math, code = teachers["math"], teachers["code"]
    assert (math.model_name, math.precision, math.megatron_cfg.moe_grouped_gemm) == ("teachers/math", "bfloat16", False)
    layouts = [it.megatron_cfg for it in (math, code)]
    assert not layouts[1].moe_grouped_gemm and not layouts[1].moe_permute_fusion, "merged key by key"
    sizes = [(it.tensor_model_parallel_size, it.pipeline_model_parallel_size) for it in layouts]
    assert sizes == [(1, 2), (2, 2)] and code.precision == "float32"
    assert [it.megatron_cfg.sequence_parallel for it in (math, code)] == [False, True]
    assert math.sequence_packing.train_mb_tokens == 2 * 64, "rows of micro_batch_size samples"
    assert math.generation == config.policy.generation, "the same temperature and cut"


def test_a_teacher_without_a_layout_is_laid_out_like_the_policy() -> None:
    config = recipe(ONE, {"name": "rloo", "opd_weight": 0.5})
    assert teacher_weight(config) == 0.5 and needs_prev(config)
    teacher = teacher_policies(config)["it"]
    assert teacher.megatron_cfg == config.policy.megatron_cfg
    assert teacher.sequence_packing.train_mb_tokens == config.policy.sequence_packing.logprob_mb_tokens == 256
    off = recipe({}, {"name": "grpo"})
    assert not teacher_policies(off) and not needs_prev(off) and teacher_weight(off) == 0


ONE = {"enabled": True, "teacher_model_by_agent_name": {"it": "big"}}


def engines(**settings: Any) -> dict[str, Any]:
    return ONE | {"non_colocated_teachers": {"default_teacher_cfg": {"backend": "vllm"} | settings}}


def test_a_teacher_on_engines_is_laid_out_as_the_policys_engines_are() -> None:
    """There are as many engines as its devices hold, and on CPU one. A Megatron teacher of the same model is a copy of
    its own."""
    section = engines(gpu_memory_utilization=0.8)
    section["teacher_model_by_agent_name"] = {"it": "big", "other": "big", "too": "big"}
    section["non_colocated_teachers"]["teacher_overrides"] = {"other": {"backend": "megatron"}}
    config = recipe(section | {"default_teacher_alias": "it"}, cluster={"gpus_per_node": 4, "platform": "gpu"})
    policy = teacher_policies(config)["it"]
    assert policy.generation.vllm_cfg.max_model_len == 65 and policy.generation.vllm_cfg.gpu_memory_utilization == 0.8
    assert policy.generation.temperature == config.policy.generation.temperature
    for gpu, count in ((True, 4), (False, 1)):
        layout = teacher_engines(config, "it", gpu=gpu)
        assert layout is not None and (layout.count, layout.layout.tensor) == (count, 1)
    assert teacher_engines(config, "other", gpu=True) is None
    assert teacher_copies(config) == {"it": "it", "other": "other", "too": "it"}


def test_a_loss_over_whole_distributions_needs_no_logprobs_of_the_step_before() -> None:
    config = recipe(ONE | {"divergence": {"enabled": True, "topk_logits_k": 64}})
    assert teacher_weight(config) == 0 and not needs_prev(config) and teacher_policies(config)


def test_teachers_with_nodes_of_their_own_leave_the_others_to_policy_and_engines() -> None:
    """Aliases of one model and layout share nodes; a layout must fill the nodes that it has."""
    models = {"math": "a", "code": "b", "chat": "a"}
    places = {
        "enabled": True,
        "default_teacher_cfg": {"num_nodes": 2, "gpus_per_node": 2, "tensor_model_parallel_size": 4},
        "teacher_overrides": {"code": {"num_nodes": 1, "gpus_per_node": 8, "tensor_model_parallel_size": 8}},
    }
    section = {"enabled": True, "teacher_model_by_agent_name": models, "default_teacher_alias": "math"}
    section["non_colocated_teachers"] = places
    cluster = {"num_nodes": 5, "gpus_per_node": 8}
    apart = recipe(section, cluster=cluster)
    assert {alias: (pool.nodes, pool.per_node) for alias, pool in teacher_pools(apart).items()} == {
        "math": (2, 2), "code": (1, 8)
    }  # fmt: skip
    assert policy_pool(apart).ranks == 16 and (teacher_ranks(apart, "math"), teacher_ranks(apart, "code")) == (4, 8)
    assert engine_pool(apart) is None
    together = recipe(section | {"non_colocated_teachers": {}})
    assert not teacher_pools(together) and policy_pool(together).ranks == teacher_ranks(together, "math") == 4


def test_an_unknown_key_of_a_teacher_whose_copies_are_shared_is_named(problems) -> None:
    text = """\
defaults: grpo_math_1B
grpo: {adv_estimator: {name: opd}}
on_policy_distillation:
  enabled: true
  teacher_model_by_agent_name: {a: Qwen/Qwen3-4B, b: Qwen/Qwen3-4B}
  deduplicate_shared_teacher_checkpoints: true
  default_teacher_alias: a
  non_colocated_teachers: {enabled: true, default_teacher_cfg: {megatron_cfg_overrides: {tensor_model_paralel_size: 2}}}
cluster: {num_nodes: 2}
"""
    (line,) = problems(text)
    assert line.endswith("is not a key of policy.megatron_cfg; nearest: tensor_model_parallel_size")
    (line,) = problems(text.replace("tensor_model_paralel_size: 2", "tensor_model_parallel_size: many"))
    assert "megatron_cfg_overrides.tensor_model_parallel_size" in line
