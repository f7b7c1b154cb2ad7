"""Keys of NeMo RL that do not exist here. A key whose value changes nothing is dropped; otherwise the recipe is refused
with what to use instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_mcore.recipe.errors import Problem, in_yaml
from grpo_mcore.recipe.loading.yaml_tree import Node
from grpo_mcore.recipe.validation.engines import GYM


def _later(feature: str) -> str:
    return f"{feature} is not supported yet; remove the key"


_DDP = "policy.megatron_cfg.distributed_data_parallel_config"
_UNSUPPORTED = "not supported; remove the key"
_ALGORITHM = "this algorithm is not supported yet; remove the section"
_ENGINE = "the engine is vLLM"
_ENV_VARS = "only listed environment variables are passed on; list them in cluster.env_vars"
_LORA = "use policy.megatron_cfg.peft"
_MEGATRON = "the policy is Megatron-Core; use policy.megatron_cfg ({})"
_TRANSPORT = "the transport follows from the devices of policy and engines; remove the key"
_VISION = "images, audio and video are not supported; remove the key"

DROPPED: dict[str, str] = {
    "policy.generation_batch_size": "engines batch by themselves",
    "policy.sequence_packing.sequence_length_round": "no effect with packing",
    "policy.sequence_packing.fuse_loss": "the loss of a bin is always a single call",
    "policy.megatron_cfg.converter_type": "the family follows from the model",
    "policy.megatron_cfg.defer_fp32_logits": "log-probs are always computed in chunks",
    "policy.megatron_cfg.use_fused_linear_logprobs": "log-probs are always computed in chunks",
    "policy.megatron_cfg.fused_linear_logprobs_chunk_size": "use policy.logprob_chunk_size",
    "policy.megatron_cfg.cuda_graph_warmup_steps": "CUDA graphs are not used in training",
    "policy.megatron_cfg.moe_hybridep_num_sms": "use moe_token_dispatcher_type",
    "policy.megatron_cfg.hybridep_num_ranks_per_nvlink_domain": "no effect",
    "policy.megatron_cfg.mtp_loss_scaling_factor": "no effect without multi-token prediction",
    "policy.megatron_cfg.use_gloo_process_groups": "the platform decides; remove the key",
    "policy.megatron_cfg.clear_memory_caches_before_refit": "use empty_unused_memory_level",
    "policy.megatron_cfg.peft.dropout_position": "no effect without dropout",
    f"{_DDP}.data_parallel_sharding_strategy": "use policy.megatron_cfg.optimizer.use_distributed_optimizer",
    f"{_DDP}.average_in_collective": "gradients are always summed and divided by the global token count",
    "policy.generation.port_range_low": "the cluster chooses ports",
    "policy.generation.port_range_high": "the cluster chooses ports",
    "policy.generation.real_quant_export_cpu_offload": "no effect without quantised generation",
    "policy.generation.real_quant_ignore": "no effect without quantised generation",
    "policy.generation.use_async_rollouts": "samples always stream as they finish",
    "policy.generation.mcore_generation_config": _ENGINE,
    "policy.generation.sglang_cfg": _ENGINE,
    "policy.generation.trtllm_cfg": _ENGINE,
    "policy.generation.dynamo_cfg": _ENGINE,
    "policy.generation.vllm_cfg.async_engine": "samples always stream as they finish",
    "policy.generation.vllm_cfg.skip_tokenizer_init": "the tokenizer is loaded if stop_strings need it",
    "policy.generation.vllm_cfg.vllm_metrics_logger_interval": "no effect",
    "policy.generation.vllm_cfg.cap_max_tokens_to_context": "answers always end at max_model_len",
    "policy.generation.vllm_cfg.use_tqdm": "the run shows its own progress",
    "sft.val_micro_batch_size": "the batches of policy.sequence_packing are used",
    "logger.mlflow": "no effect while mlflow_enabled is false",
    "logger.swanlab": "no effect while swanlab_enabled is false",
    "logger.gpu_monitoring": "no effect while monitor_gpus is false",
    "cluster.master_port_range_low": "the cluster chooses ports",
    "cluster.master_port_range_high": "the cluster chooses ports",
}
"""Keys without an effect here, dropped whatever their value: key -> why."""

REFUSED: dict[str, str] = {
    "policy.dtensor_cfg": _MEGATRON.format("tensor_model_parallel_size, activation_checkpointing, ..."),
    "policy.fsdp1_enabled": _MEGATRON.format("distributed_data_parallel_config"),
    "policy.optimizer": "use policy.megatron_cfg.optimizer (lr, weight_decay, adam_beta1, ...)",
    "policy.scheduler": "use policy.megatron_cfg.scheduler (lr_warmup_iters, lr_decay_style, ...)",
    "policy.draft": _later("a draft model"),
    "policy.pretrained_checkpoint": "weights are read from policy.model_name; export to Hugging Face first",
    "policy.reward_model_cfg": _later("training a reward model"),
    "policy.is_vlm": _VISION,
    "policy.quant_cfg": _later("quantisation"),
    "policy.tokenizer.audio": _VISION,
    "policy.tokenizer.video": _VISION,
    "policy.tokenizer.use_processor": _VISION,
    "policy.tokenizer.use_fastokens": "the Hugging Face tokenizer is used; remove the key",
    "policy.megatron_cfg.force_reconvert_from_hf": "weights are always read from the model's folder; remove the key",
    "policy.megatron_cfg.checkpoint": _later("tuning of checkpoint writing"),
    "policy.megatron_cfg.fine_grained_activation_offloading": _later("offloading of activations"),
    "policy.megatron_cfg.offload_modules": _later("offloading of activations"),
    "policy.megatron_cfg.cuda_graph_modules": "CUDA graphs are not used in training; remove the key",
    "policy.megatron_cfg.use_fused_weighted_squared_relu": _UNSUPPORTED,
    "policy.megatron_cfg.moe_enable_deepep": "use moe_token_dispatcher_type alltoall or allgather",
    "policy.megatron_cfg.moe_flex_dispatcher_backend": "use moe_token_dispatcher_type",
    "policy.megatron_cfg.hybridep_use_mnnvl": "use moe_token_dispatcher_type",
    "policy.megatron_cfg.moe_per_layer_logging": _UNSUPPORTED,
    "policy.megatron_cfg.mtp_num_layers": _later("multi-token prediction"),
    "policy.megatron_cfg.mtp_use_repeated_layer": _later("multi-token prediction"),
    "policy.megatron_cfg.mtp_detach_heads": _later("multi-token prediction"),
    "policy.megatron_cfg.transformer_impl": "the platform decides; remove the key",
    "policy.megatron_cfg.env_vars": _ENV_VARS,
    "policy.megatron_cfg.freeze_config": _later("freezing of parameters"),
    "policy.megatron_cfg.fp8_cfg": _later("FP8"),
    "policy.megatron_cfg.peft.a2a_experimental": _UNSUPPORTED,
    "policy.megatron_cfg.optimizer.fp16": "float16 is not supported; use policy.precision",
    "policy.megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d": "not supported yet; remove the key",
    f"{_DDP}.use_custom_fsdp": _UNSUPPORTED,
    "policy.generation.bad_words": _later("a list of bad words"),
    "policy.generation.refit_transport": _TRANSPORT,
    "policy.generation.refit_cfg": "use policy.refit_buffer_size_gb",
    "policy.generation.real_quant": _later("quantised generation"),
    "policy.generation.quant_cfg": _later("quantised generation"),
    "policy.generation.vllm_cfg.is_mx": _later("MX formats in the engine"),
    "policy.generation.vllm_cfg.use_deep_gemm": _later("FP8 in the engine"),
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": _later("FP8 in the engine"),
    "policy.generation.vllm_cfg.num_last_layers_in_bf16": _later("FP8 in the engine"),
    "policy.generation.vllm_cfg.enable_vllm_metrics_logger": "the step's metrics include the engines'; remove the key",
    "policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update": _VISION,
    "policy.generation.vllm_cfg.http_refit_server_port": _TRANSPORT,
    "policy.generation.vllm_cfg.http_refit_api_key_env_var": _TRANSPORT,
    "policy.generation.vllm_cfg.zmq_refit_server_port": _TRANSPORT,
    "policy.generation.vllm_cfg.env_vars": _ENV_VARS,
    "policy.generation.vllm_cfg.video": _VISION,
    "grpo.calculate_advantages_on_gpu": "the driver computes advantages in float64; remove the key",
    "grpo.invalid_tool_call_advantage": _later("advantages of flagged spans"),
    "grpo.malformed_thinking_advantage": _later("advantages of flagged spans"),
    "grpo.deduplicate_multimodal_data": _VISION,
    "grpo.debug_payload_metrics": _UNSUPPORTED,
    "data.add_system_prompt": "use system_prompt_file or the chat template",
    **{
        f"data.{part}.*.{name}": _VISION
        for part in ("train", "validation")
        for name in ("num_frames", "video_fps", "video_min_pixels", "video_max_pixels", "video_dir")
    },
    **{f"data.{part}.*.min_generation_tokens": _later("a minimum answer length") for part in ("train", "validation")},
    "logger.mlflow_enabled": "use logger.wandb_enabled or logger.tensorboard_enabled",
    "logger.swanlab_enabled": "use logger.wandb_enabled or logger.tensorboard_enabled",
    "logger.monitor_gpus": "the step's metrics have the seconds of each phase; set it to false",
    "logger.wandb.log_nemo_gym_full_result_tables": _UNSUPPORTED,
    "checkpointing.save_consolidated": "export the model to Hugging Face's format instead",
    "checkpointing.model_cache_dir": "set HF_HOME",
    "checkpointing.model_repo_id": "set policy.model_name",
    "checkpointing.is_peft": _LORA,
    "checkpointing.peft_config": _LORA,
    "async_rl": "use grpo.async_grpo",
    "data_plane": "tensors are passed through Ray's object store; remove the section",
    "reward_penalties": _later("reward penalties"),
    "on_policy_distillation": _ALGORITHM,
}
"""Keys that are dropped while they switch nothing on (see `is_off`), otherwise refused: key -> what to use instead."""

REFUSED_UNLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "policy.offload_optimizer_for_refit": ((True,), "the policy always makes room for the engines; remove the key"),
    "policy.sequence_packing.microbatch_order": (("packer",), "the batch plan orders the bins; remove the key"),
    "policy.megatron_cfg.cuda_graph_impl": (("none",), "CUDA graphs are not used in training; remove the key"),
    "policy.megatron_cfg.attention_backend": (("auto",), "the platform decides; remove the key"),
    "policy.megatron_cfg.peft.lora_dtype": (("None",), "adapters use policy.precision; remove the key"),
    "policy.generation.vllm_cfg.logprobs_mode": (
        ("processed_logprobs",),
        "log-probs are always those of the sampling distribution; remove the key",
    ),
    "checkpointing.model_save_format": (
        ("safetensors", "torch_save"),
        "exports to Hugging Face are always safetensors; remove the key",
    ),
    **dict.fromkeys(("dpo", "rm", "ppo", "distillation", "teacher", "value"), ((), _ALGORITHM)),
}
"""Keys that are dropped if null or one of these values, otherwise refused: key -> (values, what to use instead)."""


def without_nemo_rl_keys(tree: Node, problems: list[Problem]) -> Node:
    """Return the tree without the keys of the tables above. Those that would change something are added to
    `problems`."""
    tree = tree.copy()
    for path in (*DROPPED, *REFUSED, *REFUSED_UNLESS):
        for section, name in _places(tree, path.split(".")):
            node = section.value.pop(name)
            if (instead := _instead(path, node.plain())) is not None:
                culprit = _switched_on(node)
                problems.append(Problem(culprit.source, culprit.key, f"a key of NeMo RL; {instead}"))
    return tree


def _instead(path: str, value: Any) -> str | None:
    """Return what to use instead of a key with this value, or None if the key can be dropped."""
    if path in DROPPED:
        return None
    if path in REFUSED:
        return None if is_off(value) else REFUSED[path]
    values, instead = REFUSED_UNLESS[path]
    return None if value is None or any(value == known and type(value) is type(known) for known in values) else instead


def is_off(value: Any) -> bool:
    """Return whether a value switches nothing on: null, false, 0, 1 (a parallel size), empty, or `enabled: false`."""
    if isinstance(value, dict):
        if "enabled" in value:
            return is_off(value["enabled"])
        return all(is_off(item) for name, item in value.items() if not name.startswith("_"))
    return value in (None, False, 0, 1, "", []) and value is not True


def _places(node: Node, parts: list[str]) -> Iterator[tuple[Node, str]]:
    """Yield each mapping that has the key at the end of a path, and the key's name."""
    head, *rest = parts
    if head == "*":
        for _, child in node.children() if node.is_list else ():
            yield from _places(child, rest)
    elif node.is_mapping and head in node.value:
        if not rest:
            yield node, head
        else:
            yield from _places(node.value[head], rest)


