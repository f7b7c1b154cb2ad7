"""The function that test_critic.py runs on the ranks: one step of a critic and its policy, and their checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from grpo_mcore.driver.policy.policy_worker import PolicyWorker
from grpo_mcore.objective import ClippedPGLossFn, ValueLossFn, stats_by_sample
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Score, Trajectory, TrajectoryRef, Turn
from grpo_mcore.step.advantages import compute_targets, shaped_rewards
from grpo_mcore.step.step_batch import build_step_batch
from grpo_mcore.tools.parity.rank import LayoutCase, owned_slices, policy_config
from tests.recipes import small_recipe

SAMPLES = 8


def trajectories(vocabulary: int) -> list[Trajectory]:
    """Return samples of one to three generated turns, with what an environment said between them."""
    draw, found = torch.Generator().manual_seed(3), []

    def turn(size: int, generated: bool) -> Turn:
        ids = torch.randint(0, vocabulary, (size,), generator=draw)
        return Turn("x", ids, -torch.rand(size, generator=draw) if generated else None, generated)

    for index in range(SAMPLES):
        turns = [turn(3 + index % 2, False)]
        for again in range(1 + index % 3):
            turns += [turn(2, False)] * (again > 0) + [turn(3 + (index + again) % 4, True)]
        found.append(Trajectory(str(index), 0, tuple(turns), (), "stop", truncated=False))
    return found


def recipe() -> MasterConfig:
    """Return a recipe of groups of 1 and one optimizer step."""
    ppo = {"adv_estimator": {"gae_gamma": 0.98, "gae_lambda": 0.9}}
    policy, loss = {"max_total_sequence_length": 64}, {"reference_policy_kl_penalty": 0.0}
    return small_recipe(SAMPLES, 1, policy=policy, ppo=ppo, loss_fn=loss)


def step(
    address: Address, policy: str, critic: str, case: LayoutCase, folder: str, adapters: bool = False
) -> dict[str, Any]:
    """Train one step. `adapters`: the critic trains adapters and its head alone. Return statistics by sample, the
    changes of owned slices of both models, their metrics, and whether both are what was saved of them once they are
    loaded again."""
    samples = trajectories(100)
    store: Any = SimpleNamespace(fetch_many=lambda refs: [samples[ref] for ref in refs])
    rows = {"sequence_packing": {"train_mb_tokens": 64, "logprob_mb_tokens": 128}}
    sections = [policy_config(model, case, **rows) for model in (policy, critic)]
    peft = sections[1].megatron_cfg.peft
    sections[1].megatron_cfg.peft = peft.model_copy(update={"enabled": adapters, "dim": 4, "alpha": 8})
    worker = PolicyWorker(address, sections[0], store, 1, 60.0, False, "cpu", critic=sections[1])
    assert worker.critic is not None
    config = recipe()
    refs = [
        TrajectoryRef(it.uid, 0, it.length, it.prompt_length, it.generated_length, 1, False, "stop", ref=index)
        for index, it in enumerate(samples)
    ]
    scores = [Score(None if index == 5 else (-0.5) ** index, None, "", 0.0, {}) for index in range(SAMPLES)]
    groups = [Group({"uid": ref.uid}, (ref,), (score,)) for ref, score in zip(refs, scores, strict=True)]
    batch = build_step_batch(groups, config, worker.layout)
    worker.receive(batch.ranks[worker.here.data], 1)
    gathered = worker.gather_over_data(torch.full((1, 1 + worker.here.data), float(worker.here.data)))
    assert gathered[0].tolist() == [rank for rank in range(worker.layout.data) for _ in range(1 + rank)]
    rewards = shaped_rewards(batch.rewards, batch, config).nan_to_num()
    part = worker.infer_values(rewards, config.ppo.adv_estimator, None, 0.0)
    parts: list[Any] = [None] * address.world_size
    torch.distributed.all_gather_object(parts, part)
    reported = [part for part in parts if part is not None]
    stats = stats_by_sample(
        torch.cat([index for index, _ in reported]),
        {name: torch.cat([values[name] for _, values in reported]) for name in reported[0][1]},
        SAMPLES,
    )
    targets, _ = compute_targets(batch, stats, config)
    before = owned_slices(worker), owned_slices(worker.critic)
    (of_critic,) = worker.train_critic(ValueLossFn(config.value_loss_fn), targets)
    (of_policy,) = worker.train(ClippedPGLossFn(config.loss_fn, prev_equals_curr=True), targets)
    after = owned_slices(worker), owned_slices(worker.critic)
    moved = [
        [(name, box, was - now) for (name, box, was), (_, _, now) in zip(*pair, strict=True)]
        for pair in zip(before, after, strict=True)
    ]
    worker.start_save(folder)
    worker.is_saved(wait=True)
    for model in (worker, worker.critic):
        for values in (values for chunk in model.chunks for values in chunk.parameters() if values.requires_grad):
            values.data.zero_()
    worker.load(folder)
    again = owned_slices(worker), owned_slices(worker.critic)
    pairs = [pieces for pair in zip(after, again, strict=True) for pieces in zip(*pair, strict=True)]
    same = all(torch.equal(one, two) for (_, _, one), (_, _, two) in pairs)
    metrics = {"critic": of_critic.metrics, "policy": of_policy.metrics} if worker.is_reporting_rank else {}
    norms = of_critic.grad_norm, of_policy.grad_norm
    files = sorted(path.name for path in Path(folder, "critic").iterdir())
    return {"stats": stats, "moved": moved, "metrics": metrics, "norms": norms, "same": same, "files": files}
