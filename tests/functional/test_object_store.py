"""The object store and the lease of a mirror, on a server that speaks S3's protocol."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from grpo_mcore.driver.checkpoints import object_store
from grpo_mcore.driver.checkpoints.checkpoint_files import write_digests
from grpo_mcore.driver.checkpoints.lease import FolderInUse, Holder
from grpo_mcore.driver.checkpoints.mirror import LEASE, MirrorLease
from grpo_mcore.driver.checkpoints.object_store import RemoteStore, StoreError
from grpo_mcore.tools.mirrored import local_checkpoint, local_ledger, local_run


def test_objects_are_written_read_listed_and_deleted(bucket: str, tmp_path: Path) -> None:
    store, moved = RemoteStore(f"{bucket}/objects"), list[int]()
    store.probe()
    assert store.objects("") == {} and store.folders() == []
    (tmp_path / "large").write_bytes(bytes(range(256)) * 2**17)  # two pieces, so it is uploaded in parts
    store.upload("step_1/large", tmp_path / "large", moved.append)
    store.write("step_1/small", b"1")
    assert {name: size for name, (size, _) in store.objects("step_1").items()} == {"large": 2**25, "small": 1}
    assert store.folders() == ["step_1"] and sum(moved) == 2**25 and len(moved) == 2
    store.download({"step_1/large": (tmp_path / "back" / "large", 2**25)}, moved.append)
    assert (tmp_path / "back" / "large").read_bytes() == (tmp_path / "large").read_bytes()

    def cut(count: int) -> None:
        raise KeyError(count)

    with pytest.raises(KeyError):
        store.upload("step_2/large", tmp_path / "large", cut)
    assert store.objects("step_2") == {}, "an object appears whole or not at all"
    store.delete(["step_1/large", "step_1/small", "step_1/gone"])
    assert store.objects("") == {} and store.read("step_1/small") is None


def test_a_lease_has_one_holder(bucket: str) -> None:
    """Conditional writes decide: the first of two that create it, and of two that replace a dead run."""
    one, two = (RemoteStore(f"{bucket}/lease") for _ in range(2))
    lease = MirrorLease(one)
    lease.take()
    with pytest.raises(FolderInUse, match=f"mirror {bucket}/lease is in use by process"):
        MirrorLease(two).take()
    lease.beat()
    assert lease.lost is None
    lease.release()
    assert two.read(LEASE) is None
    dead = dataclasses.asdict(dataclasses.replace(Holder.this_process(), start_tick=1))
    assert (version := one.create(LEASE, json.dumps(dead).encode())) is not None
    assert one.create(LEASE, b"") is None
    follower = MirrorLease(two)
    follower.take()
    assert one.replace(LEASE, b"", version) is None, "another start was quicker"
    follower.release()


def test_what_is_wrong_is_said(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="cannot write .* s3://no-such-bucket/x: there is no such bucket; make it"):
        RemoteStore("s3://no-such-bucket/x").probe()
    with pytest.raises(StoreError, match="cannot list s3://no-such-bucket/x: there is no such bucket"):
        RemoteStore("s3://no-such-bucket/x").folders()
    with pytest.raises(StoreError, match="cannot open .*: Configuration key: 'no_such_option' is not valid"):
        RemoteStore(f"{bucket}/x", {"no_such_option": "1"})
    monkeypatch.setattr(object_store, "RETRY_S", 0)
    with pytest.raises(StoreError, match="the store does not answer; see its endpoint"):
        RemoteStore(f"{bucket}/x", {"endpoint": "http://127.0.0.1:9"}).probe()


def upload(store: RemoteStore, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            store.upload(path.relative_to(folder).as_posix(), path, lambda count: None)


def checkpoint(folder: Path, step: int, word: str) -> None:
    (folder / f"step_{step}" / "policy").mkdir(parents=True, exist_ok=True)
    info = {"save_state": {"current_step": step}, "metrics": {}}
    (folder / f"step_{step}" / "training_info.json").write_text(json.dumps(info))
    (folder / f"step_{step}" / "policy" / "weights").write_text(word)
    write_digests(folder / f"step_{step}", {})


def test_a_checkpoint_is_fetched_by_its_address(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is fetched once, again when it has changed there or here, and never one that is not whole."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run, address = tmp_path / "run", f"{bucket}/of/run"
    for step in (2, 10):
        checkpoint(run, step, "first")
    store = RemoteStore(address)
    upload(store, run)
    store.write("step_11/training_info.json", b"{}")  # half of an upload
    newest, weights = local_checkpoint(address), Path("policy") / "weights"
    assert newest == tmp_path / "cache" / "grpo_mcore" / "s3" / "runs" / "of" / "run" / "step_10"
    assert (newest / weights).read_text() == "first"
    fetched = newest.stat().st_ino
    assert local_checkpoint(f"{address}/step_10/") == newest and newest.stat().st_ino == fetched
    (newest / weights).write_text("other")  # damaged here
    assert (local_checkpoint(address) / weights).read_text() == "first"
    checkpoint(run, 10, "again")  # a run that went back has saved another step 10
    upload(store, run)
    assert (local_checkpoint(address) / weights).read_text() == "again"
    assert local_checkpoint(f"{address}/step_2").name == "step_2"
    store.write(f"step_2/{weights}", b"worse")
    assert local_checkpoint(f"{address}/step_2").name == "step_2", "what was fetched whole stays"
    (newest.with_name("step_2") / weights).unlink()
    with pytest.raises(StoreError, match=r"step_2 of .* is damaged: policy/weights is not what was saved"):
        local_checkpoint(f"{address}/step_2")
    assert [path.name for path in newest.parent.iterdir() if path.name.startswith(".")] == []
    for wrong in (f"{address}/step_11", f"{address}/step_3"):
        with pytest.raises(StoreError, match=f"{wrong} holds no whole checkpoint; whole are step_2, step_10"):
            local_checkpoint(wrong)
    with pytest.raises(StoreError, match="no whole checkpoint; give the prefix of a run"):
        local_checkpoint(f"{bucket}/of")
    assert local_checkpoint("a/folder") == Path("a/folder") and local_checkpoint("file:///b") == Path("/b")


def test_logs_are_fetched_by_their_address(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that have changed are fetched again, of one run and of all runs below an address."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def files(folder: Path) -> dict[str, str]:
        return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}

    sweep, log, sample = RemoteStore(f"{bucket}/sweep"), "logs/exp_001/metrics.jsonl", "logs/exp_001/samples/train/a"
    for run in ("x", "y"):
        for name in (log, sample, "step_1/policy/weights", "ledger.jsonl"):
            sweep.write(f"{run}/{name}", f"{run} {name}".encode())
    assert files(local_run(f"{bucket}/sweep", samples=False)) == {f"{run}/{log}": f"{run} {log}" for run in ("x", "y")}
    assert files(local_run(f"{bucket}/sweep/x")) == {log: f"x {log}", sample: f"x {sample}"}
    assert files(local_run(f"{bucket}/sweep/x/logs/exp_001")).keys() == {"metrics.jsonl", "samples/train/a"}
    sweep.write(f"x/{log}", b"more")
    sweep.delete([f"x/{sample}"])
    assert files(local_run(f"{bucket}/sweep/x")) == {log: "more"}
    for place in (f"{bucket}/sweep/y", f"{bucket}/sweep/y/ledger.jsonl"):
        assert local_ledger(place).read_text() == "y ledger.jsonl"
    with pytest.raises(StoreError, match=f"{bucket}/none holds no run: there is no logs/exp_NNN"):
        local_run(f"{bucket}/none")
    with pytest.raises(StoreError, match=f"{bucket}/sweep holds no ledger.jsonl"):
        local_ledger(f"{bucket}/sweep")
