"""Statistics of samples, and the KL from a token to the end, against plain loops, in every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mcore.batching.packed_batch import pack_rows
from grpo_mcore.objective import (
    SampleKL,
    estimate_advantages,
    kl_to_go,
    sample_stats,
    stats_by_sample,
    token_advantages,
)

from .samples import Sample, draw, packed, padded

KINDS = ["k1", "k2", "k3"]


def tokens_of(sample: Sample) -> list[int]:
    """Return the trained tokens, whether or not the sample is masked."""
    return [t for t in range(1, len(sample.curr)) if sample.columns["token_mask"][t] > 0]


def reference(sample: Sample, kind: str) -> tuple[dict[str, float], list[float]]:
    """Return statistics of the sample, and the KL to go of all its tokens."""
    prev, gen, ref = (
        sample.columns[name].tolist() for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    )
    trained = tokens_of(sample)
    kl = [0.0] * len(prev)
    for t in trained:
        x = ref[t] - prev[t]
        kl[t] = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind]
    to_go = [math.fsum(kl[t:]) for t in range(len(kl))]
    of_trained = [to_go[t] for t in trained]
    mean = math.fsum(of_trained) / max(len(trained), 1)
    stats = {
        "tokens": len(trained),
        "mult_error": math.fsum(math.exp(abs(gen[t] - prev[t])) for t in trained) / max(len(trained), 1),
        "reference_sum": math.fsum(ref[t] for t in trained),
        "kl_sum": math.fsum(kl),
        "kl_to_go_sum": math.fsum(of_trained),
        "kl_to_go_square": math.fsum((g - mean) ** 2 for g in of_trained),
    }
    return stats, to_go


def layouts(samples: list[Sample]) -> list[dict[str, Any]]:
    return [padded(samples)[1], padded(samples, extra=3)[1], packed(samples)[1], packed(samples, padding=5)[1]]


def by_sample(values: Tensor, samples: list[Sample], batch: dict[str, Any]) -> list[Tensor]:
    lengths = [len(s.curr) for s in samples]
    if "segments" in batch:
        return list(torch.split(values[0, : sum(lengths)], lengths))
    return [row[:length] for row, length in zip(values, lengths, strict=True)]


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 7), kind=st.sampled_from(KINDS))
def test_statistics_and_kl_to_go_in_every_layout(seed: int, count: int, kind: str) -> None:
    samples = draw(seed=seed, count=count, longest=40, dtype=torch.float64)
    expected = [reference(sample, kind) for sample in samples]
    bits = None
    for batch in layouts(samples):
        stats = sample_stats(batch, kind)
        for name, values in stats.items():
            assert values.dtype == torch.float64 and values.shape == (count,)
            wanted = [stats_of_sample[name] for stats_of_sample, _ in expected]
            assert values.tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-12), name
        assert set(stats) == set(expected[0][0])
        found = by_sample(kl_to_go(batch, kind), samples, batch)
        for row, (_, to_go) in zip(found, expected, strict=True):
            assert row.tolist() == pytest.approx(to_go, rel=1e-12, abs=1e-12)
        bits = bits or [row.tolist() for row in found]
        assert bits == [row.tolist() for row in found]  # bit-identical in every layout


def test_a_long_sequence_beside_another() -> None:
    """Lengths around powers of two: a neighbour with a huge or infinite KL has no influence."""
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 3, 4, 7, 8, 9, 1000, 1024, 1025):
        prev = torch.randn(1, 4 + length, generator=generator, dtype=torch.float64)
        prev[0, 1], prev[0, 2] = 1e300, math.inf
        batch = {
            "prev_logprobs": prev,
            "reference_policy_logprobs": torch.zeros_like(prev),
            "token_mask": torch.ones_like(prev),
            "segments": torch.tensor([0] * 4 + [1] * length),
            "num_segments": 2,
        }
        found = kl_to_go(batch, "k1")[0, 4:]
        counted = prev[0, 4:].clone()
        counted[0] = 0  # the first token is never trained
        expected = counted.flip(0).cumsum(0).flip(0)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        stats = sample_stats(batch, "k1")
        assert stats["kl_sum"].isfinite().tolist() == [False, True]


def test_masked_samples_have_statistics_too() -> None:
    samples = draw(seed=3, count=6, dtype=torch.float64)
    for layout in (padded, packed):
        batch = layout(samples)[1]
        expected = sample_stats(batch, "k3")
        batch["sample_mask"] = torch.zeros(6)
        for name, values in sample_stats(batch, "k3").items():
            assert values.tolist() == expected[name].tolist()
        del batch["sample_mask"]
        assert sample_stats(batch)["tokens"].tolist() == [len(tokens_of(s)) for s in samples]


def test_only_present_entries_are_reported() -> None:
    batch = padded(draw(seed=3, count=2))[1]
    assert set(sample_stats(batch)) == {"tokens", "mult_error", "reference_sum"}
    del batch["generation_logprobs"]
    assert set(sample_stats(batch)) == {"tokens", "reference_sum"}
    for name in ("reference_policy_logprobs", "prev_logprobs"):
        del batch[name]
        with pytest.raises(ValueError, match=name):
            sample_stats(batch, "k3")
        with pytest.raises(ValueError, match=name):
            kl_to_go(batch, "k3")


def test_a_row_of_padding() -> None:
    column = {"token_mask": torch.ones(3), "prev_logprobs": torch.ones(3), "reference_policy_logprobs": torch.ones(3)}
    row = pack_rows([torch.arange(3)], [column]).empty_like(4)
    stats = sample_stats(row.loss_inputs(), "k3")
    assert {values.shape for values in stats.values()} == {(0,)}
    assert kl_to_go(row.loss_inputs(), "k3").tolist() == [[0.0] * 4]


def test_token_advantages() -> None:
    advantages, to_go = torch.tensor([[1.0, 1.0, -2.0]]), torch.tensor([[0.5, 0.25, 4.0]])
    assert token_advantages(advantages, None, 0.0).tolist() == advantages.tolist()
    assert token_advantages(advantages, to_go, 2.0).tolist() == [[0.0, 0.5, -10.0]]
    assert token_advantages(advantages, to_go, 2.0, -3.0, 0.25).tolist() == [[0.0, 0.25, -3.0]]
    assert token_advantages(advantages, to_go, 0.0, 0.0, None).tolist() == [[1.0, 1.0, 0.0]]
    assert token_advantages(advantages, None, 0.0).dtype == torch.float64
    with pytest.raises(ValueError, match="kl_to_go"):
        token_advantages(advantages, None, 0.5)


@pytest.mark.parametrize("minus_baseline", [True, False])
def test_reinforce_plus_plus_from_the_ranks_to_the_tokens(minus_baseline: bool) -> None:
    """Follow the KL from the statistics of two ranks over the driver's estimate to the tokens of each rank, and compare
    with standardising all tokens of the step at once."""
    samples = [s for s in draw(seed=5, count=12, longest=30, dtype=torch.float64) if tokens_of(s)]
    ids = torch.arange(len(samples)) // 3
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    beta, ranks = 0.3, (samples[:5], samples[5:])
    batches = [packed(part, padding=2)[1] for part in ranks]
    found = [sample_stats(batch, "k3") for batch in batches]
    stats = {name: torch.cat([part[name] for part in found]) for name in found[0]}
    estimate = estimate_advantages(
        "reinforce_plus_plus", rewards, ids, minus_baseline=minus_baseline, tokens=stats["tokens"],
        kl=SampleKL(stats["kl_sum"], stats["kl_to_go_sum"], stats["kl_to_go_square"]), kl_penalty=beta,
    )  # fmt: skip
    assert estimate.kl_weight > 0

    centred = rewards.clone()
    if minus_baseline:
        for group in ids.unique():
            centred[ids == group] -= rewards[ids == group].mean()
    raw = [[centred[i].item() - beta * reference(s, "k3")[1][t] for t in tokens_of(s)] for i, s in enumerate(samples)]
    flat = torch.tensor([x for row in raw for x in row], dtype=torch.float64)
    at = 0
    for part, batch in zip(ranks, batches, strict=True):
        lengths = torch.tensor([len(s.curr) for s in part] + [2])
        own = torch.cat([estimate.advantages[at : at + len(part)], torch.zeros(1, dtype=torch.float64)])
        column = torch.repeat_interleave(own, lengths)[None]
        trained = token_advantages(column, kl_to_go(batch, "k3"), estimate.kl_weight)
        for sample, row, values in zip(part, by_sample(trained, part, batch), raw[at : at + len(part)], strict=True):
            expected = (torch.tensor(values, dtype=torch.float64) - flat.mean()) / (flat.std(correction=0) + 1e-6)
            torch.testing.assert_close(row[tokens_of(sample)], expected, rtol=1e-9, atol=1e-9)
        at += len(part)


@given(st.integers(0, 10**6))
@settings(max_examples=30)
def test_statistics_of_parts_add_up_to_those_of_the_sample(seed: int) -> None:
    """Samples cut in up to four parts, each with a token before it that is not trained."""
    generator = torch.Generator().manual_seed(seed)
    names = ("generation_logprobs", "prev_logprobs", "reference_policy_logprobs", "teacher_logprobs")
    whole: list[list[dict[str, Tensor]]] = []
    for _ in range(3):
        sizes = torch.randint(1, 6, (int(torch.randint(1, 5, (), generator=generator)),), generator=generator).tolist()
        whole.append(
            [
                {name: -torch.rand(size + 1, generator=generator, dtype=torch.float64) for name in names}
                | {"token_mask": torch.tensor([0.0] + [1.0] * size), "sample_mask": torch.tensor(1.0)}
                for size in sizes
            ]
        )

    def stats(rows: list[dict[str, Tensor]], kind: Any = None) -> dict[str, Tensor]:
        ids = [torch.ones(len(row["token_mask"]), dtype=torch.int64) for row in rows]
        return sample_stats(pack_rows(ids, rows, 4).loss_inputs(), kind)

    joined = [
        {name: torch.cat([part[name].expand(len(part["token_mask"])) for part in parts]) for name in parts[0]}
        for parts in whole
    ]
    expected = stats(joined)
    index = torch.tensor([3 * i % 5 for i, parts in enumerate(whole) for _ in parts])  # samples 0, 3 and 1 of 5
    found = stats_by_sample(index, stats([part for parts in whole for part in parts]), 5)
    for name, values in expected.items():
        torch.testing.assert_close(found[name][[0, 3, 1]], values, rtol=1e-12, atol=1e-14)
        assert not found[name][[2, 4]].any()
    alone = stats_by_sample(torch.tensor([2, 0, 1]), expected, 3)
    assert all(alone[name][[2, 0, 1]].equal(values) for name, values in expected.items())
