"""Keys of TRL, verl and OpenRLHF: each row of the table names a key that exists, and configurations become recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.recipe import load_recipe
from grpo_mcore.recipe.other_trainers import meaning_here, read_elsewhere, tables, translated
from grpo_mcore.recipe.schema.keys import known_keys

VERL = r"""
# from verl's examples
set -x
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=train.jsonl data.val_files=test.jsonl \
    data.train_batch_size=128 \
    data.max_prompt_length=512 data.max_response_length=1024 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.n=5 +trainer.unheard_of=3 \
    actor_rollout_ref.rollout.top_k=-1 \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.test_freq=-1 $@
"""
TRL = """
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
learning_rate: 1.0e-6
num_generations: 8
per_device_train_batch_size: 4
epsilon_high: 0.28
epsilon: 0.2
beta: 0.04
loss_type: dapo
top_k: 50
scale_rewards: false
importance_sampling_level: sequence
"""


def test_every_row_names_keys_that_exist_or_says_what_to_use_instead() -> None:
    known = {key.replace(".*", "") for key in known_keys()}
    assert sum(map(len, tables().values())) > 130
    for table in tables().values():
        for key, row in table.items():
            assert set(row) <= {"to", "note", "values", "replace", "times", "while"}, key
            assert row["to"] or row["note"], key
            for target in row["to"]:
                assert target in known or target.startswith("policy.generation.vllm_kwargs."), (key, target)
            for other in {row.get("times"), row.get("while")} - {None}:
                assert other in table, key


def test_a_script_of_verl_becomes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, recipe = tmp_path / "run.sh", tmp_path / "ours.yaml"
    script.write_text(VERL)
    assert main(["config", "--imported", str(script)]) == 0
    recipe.write_text(out := capsys.readouterr().out)
    assert "# not used: trainer.unheard_of: no key here" in out and "has_no" not in out
    assert "num_generations_per_prompt: 5  # actor_rollout_ref.rollout.n" in out
    config = load_recipe(recipe, ["+env.math={num_workers: 1}", "data.default={env_name: math}"]).config
    assert config.policy.model_name == "Qwen/Qwen2.5-7B-Instruct" and config.cluster.gpus_per_node == 8
    assert config.policy.train_global_batch_size == 64 * 5, "mini-batches are prompts there and samples here"
    assert config.policy.max_total_sequence_length == 1536 and config.policy.generation.max_new_tokens == 1024
    assert (config.loss_fn.reference_policy_kl_penalty, config.loss_fn.reference_policy_kl_type) == (0.001, "k3")
    assert config.policy.megatron_cfg.optimizer.lr == 1e-6
    assert config.grpo.val_period == 0 and config.policy.generation.top_k is None


def test_a_configuration_of_trl_becomes_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text(TRL)
    found = read_elsewhere(file)
    assert found is not None and found[0] == "trl"
    ours, rest = translated(*found)
    assert {key: value for key, (value, _) in ours.items()} == {
        "policy.model_name": "Qwen/Qwen2-0.5B-Instruct",
        "policy.megatron_cfg.optimizer.lr": 1e-6,
        "grpo.num_generations_per_prompt": 8,
        "loss_fn.ratio_clip_min": 0.2,
        "loss_fn.ratio_clip_max": 0.28,
        "loss_fn.reference_policy_kl_penalty": 0.04,
        "loss_fn.token_level_loss": True,
        "policy.generation.top_k": 50,
        "grpo.normalize_rewards": False,
        "loss_fn.sequence_level_importance_ratios": True,
    }
    assert (
        list(rest) == ["per_device_train_batch_size"]
        and "counts samples of all devices" in rest["per_device_train_batch_size"]
    )


def test_flags_of_openrlhf_and_values_without_a_counterpart(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    command = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --advantage_estimator gae"
    file.write_text(f"{command} \\\n  --n_samples_per_prompt 8 --colocate_all_models --zero_stage 3\n")
    found = read_elsewhere(file)
    assert found is not None and found[0] == "openrlhf"
    ours, rest = translated(*found)
    assert ours["grpo.num_generations_per_prompt"][0] == 8 and ours["policy.generation.colocated.enabled"][0] is True
    assert rest["advantage_estimator"] == "gae: add the section ppo" and "zero_stage" in rest


def test_a_recipe_of_ours_is_none_of_theirs() -> None:
    assert read_elsewhere(Path("recipes/grpo-arithmetic-cpu.yaml")) is None


def test_an_unknown_key_of_theirs_is_told_by_its_name_here(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "beta=0.1",
        "num_generations=4",
        "epsilon=0.1",
        "actor_rollout_ref.rollout.n=8",
        "algorithm.adv_estimator=x",
    ]
    assert main(["config", "grpo-arithmetic-cpu", *words]) == 2
    error = capsys.readouterr().err
    for text in (
        "TRL's beta is loss_fn.reference_policy_kl_penalty",
        "num_generations is grpo.num_generations_per_prompt",
        "TRL's epsilon is loss_fn.ratio_clip_min and loss_fn.ratio_clip_max",
        "verl's actor_rollout_ref.rollout.n is grpo.num_generations_per_prompt",
        "verl's algorithm.adv_estimator is grpo.adv_estimator.name",
    ):
        assert text in error
    assert meaning_here("nothing.of_the_kind") is None
