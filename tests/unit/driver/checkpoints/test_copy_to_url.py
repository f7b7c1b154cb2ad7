"""Copies of a run's checkpoints at a URL: whole or not there, whatever fails and when; each run writes below its own
id; a machine without checkpoints goes on from them."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from grpo_mcore.driver.checkpoints import copy_to_url
from grpo_mcore.driver.checkpoints.checkpoint_files import ResumeError, damage
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.driver.checkpoints.copy_to_url import ID_FILE, CopyError, advice, fetch_files, read, sizes_of
from grpo_mcore.recipe import CheckpointingConfig
from tests.unit.driver.checkpoints.saving import save

URL = "s3://bucket/run"
OPERATIONS = ("put", "get", "get_range", "list", "delete")


class Outage:
    """Lets obstore fail. `works`: number of operations that still succeed; `dies`: all that follow fail, else one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.works, self.dies, self.seen = float("inf"), True, False
        for name in OPERATIONS:
            patch.setattr(obstore, name, self._failing(getattr(obstore, name)))

    def _failing(self, operation: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.works -= 1
            if self.works < 0:
                self.seen = True
                self.works = self.works if self.dies else float("inf")
                raise GenericError("out of order")
            return operation(*args, **options)

        return call


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Outage:
    return Outage(monkeypatch)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_to_url, "WAIT_S", 0.001)
    monkeypatch.setattr(copy_to_url, "LONGEST_WAIT_S", 0.001)


def manager(folder: Path, store: Any, **config: Any) -> CheckpointManager:
    settings = {"checkpoint_dir": str(folder), "mirror": URL, "mirror_wait_s": 20.0, **config}
    return CheckpointManager(CheckpointingConfig(**settings), store=store)


def run(folder: Path, store: Any, *steps: int, resume: Any = None, **config: Any) -> CheckpointManager:
    """Save these steps as a run does, of which step N is better than the ones before."""
    checkpoints = manager(folder, store, **config)
    checkpoints.open(resume)
    with checkpoints.held():
        assert checkpoints.copy is not None
        log = checkpoints.copy.log_dir = folder / "logs" / "exp_001"
        (log / "samples" / "train").mkdir(parents=True, exist_ok=True)
        for step in steps:
            (folder / "ledger.jsonl").write_text("".join(f"entry of step {n}\n" for n in range(1, step + 1)))
            (log / "metrics.jsonl").write_text(f"up to step {step}\n")
            (log / "samples" / "train" / f"step_{step:06d}.parquet").write_bytes(bytes(step))
            save(checkpoints, step, val_accuracy=step / 100)
        checkpoints.copy.finish()
        (log / "summary.json").write_text("{}")
    return checkpoints


def resumed(folder: Path, store: Any, **config: Any) -> str | None:
    """Return the checkpoint that a run in this folder takes, where it has none from the store."""
    checkpoints = manager(folder, store, **config)
    checkpoints.open("auto", trains=False)
    if checkpoints.resumed_from is None:
        return None
    assert damage(checkpoints.resumed_from) is None
    assert not list(folder.glob("tmp_*"))
    return checkpoints.resumed_from.name


def whole(store: Any) -> dict[int, list[int]]:
    """Return the whole steps by the number of their run."""
    return {copy_to_url.run_number(prefix): steps for prefix, steps in copy_to_url.whole_steps(store).items()}


def prefix_of(folder: Path) -> str:
    return (folder / ID_FILE).read_text().strip() + "/"


def test_a_machine_without_checkpoints_goes_on_from_the_copy(tmp_path: Path) -> None:
    store = MemoryStore()
    run(tmp_path / "a", store, 1, 2)
    other = manager(tmp_path / "b", store)
    other.open(True)
    assert other.resumed_from == tmp_path / "b" / "step_2"
    assert other.read(other.resumed_from) == other.read(tmp_path / "a" / "step_2")
    with other.held():
        assert (tmp_path / "b" / "ledger.jsonl").read_text() == (tmp_path / "a" / "ledger.jsonl").read_text()
        assert other.copy is not None
        other.fetch_log(tmp_path / "b" / "logs")
        save(other, 3)
        other.copy.finish()
    files = sorted(path.name for path in (tmp_path / "b" / "logs" / "exp_001").rglob("*.*"))
    assert files == ["metrics.jsonl", "step_000001.parquet", "step_000002.parquet", "summary.json"]
    assert whole(store) == {1: [1, 2], 2: [2, 3]}, "each folder has an id of its own"
    assert resumed(tmp_path / "c", store) == "step_3"
    run(tmp_path / "b", store, 4, resume=True)
    assert whole(store) == {1: [1, 2], 2: [2, 3, 4]}, "a run that goes on in its folder keeps its id"


