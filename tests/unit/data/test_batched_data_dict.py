"""BatchedDataDict: batches as dicts of columns."""

from __future__ import annotations

import pytest
import torch

from grpo_mcore.data import BatchedDataDict, DatumSpec


def batch(**entries) -> BatchedDataDict:
    return BatchedDataDict[DatumSpec]({"idx": [3, 4, 5], "length": torch.tensor([1, 2, 3])} | entries)


def as_lists(found: BatchedDataDict) -> dict[str, list]:
    return {name: values.tolist() if isinstance(values, torch.Tensor) else values for name, values in found.items()}


def test_size_and_different_lengths() -> None:
    assert batch().size == 3 and BatchedDataDict().size == 0
    odd = batch()
    odd["total_reward"] = torch.zeros(2)
    for use in (
        lambda: odd.size,
        lambda: odd.slice(0, 1),
        lambda: odd.select_indices([0]),
        lambda: odd.repeat_interleave(2),
        lambda: BatchedDataDict.from_batches([odd]),
    ):
        with pytest.raises(ValueError, match="idx 3, length 3, total_reward 2"):
            use()
    for wrong in (torch.tensor(1.0), "text", None):
        with pytest.raises(TypeError, match="'name'"):
            _ = batch(name=wrong).size


def test_slice() -> None:
    found = batch().slice(1, 3)
    assert isinstance(found, BatchedDataDict)
    assert as_lists(found) == {"idx": [4, 5], "length": [2, 3]}
    assert batch().slice(2, 2).size == 0
    for start, end in ((0, 4), (-1, 2), (2, 1)):
        with pytest.raises(ValueError, match="batch of 3"):
            batch().slice(start, end)


def test_select_indices() -> None:
    expected = {"idx": [5, 3, 3], "length": [3, 1, 1]}
    assert as_lists(batch().select_indices([2, 0, 0])) == expected
    assert as_lists(batch().select_indices(torch.tensor([2, 0, 0]))) == expected
    assert as_lists(batch().select_indices([])) == {"idx": [], "length": []}
    with pytest.raises(TypeError, match="mask"):
        batch().select_indices(torch.tensor([True, False, True]))


def test_repeat_interleave_copies_items_of_lists() -> None:
    logs = [[{"role": "user"}], [{"role": "user"}], []]
    found = batch(message_log=logs).repeat_interleave(2)
    assert found["idx"] == [3, 3, 4, 4, 5, 5] and found["length"].tolist() == [1, 1, 2, 2, 3, 3]
    found["message_log"][0].append({"role": "assistant"})
    assert [len(log) for log in found["message_log"]] == [2, 1, 1, 1, 0, 0] and len(logs[0]) == 1


def test_from_batches_pads_to_the_widest() -> None:
    ids = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6, 7]])]
    logits = [torch.ones(2, 1, 2), torch.ones(1, 3, 2)]
    parts = [
        {"ids": ids[i], "logits": logits[i], "keep": ids[i] > 2, "name": [str(i)] * len(ids[i]), "x": ids[i][:, 0] / 2}
        for i in (0, 1)
    ]
    found = BatchedDataDict.from_batches(parts, pad_value_dict={"ids": 9})
    assert found.size == 3
    assert found["ids"].tolist() == [[1, 2, 9], [3, 4, 9], [5, 6, 7]] and found["ids"].dtype == torch.int64
    assert found["keep"].tolist() == [[False, False, False], [True, True, False], [True] * 3]
    assert found["logits"].shape == (3, 3, 2) and found["logits"].sum() == 2 * 2 + 3 * 2
    assert found["name"] == ["0", "0", "1"] and found["x"].tolist() == [0.5, 1.5, 2.5]
    with pytest.raises(ValueError, match="at least one batch"):
        BatchedDataDict.from_batches([])
    with pytest.raises(ValueError, match="some lack: extra"):
        BatchedDataDict.from_batches([batch(), batch(extra=[1, 2, 3])])


def test_get_dict_is_a_plain_dict() -> None:
    found = batch().get_dict()
    assert type(found) is dict and found["idx"] == [3, 4, 5]
    found["more"] = []
    assert "more" not in batch()
