"""Every recipe of recipes/variants trains for two steps in one process, and computes what its paper says."""

import functools
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mcore.algorithms import grpo
from grpo_mcore.data import build_dataloader, build_task_data, load_tokenizer
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.driver.policy.policy_worker import PolicyWorker
from grpo_mcore.driver.run import setup
from grpo_mcore.driver.run.checks import check_run
from grpo_mcore.objective import loss
from grpo_mcore.objective.loss import PolicyTerm
from grpo_mcore.objective.reduce import MaskedTokens
from grpo_mcore.observe import Logger
from grpo_mcore.parallel import policy as parallel_policy
from grpo_mcore.recipe import MasterConfig, load_recipe, samples_per_step
from grpo_mcore.step.step_batch import StepBatch, TrainTargets
from tests.functional.runs import Task

pytestmark = pytest.mark.filterwarnings("ignore:::megatron.core.*")  # its own deprecations
VARIANTS = Path(__file__).resolve().parents[2] / "recipes" / "variants"
SAMPLES = 32  # per step; the recipes have 256


@dataclass
class Term:
    """One call of the loss, which is a whole optimizer step because one bin holds it. Tensors are [tokens]."""

    term: PolicyTerm
    curr: Tensor
    advantages: Tensor
    tokens: MaskedTokens


@dataclass
class Variant:
    """Record of a run of two steps."""

    config: MasterConfig
    batches: list[StepBatch] = field(default_factory=list)
    targets: list[TrainTargets] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    optimizer_steps: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def rewards(self, step: int) -> Tensor:
        """Return the rewards of a step, [groups, samples]."""
        return self.batches[step].rewards.reshape(-1, self.config.grpo.num_generations_per_prompt)

    def advantages(self, step: int) -> Tensor:
        """Return the advantages of a step, [groups, samples]."""
        advantages = self.targets[step].advantages
        assert advantages is not None
        return advantages.reshape_as(self.rewards(step))


class Stage:
    """One cluster, one mesh and one engine; a policy, data and an environment for each variant."""

    def __init__(self, task: Task, model: Path, folder: Path) -> None:
        self.task, self.model, self.folder = task, model, folder
        config = self.config("grpo")
        self.tokenizer = load_tokenizer(str(model))
        self.cluster = setup.start_cluster(config, folder)
        self.shared = check_run(config)
        first = setup.start_policy(config, self.cluster, self.shared)
        self.engines = setup.start_engines(config, self.cluster, self.shared, first)
        self._ran: dict[str, Variant] = {}

    def config(self, name: str) -> MasterConfig:
        recipe = load_recipe(VARIANTS / f"{name}.yaml").config
        generations = recipe.grpo.num_generations_per_prompt
        per_optimizer_step = SAMPLES * recipe.policy.train_global_batch_size // samples_per_step(recipe)
        words = {
            "grpo.num_prompts_per_step": SAMPLES // min(generations, 4),
            "grpo.num_generations_per_prompt": min(generations, 4),
            "grpo.max_num_steps": 2,
            "grpo.val_at_start": False,
            "grpo.val_at_end": False,
            "policy.model_name": json.dumps(str(self.model)),
            "policy.train_global_batch_size": per_optimizer_step,
            "policy.max_total_sequence_length": 16,
            "policy.sequence_packing.train_mb_tokens": 1024,
            "policy.refit_buffer_size_gb": 1e-4,
            "policy.megatron_cfg.tensor_model_parallel_size": 1,
            "policy.megatron_cfg.optimizer": "{lr: 1e-3, min_lr: 1e-3}",
            "policy.megatron_cfg.scheduler.lr_warmup_init": 1e-3,
            "policy.generation.max_new_tokens": 4,
            "policy.generation.vllm_cfg.kv_cache_memory_gb": 0.1,
            "data.train.data_path": json.dumps(str(self.task.train)),
            "data.validation": "null",
            "checkpointing.enabled": False,
            "logger.log_dir": json.dumps(str(self.folder / name)),
            "logger.tensorboard_enabled": False,
            "cluster": "{backend: local, gpus_per_node: 1}",
        }
        if name == "dapo":  # an answer is one digit and the end token
            words |= {"grpo.reward_shaping": "{max_response_length: 3, overlong_buffer_length: 2}"}
        if name == "gdpo":
            words |= {"env.math.format_pattern": '"1"'}
        overrides = [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in words.items()
        ]
        return load_recipe(VARIANTS / f"{name}.yaml", overrides).config

    def ran(self, name: str) -> Variant:
        if name not in self._ran:
            self._ran[name] = self._run(name)
        return self._ran[name]

    def _run(self, name: str) -> Variant:
        config = self.config(name)
        data = build_task_data(config.data.train, [], self.tokenizer, config.data.max_input_seq_length)
        dataloader = build_dataloader(data.train, config.grpo.num_prompts_per_step, True, config.grpo.seed)
        environments = setup.start_environments(config, self.cluster, data.env_names, self.tokenizer)
        start = grpo.GRPOSaveState(
            consumed_samples=0, current_step=0, current_epoch=0, total_steps=0, total_valid_tokens=0
        )
        with closing(Logger(config.logger)) as logger, sharing_the_first_mesh(), looking_inside(config) as variant:
            policy = setup.start_policy(config, self.cluster, self.shared)
            grpo.grpo_train(
                policy, self.engines, dataloader, None, self.tokenizer, setup.make_loss(config), environments, None,
                logger, CheckpointManager(config.checkpointing), start, config,
            )  # fmt: skip
            for environment in environments.values():
                self.cluster.stop([environment.worker])
            self.cluster.stop(policy.workers)
        lines = map(json.loads, (Path(logger.log_dir) / "metrics.jsonl").read_text().splitlines())
        variant.lines = [line for line in lines if line["prefix"] == "train"]
        return variant


