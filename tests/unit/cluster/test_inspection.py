"""What processes are doing, and which of them the others wait for."""

import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_mcore.cli.look import inspect as inspect_command
from grpo_mcore.cluster.inspection import (
    Answering,
    Collective,
    ProcessReport,
    ask,
    driver_key,
    frames_here,
    odd_ones,
    reports_here,
    workers_here,
)
from grpo_mcore.cluster.local_cluster import LocalCluster
from grpo_mcore.rollout.workers import Place
from grpo_mcore.tools.report.run_files import NoRun

TP, PP, DP = 4, 4, 16
STUCK_AT = 'File "/app/data.py", line 7 in read'
IN_RECEIVE = 'File "/lib/torch/distributed/distributed_c10d.py", line 9 in recv'


def rank_of(dp: int, pp: int, tp: int) -> int:
    return (dp * PP + pp) * TP + tp


def program(rank: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return what a rank does in a step of training: (kind, group, ranks), twice each way."""
    dp, pp, tp = rank // (PP * TP), rank // TP % PP, rank % TP
    tensor = "collective", f"tp{dp}-{pp}", tuple(rank_of(dp, pp, other) for other in range(TP))
    data = "collective", f"dp{pp}-{tp}", tuple(rank_of(other, pp, tp) for other in range(DP))
    stage = {step: (rank_of(dp, pp + step, tp),) for step in (-1, 1)}
    words: list[tuple[str, str, tuple[int, ...]]] = [("collective", "world", tuple(range(TP * PP * DP)))]
    for _ in range(2):
        words += [("receive", "", stage[-1])] if pp > 0 else []
        words += [tensor, tensor]
        words += [("send", "", stage[1])] if pp < PP - 1 else []
    for _ in range(2):
        words += [("receive", "", stage[1])] if pp < PP - 1 else []
        words += [tensor, tensor]
        words += [("send", "", stage[-1])] if pp > 0 else []
    return [*words, data, ("collective", "world", tuple(range(TP * PP * DP)))]


PROGRAMS = [program(rank) for rank in range(TP * PP * DP)]


def stalled(stuck: int, before: int) -> dict[str, ProcessReport]:
    """Return what each rank says once all stand still, where one never begins its `before`-th operation."""
    at = [0] * len(PROGRAMS)
    numbers: list[dict[str, int]] = [{} for _ in PROGRAMS]  # of the last collective entered in each group
    waits: list[str | None] = [None] * len(PROGRAMS)  # the group whose collective a rank is in
    arrived: Counter[tuple[str, int]] = Counter()
    messages: Counter[tuple[int, int]] = Counter()
    ready = set(range(len(PROGRAMS)))
    while ready:
        rank = ready.pop()
        while at[rank] < len(PROGRAMS[rank]) and not (rank == stuck and at[rank] >= before):
            kind, group, peers = PROGRAMS[rank][at[rank]]
            if kind == "send":
                messages[rank, peers[0]] += 1
                ready.add(peers[0])
            elif kind == "receive":
                if not messages[peers[0], rank]:
                    break
                messages[peers[0], rank] -= 1
            else:
                if waits[rank] is None:
                    number = numbers[rank][group] = numbers[rank].get(group, 0) + 1
                    waits[rank] = group
                    arrived[group, number] += 1
                    if arrived[group, number] == len(peers):
                        ready |= set(peers)
                if arrived[group, numbers[rank][group]] < len(peers):
                    break
                waits[rank] = None
            at[rank] += 1
    reports = {}
    for rank, entered in enumerate(numbers):
        peers_of = {group: peers for _, group, peers in PROGRAMS[rank]}
        collectives = tuple(
            Collective(group[:2], group, peers_of[group], number, "all_reduce", waits[rank] == group)
            for group, number in entered.items()
        )
        receives = rank != stuck and waits[rank] is None and at[rank] < len(PROGRAMS[rank])
        frames = IN_RECEIVE if receives else "" if waits[rank] else STUCK_AT
        reports[f"policy-{rank}"] = ProcessReport(frames, collectives)
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 2, 5, -2, -1], ids=["start", "tensor", "pipeline", "data", "world"])
def test_of_256_ranks_the_one_that_is_stuck_is_named_and_only_it(before: int) -> None:
    """In the pipeline every rank of a mesh of 4 x 4 x 16 in turn, else every fifth; the others wait where they must."""
    for stuck in range(0, len(PROGRAMS), 1 if before == 5 else 5):
        reports = stalled(stuck, before % len(PROGRAMS[stuck]))
        assert odd_ones(reports) == [f"policy-{stuck}"], stuck


def test_ranks_that_are_not_known_are_neither_accused_nor_do_others_take_the_blame() -> None:
    reports = stalled(77, 5)
    for rank in (77, 78, 79):
        del reports[f"policy-{rank}"]
    assert odd_ones(reports) == []


def test_a_process_that_does_not_run_comes_first() -> None:
    reports = stalled(3, 5) | {"engine-1": ProcessReport(state="is stopped")}
    assert odd_ones(reports) == ["engine-1"]


def test_without_numbers_the_stacks_decide_within_a_kind() -> None:
    reports = {f"policy-{rank}": ProcessReport(STUCK_AT if rank == 6 else IN_RECEIVE) for rank in range(8)}
    assert odd_ones(reports | {"engine-0": ProcessReport(STUCK_AT)}) == ["policy-6"]
    assert odd_ones({name: ProcessReport(STUCK_AT) for name in reports}) == []


def test_ranks_in_different_collectives_accuse_nobody() -> None:
    """Each waits for the other: the numbers show both, and the text their collectives."""

    def rank(tensor: int, data: int) -> ProcessReport:
        groups = Collective("T", "1", (0, 1), tensor, "all_gather", tensor > 4), Collective(
            "D", "2", (0, 1), data, "all_reduce", data > 4)  # fmt: skip
        return ProcessReport("", groups)

    assert odd_ones({"policy-0": rank(5, 4), "policy-1": rank(4, 5)}) == []


@contextmanager
def program_at(log: Path, text: str) -> Iterator[Place]:
    """Run Python that answers inspections like a worker, and wait until it says that it is ready."""
    head = f"""
import faulthandler, os, pathlib, signal, sys, time
from grpo_mcore.cluster.inspection import Answering, report_here, worker_key
faulthandler.register(signal.SIGUSR1)
answering = Answering(worker_key({str(log)!r}, os.getpid()), report_here)
"""
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", head + text], stderr=file, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield Place("", "127.0.0.1", process.pid, (), str(log))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def until(places: dict[str, Place], said: Sequence[str]) -> ProcessReport:
    """Ask again until the report of the only worker has all of these texts."""
    deadline = time.monotonic() + 60
    while True:
        (report,) = reports_here(places).values()
        if all(text in str(report) for text in said) or time.monotonic() > deadline:
            return report
        time.sleep(0.2)


def test_a_worker_tells_its_stacks_and_is_seen_when_it_is_stopped_and_when_it_ended(tmp_path: Path) -> None:
    sleeps = """
def work():
    print("ready", flush=True)
    time.sleep(600)
work()
"""
    with program_at(tmp_path / "policy-0.log", sleeps) as place:
        assert workers_here(tmp_path) == {"policy-0": place}
        report = until({"policy-0": place}, ["in work"])
        assert "in work" in report.frames and not report.state and not report.collectives
        os.kill(place.pid, signal.SIGSTOP)
        assert "SIGSTOP" in until({"policy-0": place}, ["SIGSTOP"]).state
        assert frames_here({"policy-0": place}) == {}
        os.kill(place.pid, signal.SIGCONT)
        assert until({"policy-0": place}, ["in work"]).frames
    assert "has ended" in reports_here({"policy-0": place})["policy-0"].state
    assert workers_here(tmp_path) == {}


def test_a_worker_whose_interpreter_is_held_by_c_code_still_tells_its_stacks(tmp_path: Path) -> None:
    """PyDLL calls without releasing the interpreter, so no thread can answer."""
    holds = """
import ctypes
def hold():
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(600)
hold()
"""
    with program_at(tmp_path / "engine-0.log", holds) as place:
        report = until({"engine-0": place}, ["in hold"])
        assert "in hold" in report.frames and not report.state


def test_an_answer_that_fails_is_logged_and_the_next_one_comes(
    tmp_path: Path, package_log: pytest.LogCaptureFixture
) -> None:
    answers = iter(["first"])
    key = str(tmp_path / "log")
    answering = Answering(key, lambda: next(answers))
    Answering(key, lambda: "another").close()  # it finds the key taken, and leaves the first alone
    assert ask(key) == "first" and ask(key) is None and ask(key) is None
    answering.close()
    again = Answering(key, lambda: "again")
    assert ask(key) == "again"
    again.close()
    assert package_log.text.count("an inspection of this process failed") == 2


def test_the_command_asks_the_driver_else_the_workers_here_else_says_where_to_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "logs" / "exp_001"
    (run / "workers").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    args = Namespace(run=tmp_path)
    assert inspect_command.run(args) == 1
    assert "is on this machine" in capsys.readouterr().err
    with LocalCluster(log_dir=run / "workers"):
        assert ask(driver_key(run / "workers"), 60.0) is not None
        assert inspect_command.run(args) == 0
    told = capsys.readouterr().out
    assert f"process {os.getpid()}, all of the run" in told
    assert "in test_the_command_asks_the_driver_else_the_workers_here_else_says_where_to_look" in told
    assert threading.current_thread() is threading.main_thread()
    with program_at(run / "workers" / "policy-0.log", "print('ready', flush=True)\ntime.sleep(600)") as place:
        until({"policy-0": place}, ["<module>"])
        assert inspect_command.run(args) == 0
    told = capsys.readouterr().out
    assert "the driver does not answer" in told and "policy-0 is at <string>" in told
    with pytest.raises(NoRun, match="holds no run"):
        inspect_command.run(Namespace(run=tmp_path / "nowhere"))
