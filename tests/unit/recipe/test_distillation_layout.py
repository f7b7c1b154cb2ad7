"""Distillations in NeMo RL's form: `distillation`, `teacher` and the divergence in `loss_fn`."""

from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.recipe import MasterConfig, RecipeError, algorithm_of, load_recipe, needs_prev, needs_reference
from grpo_mcore.recipe import teacher_policies as teachers

NEMO_RL = Path(__file__).with_name("nemo_rl_distillation.yaml").read_text()


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
