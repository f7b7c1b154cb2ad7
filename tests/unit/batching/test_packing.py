"""Packing algorithms: properties of all of them, their published behaviour, their speed."""

import random
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.batching import PACKING_ALGORITHMS, PackingError, pack
from grpo_mcore.batching.packing import PADDED, spread

QUICK = settings(deadline=None, max_examples=60)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def loads(bins: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in samples) for samples in bins]


def first_fit_by_hand(order: list[int], lengths: list[int], room: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for i in order:
        for samples in bins:
            if sum(lengths[j] for j in samples) + lengths[i] <= room:
                samples.append(i)
                break
        else:
            bins.append([i])
    return bins


def mffd_by_hand(lengths: list[int], room: int) -> list[list[int]]:
    """Johnson and Garey's five steps, with plain lists."""
    left = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    bins = [[i] for i in left if lengths[i] > room / 2]
    left = [i for i in left if lengths[i] <= room / 2]

    def free(samples: list[int]) -> int:
        return room - sum(lengths[i] for i in samples)

    def move(samples: list[int], i: int) -> None:
        samples.append(i)
        left.remove(i)

    for samples in bins:
        fitting = [i for i in left if lengths[i] > room / 3 and lengths[i] <= free(samples)]
        if fitting:
            move(samples, max(fitting, key=lambda i: lengths[i]))
    for samples in bins[::-1]:
        small = sorted((i for i in left if room / 6 < lengths[i] <= room / 3), key=lambda i: lengths[i])
        if len(samples) > 1 or len(small) < 2 or lengths[small[0]] + lengths[small[1]] > free(samples):
            continue
        move(samples, small[0])
        move(samples, max((i for i in small[1:] if lengths[i] <= free(samples)), key=lambda i: lengths[i]))
    for samples in bins:
        while fitting := [i for i in left if lengths[i] <= free(samples)]:
            move(samples, max(fitting, key=lambda i: lengths[i]))
    return bins + first_fit_by_hand(left, lengths, room)


@pytest.mark.parametrize("algorithm", PACKING_ALGORITHMS)
@QUICK
@given(lengths=LENGTHS, slack=st.integers(0, 80), multiple=st.sampled_from([1, 2, 8]), min_bins=st.integers(1, 6))
def test_properties(algorithm: str, lengths: list[int], slack: int, multiple: int, min_bins: int) -> None:
    capacity = max(lengths) + slack
    min_bins = min(min_bins, len(lengths))
    bins = pack(lengths, capacity, algorithm, multiple, min_bins=min_bins, seed=3)
    assert sorted(i for samples in bins for i in samples) == list(range(len(lengths)))
    assert all(bins) and len(bins) >= min_bins
    room = -(-capacity // multiple) * multiple
    assert max(loads(bins, lengths)) <= room
    assert bins == pack(lengths, capacity, algorithm, multiple, min_bins=min_bins, seed=3)
    if algorithm != "concatenative" and min_bins == 1 and len(bins) > 1:
        # No two bins could be merged, which holds for every any-fit algorithm.
        lightest = sorted(loads(bins, lengths))[:2]
        assert sum(lightest) > room or algorithm == "balanced"


@QUICK
@given(lengths=LENGTHS, slack=st.integers(0, 80))
def test_first_fit_decreasing_follows_its_definition(lengths: list[int], slack: int) -> None:
    room = max(lengths) + slack
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    assert pack(lengths, room, "first_fit_decreasing") == first_fit_by_hand(order, lengths, room)


@QUICK
@given(lengths=LENGTHS, slack=st.integers(0, 80))
def test_modified_first_fit_decreasing_follows_its_definition(lengths: list[int], slack: int) -> None:
    room = max(lengths) + slack
    actual = pack(lengths, room, "modified_first_fit_decreasing")
    expected = mffd_by_hand(lengths, room)
    # Samples of one length are interchangeable.
    assert [[lengths[i] for i in b] for b in actual] == [[lengths[i] for i in b] for b in expected]


def test_modified_first_fit_decreasing_beats_first_fit_decreasing() -> None:
    # Johnson and Garey's pattern: pairs of small samples belong beside large ones.
    room = 1000
    lengths = [510] * 6 + [270] * 6 + [260] * 6 + [230] * 12
    assert sum(lengths) <= 9 * room
    assert len(pack(lengths, room, "first_fit_decreasing")) == 11
    assert len(pack(lengths, room, "modified_first_fit_decreasing")) < 11


@QUICK
@given(lengths=LENGTHS, slack=st.integers(0, 200), multiple=st.sampled_from([1, 8, 64]), min_bins=st.integers(1, 6))
def test_batched_by_length_bins_hold_their_padded_samples(
    lengths: list[int], slack: int, multiple: int, min_bins: int
) -> None:
    room = -(-(max(lengths) + slack) // multiple) * multiple
    bins = pack(lengths, max(lengths) + slack, PADDED, multiple, min_bins=min(min_bins, len(lengths)))
    assert sorted(i for samples in bins for i in samples) == list(range(len(lengths)))
    padded = [-(-max(lengths[i] for i in samples) // multiple) * multiple for samples in bins]
    assert all(len(samples) * each <= room for samples, each in zip(bins, padded, strict=True))
    if min_bins == 1:  # from the longest down, each bin as full as it can be
        assert all((len(samples) + 1) * each > room for samples, each in zip(bins[:-1], padded, strict=False))


def test_concatenative_keeps_the_order() -> None:
    assert pack([4, 4, 3, 9, 1], 10, "concatenative") == [[0, 1], [2], [3, 4]]


def test_first_fit_shuffle_depends_on_the_seed_only() -> None:
    lengths = [random.Random(0).randint(1, 50) for _ in range(50)]
    assert pack(lengths, 60, "first_fit_shuffle", seed=1) == pack(lengths, 60, "first_fit_shuffle", seed=1)
    assert pack(lengths, 60, "first_fit_shuffle", seed=1) != pack(lengths, 60, "first_fit_shuffle", seed=2)


def test_balanced_fills_the_same_number_of_bins_evenly() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(20, 200) for _ in range(30)]
    fitted, even = (pack(lengths, 1000, name) for name in ("first_fit_decreasing", "balanced"))
    assert len(even) == len(fitted)
    assert max(loads(fitted, lengths)) - min(loads(fitted, lengths)) > 200
    assert max(loads(even, lengths)) - min(loads(even, lengths)) <= 40


def test_balanced_falls_back_where_even_bins_do_not_fit() -> None:
    # Must be 3 + 3 + 3 | 5 + 4; distributed evenly, one bin would hold 5 + 3 + 3.
    lengths = [5, 4, 3, 3, 3]
    assert sorted(loads(pack(lengths, 9, "balanced"), lengths)) == [9, 9]


def test_a_bin_may_use_the_padding_of_its_row() -> None:
    assert len(pack([5, 6], 10, "first_fit_decreasing")) == 2
    assert len(pack([5, 6], 10, "first_fit_decreasing", multiple=4)) == 1  # a row of 12 either way
    assert len(pack([11], 10, "first_fit_decreasing", multiple=4)) == 1


@pytest.mark.parametrize("algorithm", PACKING_ALGORITHMS)
def test_edges(algorithm: str) -> None:
    assert pack([], 10, algorithm) == []
    assert pack([10], 10, algorithm) == [[0]]
    assert len(pack([1] * 7, 100, algorithm, min_bins=7)) == 7


@pytest.mark.parametrize("algorithm", PACKING_ALGORITHMS)
def test_errors(algorithm: str) -> None:
    with pytest.raises(PackingError, match=r"sample 1 has 11 tokens and a bin holds 10 \(2 of 3.*train_mb_tokens"):
        pack([3, 11, 12], 10, algorithm)
    with pytest.raises(PackingError, match="sample 0 has 0 tokens"):
        pack([0], 10, algorithm)
    with pytest.raises(PackingError, match="2 samples cannot fill 3 bins"):
        pack([1, 1], 10, algorithm, min_bins=3)
    with pytest.raises(PackingError, match="capacity 0"):
        pack([1], 0, algorithm)


def test_unknown_algorithm_lists_the_known_ones() -> None:
    with pytest.raises(PackingError, match="modified_ffd.*modified_first_fit_decreasing"):
        pack([1], 10, "modified_ffd")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", PACKING_ALGORITHMS)
def test_a_hundred_thousand_samples_are_no_hang(algorithm: str) -> None:
    """Packing is close to linear: comparing every sample with every bin would take hours."""
    generator = random.Random(0)
    lengths = [max(1, int(8192 * generator.random() ** 2)) for _ in range(100_000)]
    start = time.process_time()  # other processes on the machine do not count
    pack(lengths, 8192, algorithm)
    assert time.process_time() - start < 60.0


def test_spread_is_within_four_thirds_of_the_best() -> None:
    bins = spread([0, 1, 2, 3, 4], [7.0, 6.0, 5.0, 4.0, 3.0], 2)
    assert bins == [[0, 3, 4], [1, 2]]  # 14 and 11; the best is 13 and 12


def test_planning_does_not_import_torch() -> None:
    code = "import sys, grpo_mcore.batching; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
