"""Text for error messages: stacks, the end of a log, who waits for whom."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mcore.cluster.diagnostics import TAIL_LINES, Wait, last_line, listed, log_tail, stacks, wait_graph
from grpo_mcore.cluster.inspection import Collective, ProcessReport, own_frames
from grpo_mcore.rollout.workers import Place

DUMP = """\
Thread 0x00007f606a7fc6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/venv/lib/site-packages/ray/_private/gc_collect_manager.py", line 29 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f606a7fc6c1 (most recent call first):
  File "/venv/lib/site-packages/vllm/engine.py", line 5 in poll
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f60b3450b80 (most recent call first):
  File "/venv/lib/site-packages/torch/distributed/distributed_c10d.py", line 97 in barrier
  File "/src/policy.py", line 7 in train
  File "/src/grpo_mcore/cluster/ray_actor.py", line 113 in call
  File "/venv/lib/site-packages/ray/_private/worker.py", line 1069 in main_loop
"""


def test_stacks_show_what_is_ours():
    assert own_frames(DUMP) == (
        '  File "/venv/lib/site-packages/torch/distributed/distributed_c10d.py", line 97 in barrier\n'
        '  File "/src/policy.py", line 7 in train\n'
        "  another thread:\n"
        '  File "/venv/lib/site-packages/vllm/engine.py", line 5 in poll\n'
        '  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap'
    )
    assert own_frames("") == ""


def test_no_other_process_is_asked_for_its_stacks(tmp_path):
    log = tmp_path / "worker.log"
    log.write_text("")
    # this very process: a signal would end it
    place = Place("node", "10.0.0.1", os.getpid(), (), str(log))
    assert stacks("policy-0", place) == f"policy-0 is on 10.0.0.1, its log: {log}"


def test_the_end_of_a_log(tmp_path):
    log = tmp_path / "worker.log"
    assert log_tail(str(log)) == f"its log is on its node: {log}"
    log.write_text(":job_id:01\n:actor_name:x\n")
    assert log_tail(str(log)) == f"its log is empty: {log}"
    log.write_text("\n".join(f"line {number}" for number in range(5000)))
    title, *lines = log_tail(str(log)).splitlines()
    assert title == f"end of its log, {log}:" and len(lines) == TAIL_LINES
    assert lines[-2:] == ["    line 4998", "    line 4999"]


IN_REDUCE = ProcessReport("""  File "/lib/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/lib/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/app/policy.py", line 12 in train_step""")
AT_WORK = ProcessReport("""  File "/app/data.py", line 7 in read
  File "/app/policy_worker.py", line 40 in receive""")


def test_the_rank_that_is_not_in_the_collective_is_the_culprit() -> None:
    waits = [
        Wait("engine-0", "samples of step 3", 4.2, late=False),
        Wait("policy-0", "training", 61.0, late=True),
        Wait("policy-1", "training", 61.0, late=True),
    ]
    told = wait_graph(waits, {"policy-0": IN_REDUCE, "policy-1": AT_WORK, "engine-0": ProcessReport()})
    assert told.splitlines() == [
        "who waits for whom:",
        "  the driver waits for policy-0, policy-1: training, for 61 s, past its deadline",
        "  the driver waits for engine-0: samples of step 3, for 4 s",
        "  policy-1 is at /app/data.py:7 in read",
        "  engine-0 runs no Python of its own",
        "  policy-0 waits for its group in wrapper",
        "culprit: policy-1",
    ]


def test_where_all_are_in_a_collective_none_is_accused() -> None:
    told = wait_graph([Wait(f"policy-{rank}", "training", 9, late=True) for rank in (0, 1)], dict.fromkeys(
        ("policy-0", "policy-1"), IN_REDUCE))  # fmt: skip
    assert told.endswith("culprit: none of policy-0, policy-1 alone: each waits for another in a collective")


def test_a_process_that_is_gone_is_the_culprit() -> None:
    told = wait_graph(
        [Wait("engine-0", "health", 60, late=True)],
        {"engine-0": ProcessReport(state="has ended: there is no such process any more")},
    )
    assert "engine-0 has ended: there is no such process any more" in told and told.endswith("culprit: engine-0")


def test_a_worker_that_could_not_be_asked_is_accused_of_nothing() -> None:
    """248 ranks of other nodes were, once."""
    waits = [Wait(f"policy-{rank}", "training", 61, late=True) for rank in range(256)]
    unknown = wait_graph(waits, {f"policy-{rank}": IN_REDUCE for rank in range(8)})
    assert unknown.splitlines() == [
        "who waits for whom:",
        "  the driver waits for policy-0 to policy-255 (256): training, for 61 s, past its deadline",
        "  policy-0 to policy-7 (8) waits for its group in wrapper",
        "  policy-8 to policy-255 (248) could not be asked: unknown",
        "culprit: unknown; policy-8 to policy-255 (248) could not be asked",
    ]
    found = wait_graph(waits, {f"policy-{rank}": AT_WORK if rank == 77 else IN_REDUCE for rank in range(256)})
    assert found.splitlines()[2] == "  policy-77 is at /app/data.py:7 in read"
    assert found.splitlines()[3].startswith("  policy-0 to policy-76, policy-78 to policy-255 (255) waits")
    assert found.endswith("culprit: policy-77")


def test_an_inspection_shows_equal_ranks_once_with_their_stack_and_collective() -> None:
    def waits(number: int, waits: bool = True) -> ProcessReport:
        return ProcessReport(IN_REDUCE.frames if waits else AT_WORK.frames, (
            Collective("DATA", "3", tuple(range(16)), number, "all_reduce", waits),))  # fmt: skip

    reports = {f"policy-{rank}": waits(16, waits=False) if rank == 5 else waits(17) for rank in range(16)}
    names = [*reports, "engine-0"]
    waits_for = [Wait(name, "training", 365.0, late=False) for name in reports]
    told = wait_graph(waits_for, reports, names).splitlines()
    assert told[:5] == [
        "who waits for whom:",
        "  the driver waits for policy-0 to policy-15 (16): training, for 365 s",
        "  policy-5 is at /app/data.py:7 in read",
        '      File "/app/data.py", line 7 in read',
        '      File "/app/policy_worker.py", line 40 in receive',
    ]
    assert "  engine-0 could not be asked: unknown" in told
    assert (
        "  policy-0 to policy-4, policy-6 to policy-15 (15) waits for its group in all_reduce, number 17 of DATA"
        in told
    )
    assert told[-1] == "the others wait for: policy-5"
    del reports["policy-5"]  # it could not be asked: it is not accused, and nor is anybody else
    told = wait_graph(waits_for, reports, names).splitlines()
    assert told[-1] == "the others wait for: unknown; policy-5 could not be asked"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["engine-0"], "engine-0"),
        (["policy-0", "policy-1"], "policy-0, policy-1"),
        (["policy-9", "policy-10", "policy-11", "engine-0"], "policy-9 to policy-11, engine-0 (4)"),
        (["environment-math", "policy-3", "engine-4"], "environment-math, policy-3, engine-4 (3)"),
    ],
)
def test_names_in_a_row_are_a_range(names: list[str], text: str) -> None:
    assert listed(names) == text


def test_the_last_line_of_a_log_is_the_newest_state_of_a_progress_bar(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    assert last_line(log) == ""
    log.write_text("INFO loading\nshards:  33%\rshards:  67%\n\n")
    assert last_line(log) == "shards:  67%"
    log.write_text("shards: 80%\nW1129 18:29:25 15289 torch/x.py:53] no Triton\nx.py:1: FutureWarning: old\n  call()\n")
    assert last_line(log) == "shards: 80%"
    log.write_text(":job_id:01000000\n:actor_name:engine-0\n")
    assert last_line(log) == ""


def test_what_a_worker_prints_to_a_full_disk_fails_no_call() -> None:
    words = "from grpo_mcore.cluster.ray_actor import _print_to; _print_to('/dev/full')"
    words += "; print('x', flush=True); import sys, os; print('x', file=sys.stderr, flush=True); os._exit(7)"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 7
