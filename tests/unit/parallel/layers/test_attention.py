"""Packed attention against one masked softmax per sequence; the GPU branch with a stand-in for torch's kernel."""

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_mcore.parallel.mesh import prepare_megatron
from grpo_mcore.parallel.platform import Platform

prepare_megatron(Platform.detect())

from grpo_mcore.batching.shared_prefixes import find_shared_prefixes  # noqa: E402
from grpo_mcore.families import FamilyError  # noqa: E402
from grpo_mcore.parallel.layers import packed_row  # noqa: E402
from grpo_mcore.parallel.layers.attention import PackedAttention  # noqa: E402
from grpo_mcore.parallel.layers.context import computed_here, share_of_row  # noqa: E402
from grpo_mcore.parallel.layers.packed_row import bucket_by_length, describe_row  # noqa: E402

CPU = Platform("cpu")


def config(window: int = 0) -> SimpleNamespace:
    """Megatron-Core's settings; `window`: how many keys a query sees."""
    size = (window - 1, 0) if window else None
    return SimpleNamespace(kv_channels=8, window_size=size, window_attn_skip_freq=None, softmax_type="vanilla")


def row(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(tokens: int, heads: int = 4, groups: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tokens, n, 8, generator=generator).requires_grad_() for n in (heads, groups, groups)]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    platform: Platform = CPU,
    window: int = 0,
) -> torch.Tensor:
    attention = PackedAttention(config(window), 1, None, "self", platform=platform)
    return attention(query, key, value, None, packed_seq_params=describe_row(row(lengths), platform))


@pytest.mark.parametrize(
    ("lengths", "window"), [([1], 0), ([7], 0), ([3, 9, 1, 30, 30, 2], 0), ([5, 5, 5], 0), ([3, 9, 1, 30, 30, 2], 4)]
)
def test_equals_a_masked_softmax_per_sequence(lengths: list[int], window: int) -> None:
    query, key, value = inputs(sum(lengths))
    found = attend(query, key, value, lengths, window=window)
    found.square().sum().backward()
    gradients = [t.grad.clone() for t in (query, key, value)]

    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    parts, at = [], 0
    for length in lengths:
        q, k, v = (t[at : at + length] for t in exact)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * 8**-0.5
        seen = torch.ones(length, length).tril().triu(1 - (window or length)).bool()
        scores = scores.masked_fill(~seen, -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
        at += length
    expected = torch.cat(parts)
    expected.square().sum().backward()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    for gradient, other in zip(gradients, exact, strict=True):
        torch.testing.assert_close(gradient.double(), other.grad, atol=1e-4, rtol=0)


def test_sinks_take_a_part_of_the_attention() -> None:
    lengths, settings = [3, 30, 9], config()
    settings.softmax_type, settings.num_attention_heads = "learnable", 4
    settings.tensor_model_parallel_size, settings.params_dtype = 1, torch.float32
    with pytest.raises(FamilyError, match="attention sinks on GPUs need the attention of"):
        PackedAttention(settings, 1, None, "self", platform=Platform("gpu"))
    attention = PackedAttention(settings, 1, None, "self", platform=CPU)
    assert attention.softmax_offset is not None
    sinks = attention.softmax_offset.data.copy_(torch.tensor([-1.0, 0.0, 2.0, 5.0])).double()
    query, key, value = inputs(sum(lengths))
    found = attention(query, key, value, None, packed_seq_params=describe_row(row(lengths), CPU))
    whole = [t.detach().double().split(lengths) for t in (query, key, value)]
    parts = []
    for q, k, v in zip(*whole, strict=True):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * 8**-0.5
        weights = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + sinks.exp()[:, None, None]
        parts.append(torch.einsum("hqk,khd->qhd", weights / total, v).flatten(1))
    torch.testing.assert_close(found.double(), torch.cat(parts), atol=1e-5, rtol=0)


def kernel(query, key, value, query_ends, key_ends, longest_query, longest_key, *, scale, window_size) -> torch.Tensor:
    """Stand-in for `varlen_attn` of torch 2.11: a masked softmax per sequence, the last query sees the last key."""
    assert query.size(1) == key.size(1) and query.shape[-1] == value.shape[-1] and window_size[1] == 0
    assert longest_query == query_ends.diff().max() and longest_key == key_ends.diff().max()
    outputs = []
    sizes = query_ends.diff().tolist(), key_ends.diff().tolist(), key_ends.diff().tolist()
    for q, k, v in zip(*(t.split(size) for t, size in zip((query, key, value), sizes, strict=True)), strict=True):
        hidden = torch.ones(len(q), len(k)).triu(1 + len(k) - len(q)).bool()
        if window_size[0] >= 0:
            hidden |= torch.ones(len(q), len(k)).tril(len(k) - len(q) - window_size[0] - 1).bool()
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs)


