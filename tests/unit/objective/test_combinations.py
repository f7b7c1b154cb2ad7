"""The loss against the formulas for every combination of settings that is allowed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.objective import ClippedPGLossConfig

from .cases import is_allowed, other_settings, policy_settings
from .harness import assert_same, expected, run
from .samples import draw, packed, padded

SHARE = 31
"""One of 31 pairs (policy settings, other settings) is tested. 1 tests all of them, in minutes."""


@pytest.mark.slow
def test_every_combination_of_terms_is_the_formula() -> None:
    policies, others = list(policy_settings()), list(other_settings())
    assert len(policies) > 250 and len(others) > 50
    samples = draw(seed=5, count=4, longest=5, dtype=torch.float64)
    for i, policy in enumerate(policies):
        for j in range(i % SHARE, len(others), SHARE):
            cfg = ClippedPGLossConfig(**policy, **others[j])
            assert_same(run(cfg, samples, packed), expected(cfg, samples))


@st.composite
def configs(draw_from: st.DrawFn) -> ClippedPGLossConfig:
    """Draw settings with any values until they are allowed."""
    rng = draw_from(st.randoms(use_true_random=True))
    while True:
        found = random_settings(rng)
        if is_allowed(found):
            return ClippedPGLossConfig(**found)


def random_settings(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice([None, "tis", "icepop", "seq-mask-tis"])
    by_sequence, by_age = rng.random() < 0.4, rng.random() < 0.4
    low = rng.choice([0.0, 0.5, 0.95])

    def bound() -> float:
        return rng.choice([1.0, 1.2, rng.uniform(0.95, 5.0)])

    return {
        "disable_ppo_ratio": rng.random() < 0.2,
        "token_level_loss": not by_sequence and rng.random() < 0.6,
        "sequence_length_normalizer": rng.choice([None, None, 1, 7]),
        "sequence_level_importance_ratios": by_sequence,
        "sequence_importance_weight": rng.choice(["geometric_mean", "product"]),
        "ratio_clip_min": rng.choice([0.05, 0.2, 1.0, rng.random()]),
        "ratio_clip_max": rng.choice([0.05, 0.28, 4.0, rng.random()]),
        "ratio_clip_c": rng.choice([None, None, 1.2, 3.0]),
        "reference_policy_kl_penalty": rng.choice([0.0, 0.02, 1.0]),
        "reference_policy_kl_type": rng.choice(["k1", "k2", "k3"]),
        "kl_input_clamp_value": rng.choice([None, 0.3, 20.0]),
        "kl_output_clamp_value": rng.choice([None, 0.1, 10.0]),
        "use_kl_in_reward": rng.random() < 0.1,
        "use_importance_sampling_correction": kind is not None or rng.random() < 0.5,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": bound() if kind and not by_age else None,
        "truncated_importance_sampling_ratio_by_age": [bound() for _ in range(rng.randint(1, 5))]
        if kind and by_age
        else None,
        "truncated_importance_sampling_ratio_min": low if kind else None,
        "use_on_policy_kl_approximation": rng.random() < 0.4,
        "force_on_policy_ratio": rng.random() < 0.2,
        "use_cispo": rng.random() < 0.3,
        "positive_example_nll_weight": rng.choice([0.0, 0.5]),
        "entropy_coeff": rng.choice([None, 0.0, 0.3]),
    }


@settings(deadline=None, max_examples=150)
@given(
    cfg=configs(),
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 6),
    spread=st.sampled_from([1e-3, 0.3, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    layout=st.sampled_from([padded, packed]),
    max_age=st.sampled_from([None, 0, 1, 4]),
)
def test_any_settings_and_values_are_the_formula(cfg, seed, count, spread, dtype, layout, max_age) -> None:
    samples = draw(seed, count, longest=8, spread=spread, dtype=dtype)
    assert_same(run(cfg, samples, layout, max_age=max_age), expected(cfg, samples, max_age))
