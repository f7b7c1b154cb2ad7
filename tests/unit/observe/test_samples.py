"""The samples of a run as files: whole or not there, never in the way of the run."""

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from grpo_mcore.observe.run_folder import read_token_texts
from grpo_mcore.observe.samples import (
    NEWEST,
    QUEUED,
    WRITTEN_TOGETHER,
    SampleFiles,
    SamplesError,
    read_samples,
    sample_steps,
)
from tests.waiting import wait_until

SPAN = {"version": 3, "first": 0, "end": 3}
TURN = {"role": "assistant", "text": "a", "tokens": 3, "generated": True}


def row(uid: str, reward: float | None = 1.0, **more: Any) -> dict[str, Any]:
    tokens = {"token_ids": np.array([5, 7, 5]), "engine_logprobs": np.array([0, -0.5, -1.25], dtype=np.float32)}
    return {"uid": uid, "reward": reward, "versions": [SPAN], "turns": [TURN], **tokens, **more}


def files(run: Path, max_bytes: float = 1e9) -> SampleFiles:
    return SampleFiles(run / "samples", lambda token: f"<{token}>", max_bytes)


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    writer = files(tmp_path)
    writer.add("train", 4, lambda: [row("left", None, left_out="equal")], last=False)
    policy = np.array([0, -0.5, -1.0], dtype=np.float32)
    writer.add("train", 4, lambda: [row("a", policy_logprobs=policy)])
    writer.add("validation", 4, lambda: [row("v")])
    writer.close()
    assert list(sample_steps(tmp_path, "train")) == list(sample_steps(tmp_path, "validation")) == [4]
    left, trained = read_samples(sample_steps(tmp_path, "train")[4])
    assert (left["uid"], left["reward"], left["left_out"], left["policy_logprobs"]) == ("left", None, "equal", None)
    assert (trained["reward"], trained["policy_logprobs"]) == (1.0, [0, -0.5, -1.0])
    assert (trained["token_ids"], trained["engine_logprobs"]) == ([5, 7, 5], [0, -0.5, -1.25])
    assert (trained["versions"], trained["turns"]) == ([SPAN], [TURN | {"flag": None, "images": None}])
    with (tmp_path / "samples" / "tokens.jsonl").open("ab") as tokens:
        tokens.write(b"\xff\n[]\nnull\n[8]")
    assert read_token_texts(tmp_path / "samples") == {5: "<5>", 7: "<7>"}
    assert writer.dropped == 0
    file = sample_steps(tmp_path, "train")[4]
    for cut in (100, 0):
        file.write_bytes(file.read_bytes()[:cut])
        with pytest.raises(SamplesError, match=f"{file.name} cannot be read: .*; it may be cut off: copy it again"):
            read_samples(file, ["uid"])


def test_samples_are_made_one_by_one_and_few_are_held(tmp_path: Path) -> None:
    """A step that fails in the middle leaves no file, and neither does one that does not end."""
    held = Counter[str]()

    class Tokens(np.ndarray):
        pass

    def rows(count: int, fails: bool = False) -> Iterator[dict[str, Any]]:
        for number in range(count):
            tokens = np.array([5, 7, 5]).view(Tokens)
            held["rows"] += 1
            weakref.finalize(tokens, held.subtract, ["rows"])
            assert held["rows"] <= WRITTEN_TOGETHER + 2
            yield row(f"p{number}", None, token_ids=tokens)
        if fails:
            raise OSError("the store is gone")

    writer = files(tmp_path)
    writer.add("train", 1, partial(rows, 1000))
    writer.add("train", 2, partial(rows, 100, fails=True))
    writer.add("train", 3, partial(rows, 100), last=False)
    writer.close()
    assert writer.dropped == 1
    assert [path.name for path in (tmp_path / "samples" / "train").iterdir()] == ["step_000001.parquet"]
    uids = [sample["uid"] for sample in read_samples(sample_steps(tmp_path, "train")[1], ["uid"])]
    assert uids == [f"p{number}" for number in range(1000)]


def test_a_resumed_run_replaces_its_steps(tmp_path: Path) -> None:
    for uid in ("first", "again"):
        writer = files(tmp_path)
        writer.add("train", 1, lambda uid=uid: [row(uid)])  # type: ignore[misc]
        writer.close()
    assert [sample["uid"] for sample in read_samples(sample_steps(tmp_path, "train")[1], ["uid"])] == ["again"]
    assert len((tmp_path / "samples" / "tokens.jsonl").read_text().splitlines()) == 2


def test_an_error_is_said_once_and_the_next_step_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def lost() -> list[dict[str, Any]]:
        raise OSError("the disk is gone")

    with caplog.at_level(logging.WARNING):
        writer = files(tmp_path)
        writer.add("train", 1, lost)
        writer.add("train", 2, lost)
        writer.add("train", 3, lambda: [row("a")])
        writer.close()
    assert [record.message.count("the disk is gone") for record in caplog.records] == [1]
    assert list(sample_steps(tmp_path, "train")) == [3] and writer.dropped == 2


def test_a_writer_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    free, begun = threading.Event(), threading.Event()

    def slow() -> list[dict[str, Any]]:
        begun.set()
        free.wait(30)
        return [row("a")]

    writer = files(tmp_path)
    writer.add("train", 1, slow)
    assert begun.wait(30)
    for step in range(QUEUED + 3):
        writer.add("train", 2 + step, lambda: [])
    assert writer.dropped == 3
    free.set()
    writer.close()
    assert list(sample_steps(tmp_path, "train")) == [1]


def test_older_files_make_room(tmp_path: Path) -> None:
    writer = files(tmp_path)
    writer.add("train", 1, lambda: [row("a")])
    writer.close()
    size = sample_steps(tmp_path, "train")[1].stat().st_size
    writer = files(tmp_path, max_bytes=(NEWEST + 4.5) * size)
    for step in range(2, NEWEST + 6):
        writer.add("train", step, lambda: [row("a")])
    writer.close()
    kept = list(sample_steps(tmp_path, "train"))
    assert kept == [2, 4, *range(6, NEWEST + 6)]  # 1, 3 and 5 made room


def test_the_folder_is_a_table_while_a_file_is_being_written(tmp_path: Path) -> None:
    """pandas found no Parquet in the one that was not complete, and so did whoever read the folder of a killed run."""
    writer = files(tmp_path)
    writer.add("train", 1, lambda: [row("a")])
    writer.add("train", 2, lambda: [row("b")], last=False)
    folder = tmp_path / "samples" / "train"
    wait_until(lambda: list(folder.glob("*2.tmp")))
    assert pq.read_table(folder)["uid"].to_pylist() == ["a"]  # as pandas reads it
    writer.close()


def test_a_kill_leaves_whole_files(tmp_path: Path) -> None:
    """A file that was not finished has another name, and a line of tokens that was cut off is left out."""
    writer = files(tmp_path)
    writer.add("train", 1, lambda: [row("a")])
    writer.close()
    folder = tmp_path / "samples"
    (folder / "train" / "step_000002.tmp").write_bytes(b"PAR1")
    with (folder / "tokens.jsonl").open("a") as file:
        file.write('[9, "ni')
    assert pq.read_metadata(sample_steps(tmp_path, "train")[1]).num_rows == 1
    assert list(sample_steps(tmp_path, "train")) == [1] and sorted(read_token_texts(folder)) == [5, 7]
