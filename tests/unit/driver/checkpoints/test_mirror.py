"""The mirror of a run's checkpoints: whole or not there, whatever fails and when; one run writes to it; a machine
without checkpoints goes on from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.driver.checkpoints import lease, object_store
from grpo_mcore.driver.checkpoints import mirror as module
from grpo_mcore.driver.checkpoints.checkpoint_files import ResumeError, damage
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.driver.checkpoints.lease import FolderInUse, Holder
from grpo_mcore.driver.checkpoints.mirror import LEASE, Mirror, MirrorLease
from grpo_mcore.driver.checkpoints.object_store import RemoteStore, StoreError, _advice
from grpo_mcore.recipe import CheckpointingConfig
from tests.clocks import StandingClock
from tests.unit.driver.checkpoints.saving import save


class Store(RemoteStore):
    """A store in memory that can be out of order. `works`: number of operations that still succeed; `dies`: all that
    follow fail, else one does."""

    def __init__(self, like: Store | None = None) -> None:
        from obstore.store import MemoryStore

        self.works: float = float("inf")
        self.dies = True
        self.operations = 0
        super().__init__("s3://bucket/run", store=like._store if like else MemoryStore())

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        self.operations += 1
        if self.operations > self.works:
            if not self.dies:
                self.works = float("inf")
            raise StoreError(f"cannot {what} {self.address}: out of order")
        with super()._explained(what):
            yield


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITS_S", (0.001,))
    monkeypatch.setattr(lease, "SETTLE_S", 0.0)
    monkeypatch.setattr(object_store, "READ_AGAIN_S", (0.0,))


def manager(folder: Path, store: RemoteStore, **config: Any) -> CheckpointManager:
    settings = {"checkpoint_dir": str(folder), "mirror": store.address, "mirror_wait_s": 20.0, **config}
    return CheckpointManager(CheckpointingConfig(**settings), store=store)


def run(folder: Path, store: Store, *steps: int, resume: Any = None, **config: Any) -> CheckpointManager:
    """Save these steps as a run does, of which step N is better than the ones before."""
    checkpoints = manager(folder, store, **config)
    checkpoints.open(resume)
    with checkpoints.held():
        mirror = checkpoints.mirror
        assert mirror is not None
        mirror.log_dir = folder / "logs" / "exp_001"
        (mirror.log_dir / "samples" / "train").mkdir(parents=True, exist_ok=True)
        for step in steps:
            (folder / "ledger.jsonl").write_text("".join(f"entry of step {n}\n" for n in range(1, step + 1)))
            (mirror.log_dir / "metrics.jsonl").write_text(f"up to step {step}\n")
            (mirror.log_dir / "samples" / "train" / f"step_{step:06d}.parquet").write_bytes(bytes(step))
            save(checkpoints, step, val_accuracy=step / 100)
        mirror.finish()
    return checkpoints


def settled(mirror: Mirror) -> dict[str, str]:
    """Return what the mirror lacks, once an upload has succeeded or failed."""
    while "it is being uploaded" in str(outages := mirror.outages()):
        mirror.finish()
    return outages


def resumed(folder: Path, store: Store, **config: Any) -> str | None:
    """Return the checkpoint that a machine without any takes from the store."""
    checkpoints = manager(folder, store, **config)
    checkpoints.open("auto", trains=False)
    if checkpoints.resumed_from is None:
        return None
    assert damage(checkpoints.resumed_from) is None
    assert not list(folder.glob("tmp_*"))
    return checkpoints.resumed_from.name


def test_a_machine_without_checkpoints_goes_on_from_the_mirror(tmp_path: Path) -> None:
    store = Store()
    run(tmp_path / "a", store, 1, 2)
    there = manager(tmp_path / "b", store)
    there.open(True)
    assert there.resumed_from == tmp_path / "b" / "step_2"
    assert there.read(there.resumed_from) == there.read(tmp_path / "a" / "step_2")
    with there.held():
        assert (tmp_path / "b" / "ledger.jsonl").read_text() == (tmp_path / "a" / "ledger.jsonl").read_text()
        assert there.mirror is not None
        there.mirror.fetch_log(tmp_path / "b" / "exp_001")
        save(there, 3)
        there.mirror.finish()
    files = sorted(path.name for path in (tmp_path / "b" / "exp_001").rglob("*.*"))
    assert files == ["metrics.jsonl", "step_000001.parquet", "step_000002.parquet"]
    assert resumed(tmp_path / "c", store) == "step_3"
    assert LEASE not in store.objects("")


def test_a_newer_checkpoint_of_the_mirror_is_taken(tmp_path: Path) -> None:
    store = Store()
    run(tmp_path / "a", store, 1)
    run(tmp_path / "b", store, 2, resume=True)
    assert (tmp_path / "b" / "step_1").is_dir()
    (tmp_path / "a" / "ledger.jsonl").write_text("entry of step 1\nvoid\n")
    back = manager(tmp_path / "a", store)
    back.open(True)
    assert back.resumed_from == tmp_path / "a" / "step_2"
    assert (tmp_path / "a" / "ledger.jsonl").read_text() == (tmp_path / "b" / "ledger.jsonl").read_text()
    (aside,) = (tmp_path / "a").glob("ledger.jsonl.before-*")
    assert aside.read_text().endswith("void\n")


@pytest.mark.parametrize("dies", [True, False])
def test_whatever_fails_the_mirror_is_whole_or_not_there(tmp_path: Path, dies: bool) -> None:
    """Each operation of an upload fails, once or with all that follow. In the first case everything arrives."""
    begin = Store()
    run(tmp_path / "a", begin, 1)
    saved = {name: begin.read(name) for name in begin.objects("")}
    failed = 0
    for works in range(200):
        store, folder = Store(), tmp_path / f"{works}"
        for name, got in saved.items():
            store.write(name, got[0] if got else b"")
        checkpoints = manager(folder, store, keep_top_k=1, mirror_wait_s=0.005 if dies else 20.0)
        checkpoints.open(True)
        with checkpoints.held():
            store.operations, store.works, store.dies = 0, works, dies
            save(checkpoints, 2, val_accuracy=0.5)
            assert checkpoints.mirror is not None
            if not dies:
                checkpoints.mirror.finish()
            missing = settled(checkpoints.mirror)
        over, reader = store.operations <= works, Store(store)
        expected = "step_1" if missing else "step_2"
        assert resumed(tmp_path / f"from-{works}", reader) == expected
        if not dies:
            assert not missing
        elif missing:
            failed += 1
            assert "lacks step_2: cannot" in missing["mirror s3://bucket/run"]
        if over:
            assert reader.folders() == ["logs", "step_2"]
            break
    assert over and failed == (9 if dies else 0), "four files, the ledger, a list of old ones, two beats, the marker"


@pytest.mark.parametrize("name", ["policy/weights", "data.pt", "training_info.json", "digests.json"])
@pytest.mark.parametrize("how", ["gone", "cut", "changed"])
def test_a_damaged_one_is_named_and_the_one_before_is_taken(
    tmp_path: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store()
    run(tmp_path / "a", store, 1, 2)
    data = (store.read(f"step_2/{name}") or (b"", {}))[0]
    if how == "gone":
        store.delete([f"step_2/{name}"])
    else:
        store.write(f"step_2/{name}", data[:-1] if how == "cut" else bytes([data[0] ^ 1]) + data[1:])
    with caplog.at_level("WARNING", "grpo_mcore"):
        assert resumed(tmp_path / "b", store) == "step_1"
    if (name, how) != ("digests.json", "gone"):
        assert f"step_2 of s3://bucket/run is damaged: {name}" in caplog.text
        assert "and step_1 is used" in caplog.text


def test_a_name_that_leaves_the_folder_is_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    run(tmp_path / "a", store, 1, 2)
    digests = json.loads((store.read("step_2/digests.json") or (b"", {}))[0])
    digests["files"]["../../evil"] = {"bytes": 1, "sha256": ""}
    store.write("step_2/digests.json", json.dumps(digests).encode())
    with caplog.at_level("WARNING", "grpo_mcore"):
        assert resumed(tmp_path / "b", store) == "step_1"
    assert "'../../evil', which is no file of a checkpoint" in caplog.text


def test_a_damaged_one_here_is_fetched_again(tmp_path: Path) -> None:
    store = Store()
    run(tmp_path, store, 1, 2)
    (tmp_path / "step_2" / "data.pt").write_bytes(b"")
    assert resumed(tmp_path, store) == "step_2"
    assert (tmp_path / "damaged_step_2").is_dir()


def test_a_file_of_the_log_that_cannot_be_copied_costs_itself_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, folder = Store(), tmp_path / "logs" / "exp_001"
    folder.mkdir(parents=True)
    for name in ("a\nb", "\udcff.txt", "a b#1%"):
        (folder / name).write_text("mine")
    run(tmp_path, store, 1, 2)
    assert resumed(tmp_path / "other", store) == "step_2"
    assert {"a b#1%", "metrics.jsonl"} <= store.objects("logs/exp_001").keys()
    assert [text.partition(" of the run's log")[0] for text in caplog.messages if "lacks" in text] == [
        "the mirror lacks 'a\\nb'", "the mirror lacks '\\udcff.txt'",
    ]  # fmt: skip


def test_the_mirror_keeps_what_the_folder_keeps(tmp_path: Path) -> None:
    store = Store()
    run(tmp_path / "a", store, 1, 2, 3, 4, keep_top_k=2)
    assert store.folders() == ["logs", "step_3", "step_4"]
    run(tmp_path / "b", store, 5, resume=True, keep_top_k=2)  # that folder holds 4 and 5
    assert store.folders() == ["logs", "step_4", "step_5"]
    run(tmp_path / "b", store, 6, resume=True, keep_top_k=1, higher_is_better=False)
    assert store.folders() == ["logs", "step_4", "step_6"], "the best, and the newest"


def test_a_run_that_does_not_resume_refuses_the_mirror_of_another(tmp_path: Path) -> None:
    store = Store()
    run(tmp_path / "a", store, 7)
    with pytest.raises(ResumeError, match="s3://bucket/run holds step_7 of another run: go on from it with --resume"):
        manager(tmp_path / "b", store).open(None)
    with pytest.raises(ResumeError, match="no step_N folder in .* or s3://bucket/run"):
        manager(tmp_path / "b", Store()).open(True)


def test_what_is_newer_than_the_run_is_set_aside(tmp_path: Path) -> None:
    store = Store()
    run(tmp_path / "a", store, 1, 2, 3)
    run(tmp_path / "a", store, resume=tmp_path / "a" / "step_1")
    assert resumed(tmp_path / "b", store) == "step_1"
    assert "abandoned_digests.json" in store.objects("step_3")
    run(tmp_path / "a", store, 2, resume=True)
    assert resumed(tmp_path / "c", store) == "step_2"
    assert "abandoned_digests.json" not in store.objects("step_2")


def test_an_outage_ends_nothing_and_is_made_up_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    run(tmp_path, store, 1)
    store.operations, store.works = 0, 0
    with caplog.at_level("WARNING", "grpo_mcore"):
        lacking = run(tmp_path, store, 2, resume=True, mirror_wait_s=0.01).mirror
    assert lacking is not None
    assert "lacks step_1, step_2: cannot create in_use.json in" in lacking.outages()["mirror s3://bucket/run"]
    assert "out of order; it is tried again, and the run goes on" in caplog.text
    store.works = float("inf")
    run(tmp_path, store, resume=True)
    assert store.folders() == ["logs", "step_1", "step_2"]
    store.operations, store.works = 0, 0
    with pytest.raises(StoreError, match="out of order"):
        manager(tmp_path / "empty", store).open("auto")


@pytest.mark.parametrize("end", ["?x=hidden", "#hidden", "%20hidden"])
def test_an_address_is_another_one_to_no_one(end: str) -> None:
    """obstore would drop what follows, or decode it, and write under another prefix."""
    with pytest.raises(StoreError, match="has a meaning of its own") as refused:
        RemoteStore(f"s3://bucket/run{end}")
    assert f"s3://bucket/run: {end[0]} after it" in str(refused.value) and "hidden" not in str(refused.value)


def test_one_run_writes_to_a_prefix(tmp_path: Path) -> None:
    store = Store()
    first = manager(tmp_path / "a", store)
    first.open(None)
    with first.held():
        with pytest.raises(FolderInUse, match=r"mirror s3://bucket/run is in use by process \d+ on .*choose another"):
            manager(tmp_path / "b", store).open(None)
    manager(tmp_path / "b", store).open(None)


def leave_lease(store: RemoteStore, **changes: Any) -> None:
    holder = dataclasses.replace(Holder.this_process(), **changes)
    store.write(LEASE, json.dumps(dataclasses.asdict(holder) | {"beat": 1}).encode())


def test_a_dead_run_is_replaced(tmp_path: Path) -> None:
    store = Store()
    leave_lease(store, start_tick=1)  # a process of this machine with another start
    assert run(tmp_path / "a", store, 1).mirror is not None
    leave_lease(store, machine="another")  # watched, and stands still
    clock = StandingClock()
    MirrorLease(store, clock=clock).take()
    assert sum(clock.slept) == module.STALE_S


def test_a_run_on_another_machine_that_lives_is_seen(tmp_path: Path) -> None:
    store = Store()
    leave_lease(store, machine="another")

    class Beating(StandingClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            leave_lease(store, machine="another")

    with pytest.raises(FolderInUse, match="is in use by"):
        MirrorLease(store, clock=Beating()).take()


@pytest.mark.parametrize("also", ["a beat whose answer was lost", "another run"])
def test_a_run_that_was_replaced_mirrors_nothing_more(tmp_path: Path, also: str) -> None:
    store = Store()
    checkpoints = manager(tmp_path, store, mirror_wait_s=0.01)
    checkpoints.open(None)
    with checkpoints.held():
        assert checkpoints.mirror is not None
        held = checkpoints.mirror.lease
        leave_lease(store, token="another" if also == "another run" else held._me.token)
        save(checkpoints, 1)  # no beat has come since
        settled(checkpoints.mirror)
        lost = also == "another run"
        assert ("step_1" not in store.folders()) == lost == bool(checkpoints.mirror.outages())
    assert (LEASE in store.objects("")) == lost, "another run's lease stays"


def test_steps_say_what_goes_on(tmp_path: Path) -> None:
    store = Store()
    checkpoints = manager(tmp_path, store, mirror_wait_s=0.01)
    checkpoints.open(None)
    with checkpoints.held():
        mirror = checkpoints.mirror
        assert mirror is not None and mirror.notes() == []
        store.works = store.operations
        save(checkpoints, 1)
        assert settled(mirror)
        assert mirror.notes() == ["not mirrored: step_1"]
        assert mirror.metrics() == {"steps_waiting": 1.0, "uploaded_gb": 0.0, "failing": 1.0}
        store.works = float("inf")
        while mirror.outages():
            mirror.finish()
        assert mirror.notes() == [] and mirror.metrics()["failing"] == 0.0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("Generic S3 error: 404 Not Found: <Code>NoSuchBucket</Code>", "there is no such bucket"),
        ("Error performing PUT x: 403 Forbidden: <Code>AccessDenied</Code>", "access denied; the credentials must"),
        ("403 Forbidden: <Code>InvalidAccessKeyId</Code>", "no valid credentials; set AWS_ACCESS_KEY_ID"),
        ("Error performing PUT http://169.254.169.254/latest/api/token: 403 Forbidden", "no valid credentials"),
        ("HTTP error: error sending request", "the store does not answer; see its endpoint"),
        ("GET https://x/y?sig=SIGNED failed\n\nDebug source: SIGNED", "GET https://x/y?... failed"),
    ],
)
def test_errors_say_what_to_do(error: str, said: str) -> None:
    assert said in _advice(error) and "SIGNED" not in _advice(error)


def test_files_larger_than_a_request_travel_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PIECE_BYTES", 1000)
    store, moved = Store(), list[int]()
    (tmp_path / "file").write_bytes(bytes(range(250)) * 13)
    store.upload("a/file", tmp_path / "file", moved.append)
    assert store.objects("a").keys() == {"file"} and moved == [1000, 1000, 1000, 250]
    store.download({"a/file": (tmp_path / "new" / "file", 3250)}, moved.append)
    assert (tmp_path / "new" / "file").read_bytes() == (tmp_path / "file").read_bytes() and sum(moved) == 6500
    store.works, store.dies = store.operations, False  # the next one fails once, and is read again
    store.download({"a/file": (tmp_path / "again", 3250)}, moved.append)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()
