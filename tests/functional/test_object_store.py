"""The object store and the lease of a mirror, on a server that speaks S3's protocol."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from grpo_mcore import object_store
from grpo_mcore.algorithms.checkpointing.lease import FolderInUse, Holder
from grpo_mcore.algorithms.checkpointing.mirror import LEASE, MirrorLease
from grpo_mcore.object_store import RemoteStore, StoreError


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
