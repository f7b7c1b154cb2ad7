"""Recipes of the specification, as users of NeMo RL write them."""

from __future__ import annotations

GYM_GRPO = """\
defaults:
  - grpo_math_1B  # Or grpo_math_8B, grpo_math_1B_megatron, etc.
data:
  dataset_name: ResponseDataset
  train_data_path: "grpo_data/train.jsonl"
  val_data_path: "grpo_data/val.jsonl"
  input_key: "input"       # Matches transformed format
  output_key: "output"     # Matches transformed format
  max_input_seq_length: 1024
  shuffle: true
env:
  math:
    num_workers: 8
    math_verify_impl: "hf_math_verify"  # Or your custom verification
policy:
  model_name: "Qwen/Qwen2.5-1.5B"  # Or your preferred model
  max_total_sequence_length: 1024
  train_global_batch_size: 512
  train_micro_batch_size: 4
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  val_period: 10
checkpointing:
  enabled: true
  checkpoint_dir: "results/gym_grpo"
  save_period: 10
logger:
  wandb_enabled: true
  wandb:
    project: "nemo-gym-grpo"
    name: "gym-data-run-1"
"""
GRPO_TEMPLATE = """\
defaults:
  - grpo_math_1B
data:
  dataset_name: ResponseDataset
  train_data_path: "grpo_train.jsonl"
  input_key: "input"
  output_key: "output"
policy:
  model_name: "Qwen/Qwen2.5-1.5B"
  max_total_sequence_length: 1024
checkpointing:
  checkpoint_dir: "results/gym_grpo"
logger:
  wandb_enabled: true
"""
SFT_TEMPLATE = """\
defaults:
  - sft
data:
  dataset_name: openai_format  # or ResponseDataset for simple
  train_data_path: "sft_train.jsonl"
  use_preserving_dataset: true
policy:
  model_name: "Qwen/Qwen2.5-1.5B"
checkpointing:
  checkpoint_dir: "results/gym_sft"
"""
DPO_TEMPLATE = """\
defaults:
  - dpo
data:
  dataset_name: BinaryPreferenceDataset
  train_data_path: "dpo_train.jsonl"
  prompt_key: "prompt"
  chosen_key: "chosen"
  rejected_key: "rejected"
policy:
  model_name: "Qwen/Qwen2.5-1.5B"
checkpointing:
  checkpoint_dir: "results/gym_dpo"
"""
