"""Batches are full, ordered by the seed, and can be resumed at any point."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator

import pytest
import torch

from grpo_mcore.data import AllTaskProcessedDataset, DataError, DatumSpec, TaskDataSpec, build_dataloader, task_datasets


def by_length(datum_dict, task_data_spec, tokenizer, max_seq_length, idx) -> DatumSpec:
    """Process rows {"length": n}."""
    n = datum_dict["length"]
    by_length.calls += 1
    return DatumSpec(
        message_log=[{"role": "user", "content": "", "token_ids": torch.arange(n)}],
        length=n,
        extra_env_info={},
        loss_multiplier=float(n < max_seq_length),
        idx=idx,
        task_name="t",
        uid=f"t:{idx}",
    )


by_length.calls = 0


def dataset(count: int, too_long: tuple[int, ...] = ()) -> AllTaskProcessedDataset:
    rows = [{"length": 50 if n in too_long else 5, "task_name": "t"} for n in range(count)]
    return AllTaskProcessedDataset(rows, None, None, {"t": (TaskDataSpec("t"), by_length)}, max_seq_length=10)


def forever(loader) -> Iterator[list[str]]:
    while True:
        for batch in loader:
            yield [datum["uid"] for datum in batch]


@pytest.mark.parametrize("at_once", [True, False])
def test_batches_skip_excluded_prompts_and_leftover_prompts_are_counted(monkeypatch, caplog, at_once):
    monkeypatch.setattr(task_datasets, "CHECK_AT_ONCE", 100 if at_once else 0)
    caplog.set_level("INFO")
    data = dataset(23, too_long=(0, 3, 4, 9))
    loader = build_dataloader(data, batch_size=4, shuffle=True, seed=1)
    batches = [[datum["uid"] for datum in batch] for batch in loader]
    assert [len(batch) for batch in batches] == [4] * 4
    seen = [uid for batch in batches for uid in batch]
    assert len(set(seen)) == 16 and not set(seen) & {"t:0", "t:3", "t:4", "t:9"}
    assert loader.batch_sampler.dropped == 3 and len(loader) == 4
    assert data.excluded.count == 4 and set(data.excluded.uids) == {"t:0", "t:3", "t:4", "t:9"}
    assert (data.excluded.checked, data.excluded.total) == (23, 23)
    assert "4 of 23 prompts excluded as too long or invalid: t:" in caplog.text
    assert "3 rows did not fill a batch and were dropped" in caplog.text


def test_validation_keeps_the_order_and_the_last_smaller_batch():
    loader = build_dataloader(dataset(7, too_long=(1,)), 4, shuffle=False, seed=1, drop_last=False)
    for _ in range(2):
        batches = [[datum["uid"] for datum in batch] for batch in loader]
        assert batches == [["t:0", "t:2", "t:3", "t:4"], ["t:5", "t:6"]]
    assert len(loader) == 2 and loader.batch_sampler.dropped == 0


def test_the_seed_determines_a_different_order_for_each_epoch():
    def epochs(seed: int) -> list[list[str]]:
        loader = build_dataloader(dataset(16), 4, shuffle=True, seed=seed)
        return [[uid for batch in [[d["uid"] for d in b] for b in loader] for uid in batch] for _ in range(3)]

    first = epochs(5)
    assert first == epochs(5) != epochs(6)
    assert len({tuple(epoch) for epoch in first}) == 3
    assert all(sorted(epoch) == sorted(first[0]) for epoch in first)


@pytest.mark.parametrize("taken", range(11))
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_resumed_loader_gives_exactly_the_following_batches(taken, drop_last):
    """Resume at every point: before the first batch, within an epoch, after its last batch, in later epochs."""

    def loader():
        return build_dataloader(dataset(18, too_long=(2, 11)), 4, shuffle=True, seed=3, drop_last=drop_last)

    first = loader()
    batches = forever(first)
    for _ in range(taken):
        next(batches)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    expected = list(itertools.islice(batches, 10))

    resumed = loader()
    resumed.load_state_dict(copy.deepcopy(state))
    assert resumed.state_dict() == state  # reading the state before the first batch changes nothing
    assert list(itertools.islice(forever(resumed), 10)) == expected
    assert resumed.batch_sampler.dropped == first.batch_sampler.dropped


def test_a_state_at_the_end_of_an_epoch_resumes_with_the_next():
    loader = build_dataloader(dataset(8), 4, shuffle=True, seed=3)
    assert len(list(loader)) == 2
    state = loader.state_dict()
    expected = list(itertools.islice(forever(loader), 4))
    resumed = build_dataloader(dataset(8), 4, shuffle=True, seed=3)
    resumed.load_state_dict(state)
    assert list(itertools.islice(forever(resumed), 4)) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"count": 9}, "rows is 9, at the checkpoint it was 8"),
        ({"seed": 4}, "seed is 4, at the checkpoint it was 3"),
        ({"shuffle": False}, "shuffle is False, at the checkpoint it was True"),
    ],
)
def test_a_state_of_other_data_is_rejected(changed, message):
    settings = {"count": 8, "seed": 3, "shuffle": True}

    def loader(count, seed, shuffle):
        return build_dataloader(dataset(count), 4, shuffle=shuffle, seed=seed)

    first = loader(**settings)
    next(iter(first))
    other = loader(**{**settings, **changed})
    other.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match=message):
        next(iter(other))


def test_fewer_prompts_than_a_batch_is_an_error(monkeypatch):
    with pytest.raises(DataError, match="has 3 usable prompts, fewer than one batch of 4.*1 of 4 prompts excluded"):
        build_dataloader(dataset(4, too_long=(0,)), 4, shuffle=True, seed=0)
    monkeypatch.setattr(task_datasets, "CHECK_AT_ONCE", 0)
    with pytest.raises(DataError, match="a whole epoch gave no batch of 4: 1 of 4 prompts excluded"):
        list(build_dataloader(dataset(4, too_long=(0,)), 4, shuffle=True, seed=0))


def test_no_usable_row_and_no_row_are_errors():
    with pytest.raises(
        DataError,
        match="no usable prompt is left: 2 of 2 prompts excluded.*limit is 10 tokens, and the shortest prompt has",
    ):
        dataset(2, too_long=(0, 1))
    with pytest.raises(DataError, match="the dataset is empty"):
        dataset(0)


def test_an_unknown_task_names_the_known_ones(monkeypatch):
    processors = {"t": (TaskDataSpec("t"), by_length)}
    with pytest.raises(DataError, match=r"row 0: no processor for task_name 'u', only \['t'\]"):
        AllTaskProcessedDataset([{"task_name": "u"}], None, None, processors, max_seq_length=10)


@pytest.mark.parametrize(("keep_rows", "calls"), [(100, 12), (0, 36)])
def test_rows_are_tokenised_once_within_the_cache_limit(monkeypatch, keep_rows, calls):
    monkeypatch.setattr(task_datasets, "KEEP_ROWS", keep_rows)
    by_length.calls = 0
    loader = build_dataloader(dataset(12), 4, shuffle=True, seed=0)
    for batch in itertools.chain(loader, loader):
        batch[0]["message_log"].append({"role": "assistant", "content": "mine"})
        batch[0]["extra_env_info"]["note"] = "mine"
    assert by_length.calls == calls
    assert all(len(datum["message_log"]) == 1 and not datum["extra_env_info"] for batch in loader for datum in batch)