def grouped_kernel(query, key, value, *arguments, enable_gqa: bool = False, **options) -> torch.Tensor:
    """Stand-in for a later `varlen_attn`, which takes `enable_gqa`."""
    assert enable_gqa == (query.size(1) != key.size(1))
    key, value = (t.repeat_interleave(query.size(1) // key.size(1), 1) for t in (key, value))
    return kernel(query, key, value, *arguments, **options)


@pytest.mark.parametrize("varlen_attn", [kernel, grouped_kernel])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("width", [5, 8])
def test_the_gpu_branch_equals_the_cpu_branch(
    varlen_attn: Callable, groups: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    lengths = [3, 9, 1, 30]
    query, key, value = (t.detach() for t in inputs(sum(lengths), groups=groups))
    for window in (0, 4):
        found = attend(query, key, value[..., :width], lengths, Platform("gpu"), window)
        expected = attend(query, key, value[..., :width], lengths, window=window)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("platform", [CPU, Platform("gpu")], ids=["cpu", "gpu"])
def test_a_context_parallel_rank_computes_its_share(
    rank: int, window: int, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [3, 9, 1, 30]
    total, row_of_all = sum(lengths), [t.detach() for t in inputs(sum(lengths))]
    shares = [share_of_row(row(lengths), each, 2) for each in (0, 1)]

    gathered = [torch.cat([take_rows(values, share.index) for share in shares]) for values in row_of_all[1:]]
    monkeypatch.setattr("grpo_mcore.parallel.layers.attention._gather_context", lambda *_: gathered)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    share = shares[rank]
    found = PackedAttention(config(window), 1, None, "self", platform=platform)(
        *(take_rows(values, share.index) for values in row_of_all),
        None,
        packed_seq_params=describe_row(row(lengths), platform, share, object()),
    )
    real = share.index < total
    expected = attend(*row_of_all, lengths, window=window)[share.index[real]]
    torch.testing.assert_close(found[real], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("platform", [CPU, Platform("gpu")], ids=["cpu", "gpu"])
def test_samples_with_shared_prefixes_attend_as_whole_ones(
    platform: Platform, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    lengths = [9, 7, 4, 12, 9]  # the last sample is the first one, the third the start of the second
    tokens = torch.tensor([*range(9), *range(6), 20, *range(4), *range(8), *range(30, 34), *range(9)])
    shared = find_shared_prefixes(tokens, lengths, 8, block=1)
    assert shared is not None and shared.new_tokens == (9, 1, 0, 4, 0) and shared.padding == 2
    whole = [values.detach()[shared.places] for values in inputs(len(shared.source))]
    expected = attend(*whole, lengths, window=window)
    found = PackedAttention(config(window), 1, None, "self", platform=platform)(
        *(values.detach() for values in inputs(len(shared.source))),
        None,
        packed_seq_params=describe_row(row(lengths), platform, shared=shared, index=shared.source),
    )
    assert len(found) == len(shared.source)
    torch.testing.assert_close(found[shared.places], expected, atol=1e-5, rtol=0)

    shares = [share_of_row(shared.cu_seqlens, rank, 2) for rank in (0, 1)]
    parts = [[take_rows(t.detach(), share.index) for t in inputs(len(shared.source))] for share in shares]
    gathered = [torch.cat([part[i] for part in parts]) for i in (1, 2)]
    monkeypatch.setattr("grpo_mcore.parallel.layers.attention._gather_context", lambda *_: gathered)
    for part, share in zip(parts, shares, strict=True):
        index, places = computed_here(shared, share, sum(lengths))
        described = describe_row(row(lengths), platform, share, object(), shared=shared, index=index)
        found = PackedAttention(config(window), 1, None, "self", platform=platform)(
            *part, None, packed_seq_params=described
        )
        mine = places >= 0
        torch.testing.assert_close(found[places[mine]], expected[mine], atol=1e-5, rtol=0)
        order, here = described.whole
        assert torch.cat([t.index for t in shares])[order].equal(shared.places), "every sample whole, in order"
        assert here[places[mine]].equal(shared.source[shared.places[mine]])


@settings(max_examples=40, deadline=None)
@given(
    samples=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=9),
    block=st.integers(1, 4),
    window=st.sampled_from([0, 4]),
    platform=st.sampled_from([CPU, Platform("gpu")]),
    masked=st.sampled_from([1, 3, 256]),
)
def test_random_trees_attend_as_whole_samples(
    samples: list[list[int]], block: int, window: int, platform: Platform, masked: int
) -> None:
    """A key that several samples share gets the sum of the gradients that it has in each of them."""
    lengths, tokens = [len(ids) for ids in samples], torch.tensor([token for ids in samples for token in ids])
    shared = find_shared_prefixes(tokens, lengths, 4, block)
    assume(shared is not None)
    alone, together = inputs(len(shared.source)), inputs(len(shared.source))
    expected = attend(*(values[shared.places] for values in alone), lengths, window=window)
    with mock.patch.object(packed_row, "MASKED_QUERIES", masked):
        described = describe_row(row(lengths), platform, shared=shared, index=shared.source)
    with mock.patch("torch.nn.attention.varlen.varlen_attn", kernel):
        found = PackedAttention(config(window), 1, None, "self", platform=platform)(
            *together, None, packed_seq_params=described
        )[shared.places]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for result in (expected, found):
        result.square().sum().backward()
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=0)


def take_rows(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, torch.zeros_like(values[:1])]).index_select(0, index)


def test_a_sequence_does_not_influence_its_neighbours() -> None:
    lengths = [6, 11, 4]
    query, key, value = (t.detach() for t in inputs(sum(lengths)))
    before = attend(query, key, value, lengths)
    for tensor in (query, key, value):
        tensor[6:17] += 3.0  # the middle sequence
    after = attend(query, key, value, lengths)
    assert torch.equal(before[:6], after[:6]) and torch.equal(before[17:], after[17:])
    assert not torch.equal(before[6:17], after[6:17])


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_buckets_hold_every_sequence_once_and_waste_little(lengths: list[int]) -> None:
    buckets = bucket_by_length(lengths)
    assert sorted(i for bucket in buckets for i in bucket) == [i for i, n in enumerate(lengths) if n]
    for bucket in buckets:
        sizes = [lengths[i] for i in bucket]
        assert max(sizes) <= 1.25 * min(sizes) + 1
