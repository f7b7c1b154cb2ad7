"""Types, unknown keys, and reports of several problems."""

import pickle

import pytest

from grpo_mcore.recipe import MasterConfig, RecipeError
from tests.unit.recipe.conftest import MINIMAL


def test_all_problems_of_a_recipe_are_reported_at_once(problems) -> None:
    assert problems(
        """\
        polcy: {x: 1}
        policy:
          model_name: m
          train_global_batchsize: 100
          tensor_model_parallel_size: 2
          precision: bf16
          max_total_sequence_length: "512"
          sequence_packing: {enabled: yes, algorithm: modified_ffd}
          megatron_cfg:
            optimizer: {lr: -1.0, adam_beta1: 1.5, weight_decay: .nan}
        data: {train: {data_path: x}}
        grpo:
          num_prompts_per_step: 3.0
          seed: null
          reward_scaling: 7
          advantage_clip_low: low
        grpo.max_num_epochs: 1
        env: [math]
        checkpointing: {metric_name: val_score}
        """
    ) == [
        "r.yaml:1: polcy: unknown key; nearest known key: policy",
        "r.yaml:4: policy.train_global_batchsize: unknown key; nearest known key: policy.train_global_batch_size",
        "r.yaml:5: policy.tensor_model_parallel_size: unknown key; "
        "nearest known key: policy.megatron_cfg.tensor_model_parallel_size",
        "r.yaml:6: policy.precision: expected one of 'auto', 'bfloat16', 'float32', got 'bf16'; nearest: 'bfloat16'",
        "r.yaml:7: policy.max_total_sequence_length: expected a whole number, got '512'",
        "r.yaml:8: policy.sequence_packing.enabled: expected true or false, got 'yes'",
        "r.yaml:8: policy.sequence_packing.algorithm: expected one of 'concatenative', "
        "'first_fit_decreasing', "
        "'first_fit_shuffle', 'modified_first_fit_decreasing', 'balanced', got 'modified_ffd'; "
        "nearest: 'modified_first_fit_decreasing'",
        "r.yaml:10: policy.megatron_cfg.optimizer.lr: must be above 0, got -1.0",
        "r.yaml:10: policy.megatron_cfg.optimizer.weight_decay: expected a finite number, got nan",
        "r.yaml:10: policy.megatron_cfg.optimizer.adam_beta1: must be below 1, got 1.5",
        "r.yaml:13: grpo.num_prompts_per_step: expected a whole number, got 3.0",
        "r.yaml:14: grpo.seed: expected a whole number, got null",
        "r.yaml:15: grpo.reward_scaling: expected a mapping of keys, got 7",
        "r.yaml:16: grpo.advantage_clip_low: expected a number or null, got 'low'",
        "r.yaml:17: grpo.max_num_epochs: unknown key: in a file, sections are nested; "
        "write grpo: {max_num_epochs: VALUE}",
        "r.yaml:18: env: expected a mapping of keys, got ['math']",
        'r.yaml:19: checkpointing.metric_name: expected "val:" or "train:" and a metric, '
        'such as "val:accuracy", '
        "got 'val_score'",
    ]


def test_booleans_are_not_numbers_and_numbers_not_text(problems) -> None:
    assert problems(MINIMAL.replace("models/tiny", "5") + "grpo: {seed: true}\n") == [
        "r.yaml:2: policy.model_name: expected text, got 5",
        "r.yaml:6: grpo.seed: expected a whole number, got true",
    ]


def test_checks_between_keys_skip_faulty_values(problems) -> None:
    text = MINIMAL + "grpo: {sed: 1}\nloss_fn: {use_cispo: true, disable_ppo_ratio: true}\n"
    assert problems(text) == [
        "r.yaml:6: grpo.sed: unknown key; nearest known key: grpo.seed",
        "r.yaml:7: loss_fn.use_cispo: cannot be combined with disable_ppo_ratio: true; CISPO weights tokens by the "
        "clipped ratio",
    ]
    # 32 prompts x 16 generations would not divide by 500, but the real number of generations is not known.
    text = MINIMAL + "grpo:\n  num_generations_per_prompts: 50\n"
    assert problems(text, "policy.train_global_batch_size=500") == [
        "r.yaml:7: grpo.num_generations_per_prompts: unknown key; nearest known key: grpo.num_generations_per_prompt"
    ]


def test_an_integer_is_a_number(load) -> None:
    seconds = load(MINIMAL + "cluster: {step_timeout_s: 60}\n").config.cluster.step_timeout_s
    assert seconds == 60.0 and isinstance(seconds, float)


def test_sections_that_are_off_by_default_may_be_null(load, problems) -> None:
    text = MINIMAL + "grpo: {async_grpo: null, reward_scaling: null, reward_shaping: null, adv_estimator: null}\n"
    assert load(text).config.grpo.async_grpo.enabled is False
    assert problems(MINIMAL + "checkpointing:\n") == ["r.yaml:6: checkpointing: expected a mapping of keys, got null"]


def test_scripts_validate_dicts() -> None:
    plain = {"policy": {"model_name": "m"}, "data": {"dataset_name": "ResponseDataset", "train_data_path": "x"}}
    config = MasterConfig.model_validate(plain)
    assert config.data.train[0].data_path == "x" and config.policy.tokenizer.name == "m"
    assert MasterConfig.model_validate(config) is config
    assert MasterConfig.model_validate(config.model_dump()) == config
    plain = {"policy": {"modle_name": "m"}, "data": {"train": {"data_path": "x"}}, "grpo": {"max_rollout_turns": 2}}
    with pytest.raises(RecipeError) as error:
        MasterConfig.model_validate(plain)
    assert str(error.value) == (
        "2 problems in the configuration\n"
        "  policy.model_name: this key is required\n"
        "  policy.modle_name: unknown key; nearest known key: policy.model_name"
    )
    assert isinstance(error.value, ValueError)


def test_errors_travel_between_processes(load) -> None:
    with pytest.raises(RecipeError) as error:
        load(MINIMAL + "grpo: {sed: 1}\n")
    again = pickle.loads(pickle.dumps(error.value))
    assert str(again) == str(error.value) and again.problems == error.value.problems
    config = load(MINIMAL).config
    assert pickle.loads(pickle.dumps(config)) == config


def test_long_values_are_cut(problems) -> None:
    (line,) = problems(MINIMAL + f"grpo: {{seed: {'x' * 200}}}\n")
    assert line.endswith("xxx...") and len(line) < 130
