"""Recipes written for NeMo RL load, or the error says what to use instead."""

from pathlib import Path

import pytest

from grpo_mcore.recipe.nemo_rl.nemo_rl_keys import key_tables
from grpo_mcore.recipe.schema.keys import field_at
from grpo_mcore.recipe.schema.master import value_at
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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "policy={dtensor_cfg: {enabled: true}, dtensor_as_megatron: false}",
            "policy.dtensor_cfg.enabled: a key of NeMo RL; the policy is Megatron-Core; use "
            "policy.megatron_cfg "
            "(tensor_model_parallel_size, activation_checkpointing, ...)",
        ),
        (
            "policy={optimizer: {name: torch.optim.AdamW}, dtensor_as_megatron: false}",
            "policy.optimizer.name: a key of NeMo RL; use policy.megatron_cfg.optimizer "
            "(lr, weight_decay, adam_beta1, ...)",
        ),
        ("policy.megatron_cfg.peft={enabled: true, a2a_experimental: true}",
         "policy.megatron_cfg.peft.a2a_experimental: a key of NeMo RL; not supported; remove the key"),
        ("policy.megatron_cfg.fp8_cfg={enabled: true}",
         "policy.megatron_cfg.fp8_cfg.enabled: a key of NeMo RL; training in FP8 is not supported yet; remove the "
         "key, FP8 rollouts (vllm_cfg.precision) do without"),
        (
            "policy.megatron_cfg.dynamic_context_parallel={enabled: true, max_size: 4}",
            "policy.megatron_cfg.dynamic_context_parallel.enabled: a key of NeMo RL; context parallelism with a size "
            "per sequence is not supported yet; set context_parallel_size",
        ),
        (
            "policy.megatron_cfg.moe_aux_loss_coeff=0.01",
            "policy.megatron_cfg.moe_aux_loss_coeff: a key of NeMo RL; a balancing loss changes the log-probs; "
            "leave it 0",
        ),
        ("data.train.num_frames=8",
         "data.train.num_frames: a key of NeMo RL; audio and video are not supported; remove the key"),
        (
            "async_rl={sampler: {name: mine.Sampler}}",
            "async_rl.sampler.name: expected in_order, weight_fifo, windowed, ready_first, got 'mine.Sampler'; custom "
            "samplers are not supported",
        ),
        ("policy.reward_model_cfg.enabled=true", "policy.reward_model_cfg.enabled: a key of NeMo RL; a reward model is "
         "trained by a recipe with a section rm; remove the key"),
    ],
)  # fmt: skip
def test_keys_with_an_effect_are_rejected(problems, text: str, line: str) -> None:
    assert problems(MINIMAL, text) == [f"command line: {line}"]


@pytest.mark.parametrize(
    ("keys", "quantization"),
    [
        ("use_deep_gemm: true", "fp8_per_block"),
        ("use_deep_gemm: true, num_first_layers_in_bf16: 1, pow2_weight_scaling_factors: false", "fp8_per_block"),
        (
            "is_mx: true, refit_prequantize: true, refit_cache_loader_routes: true, "
            "quantization_ignored_layer_kws: [q_proj, k_proj, v_proj, o_proj, .mlp.gate]",
            "mxfp8",
        ),
        ("is_mx: true, quantization_ignore_patterns: [model.layers.*.self_attn.*, mtp.*]", "mxfp8"),
    ],
)
def test_fp8_rollouts_load(load, keys: str, quantization: str) -> None:
    """The keys of the peer's recipes with fp8-rollouts and mxfp8-rollout in their names."""
    texts = ["loss_fn.use_importance_sampling_correction=true", "policy.precision=bfloat16"]
    config = load(MINIMAL, f"policy.generation.vllm_cfg={{precision: fp8, {keys}}}", *texts).config
    assert config.policy.generation.vllm_cfg.quantization == quantization


@pytest.mark.parametrize(
    ("sampler", "order", "age"),
    [
        ("{name: in_order, max_lookahead_versions: 2}", "in_order", 2),
        ("{name: windowed, max_staleness_versions: 3, sample_freshest_first: true}", "freshest_first", 3),
        ("{name: windowed, max_staleness_versions: 3}", "oldest_first", 3),
        ("{name: ready_first}", "oldest_first", 1),
        ("{}", "in_order", 1),
    ],
)
def test_the_asynchronous_controllers_section_is_used(load, sampler: str, order: str, age: int) -> None:
    section = f"async_rl={{sampler: {sampler}, max_inflight_prompts: 64, stall_watchdog: {{interval: 30}}}}"
    recipe = load(MINIMAL, section, "loss_fn.use_importance_sampling_correction=true")
    ours = recipe.config.grpo.async_grpo
    assert (ours.enabled, ours.in_flight_weight_updates, ours.group_order) == (True, True, order)
    assert (ours.max_trajectory_age_steps, ours.max_groups_in_flight) == (age, 64)
    notes = "\n".join(map(str, recipe.imported))
    assert "async_rl.max_inflight_prompts: used as grpo.async_grpo.max_groups_in_flight" in notes
    assert "async_rl.stall_watchdog: dropped: lost engines" in notes


