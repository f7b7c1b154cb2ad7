"""The zigzag split: every token on exactly one rank, chunks in the order that rotary embeddings assume."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.parallel.layers.context import padded_length, share_of_row, take


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 200),
)
@settings(max_examples=100, deadline=None)
def test_the_shares_of_all_ranks_make_up_the_row(lengths: list[int], size: int, multiple: int, length: int) -> None:
    starts, total = cumulative(lengths), sum(lengths)
    shares = [share_of_row(starts, rank, size, multiple, length) for rank in range(size)]
    tokens = [share.index[share.index < total] for share in shares]
    assert torch.equal(torch.cat(tokens).sort().values, torch.arange(total)), "every token on exactly one rank"
    padded = shares[0].cu_seqlens
    assert int(padded[-1]) >= length and (padded.diff() % (2 * size) == 0).all()
    assert int(padded[-1]) >= padded_length(lengths, size, multiple)
    if length <= padded_length(lengths, size, multiple):
        assert int(padded[-1]) == padded_length(lengths, size, multiple)
    for share in shares:
        assert len(share.index) == int(padded[-1]) // size and len(share.index) % multiple == 0
    # Keys gathered rank after rank and reordered are the sequences one after another, each with its padding.
    row = torch.cat([share.index for share in shares])[shares[0].key_order]
    for i, size_of in enumerate(lengths):
        sequence = row[int(padded[i]) : int(padded[i + 1])]
        assert torch.equal(sequence[:size_of], torch.arange(int(starts[i]), int(starts[i + 1])))
        assert (sequence[size_of:] == total).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_a_chunk_from_the_front_and_one_from_the_back(rank: int) -> None:
    share = share_of_row(cumulative([8, 3]), rank, 2)
    expected = [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]][rank]
    assert share.index.tolist() == expected
    assert take(torch.arange(11)[None] + 100, share.index).tolist() == [[0 if i == 11 else i + 100 for i in expected]]
    # Its chunks of the first sequence see the keys up to their own end.
    assert share.spans[:2] == [((0, 2, 0, 2), (2, 2, 0, 8)), ((0, 2, 0, 4), (2, 2, 0, 6))][rank]
