#!/bin/bash
# recipes/grpo-llama3.1-8B-2n8g.yaml on Slurm. Written by: grpo-mcore launch slurm recipes/grpo-llama3.1-8B-2n8g.yaml --dry-run
#
# Usage: sbatch FILE, from a shell in which `grpo-mcore` is in PATH, or with a container (pyxis):
#   CONTAINER=image.sqsh MOUNTS="$PWD:$PWD" COMMAND="grpo-mcore train ... --resume=auto" sbatch FILE
# Options on sbatch's own command line override those below.
#SBATCH --job-name=grpo-llama3-1-8b-2n8g
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=512G
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --export=PATH,HOME,USER,LOGNAME,SHELL,LANG,TZ,VIRTUAL_ENV,PYTHONPATH,OMP_NUM_THREADS,CONTAINER,MOUNTS,COMMAND,RESTARTS,LOGS,PYTHON,START_TIMEOUT,RAY_PORT,HEAD_IP,OBJECT_STORE_GB,HF_HOME,HF_HUB_CACHE,HF_DATASETS_CACHE,HF_ENDPOINT,HF_HUB_OFFLINE,HTTP_PROXY,HTTPS_PROXY,NO_PROXY,http_proxy,https_proxy,no_proxy,LD_LIBRARY_PATH,CUDA_HOME,HF_TOKEN,WANDB_API_KEY

