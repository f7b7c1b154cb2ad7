"""Recipes in NeMo RL's keys that name its DTensor policy: bases, and the values in which recipes differ."""

from __future__ import annotations

_POLICY = """\
policy: &POLICY
  model_name: Qwen/Qwen2.5-1.5B
  tokenizer: {name: "${..model_name}"}
  train_global_batch_size: 512
  train_micro_batch_size: 4
  generation_batch_size: 32
  logprob_batch_size: 4
  max_total_sequence_length: 512
  precision: bfloat16
  logprob_chunk_size: null
  dtensor_cfg: &DTENSOR
    _v2: true
    enabled: true
    env_vars: {}
    cpu_offload: false
    sequence_parallel: false
    activation_checkpointing: false
    tensor_parallel_size: 1
    context_parallel_size: 1
    expert_parallel_size: 1
    custom_parallel_plan: null
    clear_cache_every_n_steps: null
    automodel_kwargs: {}
    lora_cfg: {enabled: false, target_modules: [], exclude_modules: [], match_all_linear: true, dim: 8, alpha: 32,
               dropout: 0.0, dropout_position: post, lora_A_init: xavier, use_triton: true}
  megatron_cfg:
    enabled: false
    empty_unused_memory_level: 0
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 1
    sequence_parallel: true
    moe_router_load_balancing_type: aux_loss
    moe_router_bias_update_rate: 1e-3
    optimizer: {optimizer: adam, lr: 4.0e-6, min_lr: 4.0e-6, weight_decay: 0.2, clip_grad: "${policy.max_grad_norm}"}
    scheduler:
      start_weight_decay: ${policy.megatron_cfg.optimizer.weight_decay}
      end_weight_decay: ${policy.megatron_cfg.optimizer.weight_decay}
      lr_decay_iters: 1000
      lr_warmup_iters: 13
      lr_warmup_init: 5.0e-7
    fp8_cfg: {enabled: false}
  dynamic_batching:
    enabled: false
    train_mb_tokens: ${mul:${..max_total_sequence_length}, ${..train_micro_batch_size}}
    logprob_mb_tokens: ${mul:${..max_total_sequence_length}, ${..logprob_batch_size}}
    sequence_length_round: 64
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${..max_total_sequence_length}, ${..train_micro_batch_size}}
    logprob_mb_tokens: ${mul:${..max_total_sequence_length}, ${..logprob_batch_size}}
    algorithm: modified_first_fit_decreasing
  make_sequence_length_divisible_by: ${mul:${.dtensor_cfg.tensor_parallel_size}, ${.dtensor_cfg.context_parallel_size}}
  max_grad_norm: 1.0
  optimizer:
    name: torch.optim.AdamW
    kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.98], eps: 1e-8, foreach: false, fused: false}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - milestones: [50]
  generation:
    backend: vllm
    max_new_tokens: ${..max_total_sequence_length}
    vllm_cfg: {precision: "${...precision}", tensor_parallel_size: 1, max_model_len: "${...max_total_sequence_length}"}
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
"""
GRPO = (
    "grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, val_period: 10, max_rollout_turns: 1}\n"
    "data: {train: {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05}, default: {env_name: math}}\n"
    "env: {math: {num_workers: 8}}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n" + _POLICY
)
SFT = (
    "sft: {max_num_steps: 60, val_period: 10, val_global_batch_size: 32, val_micro_batch_size: 1}\n"
    "data: {train: {dataset_name: squad, split: train}, validation: {dataset_name: squad, split: validation}}\n"
    "cluster: {gpus_per_node: 8, num_nodes: 1}\n" + _POLICY
)
DPO = (
    "dpo: {max_num_steps: 150, val_period: 25, val_global_batch_size: 8, reference_policy_kl_penalty: 0.05}\n"
    "data: {train: {dataset_name: HelpSteer3, split: train}, validation: {dataset_name: HelpSteer3, split: test}}\n"
    "cluster: {gpus_per_node: 8, num_nodes: 1}\n" + _POLICY
)
DISTILLATION = (
    _POLICY
    + "teacher: {<<: *POLICY, model_name: Qwen/Qwen3-4B, dtensor_cfg: {<<: *DTENSOR, tensor_parallel_size: 4}}\n"
    "distillation: {num_prompts_per_step: 512, num_generations_per_prompt: 1, topk_logits_k: 64}\n"
    "loss_fn: {kl_type: mixed}\ndata: {train: {dataset_name: DeepScaler}, default: {env_name: math}}\n"
    "env: {math: {num_workers: 8}}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
)
BASES = {"grpo": GRPO, "sft": SFT, "dpo": DPO, "distillation": DISTILLATION}

