"""Credit by turn against formulas in plain Python, and its gradient through the loss on random dialogues."""

import math
import random
import statistics
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.objective import ClippedPGLossFn, credit_by_token, difference_credit, gigpo_credit

SCORES = st.lists(st.none() | st.integers(-5, 5).map(float), max_size=8)


@given(SCORES, st.sampled_from([0.0, 0.3, 0.95, 1.0]))
def test_differences_add_up_to_the_last_score_minus_the_first(scores: list[float | None], gamma: float) -> None:
    credits = difference_credit(scores, gamma)
    known = [score for score in scores if score is not None]
    assert sum(credits) == pytest.approx(known[-1] - known[0] if known else 0.0, abs=1e-12)
    assert len(credits) == len(scores)


def test_an_increase_is_spread_over_the_turns_since_the_last_score() -> None:
    assert difference_credit([1, 3, 2, 2], 0.5) == [0, 2, -1, 0]
    assert difference_credit([None, 1, None, None, 8, None], 0.5) == pytest.approx([0, 0, 1, 2, 4, 0])
    assert difference_credit([0, None, 6], 0.0) == [0, 0, 6] and difference_credit([0, None, 6], 1.0) == [0, 3, 3]
    assert difference_credit([4], 0.5) == [0] and difference_credit([], 0.5) == []


def by_hand(
    rewards: Sequence[Sequence[float]], states: Sequence[Sequence[str]], groups: Sequence[str], gamma: float, norm: bool
) -> list[list[float]]:
    """GiGPO's formula as the paper writes it, turn by turn."""
    returns = [[sum(gamma ** (k - t) * one[k] for k in range(t, len(one))) for t in range(len(one))] for one in rewards]
    credits = []
    for i, of_sample in enumerate(returns):
        credits.append([0.0] * len(of_sample))
        for t, value in enumerate(of_sample):
            alike = [
                returns[j][u]
                for j in range(len(rewards))
                for u in range(len(rewards[j]))
                if (groups[j], states[j][u]) == (groups[i], states[i][t])
            ]
            if max(alike) - min(alike) > 1e-9:
                scale = statistics.stdev(alike) + 1e-6 if norm else 1.0
                credits[i][t] = (value - statistics.fmean(alike)) / scale
    return credits


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=60)
def test_gigpo_is_the_papers_formula(seed: int, norm: bool) -> None:
    draw = random.Random(seed)
    turns = [draw.randint(0, 5) for _ in range(draw.randint(1, 6))]
    rewards = [[float(draw.randint(0, 2)) for _ in range(count)] for count in turns]
    states = [[draw.choice("abc") for _ in range(count)] for count in turns]
    groups = [draw.choice("xy") for _ in turns]
    found = gigpo_credit(rewards, states, groups, 0.9, normalize=norm)
    expected = by_hand(rewards, states, groups, 0.9, norm)
    assert [len(of_sample) for of_sample in found] == turns
    assert sum(found, []) == pytest.approx(sum(expected, []), abs=1e-9)


def test_a_state_that_nobody_shares_gets_no_credit() -> None:
    credits = gigpo_credit([[0, 1], [0, 0]], [["a", "b"], ["a", "c"]], ["p", "p"], 1.0, normalize=False)
    assert credits == [[0.5, 0.0], [-0.5, 0.0]]
    assert gigpo_credit([[1], [0]], [["a"], ["a"]], ["p", "q"], 1.0, normalize=True) == [[0], [0]]


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=30, deadline=None)
def test_the_gradient_of_random_dialogues_is_that_of_the_formula(seed: int, token_level: bool) -> None:
    """Packed rows in float64: d loss / d logprob of token t of turn k of sample i is -(A_i + c_ik) w_t."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    count, most = number(1, 5), 4
    dialogues = [[(number(1, 4), number(0, 4)) for _ in range(number(1, most + 1))] for _ in range(count)]
    mask, turns, segments = list[float](), list[int](), list[int]()
    for i, dialogue in enumerate(dialogues):
        for k, (prompt, answer) in enumerate(dialogue):
            mask += [0.0] * prompt + [1.0] * answer
            turns += [0] * prompt + [k] * answer
            segments += [i] * (prompt + answer)
    padding = number(0, 3)
    mask, turns, segments = mask + [0.0] * padding, turns + [0] * padding, segments + [count] * padding
    advantages = torch.randn(count, generator=draw, dtype=torch.float64)
    credits = torch.randn(count, most, generator=draw, dtype=torch.float64)
    logprobs = -torch.rand(1, len(mask), generator=draw, dtype=torch.float64)
    logprobs.requires_grad_()
    row = torch.tensor(segments)
    batch = {
        "token_mask": torch.tensor([mask]),
        "sample_mask": torch.ones(count),
        "segments": row,
        "num_segments": count,
        "advantages": torch.cat([advantages, torch.zeros(1)])[row][None]
        + credit_by_token(credits, row, torch.tensor([turns])),
        "prev_logprobs": logprobs.detach(),
    }
    trained = sum(mask)
    loss, _ = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0, "token_level_loss": token_level})(
        logprobs, batch, count, trained
    )
    loss.backward()
    assert logprobs.grad is not None
    of_sample = [sum(answer for _, answer in dialogue) for dialogue in dialogues]
    expected = [
        -(advantages[i] + credits[i, k]).item() * (1 / trained if token_level else 1 / (of_sample[i] * count))
        if is_trained
        else 0.0
        for is_trained, k, i in zip(mask, turns, segments, strict=True)
    ]
    assert logprobs.grad[0].tolist() == pytest.approx(expected, abs=1e-14)
    assert math.isfinite(loss.item())
