"""Distillations in NeMo RL's form: `distillation`, `teacher` and the divergence in `loss_fn`."""

from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.recipe import MasterConfig, RecipeError, algorithm_of, load_recipe, needs_prev, needs_reference
from grpo_mcore.recipe import teacher_policies as teachers

NEMO_RL = """
distillation:
  num_prompts_per_step: 8
  num_generations_per_prompt: 2
  max_rollout_turns: 1
  max_num_steps: 30
  max_num_epochs: 10
  val_batch_size: 64
  val_period: -1
  val_at_start: false
  val_at_end: false
  max_val_samples: 512
  topk_logits_k: 64
  seed: 7
loss_fn: {kl_type: mixed, mixed_kl_weight: 0.25, zero_outside_topk: true}
policy: &POLICY_BASE
  model_name: student
  tokenizer: {name: "${..model_name}"}
  train_global_batch_size: 8
  train_micro_batch_size: 1
  generation_batch_size: 64
  logprob_batch_size: 2
  max_total_sequence_length: 128
  precision: bfloat16
  dtensor_cfg: {enabled: false, tensor_parallel_size: 8}
  dynamic_batching: {enabled: false}
  sequence_packing: {enabled: true}
  make_sequence_length_divisible_by: 4
  max_grad_norm: 1.0
  megatron_cfg: &MEGATRON_BASE
    enabled: true
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 2
    sequence_parallel: false
    empty_unused_memory_level: 0
    converter_type: Qwen3ForCausalLM
    optimizer: {lr: 1.0e-5}
  generation: {backend: vllm, max_new_tokens: 64, colocated: {enabled: true}}
teacher:
  <<: *POLICY_BASE
  model_name: teacher
  megatron_cfg:
    <<: *MEGATRON_BASE
    tensor_model_parallel_size: 4
    pipeline_model_parallel_size: 1
    sequence_parallel: true
data:
  train: {data_path: x.jsonl}
env: {math: {num_workers: 1}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


def load(tmp_path: Path, *words: str, text: str = NEMO_RL) -> MasterConfig:
    (file := tmp_path / "recipe.yaml").write_text(text)
    return load_recipe(file, words).config


def test_the_sections_of_nemo_rl_are_a_grpo_run_with_a_teacher(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert algorithm_of(config) == "grpo" and config.grpo.adv_estimator.name == "opd"
    grpo = config.grpo
    assert (grpo.num_prompts_per_step, grpo.num_generations_per_prompt, grpo.max_num_steps) == (8, 2, 30)
    assert (grpo.val_period, grpo.max_val_samples, grpo.seed, grpo.max_num_epochs) == (0, 512, 7, 10)
    loss = config.on_policy_distillation.divergence
    assert (loss.enabled, loss.kl_type, loss.mixed_kl_weight) == (True, "mixed", 0.25)
    assert (loss.topk_logits_k, loss.zero_outside_topk) == (64, True)
    (teacher,) = teachers(config).values()
    megatron = teacher.megatron_cfg
    assert (teacher.model_name, megatron.tensor_model_parallel_size, megatron.sequence_parallel) == ("teacher", 4, True)
    assert megatron.pipeline_model_parallel_size == 1 and teacher.sequence_packing.train_mb_tokens == 2 * 128
    assert config.policy.megatron_cfg.pipeline_model_parallel_size == 2
    assert not needs_prev(config) and not needs_reference(config), "the loss reads neither, in two optimizer steps"


def test_given_answers_are_a_fine_tuning_with_a_teacher(tmp_path: Path) -> None:
    words = ("+distillation.on_policy=false", "+distillation.val_batches=3", "loss_fn.kl_type=forward")
    config = load(tmp_path, *words)
    assert algorithm_of(config) == "sft"
    assert (config.sft.max_num_steps, config.sft.val_batches, config.sft.seed) == (30, 3, 7)
    assert config.on_policy_distillation.divergence.kl_type == "forward" and len(teachers(config)) == 1


def test_the_resolved_recipe_is_the_same_again(tmp_path: Path) -> None:
    config = load(tmp_path)
    again = MasterConfig.model_validate(config.model_dump(mode="json"))
    assert again.model_dump() == config.model_dump()


def test_what_became_of_every_key_is_said(tmp_path: Path) -> None:
    (file := tmp_path / "recipe.yaml").write_text(NEMO_RL)
    notes = "\n".join(map(str, load_recipe(file).imported))
    for text in (
        "distillation.seed: used as grpo.seed",
        "loss_fn.kl_type: used as on_policy_distillation.divergence.kl_type",
        "teacher.model_name: used as on_policy_distillation.teacher_model_by_agent_name.teacher",
        "dropped: a teacher reads the policy's samples",
    ):
        assert text in notes, notes


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["distillation.num_prompt_per_step=3"], ["distillation.num_prompt_per_step: unknown key"]),
        (["distillation.max_num_steps=no"], ["distillation.max_num_steps: expected a whole number"]),
        (["+distillation.on_policy=maybe"], ["expected true or false, got 'maybe'"]),
        (["+grpo.max_num_steps=3"], ["distillation.max_num_steps: contradicts grpo.max_num_steps = 3 (command line)"]),
        (["loss_fn.kl_type=backward"], ["loss_fn.kl_type: expected one of"]),
        (["teacher.model_name=null"], ["teacher.model_name: this key is required"]),
        (["~teacher"], ["names no teacher"]),
        (["+teacher.modelname=x"], ["teacher.modelname: unknown key of a teacher; nearest: model_name"]),
        (["+teacher.hf_config_overrides={x: 1}"], ["teacher.hf_config_overrides: not supported for a teacher"]),
        (["teacher.dtensor_cfg.enabled=true", "+policy.dtensor_as_megatron=false"],
         ["teacher.dtensor_cfg", "the policy is Megatron-Core"]),
        (["+teacher.megatron_cfg.tensor_model_parallel=2"], ["tensor_model_parallel_size"]),
        (["+teacher.megatron_cfg.sequence_paralell=true"], ["is not a key of policy.megatron_cfg; nearest: seq"]),
        (["teacher.megatron_cfg.tensor_model_parallel_size=3"],
         ["teacher: the teacher: one copy of the model needs TP 3", "8 is not a multiple"]),
        (["teacher.megatron_cfg.sequence_parallel=3"], ["valid boolean, got 3"]),
    ],
)  # fmt: skip
def test_what_does_not_fit(tmp_path: Path, words: list[str], messages: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        load(tmp_path, *words)
    for message in messages:
        assert message in str(error.value), error.value


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"divergence": {"enabled": False}}, "compared over the whole vocabulary, with one teacher"),
        ({"teacher_model_by_agent_name": {"a": "x", "b": "y"}}, "with one teacher"),
    ],
)
def test_given_answers_need_the_vocabulary_and_one_teacher(section: dict[str, Any], message: str) -> None:
    teaching = {"enabled": True, "teacher_model_by_agent_name": {"a": "x"}, "divergence": {"enabled": True}}
    recipe = {
        "policy": {"model_name": "m", "train_global_batch_size": 8, "max_total_sequence_length": 64},
        "data": {"train": {"data_path": "x.jsonl"}},
        "sft": {},
        "on_policy_distillation": teaching | {"default_teacher_alias": "a"} | section,
    }
    with pytest.raises(RecipeError, match=message):
        MasterConfig.model_validate(recipe)