RECIPES = {
    "grpo-long-tp8-actckpt": ("grpo", """\
policy: {model_name: Qwen/Qwen3-32B, train_micro_batch_size: 1, max_total_sequence_length: 16384,
         dtensor_cfg: {_v2: false, activation_checkpointing: true, tensor_parallel_size: 8},
         sequence_packing: {enabled: false}, optimizer: {kwargs: {lr: 3e-7}}}
""", {"tensor_model_parallel_size": 8, "activation_checkpointing": True, "optimizer.lr": 3e-7}),
    "grpo-sequence-parallel": ("grpo", """\
policy: {dtensor_cfg: {tensor_parallel_size: 4, sequence_parallel: true, context_parallel_size: 2}}
""", {"tensor_model_parallel_size": 4, "context_parallel_size": 2, "sequence_parallel": True}),
    "grpo-sequence-parallel-of-one": ("grpo", "policy: {dtensor_cfg: {sequence_parallel: true}}\n",
                                      {"sequence_parallel": False}),
    "grpo-nano-lora": ("grpo", """\
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 8}
policy: {model_name: nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16, train_global_batch_size: 16,
         dtensor_cfg: {automodel_kwargs: {force_hf: true}, lora_cfg: {enabled: true, dim: 128, alpha: 512,
           exclude_modules: ["*out_proj*"], match_all_linear: false, use_triton: false}},
         sequence_packing: {enabled: false}, train_micro_batch_size: 1, logprob_batch_size: 1}
cluster: {num_nodes: 2}
""", {"peft.enabled": True, "peft.dim": 128, "peft.alpha": 512, "peft.exclude_modules": ["*out_proj*"]}),
    "grpo-lora-of-some-layers": ("grpo", """\
policy: {dtensor_cfg: {lora_cfg: {enabled: true, target_modules: [q_proj, "*.o_proj", gate_proj],
                                  match_all_linear: false, lora_A_init: uniform}}}
""", {"peft.target_modules": ["linear_qkv", "*.linear_proj", "linear_fc1"], "peft.lora_A_init_method": "kaiming"}),
    "dapo-experts-with-fused-adam": ("grpo", """\
policy:
  model_name: nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16
  optimizer: {name: transformer_engine.pytorch.optimizers.fused_adam.FusedAdam,
              kwargs: {lr: 1.0e-6, weight_decay: 0.1, master_weights: true, store_param_remainders: true,
                       exp_avg_dtype: torch.bfloat16, exp_avg_sq_dtype: torch.bfloat16}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 1.0e-8, end_factor: 1.0, total_iters: 10}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - milestones: [10]
  dtensor_cfg: {expert_parallel_size: 8, moe_parallelizer: {ignore_router_for_ac: true},
                env_vars: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"},
                automodel_kwargs: {backend: {attn: te, experts: gmm, dispatcher: deepep}}}
""", {"expert_model_parallel_size": 8, "optimizer.weight_decay": 0.1, "scheduler.lr_warmup_iters": 10,
      "scheduler.lr_warmup_init": 1e-14, "env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}),
    "grpo-cosine": ("grpo", """\
policy: {scheduler: [{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 20}},
                     {name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 180, eta_min: 1e-7}},
                     {milestones: [20]}]}
""", {"scheduler.lr_decay_style": "cosine", "scheduler.lr_decay_iters": 200, "optimizer.min_lr": 1e-7,
      "scheduler.lr_warmup_iters": 20}),
    "sft-dynamic": ("sft", """\
policy: {dynamic_batching: {enabled: true}, sequence_packing: {enabled: false}, scheduler: null,
         dtensor_cfg: {tensor_parallel_size: 4}, optimizer: {kwargs: {lr: 2e-5}}}
""", {"tensor_model_parallel_size": 4, "scheduler.lr_warmup_iters": 0, "optimizer.lr": 2e-5}),
    "sft-lora": ("sft", """\
policy: {dtensor_cfg: {lora_cfg: {enabled: true, dim: 128, alpha: 128}}, train_global_batch_size: 128}
""", {"peft.enabled": True, "peft.dim": 128, "peft.target_modules": []}),
    "dpo-offload": ("dpo", """\
policy: {dtensor_cfg: {cpu_offload: true, checkpoint: {model_save_format: safetensors}}, train_global_batch_size: 16,
         sequence_packing: {enabled: false}, train_micro_batch_size: 1}
dpo: {val_period: -1}
""", {"optimizer.optimizer_cpu_offload": True, "optimizer.weight_decay": 0.01}),
    "dpo-constant": ("dpo", """\
policy: {scheduler: [{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}},
                     {milestones: []}]}
""", {"scheduler.lr_warmup_iters": 0, "scheduler.lr_decay_style": "constant", "optimizer.adam_beta2": 0.98}),
    "dapo-context-parallel": ("grpo", """\
policy: {dtensor_cfg: {context_parallel_size: 4}, sequence_packing: {enabled: false}, train_micro_batch_size: 1,
         megatron_cfg: {tensor_model_parallel_size: 4, scheduler: {lr_decay_iters: null}},
         make_sequence_length_divisible_by: "${mul:${policy.dtensor_cfg.tensor_parallel_size},\
 ${mul:2, ${policy.dtensor_cfg.context_parallel_size}}}", generation: {vllm_cfg: {tensor_parallel_size: 2}}}
""", {"context_parallel_size": 4, "tensor_model_parallel_size": 1}),
    "grpo-offload-dynamic": ("grpo", """\
policy: {model_name: nvidia/NVIDIA-Nemotron-Nano-12B-v2, dynamic_batching: {enabled: true},
         sequence_packing: {enabled: false}, dtensor_cfg: {cpu_offload: true, activation_checkpointing: true}}
cluster: {num_nodes: 2}
""", {"optimizer.optimizer_cpu_offload": True, "activation_checkpointing": True}),
    "dpo-long": ("dpo", """\
policy: {env_vars: {PYTORCH_CUDA_ALLOC_CONF: "max_split_size_mb:64"}, fsdp_offload_enabled: false,
         dtensor_cfg: {tensor_parallel_size: 2, activation_checkpointing: true}, train_micro_batch_size: 1}
checkpointing: {metric_name: val_loss, higher_is_better: false, keep_top_k: null}
""", {"tensor_model_parallel_size": 2, "env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}}),
    "dpo-experts": ("dpo", """\
policy: {model_name: nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16, train_global_batch_size: 16,
         train_micro_batch_size: 1, hf_config_overrides: {router_aux_loss_coef: 0.0},
         dtensor_cfg: {checkpoint: {model_save_format: safetensors}, expert_parallel_size: 8,
                       moe_parallelizer: {reshard_after_forward: true}}, offload_optimizer_for_logprob: true}
checkpointing: {metric_name: "val:validation-default_loss", higher_is_better: false}
""", {"expert_model_parallel_size": 8}),
    "sft-experts": ("sft", """\
policy: {model_name: openai/gpt-oss-20b, dequantize_base_checkpoint: true, hf_config_overrides:
         {router_aux_loss_coef: 0.0}, dtensor_cfg: {expert_parallel_size: 8}, train_micro_batch_size: 8}
""", {"expert_model_parallel_size": 8}),
    "distillation-of-two-layouts": ("distillation", """\
distillation: {num_prompts_per_step: 512, max_num_steps: 20}
policy: {model_name: Qwen/Qwen3-4B-Base, dtensor_cfg: {tensor_parallel_size: 2}}
teacher: {model_name: Qwen/Qwen3-32B, dtensor_cfg: {tensor_parallel_size: 8}}
""", {"tensor_model_parallel_size": 2}),
    "distillation": ("distillation", "loss_fn: {kl_type: reverse}\n", {"tensor_model_parallel_size": 1}),
}  # fmt: skip
"""By name: the base, the values in which a recipe differs, and what `policy.megatron_cfg` must hold."""