# Settings: a variable of the same name in the submitting shell overrides the value.
[[ -n ${CONTAINER:-} ]] || CONTAINER='' # image for pyxis; empty: bare metal
[[ -n ${MOUNTS:-} ]] || MOUNTS='' # FROM:TO[:ro],... for the container
[[ -n ${COMMAND:-} ]] || COMMAND='grpo-mcore train "$RECIPE" --resume=auto'
[[ -n ${RESTARTS:-} ]] || RESTARTS=3 # how often a run that ran out of time or lost something is queued again; preemptions do not count
[[ -n ${LOGS:-} ]] || LOGS=logs/slurm # on the shared file system
[[ -n ${PYTHON:-} ]] || PYTHON=python
[[ -n ${START_TIMEOUT:-} ]] || START_TIMEOUT=600 # seconds until all nodes must have joined Ray
CODE='(version and revision)'
resolved_recipe() {
    cat <<'END_OF_RECIPE'
# recipes/grpo-llama3.1-8B-2n8g.yaml
policy:
  model_name: meta-llama/Llama-3.1-8B-Instruct
  tokenizer:
    name: meta-llama/Llama-3.1-8B-Instruct
    chat_template: null
    chat_template_kwargs: null
  hf_config_overrides: {}
  train_global_batch_size: 2048
  train_micro_batch_size: 1
  logprob_batch_size: 2
  max_total_sequence_length: 4096
  precision: bfloat16
  logprob_chunk_size: 1024
  offload_optimizer_for_logprob: false
  refit_buffer_size_gb: 4.0
  refit_verify: sample
  refit_parity: sample
  make_sequence_length_divisible_by: null
  max_grad_norm: 1.0
  sequence_packing:
    enabled: true
    train_mb_tokens: 4096
    logprob_mb_tokens: 8192
    algorithm: modified_first_fit_decreasing
    shared_prefix:
      enabled: null
      min_tokens: 32
  dynamic_batching:
    enabled: false
    train_mb_tokens: 4096
    logprob_mb_tokens: 8192
    sequence_length_round: 64
  router_replay:
    enabled: false
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 2
    virtual_pipeline_model_parallel_size: null
    context_parallel_size: 1
    expert_model_parallel_size: 1
    expert_tensor_parallel_size: 1
    num_layers_in_first_pipeline_stage: null
    num_layers_in_last_pipeline_stage: null
    sequence_parallel: false
    pipeline_dtype: bfloat16
    activation_checkpointing: false
    recompute_granularity: full
    recompute_modules: null
    empty_unused_memory_level: 1
    model_overrides: {}
    apply_rope_fusion: true
    bias_activation_fusion: true
    gradient_accumulation_fusion: false
    freeze_moe_router: true
    moe_router_dtype: fp64
    moe_router_load_balancing_type: none
    moe_router_bias_update_rate: 0.0
    moe_token_dispatcher_type: alltoall
    moe_permute_fusion: true
    moe_grouped_gemm: true
    moe_shared_expert_overlap: false
    dist_ckpt_optim_fully_reshardable: true
    env_vars: {}
    optimizer:
      optimizer: adam
      lr: 5.0e-07
      min_lr: 5.0e-08
      weight_decay: 0.0
      bf16: true
      params_dtype: float32
      adam_beta1: 0.9
      adam_beta2: 0.999
      adam_eps: 1.0e-08
      use_distributed_optimizer: true
      use_precision_aware_optimizer: false
      optimizer_cpu_offload: false
      optimizer_offload_fraction: 1.0
      overlap_cpu_optimizer_d2h_h2d: false
      clip_grad: 1.0
    peft:
      enabled: false
      target_modules: []
      exclude_modules: []
      dim: 8
      alpha: 32.0
      dropout: 0.0
      lora_A_init_method: xavier
      lora_B_init_method: zero
      refit: merged
    scheduler:
      lr_decay_style: constant
      lr_decay_iters: 1000
      lr_warmup_iters: 10
      lr_warmup_init: 5.0e-08
      start_weight_decay: 0.0
      end_weight_decay: 0.0
      weight_decay_incr_style: constant
    distributed_data_parallel_config:
      grad_reduce_in_fp32: true
      overlap_grad_reduce: true
      overlap_param_gather: false
  generation:
    backend: vllm
    num_engines: null
    max_running: null
    max_new_tokens: 4096
    temperature: 1.0
    top_p: 1.0
    top_k: null
    val_temperature: 1.0
    val_top_p: 1.0
    val_top_k: null
    stop_token_ids: null
    stop_strings: null
    colocated:
      enabled: true
      resources:
        gpus_per_node: null
        num_nodes: null
    vllm_cfg:
      tensor_parallel_size: 1
      pipeline_parallel_size: 1
      expert_parallel_size: 1
      gpu_memory_utilization: 0.6
      kv_cache_memory_gb: null
      max_model_len: 4096
      precision: bfloat16
      kv_cache_dtype: auto
      enforce_eager: false
      load_format: auto
      expose_http_server: false
      http_server_host: null
      http_server_port: null
      http_server_api_key_env_var: null
      http_server_serving_chat_kwargs:
        enable_auto_tools: false
        tool_parser: null
        reasoning_parser: null
      tool_parser_plugin: null
      reasoning_parser_plugin: null
      env_vars: {}
      enable_return_routed_experts: false
    vllm_kwargs: {}
data:
  max_input_seq_length: 4096
  max_unusable_share: 0.05
  shuffle: true
  num_workers: 1
  add_bos: true
  add_eos: true
  add_generation_prompt: false
  use_multiple_dataloader: false
  num_prompts_per_dataloader: null
  custom_dataloader: null
  train:
    - dataset_name: OpenMathInstruct-2
      data_path: null
      task_name: null
      subset: null
      split: null
      download_dir: null
      input_key: input
      output_key: output
      chat_key: messages
      system_key: null
      system_prompt: null
      tool_key: tools
      use_preserving_dataset: false
      prompt_key: prompt
      chosen_key: chosen
      rejected_key: rejected
      prompt_file: recipes/prompts/cot.txt
      system_prompt_file: null
      processor: math_hf_data_processor
      train_on: all
      env_name: math
      split_validation_size: 0.05
      seed: 42
      dataset_kwargs: {}
      repeat: 1
  validation: []
  default:
    prompt_file: recipes/prompts/cot.txt
    system_prompt_file: null
    processor: math_hf_data_processor
    env_name: math
loss_fn:
  path: null
  options: {}
  disable_ppo_ratio: false
  token_level_loss: true
  sequence_level_importance_ratios: false
  sequence_importance_weight: geometric_mean
  sequence_length_normalizer: null
  ratio_clip_min: 0.2
  ratio_clip_max: 0.2
  ratio_clip_c: null
  reference_policy_kl_penalty: 0.01
  reference_policy_kl_type: k3
  kl_input_clamp_value: 20.0
  kl_output_clamp_value: 10.0
  use_kl_in_reward: false
  use_on_policy_kl_approximation: false
  use_importance_sampling_correction: false
  truncated_importance_sampling_type: null
  truncated_importance_sampling_ratio: null
  truncated_importance_sampling_ratio_by_age: null
  truncated_importance_sampling_ratio_min: null
  force_on_policy_ratio: false
  use_cispo: false
  positive_example_nll_weight: 0.0
  entropy_coeff: null
grpo:
  num_prompts_per_step: 64
  num_generations_per_prompt: 32
  max_num_epochs: 1
  max_num_steps: 500
  max_rollout_turns: 1
  turns: null
  normalize_rewards: true
  use_leave_one_out_baseline: true
  advantage_clip_low: null
  advantage_clip_high: null
  val_period: 10
  val_start_at: -1
  val_at_start: false
  val_at_end: false
  val_batch_size: 256
  max_val_samples: 256
  val_num_generations_per_prompt: 1
  stop_at_validation_metric: null
  stop_at_validation_threshold: null
  skip_reference_policy_logprobs_calculation: false
  seed: 42
  overlong_filtering: false
  use_dynamic_sampling: false
  dynamic_sampling_max_gen_batches: 10
  batch_multiplier: 1.0
  seq_logprob_error_threshold: null
  reward_scaling:
    enabled: false
    source_min: 0.0
    source_max: 1.0
    target_min: 0.0
    target_max: 1.0
  reward_shaping:
    enabled: false
    path: null
    options: {}
    overlong_buffer_length: 128
    overlong_buffer_penalty: 1.0
    max_response_length: 4096
    stop_properly_penalty_coef: null
  adv_estimator:
    name: grpo
    options: {}
    normalize_rewards: null
    use_leave_one_out_baseline: null
    minus_baseline: true
    reward_weights: null
  async_grpo:
    enabled: false
    max_trajectory_age_steps: 1
    max_groups_in_flight: null
    max_buffer_gb: null
    group_order: in_order
    max_generation_failures: 0
    in_flight_weight_updates: false
    recompute_kv_cache_after_weight_updates: false
    min_samples_per_group: null
    partial_rollouts: false
env:
  math:
    num_workers: 8
    math_verify_impl: hf_math_verify
cluster:
  backend: ray
  platform: gpu
  num_nodes: 2
  gpus_per_node: 8
  segment_size: null
  start_timeout_s: 600.0
  step_timeout_s: 3600.0
  max_engine_restarts: 3
  max_restarts: 0
  retry_wait_s: 1.0
  env_vars: []
logger:
  log_dir: logs
  wandb_enabled: false
  tensorboard_enabled: true
  mlflow_enabled: false
  swanlab_enabled: false
  monitor_gpus: false
  num_val_samples_to_print: 0
  samples: all
  max_samples_gb: 20.0
  profile_steps: []
  alarms:
    webhook: null
    stop_after: null
  wandb:
    project: grpo-dev
    name: grpo-llama3.1-8B-2n8g
    entity: null
  tensorboard:
    log_dir: null
  own: []
  mlflow:
    experiment_name: null
    run_name: null
    run_id: null
    tracking_uri: null
    artifact_location: null
  swanlab:
    project: null
    name: null
    workspace: null
    mode: null
  gpu_monitoring:
    collection_interval: 10.0
    flush_interval: 10.0
checkpointing:
  enabled: true
  checkpoint_dir: results/grpo-llama3.1-8B-2n8g
  metric_name: val:accuracy
  higher_is_better: true
  keep_top_k: 3
  save_period: 10
  save_optimizer: true
  save_hf: none
  is_async: false
  checkpoint_must_save_by: null
  ft_save_period: null
  ft_keep_latest_k: null
END_OF_RECIPE
}

