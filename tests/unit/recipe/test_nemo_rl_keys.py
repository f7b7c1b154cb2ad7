"""Recipes written for NeMo RL load, or the error says what to use instead: what the tables of read_recipes.yaml and
bad_recipes.yaml do not say."""

from pathlib import Path

import pytest

from grpo_mcore.recipe.nemo_rl.nemo_rl_keys import key_tables
from grpo_mcore.recipe.schema.keys import field_at
from tests.unit.recipe.conftest import MINIMAL

TABLES = key_tables()
REMOVED = [key for table in ("mapped", "dropped", "refused", "refused_unless") for key in TABLES[table]]


def test_a_whole_file_loads(load) -> None:
    config = load(Path(__file__).with_name("nemo_rl_whole.yaml").read_text()).config
    assert config.policy.logprob_chunk_size == 1024
    assert config.policy.make_sequence_length_divisible_by == 1
    megatron = config.policy.megatron_cfg
    assert megatron.optimizer.use_precision_aware_optimizer and megatron.optimizer.optimizer_cpu_offload
    assert megatron.optimizer.optimizer_offload_fraction == 0.5 and megatron.optimizer.overlap_cpu_optimizer_d2h_h2d
    assert megatron.distributed_data_parallel_config.overlap_param_gather
    assert not hasattr(config.policy, "dtensor_cfg")


def test_each_key_is_in_one_table() -> None:
    assert len(REMOVED) == len(set(REMOVED))


def test_no_key_is_in_the_schema_too() -> None:
    assert [path for path in REMOVED if field_at(path.replace("*", "0")) is not None] == []


def test_every_other_key_exists() -> None:
    free = ("policy.generation.vllm_kwargs.", "policy.tokenizer.chat_template_kwargs.")  # of any keys
    ours = [entry["to"] for entry in TABLES["mapped"].values() if not entry["to"].startswith(free)]
    values = [key.removesuffix(".*") for table in ("values", "refused_values") for key in TABLES[table]]
    assert [key for key in [*ours, *values] if field_at(key) is None] == []
    whiles = TABLES["dropped_while"]
    theirs = [*whiles, *(key for entry in whiles.values() for key in entry["key"])]
    known = {key for path in REMOVED for key in (path, path.rpartition(".")[0])}
    known |= {"policy.dtensor_cfg.enabled", "policy.automodel_cfg.enabled"}
    assert [key for key in theirs if field_at(key) is None and key not in known] == []


def test_keys_that_a_critic_does_not_read_are_dropped_with_a_note(load) -> None:
    words = ("policy.generation.temperature=0.7", "policy.megatron_cfg.env_vars={A: a}", "ppo.async_ppo={}")
    own = ("value.generation.temperature=0.5", "value.megatron_cfg.env_vars={A: b}", "value.head=tokens")
    late = "ppo.async_ppo.warmup_generation_lead_steps=1"
    recipe = load(MINIMAL, *words, *own, late)
    dropped = ("value.generation", "value.megatron_cfg.env_vars", "value.head", late.partition("=")[0])
    assert {note.key for note in recipe.imported if note.message == "dropped: it has no effect here"} == set(dropped)
    critic = recipe.config.value
    assert (critic.generation.temperature, critic.head, critic.megatron_cfg.env_vars) == (1.0, "value", {"A": "a"})


def test_a_reward_model_of_nemo_rl(load, problems) -> None:
    text = "rm: {max_num_steps: -1, val_batches: -1}\npolicy: {model_name: m, reward_model_cfg: {enabled: true}}\n"
    text += "data: {train: {dataset_name: HelpSteer3}}\n"
    config = load(text).config
    assert (config.rm.max_num_steps, config.rm.val_batches, config.rm.reward_model_type) == (
        10**9,
        None,
        "bradley_terry",
    )
    kind = load(text, "+policy.reward_model_cfg.reward_model_type=regression").config.rm.reward_model_type
    assert kind == "regression"
    for word in ("policy.reward_model_cfg.enabled=false", "+policy.reward_model_cfg.other=1"):
        (line,) = problems(text, word)
        assert line.endswith("only enabled: true and reward_model_type go with a section rm")
    twice = ("+policy.reward_model_cfg.reward_model_type=regression", "rm.reward_model_type=bradley_terry")
    assert "contradicts rm.reward_model_type" in problems(text, *twice)[0]


def test_a_key_that_is_off_needs_no_note(load) -> None:
    assert load(MINIMAL, "policy.megatron_cfg.moe_aux_loss_coeff=0.0", "logger.monitor_gpus=false").imported == ()


def test_a_correction_that_is_given_is_not_set_with_a_note(load) -> None:
    given = load(MINIMAL, "async_rl={sampler: {name: in_order}}", "loss_fn.use_importance_sampling_correction=true")
    assert "is true with it" not in "\n".join(map(str, given.imported))


@pytest.mark.parametrize(
    "word",
    [
        "policy.generation.vllm_cfg.max_num_batched_tokens=8192",
        "policy.megatron_cfg.first_last_layers_bf16=true",
        "policy.megatron_cfg.pinned_reference_swap=true",
        "policy.megatron_cfg.moe_router_fusion=true",
        "policy.refit_persistent_ipc_buffers=true",
        "policy.fsdp_offload_enabled=true",
        "policy.training_backend=hf",
        "checkpointing.resume_if_exists=true",
        "policy.dequantize_base_checkpoint=true",
        "policy.hf_config_overrides={router_aux_loss_coef: 0.001}",
    ],
)
def test_keys_that_nemo_rl_does_not_read_or_that_change_nothing_are_dropped(load, word: str) -> None:
    recipe = load(MINIMAL, word)
    (note,) = recipe.imported
    assert note.message.startswith("dropped: ") and recipe.config == load(MINIMAL).config
