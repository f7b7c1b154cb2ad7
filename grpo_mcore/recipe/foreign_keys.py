"""Keys that NeMo RL knows and that have no place here. Where the value asks for nothing that would not happen
anyway, the key is dropped; otherwise the recipe is refused, with what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from grpo_mcore.recipe.errors import Problem
from grpo_mcore.recipe.yaml_tree import Node


def off(value: Any) -> bool:
    """A value that switches nothing on: null, false, 0, 1 (a parallel size), nothing in it, or `enabled:
    false`."""
    if isinstance(value, dict):
        if "enabled" in value:
            return off(value["enabled"])
        return all(off(item) for name, item in value.items() if not name.startswith("_"))
    return value in (None, False, 0, 1, "", []) and value is not True


def anything(_value: Any) -> bool:
    """The key has no effect whatever its value."""
    return True


def one_of(*values: Any) -> Callable[[Any], bool]:
    """One of these values or null."""
    return lambda value: value is None or any(value == known and type(value) is type(known) for known in values)


@dataclass(frozen=True)
class Foreign:
    """What to do with a key: drop it where `neutral(value)`, otherwise refuse it with `instead`."""

    instead: str
    neutral: Callable[[Any], bool] = off


def _later(what: str) -> Foreign:
    return Foreign(f"{what} is not supported yet; remove the key")


_DTENSOR = "the policy is Megatron-Core; use policy.megatron_cfg ({})"
_LORA = "use policy.megatron_cfg.peft"
_OTHER_ENGINE = "the engine is vLLM; remove the key"
_ALGORITHM = "this algorithm is not supported yet; remove the section"
_VISION = "images, audio and video are not supported; remove the key"
_CLUSTER_ENV = "environment variables pass by an allow-list; name them in cluster.env_vars"

FOREIGN: dict[str, Foreign] = {
    # policy
    "policy.dtensor_cfg": Foreign(_DTENSOR.format("tensor_model_parallel_size, activation_checkpointing, ...")),
    "policy.fsdp1_enabled": Foreign(_DTENSOR.format("distributed_data_parallel_config")),
    "policy.optimizer": Foreign("use policy.megatron_cfg.optimizer (lr, weight_decay, adam_beta1, ...)"),
    "policy.scheduler": Foreign("use policy.megatron_cfg.scheduler (lr_warmup_iters, lr_decay_style, ...)"),
    "policy.generation_batch_size": Foreign("engines batch by themselves; remove the key", anything),
    "policy.offload_optimizer_for_refit": Foreign(
        "the policy always makes room for the engines; remove the key", one_of(True)
    ),
    "policy.draft": _later("a draft model"),
    "policy.pretrained_checkpoint": Foreign("weights are read from policy.model_name; export to Hugging Face first"),
    "policy.reward_model_cfg": _later("training a reward model"),
    "policy.is_vlm": Foreign(_VISION),
    "policy.quant_cfg": _later("quantisation"),
    "policy.tokenizer.audio": Foreign(_VISION),
    "policy.tokenizer.video": Foreign(_VISION),
    "policy.tokenizer.use_processor": Foreign(_VISION),
    "policy.tokenizer.use_fastokens": Foreign("the Hugging Face tokenizer is used; remove the key"),
    "policy.sequence_packing.microbatch_order": Foreign("bins are ordered by the plan; remove it", one_of("packer")),
    "policy.sequence_packing.sequence_length_round": Foreign("no effect with packing", anything),
    "policy.sequence_packing.fuse_loss": Foreign("the loss of a bin is always one call", anything),
    # policy.megatron_cfg
    "policy.megatron_cfg.converter_type": Foreign("the family follows from the model", anything),
    "policy.megatron_cfg.force_reconvert_from_hf": Foreign(
        "weights are always read from the model's folder; remove the key"
    ),
    "policy.megatron_cfg.checkpoint": _later("tuning of how checkpoints are written"),
    "policy.megatron_cfg.defer_fp32_logits": Foreign("log-probs are always computed in chunks", anything),
    "policy.megatron_cfg.use_fused_linear_logprobs": Foreign("log-probs are always computed in chunks", anything),
    "policy.megatron_cfg.fused_linear_logprobs_chunk_size": Foreign("use policy.logprob_chunk_size", anything),
    "policy.megatron_cfg.fine_grained_activation_offloading": _later("offloading of activations"),
    "policy.megatron_cfg.offload_modules": _later("offloading of activations"),
    "policy.megatron_cfg.cuda_graph_impl": Foreign("CUDA graphs are not used in training", one_of("none")),
    "policy.megatron_cfg.cuda_graph_modules": Foreign("CUDA graphs are not used in training"),
    "policy.megatron_cfg.cuda_graph_warmup_steps": Foreign("CUDA graphs are not used in training", anything),
    "policy.megatron_cfg.use_fused_weighted_squared_relu": Foreign("not supported; remove the key"),
    "policy.megatron_cfg.moe_enable_deepep": Foreign("use moe_token_dispatcher_type alltoall or allgather"),
    "policy.megatron_cfg.moe_flex_dispatcher_backend": Foreign("use moe_token_dispatcher_type"),
    "policy.megatron_cfg.moe_hybridep_num_sms": Foreign("use moe_token_dispatcher_type", anything),
    "policy.megatron_cfg.hybridep_num_ranks_per_nvlink_domain": Foreign("no effect", anything),
    "policy.megatron_cfg.hybridep_use_mnnvl": Foreign("use moe_token_dispatcher_type"),
    "policy.megatron_cfg.moe_per_layer_logging": Foreign("not supported; remove the key"),
    "policy.megatron_cfg.mtp_num_layers": _later("multi-token prediction"),
    "policy.megatron_cfg.mtp_loss_scaling_factor": Foreign("no effect without multi-token prediction", anything),
    "policy.megatron_cfg.mtp_use_repeated_layer": _later("multi-token prediction"),
    "policy.megatron_cfg.mtp_detach_heads": _later("multi-token prediction"),
    "policy.megatron_cfg.attention_backend": Foreign("chosen by platform; remove the key", one_of("auto")),
    "policy.megatron_cfg.transformer_impl": Foreign("chosen by platform; remove the key"),
    "policy.megatron_cfg.use_gloo_process_groups": Foreign("chosen by platform; remove the key", anything),
    "policy.megatron_cfg.clear_memory_caches_before_refit": Foreign("use empty_unused_memory_level", anything),
    "policy.megatron_cfg.env_vars": Foreign(_CLUSTER_ENV),
    "policy.megatron_cfg.freeze_config": _later("freezing of parameters"),
    "policy.megatron_cfg.fp8_cfg": _later("FP8"),
    "policy.megatron_cfg.peft.dropout_position": Foreign("no effect without dropout", anything),
    "policy.megatron_cfg.peft.a2a_experimental": Foreign("not supported; remove the key"),
    "policy.megatron_cfg.peft.lora_dtype": Foreign("adapters are in policy.precision", one_of("None")),
    "policy.megatron_cfg.optimizer.fp16": Foreign("float16 is not supported; use policy.precision"),
    "policy.megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d": Foreign("not supported yet"),
    "policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp": Foreign("not supported"),
    "policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy": Foreign(
        "use policy.megatron_cfg.optimizer.use_distributed_optimizer", anything
    ),
    "policy.megatron_cfg.distributed_data_parallel_config.average_in_collective": Foreign(
        "gradients are always summed and divided by the global token count", anything
    ),
    # policy.generation
    "policy.generation.bad_words": _later("a list of bad words"),
    "policy.generation.port_range_low": Foreign("ports are chosen by the cluster", anything),
    "policy.generation.port_range_high": Foreign("ports are chosen by the cluster", anything),
    "policy.generation.refit_transport": Foreign("the transport follows from where policy and engines live"),
    "policy.generation.refit_cfg": Foreign("use policy.refit_buffer_size_gb"),
    "policy.generation.real_quant": _later("quantised generation"),
    "policy.generation.real_quant_export_cpu_offload": Foreign("no effect without quantised generation", anything),
    "policy.generation.real_quant_ignore": Foreign("no effect without quantised generation", anything),
    "policy.generation.quant_cfg": _later("quantised generation"),
    "policy.generation.use_async_rollouts": Foreign("samples always stream as they finish", anything),
    "policy.generation.mcore_generation_config": Foreign(_OTHER_ENGINE, anything),
    "policy.generation.sglang_cfg": Foreign(_OTHER_ENGINE, anything),
    "policy.generation.trtllm_cfg": Foreign(_OTHER_ENGINE, anything),
    "policy.generation.dynamo_cfg": Foreign(_OTHER_ENGINE, anything),
    # policy.generation.vllm_cfg
    "policy.generation.vllm_cfg.async_engine": Foreign("samples always stream as they finish", anything),
    "policy.generation.vllm_cfg.skip_tokenizer_init": Foreign("decided by stop_strings", anything),
    "policy.generation.vllm_cfg.logprobs_mode": Foreign(
        "log-probs are those of the sampling distribution; remove the key", one_of("processed_logprobs")
    ),
    "policy.generation.vllm_cfg.is_mx": _later("MX formats in the engine"),
    "policy.generation.vllm_cfg.use_deep_gemm": _later("FP8 in the engine"),
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": _later("FP8 in the engine"),
    "policy.generation.vllm_cfg.num_last_layers_in_bf16": _later("FP8 in the engine"),
    "policy.generation.vllm_cfg.enable_vllm_metrics_logger": Foreign("engine metrics are in the step's metrics"),
    "policy.generation.vllm_cfg.vllm_metrics_logger_interval": Foreign("no effect", anything),
    "policy.generation.vllm_cfg.cap_max_tokens_to_context": Foreign("answers always end at max_model_len", anything),
    "policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update": Foreign(_VISION),
    "policy.generation.vllm_cfg.http_refit_server_port": Foreign("the transport follows from the layout"),
    "policy.generation.vllm_cfg.http_refit_api_key_env_var": Foreign("the transport follows from the layout"),
    "policy.generation.vllm_cfg.zmq_refit_server_port": Foreign("the transport follows from the layout"),
    "policy.generation.vllm_cfg.use_tqdm": Foreign("progress is shown by the run", anything),
    "policy.generation.vllm_cfg.env_vars": Foreign(_CLUSTER_ENV),
    "policy.generation.vllm_cfg.video": Foreign(_VISION),
    # grpo
    "grpo.calculate_advantages_on_gpu": Foreign("advantages are computed in float64 on the driver; remove the key"),
    "grpo.invalid_tool_call_advantage": _later("advantages of flagged spans"),
    "grpo.malformed_thinking_advantage": _later("advantages of flagged spans"),
    "grpo.deduplicate_multimodal_data": Foreign(_VISION),
    "grpo.debug_payload_metrics": Foreign("not supported; remove the key"),
    # sft
    "sft.val_micro_batch_size": Foreign("the batches of policy.sequence_packing are used", anything),
    # data
    "data.add_system_prompt": Foreign("use system_prompt_file or the chat template"),
    **{
        f"data.{place}.{name}": Foreign(_VISION)
        for place in ("train.*", "validation.*")
        for name in ("num_frames", "video_fps", "video_min_pixels", "video_max_pixels", "video_dir")
    },
    **{
        f"data.{place}.min_generation_tokens": _later("a smallest answer length")
        for place in ("train.*", "validation.*")
    },
    # logger
    "logger.mlflow_enabled": Foreign("use logger.wandb_enabled or logger.tensorboard_enabled"),
    "logger.swanlab_enabled": Foreign("use logger.wandb_enabled or logger.tensorboard_enabled"),
    "logger.mlflow": Foreign("no effect while mlflow_enabled is false", anything),
    "logger.swanlab": Foreign("no effect while swanlab_enabled is false", anything),
    "logger.monitor_gpus": Foreign("seconds by phase are in the step's metrics; set it to false"),
    "logger.gpu_monitoring": Foreign("no effect while monitor_gpus is false", anything),
    "logger.wandb.log_nemo_gym_full_result_tables": Foreign("not supported; remove the key"),
    # checkpointing
    "checkpointing.model_save_format": Foreign("`export_hf` writes safetensors", one_of("safetensors", "torch_save")),
    "checkpointing.save_consolidated": Foreign("export the model to Hugging Face's format instead"),
    "checkpointing.model_cache_dir": Foreign("set HF_HOME"),
    "checkpointing.model_repo_id": Foreign("set policy.model_name"),
    "checkpointing.is_peft": Foreign(_LORA),
    "checkpointing.peft_config": Foreign(_LORA),
    # cluster
    "cluster.master_port_range_low": Foreign("ports are chosen by the cluster", anything),
    "cluster.master_port_range_high": Foreign("ports are chosen by the cluster", anything),
    # whole sections
    "async_rl": Foreign("use grpo.async_grpo"),
    "data_plane": Foreign("tensors travel through Ray's object store; remove the section"),
    "reward_penalties": _later("reward penalties"),
    "on_policy_distillation": Foreign(_ALGORITHM),
    **{name: Foreign(_ALGORITHM, one_of()) for name in ("dpo", "rm", "ppo", "distillation", "teacher", "value")},
}


def remove(tree: Node, problems: list[Problem]) -> Node:
    """The tree without foreign keys. Those that ask for something are reported."""
    tree = tree.copy()
    for path, foreign in FOREIGN.items():
        for section, name in _places(tree, path.split(".")):
            node = section.value.pop(name)
            if not foreign.neutral(node.plain()):
                culprit = _switched_on(node)
                problems.append(Problem(culprit.source, culprit.key, f"a key of NeMo RL; {foreign.instead}"))
    return tree


def _places(node: Node, parts: list[str]) -> Iterator[tuple[Node, str]]:
    """The mappings that have the key that a path of FOREIGN ends in, and that key."""
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
    """The first value under a foreign key that asks for something."""
    if node.is_mapping and "enabled" in node.value:
        return node.value["enabled"]
    for _, child in node.children():
        if not off(child.plain()):
            return _switched_on(child)
    return node
