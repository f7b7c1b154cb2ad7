from __future__ import annotations

import pytest

from grpo_mcore.rollout.trajectory import fingerprint, said_already

END, EOS = [7, 9], 7


def test_fingerprints_tell_sequences_apart() -> None:
    names = {fingerprint(ids) for ids in ([], [0], [0, 0], [1, 2], [2, 1], [1, 2, 3], [2**40])}
    assert len(names) == 7 and fingerprint([1, 2]) == fingerprint((1, 2))


@pytest.mark.parametrize(
    ("ids", "stop_token", "count"),
    [
        ([7, 9, 4], 7, 1),
        ([7, 9, 4], None, 0),
        ([7, 9, 4], 5, 0),
        ([9, 7, 4], 7, 0),  # the template goes on otherwise than it ends
        ([7, 9, 4], 9, 0),  # in the middle of the end, and no end-of-sequence token
    ],
)
def test_an_end_that_was_said_is_not_said_twice(ids: list[int], stop_token: int | None, count: int) -> None:
    assert said_already(ids, END, stop_token, EOS) == count


def test_an_end_of_several_tokens_that_the_eos_token_closes() -> None:
    assert said_already([9, 7, 4], [9, 7], 7, EOS) == 2
