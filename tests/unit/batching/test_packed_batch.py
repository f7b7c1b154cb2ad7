"""pack_rows and PackedBatch against a loop over the samples."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.batching.packed_batch import PackedBatch, cut_row, join_rows, pack_rows

QUICK = settings(deadline=None, max_examples=30)
ROWS = st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([1, 2, 8, 16]))


def make(lengths: list[int], multiple: int) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]], PackedBatch]:
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = [torch.randint(1, 99, (n,), generator=generator) for n in lengths]
    columns = [
        {"advantages": torch.tensor(float(i + 1)), "token_mask": torch.rand(n, generator=generator) < 0.6}
        for i, n in enumerate(lengths)
    ]
    for i, values in enumerate(columns):
        values["sample_mask"] = torch.tensor(float(i % 3 != 2))
    return ids, columns, pack_rows(ids, columns, multiple)


@QUICK
@given(row=ROWS)
def test_round_trip(row) -> None:
    lengths, multiple = row
    ids, columns, packed = make(lengths, multiple)
    n, used, total = len(lengths), sum(lengths), packed.tokens.shape[1]
    assert total % multiple == 0 and total - used < multiple and packed.padding == total - used
    assert packed.tokens.shape == (1, total) and packed.tokens.dtype == torch.int64
    assert packed.segments.dtype == packed.positions.dtype == torch.int64
    assert packed.cu_seqlens.dtype == torch.int32
    for back, sample in zip(packed.split(packed.tokens), ids, strict=True):
        assert back.equal(sample)
    for back, sample in zip(packed.split(packed.columns["token_mask"]), columns, strict=True):
        assert back.equal(sample["token_mask"])
    for i, back in enumerate(packed.split(packed.columns["advantages"])):
        assert back.tolist() == [i + 1.0] * lengths[i]
    for i, back in enumerate(packed.split(packed.columns["sample_mask"])):
        assert back.tolist() == [float(i % 3 != 2)] * lengths[i]
    sequences = lengths + ([total - used] if total > used else [])
    assert packed.cu_seqlens.tolist() == [sum(sequences[:i]) for i in range(len(sequences) + 1)]
    assert packed.positions.tolist() == [p for length in sequences for p in range(length)]
    assert packed.segments.tolist() == [i for i, length in enumerate(sequences) for _ in range(length)]
    assert packed.num_segments == n
    assert not any(column[0, used:].any() for column in packed.columns.values())


@QUICK
@given(
    branches=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    multiple=st.sampled_from([1, 8]),
)
def test_branches_are_sequences_of_their_sample(branches: list[list[int]], multiple: int) -> None:
    """All but what is by sample is as if every branch were a sample."""
    sequences = [length for of_sample in branches for length in of_sample]
    ids, columns, apart = make(sequences, multiple)
    mask = [values["token_mask"] for values in columns]
    apart = pack_rows(ids, [{"token_mask": each, "sample_mask": torch.tensor(1.0)} for each in mask], multiple)
    lengths = [sum(of_sample) for of_sample in branches]
    row = pack_rows(
        torch.cat(ids).split(lengths),
        [{"token_mask": each, "sample_mask": torch.tensor(1.0)} for each in torch.cat(mask).split(lengths)],
        multiple,
        branches=branches,
    )
    joined = join_rows([row, row], multiple)
    for name in ("tokens", "positions", "cu_seqlens"):
        assert getattr(row, name).equal(getattr(apart, name))
        assert getattr(joined, name).equal(getattr(join_rows([apart, apart], multiple), name))
    assert row.targets().equal(apart.targets()) and row.next_token_counts().equal(apart.next_token_counts())
    scores = torch.arange(1.0, 1 + row.tokens.shape[1])[None]
    assert row.to_token_aligned(scores).equal(apart.to_token_aligned(scores))
    owner = [i for i, length in enumerate(lengths) for _ in range(length)]
    assert row.segments.tolist() == owner + [len(branches)] * row.padding
    assert row.num_segments == len(branches) and joined.num_segments == 2 * len(branches)
    assert [len(part) for part in row.split(row.tokens)] == lengths


@QUICK
@given(row=ROWS)
def test_alignment_against_a_loop(row) -> None:
    lengths, multiple = row
    ids, columns, packed = make(lengths, multiple)
    total = packed.tokens.shape[1]
    about_next = torch.randn(1, total, generator=torch.Generator().manual_seed(1)).requires_grad_()
    aligned = packed.to_token_aligned(about_next)
    counts = packed.split(packed.next_token_counts())
    start, values = 0, aligned[0].tolist()
    for i, sample in enumerate(ids):
        for t in range(len(sample)):
            last = t == len(sample) - 1
            assert int(packed.targets()[0, start + t]) == (0 if last else int(sample[t + 1]))
            assert values[start + t] == (0.0 if t == 0 else about_next[0, start + t - 1].item())
            trained = not last and bool(columns[i]["token_mask"][t + 1]) and i % 3 != 2
            assert bool(counts[i][t]) == trained
        start += len(sample)
    assert not packed.padding or float(aligned[0, start].detach()) == 0.0
    aligned[0, :start].sum().backward()
    ends = {sum(lengths[: i + 1]) - 1 for i in range(len(lengths))}
    expected = [float(t < start and t not in ends) for t in range(total)]
    assert about_next.grad is not None and about_next.grad[0].tolist() == expected


def test_tokens_that_nothing_predicts_do_not_leak() -> None:
    _, _, packed = make([2, 1, 3], 8)
    about_next = torch.full((1, 8), float("nan"))
    about_next[0, [0, 3, 4]] = -1.0
    about_next.requires_grad_()
    aligned = packed.to_token_aligned(about_next)
    assert aligned[0, :6].tolist() == [0, -1, 0, 0, -1, -1]
    aligned[0, :6].sum().backward()
    assert about_next.grad is not None and bool(about_next.grad.isfinite().all())


def test_a_padding_row_has_the_same_columns_and_no_sample() -> None:
    _, _, packed = make([4, 3], 2)
    empty = packed.empty_like(4)
    assert empty.tokens.tolist() == [[0] * 4] and empty.num_segments == 0 and empty.padding == 4
    assert empty.cu_seqlens.tolist() == [0, 4] and empty.segments.tolist() == [0] * 4
    assert {k: v.dtype for k, v in empty.columns.items()} == {k: v.dtype for k, v in packed.columns.items()}
    assert not any(v.any() for v in empty.columns.values())
    assert empty.split(empty.tokens) == [] and not empty.targets().any()


def test_rows_feed_the_loss() -> None:
    from grpo_mcore.objective import ClippedPGLossFn, nonfinite_samples, valid_counts

    _, _, packed = make([5, 3, 4], 16)
    loss_fn = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0}, prev_equals_curr=True)
    for row in (packed, packed.empty_like(16)):
        seqs, toks = valid_counts(row.loss_inputs())
        loss, metrics = loss_fn(torch.zeros(1, 16), row.loss_inputs(), seqs, toks)
        assert float(metrics["num_valid_samples"]) == float(seqs) == (2.0 if row is packed else 0.0)
        assert loss.isfinite() and nonfinite_samples(torch.zeros(1, 16), row.loss_inputs()).shape == (row.num_segments,)


def test_to_moves_every_tensor() -> None:
    _, _, packed = make([2, 3], 4)
    moved = packed.to("meta")
    tensors = (moved.tokens, moved.positions, moved.cu_seqlens, moved.segments, *moved.columns.values())
    assert all(t.device.type == "meta" for t in tensors)
    assert moved.lengths == packed.lengths


def test_errors_name_the_sample_and_the_column() -> None:
    ids = [torch.ones(2, dtype=torch.int64), torch.ones(3, dtype=torch.int64)]
    with pytest.raises(ValueError, match="sample 1: advantages has shape"):
        pack_rows(ids, [{"advantages": torch.zeros(2)}, {"advantages": torch.zeros(2)}])
    with pytest.raises(ValueError, match="sample 1: its columns differ.*token_mask"):
        pack_rows(ids, [{}, {"token_mask": torch.zeros(3)}])
    with pytest.raises(ValueError, match="2 samples, 1 sets of columns"):
        pack_rows(ids, [{}])
    with pytest.raises(ValueError, match="1 names"):
        pack_rows(ids, [{}, {}], names=["a"])
    with pytest.raises(ValueError, match="at least one sample"):
        pack_rows([], [])
    with pytest.raises(ValueError, match="sample 0: token ids"):
        pack_rows([torch.ones(0, dtype=torch.int64)], [{}])
    _, _, packed = make([2, 3], 1)
    for method in (packed.split, packed.to_token_aligned):
        with pytest.raises(ValueError, match="shape"):
            method(torch.zeros(5))


@QUICK
@given(lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_joined_rows_equal_one_row_and_are_cut_again(lengths: list[list[int]]) -> None:
    made = [make(few, 4) for few in lengths]
    rows = [row for _, _, row in made]
    rows.append(rows[0].empty_like(4))  # a rank without samples for its last bin
    joined = join_rows(rows, 8)
    whole = pack_rows([i for ids, _, _ in made for i in ids], [c for _, columns, _ in made for c in columns], 8)
    for name in ("tokens", "positions", "cu_seqlens", "segments"):
        assert getattr(joined, name).equal(getattr(whole, name)), name
    assert all(joined.columns[name].equal(column) for name, column in whole.columns.items())
    assert joined.lengths == whole.lengths
    for row, part in zip(rows, cut_row(joined.tokens, rows), strict=True):
        assert part.equal(row.tokens)
    empty = join_rows([rows[-1], rows[-1]], 8)
    assert empty.num_segments == 0 and empty.tokens.shape == (1, 8)
    assert not any(part.any() for part in cut_row(torch.ones(1, 8), [rows[-1], rows[-1]]))


def test_routes_stay_with_their_tokens() -> None:
    lengths = (3, 1, 4)
    ids, columns, _ = make(list(lengths), 8)
    routes = [torch.full((n - 1, 2, 3), 10 * i, dtype=torch.int16) for i, n in enumerate(lengths)]
    packed = pack_rows(ids, columns, 16, routes=routes)
    assert packed.routes is not None and packed.routes.shape == (16, 2, 3)
    # The last token of a sample predicts nothing, so its experts do not matter, as for padding.
    assert packed.routes[:, 0, 0].tolist() == [0, 0, -1, -1, 20, 20, 20, -1, *[-1] * 8]
    assert (packed.to("cpu").routes == packed.routes).all()
    empty = packed.empty_like(8).routes
    assert empty is not None and empty.shape == (8, 2, 3) and (empty == -1).all()
    assert pack_rows(ids, columns).empty_like(8).routes is None
    both = join_rows([packed, packed], 16).routes
    assert both is not None and both[:8].equal(packed.routes[:8]) and both[8:].equal(packed.routes[:8])