def test_a_newer_checkpoint_of_another_folder_is_taken(tmp_path: Path) -> None:
    store = MemoryStore()
    run(tmp_path / "a", store, 1)
    run(tmp_path / "b", store, 2, resume=True)
    (tmp_path / "a" / "ledger.jsonl").write_text("entry of step 1\nvoid\n")
    run(tmp_path / "a", store, 3, resume=True)
    assert (tmp_path / "a" / "step_2").is_dir() and whole(store) == {1: [1], 2: [1, 2], 3: [1, 2, 3]}
    (aside,) = (tmp_path / "a").glob("ledger.jsonl.before-*")
    assert aside.read_text().endswith("void\n")


@pytest.mark.parametrize("dies", [True, False])
def test_whatever_fails_a_copy_is_whole_or_not_there(tmp_path: Path, outage: Outage, dies: bool) -> None:
    """Each operation of an upload fails, once or with all that follow. In the first case everything arrives."""
    failed, works, over = 0, 0, False
    while not over:
        store, folder = MemoryStore(), tmp_path / f"{works}"
        run(folder, store, 1)
        checkpoints = manager(folder, store, keep_top_k=1, mirror_wait_s=0.005 if dies else 20.0)
        checkpoints.open(True)
        with checkpoints.held():
            assert checkpoints.copy is not None
            while checkpoints.copy.lacking():  # step 1, which is there already
                checkpoints.copy.finish()
            outage.works, outage.dies, outage.seen = works, dies, False
            save(checkpoints, 2, val_accuracy=0.5)
            checkpoints.copy.finish()
            missing, over = checkpoints.copy.lacking(), not outage.seen
        for thread in threading.enumerate():  # one that fails is not waited for: in a run the process ends
            if thread.name == "copy":
                thread.join(30)
        outage.works = float("inf")
        newest = max(whole(store)[1])
        assert resumed(tmp_path / f"from-{works}", store) == f"step_{newest}"
        if missing:
            failed += 1
            assert dies and missing == {f"checkpointing.mirror {URL}": "lacks step_2: out of order"}
        else:
            assert newest == 2 and whole(store) == {1: [2]}, "it is pruned as the folder is"
            assert not [name for name in sizes_of(store) if "/step_1/" in name]
        works += 1
    assert failed == (works - 1 if dies else 0) and works > 9