def test_the_asynchronous_controllers_section_beside_ours_is_refused(problems) -> None:
    words = ("async_rl={max_weight_staleness_versions: 2}", "grpo.async_grpo={max_trajectory_age_steps: 1}")
    said = "async_rl.max_weight_staleness_versions: contradicts grpo.async_grpo.max_trajectory_age_steps = 1"
    assert any(said in line for line in problems(MINIMAL, *words))


def test_an_older_asynchronous_section_that_says_the_same_is_used(load) -> None:
    section = (
        "async_rl={batch_selection_strategy: staleness_window, max_weight_staleness_versions: 2, force_in_order: false}"
    )
    recipe = load(MINIMAL, section, "grpo.async_grpo={enabled: true, max_trajectory_age_steps: 2}")
    ours = recipe.config.grpo.async_grpo
    assert (ours.enabled, ours.max_trajectory_age_steps, ours.group_order) == (True, 2, "oldest_first")


def test_values_that_mean_what_is_done_anyway(load) -> None:
    recipe = load(
        MINIMAL, "policy.tokenizer.chat_template=default", "policy.megatron_cfg.optimizer.params_dtype=bfloat16"
    )
    assert recipe.config.policy.tokenizer.chat_template is None and len(recipe.imported) == 2


def test_truncation_without_a_bound_is_off(load) -> None:
    off = "loss_fn={truncated_importance_sampling_type: tis, truncated_importance_sampling_ratio: null, "
    recipe = load(MINIMAL, off + "truncated_importance_sampling_ratio_min: 0.2}")
    assert recipe.config.loss_fn.truncated_importance_sampling_type is None
    assert any("dropped: truncated_importance_sampling_ratio is null" in str(note) for note in recipe.imported)


def test_a_transport_is_dropped_with_a_note_and_variables_may_be_numbers(load) -> None:
    recipe = load(
        MINIMAL,
        "policy.generation.refit_transport=nixl",
        "policy.generation.refit_cfg={nixl: {device: cuda}}",
        "policy.megatron_cfg.env_vars={NCCL_NVLS_ENABLE: 0}",
    )
    assert recipe.config.policy.megatron_cfg.env_vars == {"NCCL_NVLS_ENABLE": "0"}
    assert [str(note).partition(": ")[2] for note in recipe.imported] == [
        "policy.generation.refit_transport: dropped: the transport follows from the devices of policy and engines",
        "policy.generation.refit_cfg: dropped: the transport follows from the devices; policy.refit_buffer_size_gb "
        "bounds its buffer",
    ]


def test_other_engines_are_rejected(problems) -> None:
    assert problems(MINIMAL, "policy.generation.backend=sglang", "policy.generation.sglang_cfg={x: 1}") == [
        "command line: policy.generation.backend: 'sglang': engines are vLLM; generation by Megatron-Core, SGLang, "
        "Dynamo or TensorRT-LLM is not supported"
    ]


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


