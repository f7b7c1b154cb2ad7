"""Rules between keys, with the messages as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import grpo_mcore
from grpo_mcore.recipe.schema.keys import known_keys
from grpo_mcore.recipe.validation.validate import UNSUPPORTED
from tests.unit.recipe.conftest import MINIMAL


def batch(gbs: int = 512, prompts: int = 32, generations: int = 16, gpus: int = 1, **megatron: int) -> str:
    layout = ", ".join(f"{name}: {size}" for name, size in megatron.items())
    return (
        f"policy:\n  model_name: m\n  train_global_batch_size: {gbs}\n  megatron_cfg: {{{layout}}}\n"
        f"data: {{train: {{data_path: x}}}}\n"
        f"grpo:\n  num_prompts_per_step: {prompts}\n  num_generations_per_prompt: {generations}\n"
        f"cluster:\n  gpus_per_node: {gpus}\n"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            batch(gbs=384),
            "r.yaml:3: policy.train_global_batch_size: 32 prompts x 16 generations = 512 samples do not "
            "divide into "
            "optimizer steps of 384 samples; nearest train_global_batch_size that does: 256 or 512; "
            "nearest num_prompts_per_step: 24 or 48",
        ),
        (
            batch(gbs=1024),
            "r.yaml:3: policy.train_global_batch_size: 32 prompts x 16 generations = 512 samples do not "
            "divide into "
            "optimizer steps of 1024 samples; nearest train_global_batch_size that does: 512; "
            "nearest num_prompts_per_step: 64",
        ),
        (
            batch(gbs=100, prompts=30, generations=10, gpus=4),
            "",
        ),
        (
            batch(gbs=100, prompts=30, generations=10, gpus=8),
            "r.yaml:3: policy.train_global_batch_size: 30 prompts x 10 generations = 300 samples = 3 x "
            "100 do not "
            "divide over DP 8 = 8 ranks / 1 per copy; nearest num_prompts_per_step: 28 or 32",
        ),
        (
            batch(gbs=4, prompts=32, generations=16, gpus=16, tensor_model_parallel_size=2),
            "r.yaml:3: policy.train_global_batch_size: 32 prompts x 16 generations = 512 samples = 128 x "
            "4 do not "
            "divide over DP 8 = 16 ranks / 2 per copy; nearest train_global_batch_size that does: 8",
        ),
    ],
)
def test_batches(load, problems, text: str, line: str) -> None:
    if line:
        assert problems(text) == [line]
    else:
        load(text)


def test_micro_batches_matter_only_without_packing(load, problems) -> None:
    load(batch(), "policy.train_micro_batch_size=3")
    assert problems(batch(), "policy.train_micro_batch_size=3", "policy.sequence_packing.enabled=false") == [
        "command line: policy.train_micro_batch_size: the 512 samples of a data-parallel rank do not "
        "divide into "
        "micro-batches of 3; nearest size that does: 2 or 4"
    ]


def test_an_entry_of_a_list_names_the_known_ones(problems) -> None:
    (line,) = problems(batch(), "policy.megatron_cfg.recompute_modules=[mlp, layernorm]")
    assert "recompute_modules.1: expected one of 'core_attn', 'mlp', 'moe', 'shared_experts', got 'layernorm'" in line


def test_dynamic_batching_is_bounded_by_tokens(load, problems) -> None:
    words = ["policy.dynamic_batching.enabled=true", "policy.sequence_packing.enabled=false"]
    policy = load(batch(), "policy.train_micro_batch_size=3", *words).config.policy
    assert policy.dynamic_batching.train_mb_tokens == 3 * policy.max_total_sequence_length
    assert problems(batch(), *words, "policy.dynamic_batching.logprob_mb_tokens=100") == [
        "command line: policy.dynamic_batching.logprob_mb_tokens: a bin of 100 tokens cannot hold a sequence of "
        "policy.max_total_sequence_length = 512"
    ]
    assert problems(batch(), words[0]) == [
        "command line: policy.dynamic_batching.enabled: samples are either packed or batched by length: set one of the "
        "two to false; packed rows are fuller"
    ]


def test_sft_has_no_rollout_batch(load, problems) -> None:
    sft = "policy: {model_name: m, train_global_batch_size: 48}\ndata: {train: {data_path: x}}\nsft: {}\n"
    load(sft)
    assert problems(sft, "cluster.gpus_per_node=5") == [
        "r.yaml:1: policy.train_global_batch_size: 48 samples do not divide over DP 5 = 5 ranks / 1 per copy; "
        "nearest train_global_batch_size that does: 45 or 50"
    ]
    assert len(problems(sft + "grpo: {seed: 1}\n")) == 1, "a recipe with both sections is checked for both"


@pytest.mark.parametrize(
    ("override", "lines"),
    [
        (
            ["policy.megatron_cfg.tensor_model_parallel_size=2"],
            [
                "policy.megatron_cfg.tensor_model_parallel_size: one copy of the model needs "
                "TP 2 x PP 1 x CP 1 = 2 ranks, and 1 is not a multiple of that; there are cluster.num_nodes x "
                "gpus_per_node ranks, less those that engines or teachers have to themselves"
            ],
        ),
        (
            ["policy.megatron_cfg.pipeline_model_parallel_size=2", "cluster.gpus_per_node=3"],
            [
                "policy.megatron_cfg.pipeline_model_parallel_size: one copy of the model needs "
                "TP 1 x PP 2 x CP 1 = 2 ranks, and 3 is not a multiple of that"
            ],
        ),
        (
            ["policy.megatron_cfg.sequence_parallel=true"],
            ["policy.megatron_cfg.sequence_parallel: sequence parallelism needs tensor_model_parallel_size above 1"],
        ),
        (
            ["policy.megatron_cfg.num_layers_in_first_pipeline_stage=3"],
            [
                "policy.megatron_cfg.num_layers_in_first_pipeline_stage: an uneven split needs "
                "pipeline_model_parallel_size above 1"
            ],
        ),
        (
            ["policy.megatron_cfg.virtual_pipeline_model_parallel_size=2"],
            [
                "policy.megatron_cfg.virtual_pipeline_model_parallel_size: 2 model chunks per stage need "
                "pipeline_model_parallel_size above 1"
            ],
        ),
        (
            ["policy.megatron_cfg.context_parallel_size=2"],
            [
                "policy.megatron_cfg.context_parallel_size: one copy of the model needs TP 1 x PP 1 x CP 2 = "
                "2 ranks, and 1 is not a multiple of that"
            ],
        ),
        (
            ["policy.megatron_cfg.expert_model_parallel_size=4", "cluster.gpus_per_node=2"],
            [
                "policy.megatron_cfg.expert_model_parallel_size: EP 4 x ETP 1 = 4 does not divide the 2 ranks "
                "of a pipeline stage (2 ranks / PP 1)"
            ],
        ),
        (
            [
                "policy.megatron_cfg.tensor_model_parallel_size=2",
                "policy.megatron_cfg.expert_model_parallel_size=2",
                "cluster.gpus_per_node=2",
            ],
            ["policy.megatron_cfg.tensor_model_parallel_size: experts under tensor parallelism need"],
        ),
        (
            [
                "policy.generation.vllm_cfg.pipeline_parallel_size=2",
                "policy.megatron_cfg.peft.enabled=true",
                "policy.megatron_cfg.peft.refit=adapters",
                "policy.router_replay.enabled=true",
            ],
            [
                "policy.generation.vllm_cfg.pipeline_parallel_size: an engine of several stages takes merged weights",
                "policy.generation.vllm_cfg.pipeline_parallel_size: the experts chosen for a token are recorded on one",
            ],
        ),
        (
            [
                "policy.generation.vllm_kwargs={tensor_parallel_size: 2, logprobs_mode: raw_logprobs, seed: 1, "
                "hf_overrides: {rope_theta: 5.0}, enable_eplb: true, watermark_config: {key: 1}, revision: v2}"
            ],
            [
                "policy.generation.vllm_kwargs.tensor_parallel_size: is set by "
                "policy.generation.vllm_cfg.tensor_parallel_size; set it there",
                "policy.generation.vllm_kwargs.logprobs_mode: cannot be chosen: training needs log-probs of the",
                "policy.generation.vllm_kwargs.hf_overrides: is set by policy.hf_config_overrides; set it there",
                "policy.generation.vllm_kwargs.enable_eplb: cannot be chosen: a refit fills the experts in their order",
                "policy.generation.vllm_kwargs.watermark_config: cannot be chosen: training needs samples of the",
                "policy.generation.vllm_kwargs.revision: is set by policy.model_name; set it there",
            ],
        ),
        (
            ["policy.generation.vllm_cfg.expert_parallel_size=4", "policy.generation.vllm_cfg.tensor_parallel_size=2"],
            [
                "policy.generation.vllm_cfg.expert_parallel_size: 4 is neither 1 nor tensor_parallel_size = 2; experts "
                "are divided among all ranks of an engine or none"
            ],
        ),
        (
            [
                "policy.router_replay.enabled=true",
                "policy.megatron_cfg.activation_checkpointing=true",
                "policy.megatron_cfg.pipeline_model_parallel_size=2",
                "cluster.gpus_per_node=2",
            ],
            ["policy.router_replay.enabled: cannot be combined with both activation_checkpointing and pipeline stages"],
        ),
        (
            [
                "policy.sequence_packing.shared_prefix.enabled=true",
                "policy.sequence_packing.enabled=false",
            ],
            ["policy.sequence_packing.shared_prefix.enabled: needs policy.sequence_packing.enabled true"],
        ),
        (
            ["cluster.backend=local", "cluster.gpus_per_node=2"],
            [
                "cluster.backend: the local backend runs one rank in this process, but the cluster has "
                "num_nodes 1 x gpus_per_node 2 = 2"
            ],
        ),
        (
            ["policy.generation.max_new_tokens=600"],
            ["policy.generation.max_new_tokens: 600 tokens are more than policy.max_total_sequence_length = 512"],
        ),
        (
            ["policy.sequence_packing.train_mb_tokens=511"],
            [
                "policy.sequence_packing.train_mb_tokens: a bin of 511 tokens cannot hold a sequence of "
                "policy.max_total_sequence_length = 512"
            ],
        ),
        (["loss_fn.sequence_level_importance_ratios=true"], ["needs token_level_loss: false"]),
        (["loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=3"], ["cannot be combined with ratio_clip_c: 3.0; CISPO"]),
        (
            ["loss_fn.use_cispo=true", "loss_fn.token_level_loss=false"],
            ["cannot be combined with token_level_loss: false; CISPO"],
        ),
        (
            ["loss_fn.use_cispo=true", "loss_fn.force_on_policy_ratio=true"],
            ["cannot be combined with force_on_policy"],
        ),
        (
            [
                "loss_fn.use_cispo=true",
                "loss_fn.sequence_level_importance_ratios=true",
                "loss_fn.token_level_loss=false",
            ],
            ["cannot be combined with sequence_level", "cannot be combined with token_level_loss"],
        ),
        (
            [
                "loss_fn.truncated_importance_sampling_type=tis",
                "loss_fn.truncated_importance_sampling_ratio=2",
            ],
            ["tis needs use_importance_sampling_correction: true"],
        ),
        (
            [
                "loss_fn.truncated_importance_sampling_type=icepop",
                "loss_fn.use_importance_sampling_correction=true",
            ],
            ["icepop needs an upper bound", "icepop needs a lower bound"],
        ),
        (
            [
                "loss_fn.truncated_importance_sampling_type=seq-mask-tis",
                "loss_fn.use_importance_sampling_correction=true",
                "loss_fn.truncated_importance_sampling_ratio=1.002",
                "loss_fn.truncated_importance_sampling_ratio_min=0.999",
                "loss_fn.sequence_level_importance_ratios=true",
                "loss_fn.token_level_loss=false",
            ],
            ["seq-mask-tis keeps token weights"],
        ),
        (
            [
                "loss_fn.truncated_importance_sampling_type=tis",
                "loss_fn.use_importance_sampling_correction=true",
                "loss_fn.truncated_importance_sampling_ratio=1",
                "loss_fn.truncated_importance_sampling_ratio_min=2",
            ],
            ["the lower bound 2 is above the upper bound 1"],
        ),
        (
            ["loss_fn.truncated_importance_sampling_ratio=2"],
            ["has no effect without truncated_importance_sam"],
        ),
        (["loss_fn.truncated_importance_sampling_ratio=0"], ["must be above 0, got 0"]),
        (["loss_fn.ratio_clip_c=1"], ["must be above 1, got 1"]),
        (
            ["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=256"],
            [
                "loss_fn.force_on_policy_ratio: requires exactly one optimizer step per RL step: "
                "train_global_batch_size 512, got 256"
            ],
        ),
        (["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=32"], ["a group of 1"]),
        (
            ["grpo.advantage_clip_low=2", "grpo.advantage_clip_high=1"],
            ["the lower bound 2 is above the upper"],
        ),
        (["grpo.reward_scaling={enabled: true, source_min: 1}"], ["the source interval [1, 1] is empty"]),
        (
            ["grpo.skip_reference_policy_logprobs_calculation=true"],
            ["the KL penalty needs reference log-probs"],
        ),
        (
            ["grpo.batch_multiplier=1.5"],
            ["grpo.batch_multiplier: has no effect without use_dynamic_sampling: true"],
        ),
        (["grpo.batch_multiplier=0.5", "grpo.use_dynamic_sampling=true"], ["must be at least 1, got 0.5"]),
        (
            [
                "grpo.use_dynamic_sampling=true",
                "grpo.num_generations_per_prompt=1",
                "policy.train_global_batch_size=32",
                "grpo.adv_estimator={name: reinforce_plus_plus, minus_baseline: false}",
            ],
            ["grpo.use_dynamic_sampling: the rewards of a group of 1 never differ"],
        ),
        (
            ["grpo.stop_at_validation_metric=accuracy", "data.validation={data_path: val.jsonl}"],
            ["grpo.stop_at_validation_metric: needs stop_at_validation_threshold (such as 0.9)"],
        ),
        (
            ["grpo.stop_at_validation_threshold=0.9"],
            ["grpo.stop_at_validation_threshold: needs stop_at_validation_metric (such as accuracy)"],
        ),
        (
            [
                "grpo.stop_at_validation_metric=accuracy",
                "grpo.stop_at_validation_threshold=0.9",
                "grpo.val_period=0",
                "grpo.val_at_end=true",
            ],
            [
                "there is no validation before the end: set val_period above 0",
                "there is nothing to validate on: set data.validation",
            ],
        ),
        (["policy.megatron_cfg.optimizer.min_lr=1"], ["optimizer.min_lr: 1 is above lr = 5e-06"]),
        (
            ["policy.megatron_cfg.scheduler.lr_warmup_init=1"],
            ["scheduler.lr_warmup_init: 1 is above policy."],
        ),
        (
            ["policy.megatron_cfg.scheduler.lr_warmup_iters=1000"],
            ["1000 steps of warm-up must be fewer than"],
        ),
        (
            ["policy.precision=float32", "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=true"],
            ["optimizer.use_precision_aware_optimizer: needs policy.precision bfloat16, got float32"],
        ),
        (
            ["policy.precision=float32", "policy.megatron_cfg.optimizer.optimizer_cpu_offload=true"],
            ["optimizer.optimizer_cpu_offload: needs policy.precision bfloat16, got float32"],
        ),
        (
            [
                "policy.megatron_cfg.optimizer.optimizer_cpu_offload=true",
                "policy.megatron_cfg.optimizer.optimizer_offload_fraction=0",
            ],
            ["optimizer.optimizer_offload_fraction: 0 moves nothing to the host"],
        ),
        (
            ["logger.alarms.webhook=hooks.example.com/x"],
            ["alarms.webhook: expected an address that begins with https://"],
        ),
        (["cluster.env_vars=[A_1, B*, 'C=secret']"], ["environment variables, whose values come from"]),
        (["policy.megatron_cfg.optimizer.clip_grad=2"], ["2.0 contradicts policy.max_grad_norm = 1.0"]),
        (["policy.megatron_cfg.optimizer.bf16=false"], ["false contradicts policy.precision = bfloat16"]),
        (["policy.megatron_cfg.pipeline_dtype=float32"], ["float32 contradicts policy.precision = bfloat16"]),
    ],
)
def test_rejected_combinations(problems, override: list[str], lines: list[str]) -> None:
    found = problems(MINIMAL, *override)
    assert len(found) == len(lines)
    for got, expected in zip(found, lines, strict=True):
        assert expected in got and got.startswith("command line: ")


@pytest.mark.parametrize(
    "override",
    [
        ["loss_fn.use_cispo=true"],
        ["loss_fn.disable_ppo_ratio=true"],
        ["loss_fn.force_on_policy_ratio=true"],
        ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"],
        ["loss_fn.reference_policy_kl_type=k1", "loss_fn.use_on_policy_kl_approximation=true"],
        ["loss_fn.reference_policy_kl_penalty=0", "grpo.skip_reference_policy_logprobs_calculation=true"],
        [
            "loss_fn.truncated_importance_sampling_type=tis",
            "loss_fn.use_importance_sampling_correction=true",
            "loss_fn.truncated_importance_sampling_ratio=2",
        ],
        ["policy.max_grad_norm=null"],
        ["policy.precision=float32"],
        [
            "grpo.reward_scaling.enabled=true",
            "grpo.overlong_filtering=true",
            "grpo.use_leave_one_out_baseline=false",
        ],
        ["policy.sequence_packing.algorithm=balanced"],
        ["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5"],
        [
            "grpo.stop_at_validation_metric=val:accuracy",
            "grpo.stop_at_validation_threshold=0.9",
            "data.train={data_path: train.jsonl, split_validation_size: 0.1}",
        ],
    ],
)
def test_allowed_combinations(load, override: list[str]) -> None:
    load(MINIMAL, *override)


ASKING = {  # a value of each key that asks for the feature
    "policy.hf_config_overrides": "{a: 1}",
    "policy.megatron_cfg.optimizer.optimizer": "sgd",
    "policy.generation.vllm_cfg.kv_cache_dtype": "fp8",
    "data.custom_dataloader": "a.b",
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_unsupported_keys_are_reported(problems, key: str) -> None:
    neutral, feature = UNSUPPORTED[key]
    value = ASKING.get(key) or {"True": "false", "False": "true", "1": "2", "None": "3"}[str(neutral)]
    found = [line for line in problems(MINIMAL, f"{key}={value}") if "not supported yet" in line]
    assert len(found) == 1
    assert found[0].startswith(f"command line: {key}: not supported yet ({feature}); got ")
    assert key in known_keys()


def test_every_key_of_the_policy_is_read_or_refused() -> None:
    """The code beside the schema names it as an attribute or in a table of keys."""
    sources = [path for path in Path(grpo_mcore.__file__).parent.rglob("*.py") if path.parent.name != "schema"]
    code = "\n".join(path.read_text() for path in sources)
    keys = [key for key in known_keys() if key.startswith("policy.")]
    assert not [key for key in keys if not re.search(rf"""[."]{key.rpartition(".")[2]}\b""", code)]