@pytest.mark.parametrize("name", ["policy/weights", "data.pt", "training_info.json", "digests.json"])
@pytest.mark.parametrize("how", ["gone", "cut", "changed"])
def test_a_damaged_one_is_named_and_the_one_before_is_taken(
    tmp_path: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    run(tmp_path / "a", store, 1, 2)
    path = f"{prefix_of(tmp_path / 'a')}step_2/{name}"
    data = read(store, path) or b""
    if how == "gone":
        obstore.delete(store, path)
    else:
        obstore.put(store, path, data[:-1] if how == "cut" else bytes([data[0] ^ 1]) + data[1:])
    with caplog.at_level("WARNING", "grpo_mcore"):
        assert resumed(tmp_path / "b", store) == "step_1"
    if (name, how) != ("digests.json", "gone"):
        assert f"step_2 at s3://bucket/run is damaged: {name}" in caplog.text
        assert "and step_1 is used" in caplog.text


def test_a_name_that_leaves_the_folder_is_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    run(tmp_path / "a", store, 1, 2)
    marker = f"{prefix_of(tmp_path / 'a')}step_2/digests.json"
    digests = json.loads(read(store, marker) or b"")
    digests["files"]["../../evil"] = {"bytes": 1, "sha256": ""}
    obstore.put(store, marker, json.dumps(digests).encode())
    with caplog.at_level("WARNING", "grpo_mcore"):
        assert resumed(tmp_path / "b", store) == "step_1"
    assert "'../../evil', which is no file of a checkpoint" in caplog.text


def test_a_damaged_one_here_is_fetched_again(tmp_path: Path) -> None:
    store = MemoryStore()
    run(tmp_path, store, 1, 2)
    (tmp_path / "step_2" / "data.pt").write_bytes(b"")
    assert resumed(tmp_path, store) == "step_2"
    assert (tmp_path / "damaged_step_2").is_dir()


def test_a_copy_of_version_0_2_is_gone_on_from(tmp_path: Path) -> None:
    """It lies right below the URL."""
    store = MemoryStore()
    run(tmp_path / "a", store, 1)
    for name in sizes_of(store):
        obstore.put(store, name.partition("/")[2], read(store, name) or b"")
        obstore.delete(store, name)
    obstore.put(store, "in_use.json", b"{}")
    (tmp_path / "a" / ID_FILE).unlink()
    assert whole(store) == {0: [1]} and resumed(tmp_path / "b", store) == "step_1"
    run(tmp_path / "a", store, 2, resume=True)
    assert whole(store) == {0: [1], 1: [1, 2]}


def test_a_file_of_the_log_that_cannot_be_copied_costs_itself_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, folder = MemoryStore(), tmp_path / "logs" / "exp_001"
    (folder / "workers").mkdir(parents=True)
    for name in ("a\nb", "\udcff.txt", "a b#1%", "workers/policy.txt", ".hidden"):
        (folder / name).write_text("mine")
    run(tmp_path, store, 1, 2)
    assert resumed(tmp_path / "other", store) == "step_2"
    copied = sizes_of(store, f"{prefix_of(tmp_path)}logs/exp_001/").keys()
    samples = {f"samples/train/step_00000{step}.parquet" for step in (1, 2)}
    assert copied == {"a b#1%", "metrics.jsonl", "summary.json"} | samples
    assert [text.partition(" of the run's log")[0] for text in caplog.messages if "lacks" in text] == [
        "the copy lacks 'exp_001/a\\nb'", "the copy lacks 'exp_001/\\udcff.txt'",
    ]  # fmt: skip


def test_a_run_that_does_not_resume_leaves_the_copies_of_another(tmp_path: Path) -> None:
    store = MemoryStore()
    run(tmp_path / "a", store, 7)
    run(tmp_path / "b", store, 1)
    assert whole(store) == {1: [7], 2: [1]} and resumed(tmp_path / "c", store) == "step_1"
    with pytest.raises(ResumeError, match="no step_N folder in .* or s3://bucket/run"):
        manager(tmp_path / "d", MemoryStore()).open(True)


def test_a_run_that_goes_back_takes_a_new_id(tmp_path: Path) -> None:
    store = MemoryStore()
    run(tmp_path / "a", store, 1, 2, 3)
    run(tmp_path / "a", store, resume=tmp_path / "a" / "step_1")
    assert whole(store) == {1: [1, 2, 3], 2: [1]}
    assert resumed(tmp_path / "b", store) == "step_1"
    assert resumed(tmp_path / "a", store) == "step_1"


def test_an_outage_ends_nothing_and_is_made_up_for(
    tmp_path: Path, outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    run(tmp_path, store, 1)
    outage.works = 0
    with caplog.at_level("WARNING", "grpo_mcore"):
        copy = run(tmp_path, store, 2, resume=True, mirror_wait_s=0.01).copy
    assert copy is not None and copy.lacking() == {f"checkpointing.mirror {URL}": "lacks step_1, step_2: out of order"}
    assert "out of order; it is tried again, the run goes on" in caplog.text
    assert f"checkpointing.mirror {URL} lacks step_1, step_2: out of order" in caplog.text
    with pytest.raises(CopyError, match=f"checkpointing.mirror {URL}: out of order"):
        manager(tmp_path / "empty", store).open("auto")
    outage.works = float("inf")
    run(tmp_path, store, resume=True)
    assert whole(store) == {1: [1, 2]}


def test_an_error_ends_the_run_at_once(tmp_path: Path, outage: Outage) -> None:
    """No upload holds it up."""
    checkpoints = manager(tmp_path, MemoryStore())
    checkpoints.open(None)
    with pytest.raises(KeyboardInterrupt), checkpoints.held():
        outage.works = 0
        save(checkpoints, 1)
        raise KeyboardInterrupt


@pytest.mark.parametrize("end", ["?x=hidden", "#hidden", "%20hidden"])
def test_an_address_is_another_one_to_no_one(end: str) -> None:
    """obstore would drop what follows, or decode it, and write under another prefix."""
    with pytest.raises(CopyError, match=re.escape(f"{URL}: '{end[0]}' is not allowed in an address")) as refused:
        copy_to_url.open_store(f"{URL}{end}")
    assert "hidden" not in str(refused.value)


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
    assert said in advice(Exception(error)) and "SIGNED" not in advice(Exception(error))


def test_large_files_travel_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_to_url, "PIECE_BYTES", 1000)
    store = MemoryStore()
    obstore.put(store, "a/file", bytes(range(250)) * 13)
    fetch_files(store, "a/", sizes_of(store, "a/"), tmp_path)
    assert (tmp_path / "file").read_bytes() == bytes(range(250)) * 13