@pytest.mark.parametrize(
    ("overrides", "key", "value", "note"),
    [
        (["policy.megatron_cfg.checkpoint={async_save: true, ckpt_fully_parallel_save_process_group: dp}"],
         "checkpointing.is_async", True, "policy.megatron_cfg.checkpoint.async_save: used as checkpointing.is_async"),
        (
            ["policy.generation.vllm_cfg.enable_prefix_caching=true"],
            "policy.generation.vllm_kwargs.enable_prefix_caching",
            True,
            "policy.generation.vllm_cfg.enable_prefix_caching: used as "
            "policy.generation.vllm_kwargs.enable_prefix_caching",
        ),
        (["policy.generation.vllm_kwargs={max_num_seqs: 512}"], "policy.generation.vllm_cfg.max_num_seqs", 512,
         "policy.generation.vllm_kwargs.max_num_seqs: used as policy.generation.vllm_cfg.max_num_seqs"),
        (["policy.dtensor_cfg={activation_checkpointing: true}"], "policy.megatron_cfg.activation_checkpointing", True,
         "policy.dtensor_cfg.activation_checkpointing: used as policy.megatron_cfg.activation_checkpointing"),
        (["policy.dtensor_cfg={enabled: false}", "policy.optimizer={name: torch.optim.AdamW}"],
         "policy.megatron_cfg.optimizer.optimizer", "adam",
         "policy.optimizer: dropped: policy.megatron_cfg.optimizer is used"),
        (["loss_fn.use_on_policy_kl_approximation=true", "loss_fn.reference_policy_kl_penalty=0"],
         "loss_fn.use_on_policy_kl_approximation", False,
         "loss_fn.use_on_policy_kl_approximation: dropped: no effect at a penalty of 0"),
        (["policy.sequence_packing={enabled: false, algorithm: modified_ffd}"], "policy.sequence_packing.enabled",
         False, "policy.sequence_packing.algorithm: dropped: no effect without packing"),
        (["grpo.val_period=-1"], "grpo.val_period", 0, "grpo.val_period: -1 is 0: no validation"),
        (
            ["policy.megatron_cfg.moe_token_dispatcher_type=flex"],
            "policy.megatron_cfg.moe_token_dispatcher_type",
            "alltoall",
            "policy.megatron_cfg.moe_token_dispatcher_type: 'flex' is 'alltoall': the kernels of DeepEP and HybridEP "
            "are not used; the results are the same",
        ),
        (
            ["policy.megatron_cfg.moe_router_enable_expert_bias=true", "policy.megatron_cfg.moe_aux_loss_coeff=0.0"],
            "policy.megatron_cfg.moe_router_load_balancing_type",
            "none",
            "policy.megatron_cfg.moe_router_enable_expert_bias: dropped: the model's own config says whether its "
            "router has a bias",
        ),
        (
            ["policy.megatron_cfg.activation_checkpointing=true", "policy.megatron_cfg.recompute_granularity=selective"]
            + ["policy.megatron_cfg.recompute_modules=[core_attn, moe_act]"],
            "policy.megatron_cfg.recompute_modules",
            ["core_attn", "moe"],
            "policy.megatron_cfg.recompute_modules.1: 'moe_act' is 'moe': the whole expert layer is recomputed, not "
            "its activation alone",
        ),
        (["policy.megatron_cfg={cuda_graph_impl: transformer_engine, cuda_graph_scope: [attn]}"],
         "policy.megatron_cfg.enabled", True,
         "policy.megatron_cfg.cuda_graph_scope: dropped: CUDA graphs are not used in training"),
        (["policy.megatron_cfg.env_vars={A: b}"], "policy.megatron_cfg.env_vars", {"A": "b"}, None),
        (["policy.megatron_cfg.env_vars=null"], "policy.megatron_cfg.env_vars", {}, None),
    ],
)  # fmt: skip
def test_keys_that_change_nothing_are_accepted_with_a_note(load, overrides, key: str, value, note: str | None) -> None:
    recipe = load(MINIMAL, *overrides)
    assert value_at(recipe.config, key) == value
    notes = [str(line) for line in recipe.imported]
    assert f"command line: {note}" in notes if note else notes == []


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


def test_a_key_under_both_names_must_agree(load, problems) -> None:
    both = ["policy.megatron_cfg.checkpoint={async_save: true}", "checkpointing.is_async"]
    assert load(MINIMAL, both[0], both[1] + "=true").config.checkpointing.is_async
    assert problems(MINIMAL, both[0], both[1] + "=false") == [
        "command line: policy.megatron_cfg.checkpoint.async_save: contradicts "
        "checkpointing.is_async = false (command line)"
    ]


def test_a_wrong_value_is_reported_under_the_name_that_was_written(problems) -> None:
    assert problems(MINIMAL, "policy.megatron_cfg.checkpoint={async_save: 3}") == [
        "command line: policy.megatron_cfg.checkpoint.async_save: expected true or false, got 3"
    ]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["grpo.max_num_steps=500"], 500),
        (["grpo.max_num_steps=5"], 14),
        (["sft.max_num_steps=60", "~grpo"], 60),
        (["dpo.max_num_steps=70", "~grpo"], 70),
    ],
)
def test_a_decay_of_null_lasts_as_long_as_the_run(load, overrides: list[str], steps: int) -> None:
    text = MINIMAL + ("grpo: {max_num_steps: 9}\n" if "~grpo" in overrides else "")
    config = load(text, "policy.megatron_cfg.scheduler.lr_decay_iters=null", *overrides).config
    assert config.policy.megatron_cfg.scheduler.lr_decay_iters == steps


