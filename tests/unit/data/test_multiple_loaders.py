"""One loader per dataset: the batches of the documented example, of the user's functions, and after a resume."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mcore.data import (
    AllTaskProcessedDataset,
    BatchedDataDict,
    DataError,
    DatumSpec,
    MultipleDataloaderWrapper,
    TaskDataSpec,
    build_train_dataloader,
)
from grpo_mcore.data.datasets.rows import Joined
from grpo_mcore.driver.rollouts.prompt_stream import PromptStream

LETTERS, DIGITS = "abcd", "12345678"


def named(datum_dict, task_data_spec, tokenizer, max_seq_length, idx) -> DatumSpec:
    """Process rows {"name": uid}; letters get an extra field."""
    name = datum_dict["name"]
    own = {"case": "lower"} if name in LETTERS else {"stop_strings": ["."]}
    usable = float(name != "x")
    return DatumSpec(
        message_log=[], length=1, extra_env_info={}, loss_multiplier=usable, idx=idx, task_name="t", uid=name, **own
    )


def dataset(names: str) -> AllTaskProcessedDataset:
    return AllTaskProcessedDataset([{"name": name} for name in names], None, TaskDataSpec("t"), named)


def datasets(**more: str) -> dict[str, AllTaskProcessedDataset]:
    return {name: dataset(rows) for name, rows in ({"letters": LETTERS, "digits": DIGITS} | more).items()}


def settings(**changed: Any) -> SimpleNamespace:
    keys = {"shuffle": False, "use_multiple_dataloader": True, "num_prompts_per_dataloader": 2}
    return SimpleNamespace(**keys | {"custom_dataloader": None} | changed)


def loader(prompts: int = 4, seed: int = 0, sets: Any = None, **changed: Any) -> MultipleDataloaderWrapper:
    return build_train_dataloader(sets or datasets(), settings(**changed), prompts, seed)


def uids(batches: Iterator[list[DatumSpec]], count: int) -> list[list[str]]:
    return [[datum["uid"] for datum in batch] for batch in itertools.islice(batches, count)]


EXAMPLE = "examples.custom_dataloader.custom_dataloader.example_custom_dataloader"


@pytest.mark.parametrize("custom", [None, EXAMPLE])
def test_the_documented_batches_of_several_loaders(custom, monkeypatch) -> None:
    batches = uids(loader(custom_dataloader=custom), 6)
    assert batches[:3] == [["a", "b", "1", "2"], ["c", "d", "3", "4"], ["a@2", "b@2", "5", "6"]]
    # Each dataset starts again independently, and no two prompts of the run have the same uid.
    assert batches[3:] == [["c@2", "d@2", "7", "8"], ["a@3", "b@3", "1@2", "2@2"], ["c@3", "d@3", "3@2", "4@2"]]


def test_the_documented_batches_of_one_loader() -> None:
    both = AllTaskProcessedDataset(
        Joined([[{"name": name} for name in names] for names in (LETTERS, DIGITS)]), None, TaskDataSpec("t"), named
    )
    one = build_train_dataloader(both, settings(use_multiple_dataloader=False), 4, seed=0)
    assert uids(iter(one), 9) == [list("abcd"), list("1234"), list("5678")]
    stream = PromptStream(one, max_epochs=2)
    assert [datum["uid"] for datum in stream.take(24)][12:] == [f"{name}@2" for name in LETTERS + DIGITS]
    assert (stream.take(1), stream.epoch) == ([], 2)


def test_the_wrapper_never_ends_and_has_no_length() -> None:
    wrapped = loader()
    assert iter(wrapped) is wrapped and not hasattr(wrapped, "__len__")
    stream = PromptStream(wrapped, max_epochs=1)
    assert len(stream.take(400)) == 400 and stream.epoch == 0
    assert len({datum["uid"] for datum in PromptStream(loader(), 1).take(400)}) == 400


def test_prompts_keep_all_their_fields() -> None:
    batch = next(loader())
    assert [datum.get("case") for datum in batch] == ["lower", "lower", None, None]
    assert [datum.get("stop_strings") for datum in batch] == [None, None, ["."], ["."]]
    assert "stop_strings" not in batch[0] and "case" not in batch[2]
    assert [datum["idx"] for datum in batch] == [0, 1, 0, 1]


def test_unusable_prompts_are_skipped_and_leftover_ones_dropped() -> None:
    wrapped = loader(sets={"letters": dataset("axbxc"), "digits": dataset(DIGITS)})
    assert uids(wrapped, 3) == [["a", "b", "1", "2"], ["a@2", "b@2", "3", "4"], ["a@3", "b@3", "5", "6"]]


def by_reward(data_iterators, dataloaders, expected_num_prompts, reward=0.0, **records):
    """A function with the documented signature that takes digits only, once the reward is high."""
    chosen = ["digits", "digits"] if reward > 0.5 else ["letters", "digits"]
    batches = []
    for name in chosen:
        try:
            batches.append(next(data_iterators[name]))
        except StopIteration:
            data_iterators[name] = iter(dataloaders[name])
            batches.append(next(data_iterators[name]))
    assert sum(len(batch["message_log"]) for batch in batches) == expected_num_prompts
    return BatchedDataDict.from_batches(batches), data_iterators


BY_REWARD = f"{__name__}.by_reward"


def test_a_custom_function_sees_the_latest_records() -> None:
    wrapped = loader(custom_dataloader=BY_REWARD)
    assert uids(wrapped, 1) == [["a", "b", "1", "2"]]
    wrapped.set_records({"reward": 0.9, "loss": 1.0})
    assert uids(wrapped, 2) == [["3", "4", "5", "6"], ["7", "8", "1@2", "2@2"]]
    wrapped.set_records({"reward": 0.1})
    assert uids(wrapped, 1) == [["c", "d", "3@2", "4@2"]]
    assert wrapped.records == {"reward": 0.1, "loss": 1.0}


def test_the_example_that_begins_with_the_easier_dataset() -> None:
    wrapped = loader(custom_dataloader="examples.custom_dataloader.custom_dataloader.easier_first")
    assert uids(wrapped, 1) == [["a", "b", "c", "d"]]
    wrapped.set_records({"accuracy": 0.7, "reward": 0.7})
    assert uids(wrapped, 2) == [["1", "2", "a@2", "b@2"], ["3", "4", "c@2", "d@2"]]


def from_the_start(data_iterators, dataloaders, **_records):
    """Abandon a pass before its end."""
    return next(iter(dataloaders["digits"])), data_iterators


def test_an_abandoned_pass_counts_as_a_pass() -> None:
    wrapped = loader(2, custom_dataloader=f"{__name__}.from_the_start", shuffle=True)
    batches = uids(wrapped, 4)
    assert [uid[1:] for uid, _ in batches] == ["", "@2", "@3", "@4"]
    assert len({uid[0] for uid, _ in batches}) > 1  # each pass has its own order


@pytest.mark.parametrize("taken", range(10))
@pytest.mark.parametrize("custom", [None, BY_REWARD])
def test_a_restored_state_gives_exactly_the_following_batches(taken, custom) -> None:
    """Resume at every point: before the first batch, within and at the end of either dataset, in later passes."""

    def made() -> MultipleDataloaderWrapper:
        return loader(4, seed=3, shuffle=True, custom_dataloader=custom)

    first = made()
    for step in range(taken):
        next(first)
        first.set_records({"reward": step % 3 / 2})
    state = pickle.loads(pickle.dumps(first.state_dict()))
    expected = uids(first, 12)

    restored = made()
    restored.load_state_dict(state)
    assert restored.state_dict() == state  # reading the state before the first batch changes nothing
    assert uids(restored, 12) == expected

    used = made()  # also in a loader that was already used
    uids(used, 5)
    used.load_state_dict(state)
    assert uids(used, 12) == expected


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 6, 11])
def test_a_stream_over_several_loaders_resumes_exactly(taken) -> None:
    stream = PromptStream(loader(seed=5, shuffle=True), 1)
    stream.mark_done(datum["uid"] for datum in stream.take(taken))
    state = pickle.loads(pickle.dumps(stream.state_dict()))
    restored = PromptStream(loader(seed=5, shuffle=True), 1, state)
    assert [datum["uid"] for datum in restored.take(30)] == [datum["uid"] for datum in stream.take(30)]


def test_a_state_of_other_data_is_rejected() -> None:
    state = loader().state_dict()
    with pytest.raises(DataError, match=r"datasets are \['digits', 'more'.*at the checkpoint they were \['digits', 'l"):
        loader(sets={"digits": dataset(DIGITS), "more": dataset(LETTERS)}).load_state_dict(state)
    grown = loader(sets=datasets(letters=LETTERS + "e"))
    grown.load_state_dict(state)
    with pytest.raises(DataError, match="rows is 5, at the checkpoint it was 4"):
        next(grown)
    one = build_train_dataloader(dataset(DIGITS), settings(use_multiple_dataloader=False), 4, 0)
    with pytest.raises(DataError, match="the checkpoint comes from a run with data.use_multiple_dataloader: true"):
        one.load_state_dict(state)
    with pytest.raises(DataError, match="the checkpoint comes from a run with data.use_multiple_dataloader: false"):
        loader().load_state_dict(one.state_dict())


def runs_out(data_iterators, dataloaders, **_records):
    return BatchedDataDict.from_batches([next(data_iterators[name]) for name in dataloaders]), data_iterators


def too_few(data_iterators, dataloaders, **_records):
    return next(data_iterators["digits"]), data_iterators


def a_list(data_iterators, dataloaders, **_records):
    return [next(data_iterators[name]) for name in dataloaders], data_iterators


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("runs_out", r"runs_out let a data loader run out: it must continue with iter\(dataloaders\[name\]\)"),
        ("too_few", "too_few returned 2 prompts where grpo.num_prompts_per_step is 4; there are 2 data loaders"),
        ("a_list", r"a_list must return \(BatchedDataDict.*, data_iterators\), got list"),
    ],
)
def test_errors_of_a_custom_function_name_it(function, message) -> None:
    wrapped = loader(custom_dataloader=f"{__name__}:{function}")
    with pytest.raises(DataError, match=message):
        uids(wrapped, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: loader(custom_dataloader="no.such.function"), "cannot import the custom_dataloader 'no.such"),
        (lambda: loader(num_prompts_per_dataloader=None), "num_prompts_per_dataloader None must be a number that"),
        (lambda: loader(3), "num_prompts_per_dataloader 2 must be a number that divides .*num_prompts_per_step 3"),
        (lambda: loader(sets=dataset(LETTERS)), r"datasets by task name: build_task_data\(..., separate=True\)"),
        (lambda: loader(use_multiple_dataloader=False), "need data.use_multiple_dataloader: true"),
        (lambda: loader(sets=datasets(more="a")), "has 1 usable prompts, fewer than one batch of 2"),
    ],
)
def test_what_cannot_be_loaded(make, message) -> None:
    with pytest.raises(DataError, match=message):
        make()
