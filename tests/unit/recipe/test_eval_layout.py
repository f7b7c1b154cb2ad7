"""Evaluations in NeMo RL's form, and in ours."""

from typing import Any

from grpo_mcore.recipe import MasterConfig, load_recipe


def test_the_keys_of_nemo_rl_become_policy_and_validation() -> None:
    config = load_recipe(
        "eval",
        ["generation.model_name=some/model", "data.dataset_name=gsm8k, MMLU-Pro", "generation.temperature=0.5",
         "generation.top_k=-1", "generation.vllm_cfg.max_model_len=512", "eval.num_tests_per_prompt=4"],
    ).config  # fmt: skip
    assert config.policy.model_name == config.policy.tokenizer.name == "some/model"
    generation = config.policy.generation
    assert (generation.val_temperature, generation.val_top_k, generation.val_top_p) == (0.5, None, 1.0)
    assert generation.vllm_cfg.max_model_len == generation.max_new_tokens == 512
    assert config.policy.max_total_sequence_length == config.data.max_input_seq_length == 512
    first, second = config.data.validation
    assert (first.dataset_name, first.split, first.env_name) == ("gsm8k", "test", "math")
    assert (second.dataset_name, second.env_name) == ("MMLU-Pro", "choice")
    assert first.prompt_file is not None and first.prompt_file.endswith("prompts/cot.txt")
    assert not config.data.train


def test_a_copy_of_the_data_and_other_keys_apply_to_every_dataset() -> None:
    words = ["data.dataset_name=[MATH-500]", "+data.data_path=copy.jsonl", "data.prompt_file=own.txt"]
    (entry,) = load_recipe("eval", words).config.data.validation
    assert (entry.data_path, entry.prompt_file, entry.env_name) == ("copy.jsonl", "own.txt", "math")


def test_the_resolved_recipe_is_the_same_again() -> None:
    config = load_recipe("eval", ["data.dataset_name=AIME2025"]).config
    plain: dict[str, Any] = config.model_dump(mode="json", include={"policy", "data", "env", "eval", "cluster"})
    assert MasterConfig.model_validate(plain).data.validation == config.data.validation
