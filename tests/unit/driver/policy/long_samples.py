"""Random samples with branches, many of them longer than a bin, and a float64 network that computes rows of them."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.batching.packed_batch import PackedBatch
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Score, Trajectory, TrajectoryRef, Turn
from tests.recipes import small_recipe

VOCABULARY, LAYERS, EXPERTS = 11, 2, 2


def recipe(room: int, token_level: bool, loss: dict[str, Any] | None = None, **grpo: Any) -> MasterConfig:
    """Return a recipe with 2 prompts x 4 samples in 2 optimizer steps, whose bins hold `room` tokens."""
    packing = {"enabled": True, "train_mb_tokens": room, "logprob_mb_tokens": 2 * room}
    policy = {"train_global_batch_size": 4, "max_total_sequence_length": room, "sequence_packing": packing}
    loss = {"reference_policy_kl_penalty": 0.0, "token_level_loss": token_level} | (loss or {})
    return small_recipe(policy=policy, grpo=grpo, loss_fn=loss)


def random_tree(
    draw: random.Random, uid: str, index: int, room: int, branches: int, prompt: Sequence[int] = (3, 1, 2)
) -> Trajectory:
    """Return a sample whose branches, of at most `room` tokens, begin like earlier ones or with a summary."""

    def tokens(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(count)]

    paths: list[list[int]] = []
    turns, lengths = list[Turn](), list[int]()
    for _ in range(branches):
        path = list(prompt) if not paths else draw.choice(paths)[: draw.randint(1, room // 2)]
        if paths and draw.random() < 0.3:
            path = tokens(draw.randint(1, room // 3))
        turns.append(Turn("user", torch.tensor(path)))
        while True:
            answer = tokens(draw.randint(1, max(1, min(4, room - len(path)))))
            turns.append(Turn("assistant", torch.tensor(answer), -torch.rand(len(answer)), loss_mask=True))
            path = path + answer
            if draw.random() < 0.5 or len(path) + 5 > room:
                break
            more = tokens(draw.randint(1, 2))
            turns.append(Turn("environment", torch.tensor(more)))
            path = path + more
        paths.append(path)
        lengths.append(len(path))
    total = sum(lengths)
    middle = draw.randint(0, total)
    count = sum(turn.loss_mask for turn in turns)
    return Trajectory(
        uid, index, tuple(turns), ((3, 0, middle), (4, middle, total)), "stop", False,
        branches=tuple(lengths) if branches > 1 else (),
        routed_experts=torch.randint(0, 8, (total - 1, LAYERS, EXPERTS), dtype=torch.int16),
        turn_numbers=tuple(draw.sample(range(count), count)) if branches > 1 else (),
    )  # fmt: skip


def random_groups(
    draw: random.Random, room: int, branches: Sequence[int] = (1, 1, 2, 5, 12)
) -> tuple[list[Group], list[Trajectory]]:
    """Return 2 groups of 4 samples, some of which have failed, and all trajectories; references are indices.
    `branches`: numbers of branches of a sample, one of which is drawn."""
    trajectories: list[Trajectory] = []
    groups = []
    for uid in ("a", "b"):
        prompt = [draw.randrange(VOCABULARY) for _ in range(room // 3)]
        members = [random_tree(draw, uid, i, room, draw.choice(branches), prompt) for i in range(4)]
        refs = tuple(TrajectoryRef.of(it, len(trajectories) + i) for i, it in enumerate(members))
        rewards = [1.0, 0.0, *[draw.choice((0.0, 1.0, None)) for _ in range(2)]]
        scores = tuple(
            Score(reward, None, "", 0.0, turn_rewards=tuple(draw.random() for _ in range(ref.turns)))
            for reward, ref in zip(rewards, refs, strict=True)
        )
        groups.append(Group({"uid": uid, "task_name": "t", "extra_env_info": {}}, refs, scores))  # type: ignore[typeddict-item]
        trajectories += members
    return groups, trajectories


def parameters(seed: int) -> list[Tensor]:
    """Return the network's weights, float64: embedding, attention, positions, output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((VOCABULARY, 4), (4, 4), (64, 4), (4, VOCABULARY))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def next_token_scores(weights: Sequence[Tensor], tokens: Tensor, positions: Tensor, sequence: Tensor) -> Tensor:
    """Return the log-probs [T, vocabulary] of the token after each of T: causal attention within each sequence."""
    embedding, attention, place, output = weights
    hidden = embedding[tokens] + place[positions]
    seen = (sequence[:, None] == sequence) & torch.ones(len(tokens), len(tokens)).tril().bool()
    mixed = torch.softmax((hidden @ attention @ hidden.T).masked_fill(~seen, -torch.inf), -1) @ hidden
    return torch.log_softmax((hidden + mixed).tanh() @ output, -1)


def row_logprobs(weights: Sequence[Tensor], batch: PackedBatch) -> Tensor:
    """Return the log-probs of a row's tokens, [1, T]."""
    sequence = (batch.positions == 0).cumsum(0)
    scores = next_token_scores(weights, batch.tokens[0], batch.positions, sequence)
    return batch.to_token_aligned(scores.gather(1, batch.targets()[0][:, None]).T)


def branch_logprobs(weights: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Return the log-probs of a branch's tokens, computed by itself, [length]; 0 for the first."""
    scores = next_token_scores(weights, ids, torch.arange(len(ids)), torch.zeros(len(ids)))
    return torch.cat([scores.new_zeros(1), scores[:-1].gather(1, ids[1:, None])[:, 0]])
