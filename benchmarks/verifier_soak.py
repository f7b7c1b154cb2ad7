"""Verification with answers that hang, crash or exhaust memory among the others: nothing is lost but these, and the
others hardly notice.

    python -m benchmarks.verifier_soak --answers 20000 --faults 0.05 --workers 8 --timeout 1.0

Two pools verify with math-verify at the same time: one the answers with faulty ones among them, the other clean ones
for as long as that takes. Each has half of the workers and half of the processors, and every second they exchange
these: where one run comes after the other, a machine whose speed changes by a tenth within a minute decides the figure.
The answers come in groups of 16 from 32 threads, as from a run. At the end is a wait for the last that hang, up to one
and a half times the timeout, which no other work hides here. Exit code 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass

import psutil

from benchmarks.faulty_verifier import FAULTS, MARK
from grpo_mcore.environments.verifiers import Verdict
from grpo_mcore.environments.verify_pool import VerifyPool, spare_workers

GROUP, CALLERS = 16, 32
Answer = tuple[str, str, float | None]
"""What a model said, what is true, and the reward; None: it is faulty."""


def answers(count: int, seed: int) -> list[Answer]:
    """Half of them right."""
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


def with_faults(clean: list[Answer], share: float, seed: int) -> list[Answer]:
    """The same with `share` of them faulty, of each kind as many."""
    mixed: list[Answer] = list(clean)
    kinds = list(FAULTS)
    places = random.Random(seed).sample(range(len(mixed)), round(share * len(mixed)))
    for number, place in enumerate(places):
        mixed[place] = (MARK + kinds[number % len(kinds)], mixed[place][1], None)
    return mixed


@dataclass
class Soak:
    """`seconds`: for all answers; `clean_answers`: that were verified in this time by the other pool. `throughput`:
    answers a second with faults / without, where the end of a faulty one, with its reason, counts as an answer;
    `scored_throughput`: the same where only those with a reward count."""

    answers: int
    faulty: int
    seconds: float
    clean_answers: int
    throughput: float
    scored_throughput: float
    wrong: list[str]
    reasons: dict[str, int]
    workers_back_s: float


def soak(count: int, share: float, workers: int, timeout_s: float, memory_gb: float) -> Soak:
    """Runs it. `workers`: of both pools. `wrong`: what did not come out as it had to. Raises SystemExit where there are
    no two processors."""
    workers = max(workers // 2, 1)
    clean = answers(2 * count, seed=1)
    faulty = with_faults(clean[:count], share, seed=2)
    done, others_before = threading.Event(), psutil.Process().children()
    with ExitStack() as stack:
        pools = [
            stack.enter_context(closing(pool_on(half, workers, timeout_s, memory_gb))) for half in processor_halves()
        ]
        templates = [process for process in psutil.Process().children() if process not in others_before]
        exchange = stack.enter_context(ThreadPoolExecutor(1)).submit(exchange_processors, done, templates)
        others = stack.enter_context(ThreadPoolExecutor(1)).submit(run_until, done, pools[0], clean)
        try:
            start = time.perf_counter()
            verdicts = run(pools[1], faulty)
            seconds = time.perf_counter() - start
        finally:
            done.set()
        exchange.result()
        also_done = others.result()
        back = workers_back(pools[1], workers)
    bad = sum(reward is None for _, _, reward in faulty)
    throughput = count / max(len(also_done), 1)
    return Soak(
        answers=count,
        faulty=bad,
        seconds=seconds,
        clean_answers=len(also_done),
        throughput=throughput,
        scored_throughput=throughput * (count - bad) / count,
        wrong=[problem for pair in [*zip(faulty, verdicts, strict=True), *also_done] if (problem := check(*pair))],
        reasons=dict(Counter(verdict.reason for verdict in verdicts if verdict.reward is None)),
        workers_back_s=back,
    )


def processor_halves() -> list[set[int]]:
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        raise SystemExit("the soak compares two pools that run at the same time: it needs two processors")
    processors = processors[: len(processors) // 2 * 2]
    return [set(processors[0::2]), set(processors[1::2])]


def pool_on(processors: set[int], workers: int, timeout_s: float, memory_gb: float) -> VerifyPool:
    """A pool whose processes begin there; it counts as many."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        return VerifyPool(workers, timeout_s, memory_gb, verifier="benchmarks.faulty_verifier:verify")
    finally:
        os.sched_setaffinity(0, before)


def exchange_processors(done: threading.Event, templates: list[psutil.Process]) -> None:
    """Of the two pools, every second. A worker that is forked meanwhile has those of its template."""
    while not done.wait(1.0):
        halves = [template.cpu_affinity() for template in templates]
        for template, half in zip(templates, reversed(halves), strict=True):
            template.cpu_affinity(half)
            for worker in template.children():
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    worker.cpu_affinity(half)


def run(pool: VerifyPool, chosen: list[Answer]) -> list[Verdict]:
    with ThreadPoolExecutor(CALLERS) as callers:
        found: list[Verdict] = []
        for verdicts in callers.map(lambda group: pool.verify(*said_and_true(group)), groups_of(chosen)):
            found += verdicts
            if len(found) % 2000 < GROUP:
                print(f"{len(found):,} of {len(chosen):,} answers", file=sys.stderr)
        return found


def run_until(done: threading.Event, pool: VerifyPool, chosen: list[Answer]) -> list[tuple[Answer, Verdict]]:
    """Over and over; those that were verified until then."""
    groups = itertools.cycle(groups_of(chosen))
    found: list[tuple[Answer, Verdict]] = []
    next_one = threading.Lock()

    def call() -> None:
        while not done.is_set():
            with next_one:
                group = next(groups)
            verdicts = pool.verify(*said_and_true(group))
            if not done.is_set():
                found.extend(zip(group, verdicts, strict=True))

    with ThreadPoolExecutor(CALLERS) as callers:
        for caller in [callers.submit(call) for _ in range(CALLERS)]:
            caller.result()
    return found


def groups_of(chosen: list[Answer]) -> list[list[Answer]]:
    return [chosen[first : first + GROUP] for first in range(0, len(chosen), GROUP)]


def said_and_true(group: list[Answer]) -> tuple[list[str], list[str]]:
    return [said for said, _, _ in group], [true for _, true, _ in group]


def check(answer: Answer, verdict: Verdict) -> str | None:
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
    parser.add_argument("--workers", type=int, default=8, help="of both pools")
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