@pytest.mark.parametrize(
    ("override", "outcome"),
    [
        ("+sft.only_unmask_final=false", None),
        ("+sft.only_unmask_final=true", "set data.default.train_on: last"),
        ("+policy.draft={enabled: true}", None),
        ("+policy.megatron_cfg.track_moe_metrics=true", None),
        ("+policy.megatron_cfg.train_iters=500", None),
        ("+policy.megatron_cfg.scheduler.override_opt_param_scheduler=true", None),
        ("+policy.sequence_packing.microbatch_order=largest_first", None),
        ("+grpo.zero_variance_prompt_filtering=false", None),
        ("+grpo.zero_variance_prompt_filtering=true", "use grpo.use_dynamic_sampling"),
        ("+policy.megatron_cfg.batch_invariant_mode=false", None),
        ("+policy.megatron_cfg.batch_invariant_mode=true", "on CPU use policy.deterministic"),
        ("+policy.megatron_cfg.zero_train_gen_mismatch=true", "on CPU policy.deterministic"),
        ("policy.megatron_cfg={mtp_num_layers: 5, mtp_use_repeated_layer: true, mtp_detach_heads: true}", None),
        ("+policy.megatron_cfg.optimizer.use_distributed_optimizer=false", None),
    ],
)
def test_keys_of_peers_without_an_effect_do_not_stop_a_recipe(load, problems, override: str, outcome) -> None:
    if outcome is None:
        assert load(MINIMAL, override).config
    else:
        assert any(outcome in problem for problem in problems(MINIMAL, override))


def test_keys_without_an_effect_load_with_a_note_each(load, problems) -> None:
    """They were keys of this schema in 0.2: its recipes and checkpoints set them."""
    words = ["+cluster.segment_size=2", "+data.num_workers=4", "+data.add_bos=true", "+data.add_eos=true"]
    words += ["+data.add_generation_prompt=true", "+data.train.use_preserving_dataset=true"]
    words += ["+logger.gpu_monitoring.flush_interval=5", "+policy.megatron_cfg.peft.lora_B_init_method=zero"]
    notes = {note.key: note.message for note in load(MINIMAL, *words).imported}
    assert len(notes) == len(words) and all(message.startswith("dropped: ") for message in notes.values())
    (line,) = problems(MINIMAL, "+policy.megatron_cfg.peft.lora_B_init_method=normal")
    assert "lora_B_init_method: a key of NeMo RL; B starts at zero" in line


def test_recipes_of_the_single_controller(load) -> None:
    """They inherit a loss without the correction for older weights, and sections about recovery, on or off."""
    off = ("rollout_checkpointing={interval_s: null, keep_latest_k: 2}", "token_capture={enabled: false, partition: a}")
    recovery = "rollout_recovery={default_granularity: sibling, task_granularity_overrides: {}}"
    recipe = load(MINIMAL, "async_rl={sampler: {name: in_order, max_lookahead_versions: 1}}", *off, recovery)
    assert recipe.config.grpo.async_grpo.enabled and recipe.config.loss_fn.use_importance_sampling_correction
    notes = "\n".join(map(str, recipe.imported))
    assert "async_rl: loss_fn.use_importance_sampling_correction is true with it" in notes
    assert "rollout_recovery: dropped: after a loss" in notes
    given = load(MINIMAL, "async_rl={sampler: {name: in_order}}", "loss_fn.use_importance_sampling_correction=true")
    assert "is true with it" not in "\n".join(map(str, given.imported))


def test_raw_log_probs_are_dropped_with_a_note(load) -> None:
    """They are always those of the distribution that is sampled from."""
    recipe = load(MINIMAL, "policy.generation.vllm_cfg.logprobs_mode=raw_logprobs")
    assert [str(note).partition(": ")[2] for note in recipe.imported] == [
        "policy.generation.vllm_cfg.logprobs_mode: dropped: no effect here"
    ]


def test_sequence_parallelism_that_experts_need_is_on(load) -> None:
    sizes = "tensor_model_parallel_size: 2, expert_model_parallel_size: 2, sequence_parallel: false"
    recipe = load(MINIMAL, f"policy.megatron_cfg={{{sizes}}}", "cluster.gpus_per_node=2")
    assert recipe.config.policy.megatron_cfg.sequence_parallel
    assert "sequence_parallel: false is true: experts under" in str(recipe.imported[-1])


@pytest.mark.parametrize(
    "word",
    [
        "policy.generation.vllm_cfg.max_num_batched_tokens=8192",
        "policy.megatron_cfg.first_last_layers_bf16=true",
        "policy.megatron_cfg.pinned_reference_swap=true",
        "policy.megatron_cfg.moe_router_fusion=true",
        "policy.refit_persistent_ipc_buffers=true",
        "policy.fsdp_offload_enabled=true",
        "policy.dequantize_base_checkpoint=true",
        "policy.hf_config_overrides={router_aux_loss_coef: 0.001}",
    ],
)
def test_keys_that_nemo_rl_does_not_read_or_that_change_nothing_are_dropped(load, word: str) -> None:
    recipe = load(MINIMAL, word)
    (note,) = recipe.imported
    assert note.message.startswith("dropped: ") and recipe.config == load(MINIMAL).config


def test_variables_of_the_policy_are_those_of_its_ranks(load) -> None:
    env_vars = load(MINIMAL, "policy.env_vars={NCCL_DEBUG: INFO}").config.policy.megatron_cfg.env_vars
    assert env_vars == {"NCCL_DEBUG": "INFO"}