def _switched_on(node: Node) -> Node:
    """Return the first value under a key that switches something on."""
    if node.is_mapping and "enabled" in node.value:
        return node.value["enabled"]
    for _, child in node.children():
        if not is_off(child.plain()):
            return _switched_on(child)
    return node


def apply_gym_switches(tree: Node, problems: list[Problem]) -> Node:
    """Return the tree without the switches that NeMo RL has in `env`, after doing what they say. Idempotent.

    should_use_nemo_gym: true makes NeMo Gym the environment of datasets that name none; false removes its section.
    """
    env = tree.find("env")
    if env is None or not env.is_mapping:
        return tree
    sections = dict(env.value)
    use = sections.pop("should_use_nemo_gym", None)
    sections.pop("should_log_nemo_gym_responses", None)
    mask = sections.pop("should_mask_flagged_samples", None)
    if mask is not None and mask.value is False:
        message = "samples that NeMo Gym flags (mask_sample) are always left out"
        problems.append(Problem(mask.source, mask.key, message))
    tree = Node({**tree.value, "env": Node(sections, env.source, env.key, env.replaces)}, tree.source, tree.key)
    if use is None:
        return tree
    if not isinstance(use.value, bool):
        problems.append(Problem(use.source, use.key, f"expected true or false, got {in_yaml(use.plain())}"))
    elif not use.value:
        sections.pop(GYM, None)
    elif GYM not in sections:
        problems.append(Problem(use.source, use.key, f"there is no section env.{GYM}; give its head_server_url"))
    elif (data := tree.find("data")) is not None and data.is_mapping and "env_name" not in data.value:
        default = data.value.get("default")
        kept = default.value if default is not None and default.is_mapping else {}
        name = Node(GYM, use.source, "data.default.env_name")
        default = Node({**kept, "env_name": name}, data.source, "data.default")
        data = Node({**data.value, "default": default}, data.source, data.key, data.replaces)
        tree = Node({**tree.value, "data": data}, tree.source, tree.key)
    return tree
