"""Recipes that name NeMo RL's DTensor policy are read as those of the Megatron-Core policy."""

import pytest

from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.plan.run_plan import check_plan
from tests.unit.recipe.conftest import MINIMAL
from tests.unit.recipe.peer_recipes import BASES, GRPO, RECIPES


@pytest.mark.parametrize("section", ["dtensor_cfg", "automodel_cfg"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_the_dtensor_policy_loads(write, name: str, section: str) -> None:
    base, text, expected = RECIPES[name]
    write(BASES[base].replace("dtensor_cfg", section), "base.yaml")
    recipe = load_recipe(write("defaults: base\n" + text.replace("dtensor_cfg", section)))
    megatron = recipe.config.policy.megatron_cfg.model_dump()
    for key, value in expected.items():
        found = megatron
        for part in key.split("."):
            found = found[part]
        assert found == pytest.approx(value) if isinstance(value, float) else found == value, key
    check_plan(recipe.config)
    assert recipe.config.policy.head == ("value" if base == "rm" else "tokens")
    lines = [note for note in map(str, recipe.imported) if "read as policy.megatron_cfg" in note]
    assert len(lines) == (2 if base == "distillation" else 1)
    assert lines[-1].endswith("policy.dtensor_as_megatron: false forbids it")


def test_keys_of_the_unused_megatron_policy_have_no_effect(write) -> None:
    write(GRPO, "base.yaml")
    child = "defaults: base\npolicy: {dtensor_cfg: {enabled: true}}\n"  # as many recipes say once more
    megatron = load_recipe(write(child)).config.policy.megatron_cfg
    assert megatron == load_recipe(write("defaults: base\n")).config.policy.megatron_cfg
    assert (megatron.tensor_model_parallel_size, megatron.sequence_parallel) == (1, False)
    assert megatron.moe_router_bias_update_rate == 0 and megatron.moe_router_load_balancing_type == "none"
    assert (megatron.optimizer.lr, megatron.optimizer.weight_decay, megatron.optimizer.min_lr) == (5e-6, 0.01, 5e-7)
    assert megatron.scheduler.start_weight_decay == 0.01 and megatron.scheduler.lr_warmup_iters == 50


def test_lora_of_a_policy_that_is_off_has_no_effect(load) -> None:
    text = "defaults: grpo_math_1B\npolicy: {dtensor_cfg: {enabled: false, lora_cfg: {enabled: true}}}\n"
    assert not load(text).config.policy.megatron_cfg.peft.enabled


def test_null_says_nothing_of_the_megatron_policy(load) -> None:
    text = "defaults: grpo_math_1B\npolicy: {optimizer: null, scheduler: null}\n"
    assert load(text).config == load("defaults: grpo_math_1B\n").config


def test_a_teacher_of_the_dtensor_policy_has_its_layout(load) -> None:
    for words, size in (((), 4), (("teacher.megatron_cfg.tensor_model_parallel_size=2",), 2)):
        section = load(BASES["distillation"], *words).config.on_policy_distillation
        assert section.non_colocated_teachers.default_teacher_cfg.tensor_model_parallel_size == size
    words = ["teacher.dtensor_cfg.tensor_parallel_size=4", "teacher.optimizer.kwargs.lr=1e-6"]
    section = load_recipe("distillation_math", [*words, "cluster.gpus_per_node=4"]).config.on_policy_distillation
    assert section.non_colocated_teachers.default_teacher_cfg.tensor_model_parallel_size == 4


def test_the_command_line_decides_in_either_spelling(load) -> None:
    config = load(GRPO, "policy.megatron_cfg.tensor_model_parallel_size=2", "policy.optimizer.kwargs.lr=1e-6").config
    assert config.policy.megatron_cfg.tensor_model_parallel_size == 2
    assert config.policy.megatron_cfg.optimizer.lr == 1e-6
    config = load(GRPO, "policy.megatron_cfg.optimizer.lr=2e-6", "policy.dtensor_cfg.tensor_parallel_size=8").config
    assert (config.policy.megatron_cfg.optimizer.lr, config.policy.megatron_cfg.tensor_model_parallel_size) == (2e-6, 8)
    assert config.policy.make_sequence_length_divisible_by == 8


def test_a_child_that_enables_megatron_gets_the_megatron_section(write) -> None:
    write(GRPO, "base.yaml")
    child = "defaults: base\npolicy: {megatron_cfg: {enabled: true, moe_router_bias_update_rate: 0,\n"
    child += "  moe_router_load_balancing_type: none}, dtensor_cfg: {enabled: false, tensor_parallel_size: 8}}\n"
    for text in (child, child.replace("enabled: false, ", "")):
        megatron = load_recipe(write(text)).config.policy.megatron_cfg
        assert (megatron.tensor_model_parallel_size, megatron.optimizer.lr) == (2, 4e-6)


def test_a_remedy_in_a_recipe_on_ours_works_as_written(load) -> None:
    text = (
        "defaults: grpo_math_1B\npolicy: {train_micro_batch_size: 2, dtensor_cfg: {activation_checkpointing: true}}\n"
    )
    recipe = load(text + "  \nlogger: {wandb_name: mine, tb_name: tb}\n")
    assert recipe.config.policy.megatron_cfg.activation_checkpointing and recipe.config.logger.wandb.name == "mine"
    assert "policy.dtensor_cfg.activation_checkpointing: used as policy.megatron_cfg." in "\n".join(
        map(str, recipe.imported)
    )
    size = "policy: {make_sequence_length_divisible_by: '${policy.dtensor_cfg.tensor_parallel_size}'}\n"
    assert load("defaults: grpo_math_1B\n" + size).config.policy.make_sequence_length_divisible_by == 1


def test_both_policies_of_one_file_contradict_each_other(problems) -> None:
    text = GRPO.replace("    enabled: false\n    empty_unused", "    enabled: true\n    empty_unused")
    text = text.replace("aux_loss", "none").replace("bias_update_rate: 1e-3", "bias_update_rate: 0")
    (line,) = problems(text)
    assert (
        "policy.dtensor_cfg.enabled: contradicts r.yaml:" in line and "policy.megatron_cfg.enabled: true; set" in line
    )


def test_two_spellings_of_one_layer_contradict_each_other(problems) -> None:
    text = MINIMAL.replace("policy:\n", "policy:\n  dtensor_cfg: {tensor_parallel_size: 2}\n"
                           "  megatron_cfg: {tensor_model_parallel_size: 4}\n")  # fmt: skip
    assert "policy.dtensor_cfg.tensor_parallel_size: contradicts policy.megatron_cfg.tensor_model" in problems(text)[0]