@contextmanager
def sharing_the_first_mesh() -> Iterator[None]:
    """Keep policies from joining a mesh of their own: the engine of this process uses the first policy's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_policy, "join_mesh", lambda *_, **__: torch.device("cpu"))
        patch.setattr(parallel_policy, "leave_mesh", lambda: None)
        yield


@contextmanager
def looking_inside(config: MasterConfig) -> Iterator[Variant]:
    seen = Variant(config)
    compute_targets, policy_term, train = grpo.compute_targets, loss.policy_term, PolicyWorker.train

    def recorded_targets(batch: StepBatch, *rest: Any) -> Any:
        targets, metrics = compute_targets(batch, *rest)
        seen.batches.append(batch)
        seen.targets.append(targets)
        return targets, metrics

    def recorded_term(curr: Tensor, prev: Tensor, advantages: Tensor, tokens: MaskedTokens, cfg: Any) -> PolicyTerm:
        term = policy_term(curr, prev, advantages, tokens, cfg)
        values = [column.detach() for column in (term.loss, term.ratio, term.clipped_ratio)]
        seen.terms.append(Term(PolicyTerm(*values), curr.detach(), advantages, tokens))
        return term

    @functools.wraps(train)  # a call goes by the name of the method
    def recorded_train(self: PolicyWorker, *args: Any) -> Any:
        reports = train(self, *args)
        seen.optimizer_steps += [report.metrics for report in reports]
        return reports

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "compute_targets", recorded_targets)
        patch.setattr(loss, "policy_term", recorded_term)
        patch.setattr(PolicyWorker, "train", recorded_train)
        yield seen


@pytest.fixture(scope="module")
def stage(task: Task, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(task, model, tmp_path_factory.mktemp("variants"))
    yield stage
    stage.cluster.shutdown()


def near(got: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", sorted({path.stem for path in VARIANTS.glob("*.yaml")} - {"curriculum"}))
def test_it_trains(stage: Stage, name: str) -> None:
    variant = stage.ran(name)
    assert [line["step"] for line in variant.lines] == [1, 2]
    for line in variant.lines:
        assert line["grad_norm"] > 0 and line["num_trained_samples"] == SAMPLES
        assert line["token_mult_prob_error"] <= 1.02 or line["trajectory_age_max"]
    assert len(variant.terms) == len(variant.optimizer_steps)
    assert len(variant.optimizer_steps) == 2 * (2 if name in ("dapo", "gspo", "cispo") else 1)


def test_grpo_divides_by_the_std_of_the_group_and_penalises_kl(stage: Stage) -> None:
    variant = stage.ran("grpo")
    rewards = variant.rewards(0)
    std = rewards.std(1, keepdim=True)
    near(variant.advantages(0), (rewards - rewards.mean(1, keepdim=True)) / (std + 1e-6) * (std > 0))
    penalties = [step["kl_penalty"] for step in variant.optimizer_steps]
    assert penalties[0] == pytest.approx(0, abs=1e-9) and penalties[1] > 1e-6
    # The mean is by sequence and the ratio is 1, so the policy loss is the sum of the advantages, which is 0.
    assert variant.optimizer_steps[0]["policy_loss"] == pytest.approx(0, abs=1e-6)


def test_dapo_trains_on_groups_that_differ_and_shapes_long_answers(stage: Stage) -> None:
    variant = stage.ran("dapo")
    for step, line in enumerate(variant.lines):
        rewards, lengths = variant.batches[step].rewards, variant.batches[step].trained_tokens
        assert bool((variant.rewards(step).std(1) > 0).all()) and line["zero_advantage_rate"] < 1
        shaped = rewards - ((lengths - 1) / 2).clamp(0, 1)
        assert (
            line["shaped_reward"] == pytest.approx(shaped.mean().item())
            and line["shaped_reward"] < line["filtered_reward"]
        )
        generated = line["num_generated_samples"] / 4
        assert generated % 10 == 0 and line["num_gen_batches"] == generated / 10  # 8 prompts x 1.25
        assert generated == 8 + line["num_filtered_prompts"] + line["num_surplus_prompts"]
    assert sum(line["num_filtered_prompts"] for line in variant.lines) > 0
    clipped = torch.cat([term.term.clipped_ratio for term in variant.terms])
    assert 1.2 < clipped.max() <= 1.28 + 1e-9 and clipped.min() >= 0.8 - 1e-9


def test_async_trains_on_samples_of_the_previous_version_and_weights_them(stage: Stage) -> None:
    variant = stage.ran("async")
    assert [line["trajectory_age_max"] for line in variant.lines] == [0, 1]
    assert [line["num_groups_ahead"] for line in variant.lines] == [8, 0]
    first, second = variant.optimizer_steps
    assert first["sampling_importance_ratio"] == pytest.approx(1, abs=1e-3)
    assert 0 < abs(second["sampling_importance_ratio_before_truncation"] - 1)
    assert second["sampling_importance_ratio"] <= second["sampling_importance_ratio_before_truncation"]


def test_dr_grpo_divides_by_constants(stage: Stage) -> None:
    variant = stage.ran("dr-grpo")
    rewards, lengths = variant.rewards(0), variant.batches[0].trained_tokens
    near(variant.advantages(0), rewards - rewards.mean(1, keepdim=True))
    expected = -(variant.advantages(0).flatten() * lengths).sum() / (4 * SAMPLES)  # the ratio is 1
    assert variant.optimizer_steps[0]["policy_loss"] == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)


def test_gspo_has_one_ratio_a_sequence_and_clips_it(stage: Stage) -> None:
    variant = stage.ran("gspo")
    assert [step["clip_fraction_high"] for step in variant.optimizer_steps[::2]] == [0, 0]  # it has not moved
    for term, step in zip(variant.terms[1::2], variant.optimizer_steps[1::2], strict=True):
        highest, lowest = (
            term.tokens.maximum_by_sequence(term.term.ratio),
            -term.tokens.maximum_by_sequence(-term.term.ratio),
        )
        assert bool((term.tokens.tokens_by_sequence[:-1] >= 2).any())
        near(highest[:-1], lowest[:-1], 1e-12)
        assert len(highest[:-1].unique()) > 1
        assert (
            step["probs_ratio_clamped_min"] >= 1 - 3e-4 - 1e-12 and step["probs_ratio_clamped_max"] <= 1 + 4e-4 + 1e-12
        )
        assert step["clip_fraction_low"] + step["clip_fraction_high"] > 0


def test_cispo_weights_every_token_by_its_bounded_ratio(stage: Stage) -> None:
    variant = stage.ran("cispo")
    for term in variant.terms:
        ratio = term.term.ratio
        near(term.term.loss, -term.advantages * ratio.clamp(0, 6) * term.curr, 1e-12)
    moved = torch.cat([term.term.ratio for term in variant.terms[1::2]])
    assert moved.max() > 1.2  # where clipping would have stopped the others
    assert {step["clip_fraction_low"] for step in variant.optimizer_steps} == {0.0}


def test_rloo_subtracts_the_mean_of_the_others_after_the_kl_penalty(stage: Stage) -> None:
    variant = stage.ran("rloo")
    rewards = variant.rewards(0)  # the policy is the reference: no KL yet
    near(variant.advantages(0), rewards - (rewards.sum(1, keepdim=True) - rewards) / 3, 1e-4)
    first, second = (line["kl_in_reward"] for line in variant.lines)
    assert abs(first) < 1e-5 < abs(second)
    rewards = variant.rewards(1)
    paid = variant.advantages(1) - (rewards - (rewards.sum(1, keepdim=True) - rewards) / 3)
    assert paid.abs().max() > 1e-5
    near(variant.advantages(1).sum(1), torch.zeros(len(rewards)), 1e-9)
    for term in variant.terms:
        near(term.term.loss, -term.advantages * term.curr, 1e-12)
    assert all("kl_penalty" not in step for step in variant.optimizer_steps)


def test_reinforce_plus_plus_standardises_over_the_tokens_of_the_step(stage: Stage) -> None:
    variant = stage.ran("reinforce-plus-plus")
    assert variant.config.grpo.num_generations_per_prompt == 1 and len(variant.batches[0].groups) == SAMPLES
    for term, targets in zip(variant.terms, variant.targets, strict=True):
        advantages = term.advantages[term.tokens.valid]
        assert advantages.mean().item() == pytest.approx(0, abs=1e-5)
        assert advantages.std(correction=0).item() == pytest.approx(1, abs=1e-4)
        assert targets.kl_weight > 0
    by_sample = variant.targets[1].advantages
    assert by_sample is not None and len(variant.terms[1].advantages.unique()) > len(by_sample.unique())  # KL to go
    assert abs(variant.lines[1]["kl_in_reward"]) > 1e-5


def test_gdpo_normalises_each_named_reward_by_itself(stage: Stage) -> None:
    variant = stage.ran("gdpo")
    scores = [score.rewards_by_name for group in variant.batches[0].groups for score in group.scores]
    total = torch.zeros(SAMPLES // 4, 4, dtype=torch.float64)
    for name, weight in (("correct", 1.0), ("format", 0.5)):
        rewards = torch.tensor([score[name] for score in scores], dtype=torch.float64)
        assert variant.lines[0][f"reward/{name}"] == pytest.approx(rewards.mean().item())
        rewards = rewards.reshape(-1, 4)
        std = rewards.std(1, keepdim=True)
        assert bool((std > 0).any())
        total += weight * (rewards - rewards.mean(1, keepdim=True)) / (std + 1e-6)
    near(variant.advantages(0), total / total.square().sum().div(SAMPLES - 1).sqrt())