FIXED = "policy:\n  deterministic: true\n  model_name: m\n  precision: float32\n"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("cluster: {platform: gpu}\n", ["policy.deterministic: its order of sums is that of CPU kernels; set "
                                       "cluster.platform: cpu"]),
        ("  precision: bfloat16\n", ["policy.deterministic: needs policy.precision float32, got bfloat16"]),
        ("  megatron_cfg: {context_parallel_size: 2}\n",
         ["policy.deterministic: policy.megatron_cfg.context_parallel_size = 2 adds up samples of several ranks; set "
          "it to 1"]),
        ("  megatron_cfg: {peft: {enabled: true, dropout: 0.1}}\n",
         ["policy.deterministic: dropout depends on the row; set it to 0"]),
    ],
)  # fmt: skip
def test_what_fixed_sums_need(load, problems, text: str, lines: list[str]) -> None:
    rest = MINIMAL[MINIMAL.index("data:") :]
    fixed = FIXED.replace("  precision: float32\n", "") if "precision" in text else FIXED
    recipe = fixed + text + rest if text.startswith("  ") else fixed + rest + text
    if not lines:
        assert load(recipe).config.policy.deterministic
        return
    assert [line[line.index("policy.deterministic") :] for line in problems(recipe) if "deterministic" in line] == lines


