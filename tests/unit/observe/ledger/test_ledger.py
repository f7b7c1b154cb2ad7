"""The ledger on disk, and the audit: it passes what is right and finds what is lost, doubled or too old."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.observe import Ledger, LedgerError, audit, read_ledger


def dispatched(*uids: str, version: int = 1) -> dict[str, Any]:
    return {"event": "dispatched", "uids": uids, "version": version}


def finished(uid: str, version: int = 1) -> dict[str, Any]:
    return {"event": "finished", "uid": uid, "version": version, "scored": 4}


def trained(step: int, *uids: str) -> dict[str, Any]:
    return {"event": "trained", "uids": uids, "step": step, "version": step}


def started(step: int = 0, kept: int = 0, missing: int = 0) -> dict[str, Any]:
    return {"event": "started", "step": step, "kept": kept, "missing": missing, "max_age": 1}


def ended(data_ended: bool = True) -> dict[str, Any]:
    return {"event": "ended", "why": "", "data_ended": data_ended}


FILTERED = {"event": "filtered", "uid": "b", "why": "equal"}
FAILED = {"event": "failed", "uid": "c", "why": "down"}
RETRIED = {"event": "retried", "uid": "a", "why": "down", "times": 1}
RETURNED = {"event": "returned", "uids": ["d"]}
WHOLE = [
    started(),
    dispatched("a", "b", "c", "d"), RETRIED, finished("b"), FILTERED, FAILED, finished("d"), finished("a"),
    trained(1, "a"), RETURNED,
    dispatched("d", "e", version=2), finished("e", 2), finished("d", 2), trained(2, "d"), trained(3, "e"), ended(),
]  # fmt: skip


def flaws(entries: list[dict[str, Any]]) -> list[str]:
    return [str(flaw) for flaw in audit(entries).flaws]


def test_a_run_that_adds_up() -> None:
    found = audit(WHOLE)
    assert not found.flaws
    assert {fate: count for fate, count in found.fates.items() if count} == {
        "trained on": 3,
        "filtered": 1,
        "failed": 1,
    }
    assert (found.steps, found.starts, found.void, found.by_age) == (3, 1, 0, {0: 2, 1: 1}) and found.retries == 1


@pytest.mark.parametrize(
    ("entries", "flaw"),
    [
        ([*WHOLE[:-1], dispatched("a")], "a: twice: dispatched at step 3, after it was trained on at step 1"),
        ([*WHOLE[:-1], dispatched("b")], "b: twice: dispatched at step 3, after it was filtered at step 0"),
        ([*WHOLE[:2], trained(1, "a")], "a: trained on at step 1, after it was under way at step 0"),
        ([*WHOLE[:2], dispatched("a")], "a: dispatched at step 0, after it was under way at step 0"),
        ([started(), trained(1, "x")], "x: trained on at step 1, without having been dispatched"),
        ([*WHOLE[:9], ended()], "d: lost: it is finished, and the data has ended"),
        ([started(), dispatched("a"), ended()], "a: lost: it is under way, and the data has ended"),
        ([*WHOLE[:10], dispatched("e")], "d: lost: it went back to the data, and others came instead"),
        ([*WHOLE[:-2], trained(4)], "step 4 follows step 2"),
        ([started(), dispatched("a"), finished("a"), trained(1), trained(2), trained(3, "a")],
         "a: trained on at age 2, the limit is 1"),
        ([started(3, 0, 7)], "the 7 entries before the resume are not in this ledger"),
    ],
)  # fmt: skip
def test_what_does_not_add_up_is_named(entries: list[dict[str, Any]], flaw: str) -> None:
    assert flaws(entries) == [flaw]


def test_a_resume_takes_back_what_came_after_its_checkpoint() -> None:
    """Prompts that were in flight at the checkpoint are generated again, before any other."""
    before = [started(), dispatched("a", "b", "c"), finished("a"), finished("b"), trained(1, "a")]
    crashed = [*before, trained(2, "b"), dispatched("d", version=3)]
    resumed = [*crashed, started(1, kept=5), dispatched("b", "c", "d", version=2)]
    assert flaws(resumed) == [] and audit(resumed).void == 2
    done = [*resumed, *(finished(uid, 2) for uid in "bcd"), trained(2, "b"), trained(3, "c", "d"), ended()]
    assert flaws(done) == []
    assert flaws([*crashed, started(1, kept=5), dispatched("c", "d", version=2)]) == [
        "b: lost: it went back to the data, and others came instead"
    ]
    assert flaws([*crashed, started(1, kept=5), dispatched("a", version=2)]) == [
        "a: twice: dispatched at step 1, after it was trained on at step 1"
    ]
    again = [*done[:-1], started(1, kept=5), dispatched("b", "c", "x", version=2)]  # from the same checkpoint once more
    assert flaws(again) == [] and audit(again).void == len(again) - 7
    assert flaws([*done, started(0), dispatched("a")]) == []  # a new run in an old folder


def test_the_file_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ledger.jsonl"
    first = Ledger(path, step=0, kept=0, max_age=1)
    first.write("dispatched", uids=("a", "b"), version=1)
    first.write("finished", uid="a", version=1, scored=4)
    first.write("trained", uids=("a",), step=1, version=1)
    kept = first.sync()
    first.retried("b", "down")
    first.retried("b", "down again")
    first.close()
    with path.open("a") as file:
        file.write('{"event": "trai')  # killed here
    assert [entry["event"] for entry in read_ledger(path)][-1] == "retried" and read_ledger(path)[-1]["times"] == 2
    second = Ledger(path, step=1, kept=kept, max_age=1)
    second.write("dispatched", uids=("b", "c"), version=2)
    second.close()
    entries = read_ledger(path)
    assert kept == 4 and entries[6]["event"] == "started" and entries[6]["kept"] == 4 and second.entries == 8
    assert flaws(entries) == []
    elsewhere = Ledger(tmp_path / "other.jsonl", step=1, kept=kept, max_age=1)
    elsewhere.close()
    assert flaws(read_ledger(elsewhere.path)) == ["the 4 entries before the resume are not in this ledger"]


def test_a_resume_says_whose_ledger_it_finds(tmp_path: Path, package_log: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ledger.jsonl"
    first = Ledger(path, step=0, kept=0, max_age=1)
    first.write("dispatched", uids=["a"], version=0)
    kept = first.sync()
    last = first.last_digest(kept)
    first.close()
    again = Ledger(path, step=1, kept=kept, max_age=1, last=last)
    again.close()
    assert package_log.text == "" and again.entries == kept + 1
    path.unlink()
    Ledger(path, step=1, kept=kept, max_age=1, last=last).close()
    assert f"{path} lacks 2 of the 2 entries from before the checkpoint" in package_log.text
    package_log.clear()
    path.write_text('{"event": "started"}\n' * 5)
    other = Ledger(path, step=1, kept=kept, max_age=1, last=last)
    other.close()
    assert f"{path} is the ledger of another run: it is now ledger.jsonl.of-another-run-" in package_log.text
    assert "lacks 2 of the 2" in package_log.text and other.entries == 1
    (aside,) = tmp_path.glob("*.of-another-run-*")
    assert aside.read_text().count("started") == 5
    path.write_text('{"event": "started"}\n' * 5)
    Ledger(path, step=1, kept=kept, max_age=1).close()  # of a checkpoint that an earlier version wrote
    assert path.read_text().count("\n") == 6


def test_what_is_no_ledger_says_where(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for line in ("{\n", "[]\n", '{"step": 1}\n'):
        path.write_text('{"event": "saved", "step": 1}\n' + line)
        with pytest.raises(LedgerError, match="ledger.jsonl:2: "):
            read_ledger(path)


def test_a_damaged_ledger_is_named_or_tells_the_same_fates(tmp_path: Path) -> None:
    """Flip a bit of every fifth byte and of each comma (it becomes a form feed); take lines away, and double them."""
    path = tmp_path / "ledger.jsonl"
    lines = [json.dumps(entry).encode() + b"\n" for entry in WHOLE]
    whole = b"".join(lines)
    path.write_bytes(whole)
    right = audit(read_ledger(path)).fates
    bits = [(place, 1 << place % 8) for place in range(0, len(whole), 5)]
    bits += [(place, 0x20) for place in range(len(whole)) if whole[place] == ord(",")]
    flipped = [whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :] for place, bit in bits]
    shorter = [b"".join(lines[:line] + lines[line + 1 :]) for line in range(len(lines))]
    longer = [b"".join(lines[: line + 1] + lines[line:]) for line in range(len(lines))]
    named = 0
    for damaged in (*flipped, *shorter, *longer):
        path.write_bytes(damaged)
        try:
            found = audit(read_ledger(path))
        except LedgerError:
            named += 1
        else:
            assert found.flaws or found.fates == right, damaged
    assert named > len(flipped) / 2
    for end in range(0, len(whole), 20):  # cut off by a kill: what is left is read
        path.write_bytes(whole[:end])
        assert len(read_ledger(path)) == whole[:end].count(b"\n")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", step=0, kept=0, max_age=0)
    for entry in WHOLE[1:9]:
        ledger.write(**{"event": entry["event"]}, **{name: value for name, value in entry.items() if name != "event"})
    ledger.close()
    assert main(["ledger", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "resumes: 0\n" in out and "1 prompts trained on" in out and "nothing is lost" in out and "1 at age 0" in out
    with ledger.path.open("a") as file:
        file.write('{"event": "ended", "why": "", "data_ended": true}\n')
    assert main(["ledger", str(ledger.path)]) == 1
    assert "wrong: d: lost" in capsys.readouterr().out
    assert main(["ledger", str(tmp_path / "none")]) == 1
    assert "there is no" in capsys.readouterr().err


def test_what_was_started_anew_counts_though_a_resume_takes_back_what_came_of_it() -> None:
    restart = {"event": "restarted", "worker": "environment-math", "why": "it died"}
    found = audit([started(), restart, started(), dispatched("a"), finished("a"), trained(1, "a"), restart, ended()])
    assert not found.flaws and (found.restarts, found.void, found.starts) == (2, 2, 1)


@pytest.mark.parametrize(
    "entry",
    [{"event": "dispatched"}, {"event": "dispatched", "uids": 7}, {"event": "trained", "uids": ["a"]},
     {"event": "started", "step": 0, "kept": "x"}, {"event": "dispatched", "uids": [["a"]]}, {"event": "trainee"}],
)  # fmt: skip
def test_an_entry_that_no_run_has_written_is_named(entry: dict[str, Any]) -> None:
    with pytest.raises(LedgerError, match="no entry of a ledger"):
        audit([started(), entry])
