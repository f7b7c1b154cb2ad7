"""Evaluations in NeMo RL's form, and in ours."""

from typing import Any

import pytest

from grpo_mcore.recipe import MasterConfig, RecipeError, load_recipe


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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data.dataset_name=math"], {"dataset_name": "math", "env_name": "math"}),
        (["data.dataset_name=hmmt2025_feb"], {"dataset_name": "hmmt2025_feb", "env_name": "math"}),
        (["data.dataset_name=mmlu", "+data.language=EN-US"], {"dataset_name": "mmlu", "subset": None}),
        (["data.dataset_name=mmlu", "+data.language=ZH-CN"], {"subset": "ZH-CN", "env_name": "choice"}),
        (["data.dataset_name=mmlu_DE-DE"], {"dataset_name": "MMLU", "subset": "DE-DE"}),
        (["data.dataset_name=gpqa_diamond"], {"dataset_name": "GPQA", "env_name": "choice"}),
        (
            ["data.dataset_name='https://x.org/a.csv'", "+data.problem_key=Question"]
            + ["+data.solution_key=Answer", "+data.file_format=csv", "+data.env_name=math"],
            {"data_path": "https://x.org/a.csv", "input_key": "Question", "output_key": "Answer"},
        ),
    ],
)
def test_datasets_as_nemo_rl_names_them(words: list[str], expected: dict[str, Any]) -> None:
    (entry,) = load_recipe("eval", words).config.data.validation
    assert {name: entry[name] for name in expected} == expected


def test_other_keys_of_nemo_rls_evaluations() -> None:
    words = ["+generation.enable_thinking=true", "+eval.save_full_gym_result=false", "eval.save_path=null"]
    config = load_recipe("eval", words).config
    assert config.policy.tokenizer.chat_template_kwargs == {"enable_thinking": True}
    assert config.eval.save_path == "results/eval"


def test_the_resolved_recipe_is_the_same_again() -> None:
    config = load_recipe("eval", ["data.dataset_name=AIME2025"]).config
    plain: dict[str, Any] = config.model_dump(mode="json", include={"policy", "data", "env", "eval", "cluster"})
    assert MasterConfig.model_validate(plain).data.validation == config.data.validation


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval.k_value=4"], "4 is more than the 1 samples of a prompt"),
        (["eval.num_seeds=2"], "would be equal: the sampling temperature is 0"),
        (["data.dataset_name=GSM9K"], "'GSM9K' is not known; nearest: GSM8K"),
        (["~data.dataset_name"], "no data to evaluate on; give data.dataset_name"),
        (["eval.sets.AIME2024=5"], "expected a mapping of keys"),
        (["data.dataset_name=Squad"], "name the environment that scores it"),
        (["data.dataset_name=val.jsonl"], "val.jsonl is a file: give it as data_path"),
        (["+eval.rollout_mode=nemo_gym"], "evaluation through agents of a NeMo Gym is not supported yet"),
        (["eval.metrics=cons@k"], "nearest known key: eval.metric"),
    ],
)
def test_what_does_not_fit(words: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("eval", words)
    assert message in str(error.value), error.value