AHEAD = "loss_fn: {use_importance_sampling_correction: true}\ngrpo:\n  num_prompts_per_step: 32\n  async_grpo: "


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (AHEAD + "{enabled: true}\n", []),
        (AHEAD + "{enabled: true, max_groups_in_flight: 32, group_order: freshest_first}\n", []),
        (AHEAD.replace("true", "false", 1) + "{enabled: true, max_trajectory_age_steps: 0}\n", []),
        (
            AHEAD.replace("true", "false", 1) + "{enabled: true, max_trajectory_age_steps: 2}\n",
            ["grpo.async_grpo.enabled: training on trajectories of age 2 (in weight versions) needs "
             "loss_fn.use_importance_sampling_correction: true"],
        ),
        (
            AHEAD + "{enabled: true, max_groups_in_flight: 31}\n",
            ["grpo.async_grpo.max_groups_in_flight: 31 groups are fewer than the 32 of a step"],
        ),
        (AHEAD + "{enabled: true, max_buffer_gb: 8}\n  use_dynamic_sampling: true\n  batch_multiplier: 1.5\n", []),
        (AHEAD + "{enabled: true, partial_rollouts: true, in_flight_weight_updates: true}\n", []),
        (AHEAD + "{enabled: true, min_samples_per_group: 16}\n", []),
        (
            AHEAD + "{enabled: true, min_samples_per_group: 17}\n  max_rollout_turns: 2\n  turns: together\n",
            ["grpo.async_grpo.min_samples_per_group: 17 samples are more than the 16 of a group",
             "grpo.async_grpo.min_samples_per_group: works with samples of several turns only if they do not wait "
             "for each other: set grpo.turns to free"],
        ),
        (AHEAD + "{enabled: true, min_samples_per_group: 16}\n  max_rollout_turns: 2\n", []),
        (
            AHEAD + "{enabled: true, partial_rollouts: true}\n",
            ["grpo.async_grpo.partial_rollouts: needs in_flight_weight_updates: true: without it a refit waits for "
             "every unfinished sample"],
        ),
        (
            AHEAD + "{enabled: true, recompute_kv_cache_after_weight_updates: true}\n",
            ["grpo.async_grpo.recompute_kv_cache_after_weight_updates: has no effect without "
             "in_flight_weight_updates: true: no sample is unfinished at a refit"],
        ),
    ],
)  # fmt: skip
def test_generation_ahead_of_training(load, problems, text: str, lines: list[str]) -> None:
    if not lines:
        assert load(MINIMAL + text).config.grpo.async_grpo.enabled
        return
    found = problems(MINIMAL + text)
    assert [line.partition(": ")[2] for line in found] == lines


