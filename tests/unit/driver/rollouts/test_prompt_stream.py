"""Prompts over epochs: each once an epoch, those put back first, and a state to resume from."""

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from grpo_mcore.data import AllTaskProcessedDataset, DataError, TaskDataSpec, build_dataloader
from grpo_mcore.driver.rollouts.prompt_stream import PromptStream


class Loader:
    """Prompts a, b, c, d in batches of 2; its state is the number of batches of the epoch that were taken."""

    def __init__(self) -> None:
        self.behind = 0

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for uids in ("ab", "cd")[self.behind :]:
            self.behind += 1
            yield [{"uid": uid, "length": 1} for uid in uids]
        self.behind = 0

    def state_dict(self) -> dict[str, Any]:
        return {"behind": self.behind}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.behind = state["behind"]


def uids(prompts: list[Any]) -> str:
    return " ".join(prompt["uid"] for prompt in prompts)


def test_a_uid_names_one_prompt_of_the_run() -> None:
    stream = PromptStream(Loader(), max_epochs=2)
    assert uids(stream.take(3)) == "a b c"
    assert uids(stream.take(3)) == "d a@2 b@2"
    assert uids(stream.take(3)) == "c@2 d@2" and stream.take(1) == []


def test_prompts_put_back_come_next_unchanged() -> None:
    stream = PromptStream(Loader(), max_epochs=2)
    stream.take(3)
    taken = stream.take(3)
    stream.put_back([prompt["uid"] for prompt in taken[1:]])
    assert stream.take(4)[:2] == taken[1:]
    assert uids(stream.take(9)) == ""
    stream.put_back([prompt["uid"] for prompt in taken])  # also after the end of the data
    assert uids(stream.take(9)) == "d a@2 b@2"
    with pytest.raises(KeyError):
        stream.mark_done(["elsewhere"])


def test_the_state_holds_prompts_put_back() -> None:
    first = PromptStream(Loader(), max_epochs=2)
    taken = first.take(3)
    first.mark_done("a")
    first.put_back([prompt["uid"] for prompt in taken[1:]])
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = PromptStream(Loader(), max_epochs=2, state=state)
    rest = [uids(stream.take(9)) for stream in (first, second)]
    assert rest == ["b c d a@2 b@2 c@2 d@2"] * 2


def test_prompts_under_way_come_next_in_a_resumed_run() -> None:
    """They come in the order in which they were taken, before those put back, without those that were done."""
    first = PromptStream(Loader(), max_epochs=2)
    under_way = first.take(5)
    first.mark_done(["b", "d"])
    first.put_back([under_way[4]["uid"]])
    second = PromptStream(Loader(), max_epochs=2, state=pickle.loads(pickle.dumps(first.state_dict())))
    assert uids(second.take(99)) == "a c a@2 b@2 c@2 d@2"
    assert uids(first.take(99)) == "a@2 b@2 c@2 d@2"  # the run itself continues after them


def stream_of(answers: Sequence[str], state: Any = None, template: str = "", limit: int = 10) -> PromptStream:
    """Prompts of which each is the template and its answer."""
    rows = [{"question": "q", "answer": answer, "task_name": "t", "uid": f"t:{n}"} for n, answer in enumerate(answers)]

    def process(row: Any, spec: Any, tokenizer: Any, limit: Any, idx: int) -> Any:
        text = template + row["answer"]
        datum = {"length": len(text), "uid": row["uid"], "message_log": [{"content": text}], "extra_env_info": {}}
        return datum | {"loss_multiplier": float(len(text) <= limit), "idx": idx}

    data = AllTaskProcessedDataset(rows, None, None, {"t": (TaskDataSpec("t"), process)}, max_seq_length=limit)
    return PromptStream(build_dataloader(data, 2, True, 0), 2, state)


def test_a_resumed_run_refuses_other_rows_as_many_as_before() -> None:
    before = stream_of("abcd")
    before.take(2)
    state = before.state_dict()
    assert len(stream_of("abcd", state).take(4)) == 4
    with pytest.raises(DataError, match="its rows are not those of the checkpoint .*; restore them"):
        stream_of("abcx", state)
    del state["data"]  # of a checkpoint before this version
    stream_of("abcx", state)


def test_prompts_under_way_are_read_as_this_run_reads_them() -> None:
    """The tokenizer, its template or the task's prompt may be another one since the checkpoint."""
    before = stream_of("abcd")
    taken = before.take(6)
    before.mark_done([prompt["uid"] for prompt in taken[:3]])
    state = pickle.loads(pickle.dumps(before.state_dict()))
    again = stream_of("abcd", state, template="new ").take(3)
    assert uids(again) == uids(taken[3:]) and again[1]["uid"].endswith("@2")
    assert [one["message_log"][0]["content"] for one in again] == [
        "new " + one["message_log"][0]["content"] for one in taken[3:]
    ]


def test_a_prompt_under_way_that_is_too_long_now_is_used_as_it_was() -> None:
    before = stream_of(["a", "long", "c", "d"])
    before.take(4)
    again = stream_of(["a", "long", "c", "d"], before.state_dict(), limit=2).take(4)
    assert sorted(one["message_log"][0]["content"] for one in again) == ["a", "c", "d", "long"]
