import json
import os
import pickle
import signal
import subprocess
import sys
import uuid

import pytest
import torch

from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.transport.buffer import attach_buffer, create_buffer
from grpo_mcore.refit.transport.shared_memory import (
    PREFIX,
    SEGMENTS,
    SegmentLost,
    SharedMemoryBuffer,
    remove_stale_segments,
)
from grpo_mcore.rollout.workers import is_fault
from tests.waiting import wait_until

OWNER = """
import sys, time, torch
from grpo_mcore.refit.transport.shared_memory import SharedMemoryBuffer
buffer = SharedMemoryBuffer.create(4096, sys.argv[1])
buffer.flat[:] = 7
print(buffer.description["name"], flush=True)
time.sleep(60)
"""
ATTACHED = """
import json, sys
from grpo_mcore.refit.transport.shared_memory import SharedMemoryBuffer
buffer = SharedMemoryBuffer.attach(json.loads(sys.argv[1]))
assert int(buffer.flat[0]) == 5
buffer.flat[1] = 6
"""


@pytest.fixture
def run_id() -> str:
    return f"test.{uuid.uuid4().hex[:8]}"


def segments(run_id: str) -> list[str]:
    return [path.name for path in SEGMENTS.glob(f"{PREFIX}-{run_id}-*")]


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_another_process_reads_and_writes_and_its_end_frees_nothing(run_id: str, named: bool) -> None:
    """Also one that starts when the segment has lost its name: systemd-logind removes the names of a user who has
    logged out."""
    buffer = create_buffer(8192, torch.device("cpu"), run_id)
    buffer.flat[0] = 5
    if not named:
        (SEGMENTS / buffer.description["name"]).unlink()
    subprocess.run([sys.executable, "-c", ATTACHED, json.dumps(buffer.description)], check=True)
    assert int(buffer.flat[1]) == 6
    assert len(segments(run_id)) == named
    assert int(attach_buffer(buffer.description).flat[1]) == 6
    buffer.close()
    buffer.close()
    assert not segments(run_id)
    with pytest.raises(RefitError, match="its owner has exited"):
        attach_buffer(buffer.description)


def test_a_segment_that_cannot_be_found_is_a_loss_that_names_its_remedy(run_id: str) -> None:
    """Another start of the run makes another one."""
    buffer = SharedMemoryBuffer.create(4096, run_id)
    (SEGMENTS / buffer.description["name"]).unlink()
    with open("/dev/null") as other, pytest.raises(SegmentLost, match="RemoveIPC=no in logind.conf") as caught:
        attach_buffer(buffer.description | {"fd": other.fileno()})  # another file by now
    assert is_fault(pickle.loads(pickle.dumps(caught.value)))
    with pytest.raises(SegmentLost):
        attach_buffer(buffer.description | {"pid": 2**22 + 1})
    buffer.close()


@pytest.mark.slow
def test_a_killed_owner_leaves_nothing_behind(run_id: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, run_id], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    name = owner.stdout.readline().strip()
    assert segments(run_id) == [name]
    assert remove_stale_segments() == [] and segments(run_id), "a living owner's segment stays"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not segments(run_id), "the end of the segment, which the resource tracker frees")


def test_a_segment_without_a_living_owner_is_freed_by_the_next_run(run_id: str) -> None:
    """As after a kill that took the resource tracker with it."""
    orphan = SEGMENTS / f"{PREFIX}-{run_id}-999999-0"
    orphan.write_bytes(bytes(4096))
    being_made = SEGMENTS / f"{PREFIX}-{run_id}-999999-1"
    being_made.touch()
    try:
        buffer = SharedMemoryBuffer.create(4096, f"{run_id}.next")
        assert not orphan.exists()
        assert being_made.exists(), "an empty one is being created at this moment"
        buffer.close()
    finally:
        being_made.unlink()


def test_views_survive_a_close(run_id: str) -> None:
    buffer = SharedMemoryBuffer.create(4096, run_id)
    view = buffer.flat[:16]
    view[:] = 3
    buffer.close()
    assert view.sum() == 48


def test_a_forked_child_does_not_free_its_parents_segment(run_id: str) -> None:
    buffer = SharedMemoryBuffer.create(4096, run_id)
    child = os.fork()
    if child == 0:
        buffer.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert segments(run_id)
    buffer.close()


def test_more_than_there_is(run_id: str) -> None:
    with pytest.raises(RefitError, match=r"cannot reserve 1,125,899,906,842,624 bytes .* --shm-size"):
        SharedMemoryBuffer.create(2**50, run_id)
    assert not segments(run_id)


def test_other_mistakes(run_id: str) -> None:
    with pytest.raises(RefitError, match="run id 'a/b'"):
        SharedMemoryBuffer.create(4096, "a/b")
    with pytest.raises(RefitError, match="unknown refit transport 'pigeon'"):
        attach_buffer({"kind": "pigeon"})
    buffer = SharedMemoryBuffer.create(4096, run_id)
    with pytest.raises(RefitError, match="has 4,096 bytes, expected 8,192"):
        attach_buffer(buffer.description | {"nbytes": 8192})
    buffer.close()