def test_unknown_group_order(problems) -> None:
    (line,) = problems(MINIMAL + AHEAD + "{enabled: true, group_order: fresh_first}\n")
    assert "expected one of 'in_order', 'oldest_first', 'freshest_first', got 'fresh_first'" in line


def test_restarts_need_checkpoints(load, problems) -> None:
    words = ("cluster.max_restarts=2", "checkpointing.enabled=false")
    (found,) = problems(MINIMAL, *words)
    assert found.endswith(
        "a run restarts from its newest checkpoint: set checkpointing.enabled: true, or max_restarts: 0"
    )
    assert load(MINIMAL, words[0]).config.cluster.max_restarts == 2


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "mirror=results/copy",
            "checkpointing.mirror: is no address such as s3://BUCKET/PREFIX; it may begin with s3://",
        ),
        ("mirror=ftp://host/x", "is no address such as s3://BUCKET/PREFIX"),
        ("mirror=s3://", "is no address such as s3://BUCKET/PREFIX"),
        ("mirror=s3://key:hidden@bucket/x", "give secrets in the environment, as AWS_SECRET_ACCESS_KEY"),
        ("mirror=az://account/box/x?sig=hidden", "holds more than bucket and prefix"),
        ("mirror='s3://bucket/run#1/x'", "checkpointing.mirror: # has a meaning of its own in an address"),
        ("mirror=s3://bucket/run%201", "checkpointing.mirror: % has a meaning of its own in an address"),
        ("mirror_options={secret_access_key: hidden}", "checkpointing.mirror_options: secret_access_key: a recipe is"),
        ("mirror_options={sas_token: hidden}", "sas_token: a recipe is copied into checkpoints and logs"),
    ],
)
def test_a_mirror_is_an_address_without_secrets(load, problems, word: str, said: str) -> None:
    (found,) = problems(MINIMAL, f"checkpointing.{word}")
    assert said in found and "hidden" not in found
    options = "checkpointing.mirror_options={region: eu-west-1}"
    assert load(MINIMAL, "checkpointing.mirror=abfss://box@account.dfs.core.windows.net/x", options)
    (found,) = problems(MINIMAL, "checkpointing.mirror=s3://bucket/x", "checkpointing.enabled=false")
    assert found.endswith("there are no checkpoints to copy; set it to null")


def test_an_export_at_the_end_needs_a_checkpoint_and_for_the_best_a_metric(load, problems) -> None:
    (found,) = problems(MINIMAL, "checkpointing.save_hf=last", "checkpointing.enabled=false")
    assert found.endswith("exports a checkpoint: set checkpointing.enabled: true, or save_hf: none")
    (found,) = problems(MINIMAL, "checkpointing.save_hf=best", "checkpointing.metric_name=null")
    assert "needs checkpointing.metric_name" in found
    assert load(MINIMAL, "checkpointing.save_hf=best").config.checkpointing.save_hf == "best"
