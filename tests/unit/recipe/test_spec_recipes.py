"""The recipes in the documents that the project was created from load unchanged."""

import pytest

from tests.unit.recipe.spec_templates import DPO_TEMPLATE, GRPO_TEMPLATE, GYM_GRPO, SFT_TEMPLATE

NESTED = """\
defaults: grpo_math_1B
data:
  train:
    data_path: /path/to/local/train_dataset.jsonl
    input_key: question
    subset: null
    split: train
    split_validation_size: 0.05
    seed: 42
  validation:
    data_path: /path/to/local/val_dataset.jsonl
  default:
    dataset_name: ResponseDataset
    input_key: input
    output_key: output
    prompt_file: null
    system_prompt_file: null
    processor: "math_hf_data_processor"
    env_name: "math"
"""


def test_grpo_on_gym_data(load) -> None:
    config = load(GYM_GRPO).config
    (train,), (validation,) = config.data.train, config.data.validation
    assert (train.dataset_name, train.data_path) == ("ResponseDataset", "grpo_data/train.jsonl")
    assert (validation.data_path, validation.env_name) == ("grpo_data/val.jsonl", "math")
    assert train.processor == "math_hf_data_processor" and train.split_validation_size == 0
    assert config.policy.sequence_packing.train_mb_tokens == 4096, "interpolations follow the child"
    assert config.policy.generation.max_new_tokens == 1024
    assert config.logger.wandb.name == "gym-data-run-1"


@pytest.mark.parametrize("base", ["grpo_math_1B", "grpo_math_1B_megatron"])
def test_grpo_template(load, base: str) -> None:
    config = load(GRPO_TEMPLATE.replace("grpo_math_1B", base), "cluster.gpus_per_node=8", "cluster.num_nodes=2").config
    assert config.data.validation == [] and config.policy.max_total_sequence_length == 1024


def test_sft_template(load) -> None:
    config = load(SFT_TEMPLATE).config
    (train,) = config.data.train
    assert (train.dataset_name, train.data_path, train.chat_key) == ("openai_format", "sft_train.jsonl", "messages")
    assert train.processor == "sft_processor"
    assert config.data.validation == [] and config.sft.max_num_steps == 60
    assert config.policy.train_global_batch_size == 32


def test_dpo_template(load, problems) -> None:
    config = load(DPO_TEMPLATE).config
    (train,) = config.data.train
    assert (train.dataset_name, train.data_path) == ("BinaryPreferenceDataset", "dpo_train.jsonl")
    assert (train.prompt_key, train.chosen_key, train.rejected_key) == ("prompt", "chosen", "rejected")
    assert config.data.validation == [] and train.processor == "preference_processor"
    assert config.dpo.sft_average_log_probs is False and config.dpo.val_global_batch_size == 128
    refusal = (
        "r.yaml:4: data.dataset_name: BinaryPreferenceDataset holds pairs of answers for DPO and Bradley-Terry reward "
        "models; a recipe for them has a section dpo or rm"
    )
    for base in ("sft", "grpo_math_1B"):
        assert problems(DPO_TEMPLATE.replace("- dpo", f"- {base}")) == [refusal]


def test_nested_example(load) -> None:
    (train,), (validation,) = (data := load(NESTED).config.data).train, data.validation
    assert (train.dataset_name, train.input_key, train.split) == ("ResponseDataset", "question", "train")
    assert (validation.input_key, validation.output_key, validation.env_name) == ("input", "output", "math")
