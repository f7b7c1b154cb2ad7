"""Verification with answers that hang, crash or exhaust memory among the others: nothing is lost but these, and the
others hardly notice.

    python -m benchmarks.verifier_soak --answers 20000 --faults 0.05 --workers 8 --timeout 1.0

The same answers are verified by math-verify twice, by one pool: with faulty ones among them, and clean, one half before
that and one after it, so that a machine whose speed changes changes both. They come in groups of 16 from 32 threads, as
from a run. At the end is a wait for the last that hang, up to one and a half times the timeout, which no other work
hides here. Exit code 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from benchmarks.faulty_verifier import FAULTS, MARK
from grpo_mcore.environments.verifiers import Verdict
from grpo_mcore.environments.verify_pool import VerifyPool, spare_workers

GROUP, CALLERS = 16, 32


def answers(count: int, seed: int) -> list[tuple[str, str, float]]:
    """(response, truth, reward), half of them right."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        a, b = draw.randrange(2, 99), draw.randrange(2, 99)
        answer, truth = draw.choice(
            [
                (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{3 * a}}}{{{3 * b}}}"),
                (rf"\sqrt{{{a}}} + {b}", rf"{b} + \sqrt{{{a}}}"),
                (rf"x^2 + {a + b}x + {a * b}", rf"(x + {a})(x + {b})"),
                (rf"\left({a}, {b}\right)", f"({a}, {b})"),
            ]
        )
        right = draw.random() < 0.5
        made.append((rf"So the answer is $\boxed{{{answer}}}$.", truth if right else f"{truth} + 1", float(right)))
    return [(said, truth if "(" not in truth[:1] or right else "(0, 0)", right) for said, truth, right in made]


def with_faults(clean: list[tuple[str, str, float]], share: float, seed: int) -> list[tuple[str, str, float | None]]:
    """The same with `share` of them faulty, of each kind as many."""
    mixed: list[tuple[str, str, float | None]] = list(clean)
    kinds = list(FAULTS)
    places = random.Random(seed).sample(range(len(mixed)), round(share * len(mixed)))
    for number, place in enumerate(places):
        mixed[place] = (MARK + kinds[number % len(kinds)], mixed[place][1], None)
    return mixed


@dataclass
class Soak:
    """`clean_s`, `faulty_s`: for all answers; `clean_cpu_s`, `faulty_cpu_s`: processor time. `throughput`: answers a
    second with faults / without, where the end of a faulty one, with its reason, counts as an answer;
    `scored_throughput`: the same where only those with a reward count."""

    answers: int
    faulty: int
    clean_s: float
    faulty_s: float
    throughput: float
    scored_throughput: float
    clean_cpu_s: float
    faulty_cpu_s: float
    wrong: list[str]
    reasons: dict[str, int]
    workers_back_s: float


def soak(count: int, share: float, workers: int, timeout_s: float, memory_gb: float) -> Soak:
    """Runs it. `wrong`: what did not come out as it had to."""
    pool = VerifyPool(workers, timeout_s, memory_gb, verifier="benchmarks.faulty_verifier:verify")
    try:
        return _soak(pool, count, share, workers)
    finally:
        pool.close()


def _soak(pool: VerifyPool, count: int, share: float, workers: int) -> Soak:
    clean = answers(count, seed=1)
    faulty = with_faults(clean, share, seed=2)
    seconds, cpu = {"clean": 0.0, "faulty": 0.0}, {"clean": 0.0, "faulty": 0.0}
    wrong: list[str] = []
    reasons: Counter[str] = Counter()
    for kind, chosen in (("clean", clean[: count // 2]), ("faulty", faulty), ("clean", clean[count // 2 :])):
        start, cpu_before = time.perf_counter(), cpu_seconds()
        verdicts = run(pool, chosen)
        seconds[kind] += time.perf_counter() - start
        cpu[kind] += cpu_seconds() - cpu_before
        print(f"{len(chosen):,} answers, {kind}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
        wrong += [problem for pair in zip(chosen, verdicts, strict=True) if (problem := check(*pair))]
        reasons.update(verdict.reason for verdict in verdicts if verdict.reward is None)
    bad = sum(reward is None for _, _, reward in faulty)
    throughput = seconds["clean"] / seconds["faulty"]
    scored = throughput * (count - bad) / count
    back = workers_back(pool, workers)
    return Soak(count, bad, *seconds.values(), throughput, scored, *cpu.values(), wrong, dict(reasons), back)


def run(pool: VerifyPool, chosen: list[tuple[str, str, Any]]) -> list[Verdict]:
    groups = [chosen[first : first + GROUP] for first in range(0, len(chosen), GROUP)]
    with ThreadPoolExecutor(CALLERS) as callers:
        verdicts = callers.map(lambda group: pool.verify([g[0] for g in group], [g[1] for g in group]), groups)
        return [verdict for group in verdicts for verdict in group]


def cpu_seconds() -> float:
    """Of this process, its workers, and the workers that have been collected."""
    own = psutil.Process()
    while True:
        try:
            times = [process.cpu_times() for process in [own, *own.children(recursive=True)]]
        except psutil.NoSuchProcess:  # a worker that has just been replaced; its template has its time by now
            continue
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def check(answer: tuple[str, str, float | None], verdict: Verdict) -> str | None:
    """What is wrong with a verdict: a faulty answer has the reason of its fault, any other its reward."""
    response, truth, reward = answer
    if reward is not None:
        return None if verdict.reward == reward else f"{response} == {truth}: {verdict}"
    expected = FAULTS[response.removeprefix(MARK)]
    return None if verdict.reward is None and verdict.reason.startswith(expected) else f"{response}: {verdict}"


def workers_back(pool: VerifyPool, workers: int) -> float:
    """Seconds until there are at least as many workers as at the start and all of them answer."""
    start = time.perf_counter()
    while len(pool.worker_pids()) < workers + spare_workers(workers):
        if time.perf_counter() - start > 30:
            raise TimeoutError(f"{len(pool.worker_pids())} workers 30 s after the last answer")
        time.sleep(0.01)
    verdicts = pool.verify([r"\boxed{\frac{1}{2}}"] * 4 * workers, ["0.5"] * 4 * workers)
    assert all(verdict.reward == 1.0 for verdict in verdicts)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--faults", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=1.0, help="seconds one verification may take")
    parser.add_argument("--memory", type=float, default=0.5, help="GiB one worker may use")
    parser.add_argument("--at-least", type=float, default=0.8, help="scored_throughput that has to be reached")
    args = parser.parse_args()
    found = soak(args.answers, args.faults, args.workers, args.timeout, args.memory)
    print(json.dumps(asdict(found), indent=2))
    problems = len(found.wrong) + (found.scored_throughput < args.at_least)
    if problems:
        print(
            f"{len(found.wrong)} wrong verdicts, throughput of scored answers {found.scored_throughput:.2f}",
            file=sys.stderr,
        )
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