# ----------------------------------------------------------------------------------------------------------------------
# Starts a Ray head on the first node and a Ray node on each of the others, all by srun; then the command on the first
# node. When any of them ends, the job ends. Nothing here needs Python outside the container.

set -uo pipefail
restart=${SLURM_RESTART_COUNT:-0}
say() { echo "[$(date +%H:%M:%S)] $*"; }

export RAY_USAGE_STATS_ENABLED=0 RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1
export RAY_memory_monitor_refresh_ms=0 # Ray's memory monitor kills workers that hold a model
ulimit -Sn "$(ulimit -Hn)" 2>/dev/null || true

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
gpus=${SLURM_GPUS_ON_NODE:-0}
logs=$(realpath -m "$LOGS")/$SLURM_JOB_ID-$restart
mkdir -p "$logs"
if [[ -n $(type -t resolved_recipe) ]]; then # as it was when the job was submitted
    export RECIPE=$logs/recipe.yaml
    resolved_recipe >"$RECIPE"
fi
used_up=$(realpath -m "$LOGS")/$SLURM_JOB_ID.restarts # how many of RESTARTS; those by Slurm itself do not count
((restart)) || rm -f "$used_up" # of an older job with this number
used=$(cat "$used_up" 2>/dev/null || echo 0)

# Ray answers only to holders of this job's token. A previous start whose node was lost has left its token behind.
rm -f "$(realpath -m "$LOGS")/$SLURM_JOB_ID"-*/token
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$logs/token
(umask 077 && head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")

# Each job has ten ports, below those that the kernel gives to outgoing connections and above Ray's own range.
port=${RAY_PORT:-$((30000 + SLURM_JOB_ID % 270 * 10))}

inside=()
if [[ -n $CONTAINER ]]; then
    inside=(--container-image="$CONTAINER" --container-name="grpo-$SLURM_JOB_ID"
        --container-mounts="$logs:$logs${MOUNTS:+,$MOUNTS}" --container-workdir="$PWD" --no-container-mount-home)
fi
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # by default a step has one core
on_head=(srun --overlap --export=ALL --nodes=1 --ntasks=1 --nodelist="$head")

head_ip=${HEAD_IP:-$("${on_head[@]}" hostname -I | awk '{print $1}')}
if [[ -z $head_ip ]]; then
    say "no address of $head found; set HEAD_IP"
    exit 1
fi
address=$head_ip:$port

node="exec $PYTHON -m grpo_mcore.cluster.ray_node \$0 --address=$address --index=\$SLURM_NODEID \
--cpus=\${SLURM_CPUS_ON_NODE:-1} --gpus=$gpus --within=$START_TIMEOUT --object-store-gb=${OBJECT_STORE_GB:-0} >'$logs'/ray-\$SLURMD_NODENAME.log 2>&1"

# ---- shutdown --------------------------------------------------------------------------------------------------------
head_pid="" workers_pid="" driver_pid=""
gone() { [[ -z $1 ]] || ! kill -0 "$1" 2>/dev/null; }
end() { # PID SIGNAL SECONDS: send the signal and wait. SIGTERM makes srun kill its step; it forwards other signals.
    gone "$1" && return
    [[ $2 == none ]] || kill "-$2" "$1" 2>/dev/null
    for _ in $(seq $(($3 * 5))); do gone "$1" && return; sleep 0.2; done
    kill -TERM "$1" 2>/dev/null
    for _ in $(seq 50); do gone "$1" && return; sleep 0.2; done
    kill -KILL "$1" 2>/dev/null
}
finish() { # SECONDS that the run gets to end by itself; fewer if Slurm ends the job meanwhile
    trap '' USR1
    end "$driver_pid" none "${1:-0}"
    end "$workers_pid" USR2 15
    end "$head_pid" USR2 15
    rm -rf "$RAY_AUTH_TOKEN_PATH"
    trap '' TERM # scontrol requeue sends it
}
on_usr1() {
    if [[ -z $driver_pid ]]; then
        say "Slurm: the time limit is near, and the run has not begun"
        finish
        exit 1
    fi
    say "Slurm: the time limit is near; the run finishes its step and saves"
    kill -USR1 "$driver_pid" 2>/dev/null
}
on_term() {
    trap '' USR1 TERM
    say "Slurm: the job is cancelled or preempted; a requeued job goes on from its newest checkpoint"
    # Slurm itself ends the steps now; an srun may wait for its step longer than Slurm gives this script.
    for _ in $(seq 25); do gone "$driver_pid" && gone "$workers_pid" && gone "$head_pid" && break; sleep 0.2; done
    for pid in $driver_pid $workers_pid $head_pid; do kill -KILL "$pid" 2>/dev/null; done
    rm -rf "$RAY_AUTH_TOKEN_PATH"
    say "everything has ended"
    exit 143
}
trap on_usr1 USR1
trap on_term TERM

# ---- Ray -------------------------------------------------------------------------------------------------------------
say "job $SLURM_JOB_ID, start $((restart + 1)): ${#nodes[@]} nodes (${nodes[*]}), $gpus GPUs each; logs: $logs"
"${on_head[@]}" "${inside[@]}" bash -c "$node" head 0 &
head_pid=$!
if ((${#nodes[@]} > 1)); then
    others=$((${#nodes[@]} - 1))
    # A step numbers its nodes from 0; if several nodes are on one machine, the index must differ from the head's.
    srun --overlap --export=ALL --nodes=$others --ntasks=$others --ntasks-per-node=1 --exclude="$head" \
        "${inside[@]}" bash -c "SLURM_NODEID=\$((SLURM_NODEID + 1)); ${node//\$1/\$SLURM_NODEID}" worker 1 &
    workers_pid=$!
fi
for _ in $(seq "$START_TIMEOUT"); do # until the head answers: the program that waits runs in its container
    (exec 3<>"/dev/tcp/$head_ip/$port") 2>/dev/null && break
    gone "$head_pid" && break
    sleep 1
done
"${on_head[@]}" "${inside[@]}" "$PYTHON" -m grpo_mcore.cluster.ray_node wait --address="$address" \
    --nodes=${#nodes[@]} --gpus=$((gpus * ${#nodes[@]})) --within="$START_TIMEOUT" >"$logs/ready.log" 2>&1 &
ready_pid=$!
while ! gone "$ready_pid" && ! gone "$head_pid"; do sleep 0.5; done
gone "$ready_pid" || kill "$ready_pid"
if ! wait "$ready_pid"; then
    say "Ray did not come together:"
    tail -n 20 "$logs/ready.log" "$logs"/ray-*.log
    finish
    exit 1
fi
say "Ray is ready: $(tail -n 1 "$logs/ready.log")"

# ---- the run ---------------------------------------------------------------------------------------------------------
say "$COMMAND${CODE:+ (code: $CODE)}"
# The shell around the command survives SIGUSR1, the signal to save; Python has its own handler.
"${on_head[@]}" "${inside[@]}" --export="ALL,RAY_ADDRESS=$address" bash -c "trap : USR1; $COMMAND" &
driver_pid=$!
until gone "$driver_pid" || gone "$head_pid" || { [[ -n $workers_pid ]] && gone "$workers_pid"; }; do
    sleep 1 &
    wait $! # a trap interrupts wait at once
done

if gone "$driver_pid"; then
    wait "$driver_pid"
    code=$?
else
    say "a Ray node ended before the run; its log:"
    tail -n 15 "$logs"/ray-*.log
    code=69
fi
bad="" # nodes whose Ray ended by itself; where the head did, the others only followed it
for log in "$logs/ray-$head.log" "$logs"/ray-*.log; do
    if grep -qs "this node of Ray ended by itself" "$log"; then
        node_name=${log##*/ray-}
        bad=${bad:+$bad,}${node_name%.log}
        [[ ${node_name%.log} == "$head" ]] && break
    fi
done
finish 60
queue_again() { # WHAT: exclude the bad nodes, unless that leaves too few
    if ((used >= RESTARTS)); then
        say "$1; there were $RESTARTS restarts already: submit again to go on"
        return
    fi
    echo $((used + 1)) >"$used_up"
    say "$1; the job is queued again (restart $((used + 1)) of $RESTARTS)${bad:+, without $bad}"
    scontrol requeue "$SLURM_JOB_ID"
    for _ in $(seq 20); do # only a job that waits takes it
        [[ -z $bad ]] || scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$bad" 2>/dev/null && break
        sleep 0.5
    done
    exit 0
}
case $code in
0) say "the run is over" ;;
75) queue_again "saved" ;;
69 | 134 | 137 | 139) # a loss; the driver was killed or crashed
    queue_again "the run lost a process or a node (exit code $code)"
    ;;
*) say "the run failed with exit code $code" ;;
esac
exit "$code"
