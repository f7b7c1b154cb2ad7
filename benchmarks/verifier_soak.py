"""Verify one step's answers with math-verify, first clean ones, then with 1 % that hang, crash or exhaust memory.

    python -m benchmarks.verifier_soak --json

A fault may cost its own sample and its own time, no more. Exit code 1 where the faulty step takes longer than the time
limit of one verification plus twice the clean step, or where a verdict is wrong.
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
from itertools import chain
from typing import Any

from benchmarks.faulty_verifier import FAULTS, MARK
from grpo_mcore.environments.math.math_environment import MathEnvironment

GROUP, CALLERS = 16, 32  # answers of one call, and calls at a time, as in a run


@dataclass(frozen=True)
class Answer:
    """A response, its ground truth and the expected reward. None: the answer is faulty."""

    response: str
    truth: str
    reward: float | None


@dataclass
class Soak:
    """Seconds of the clean and of the faulty step; `limit_s`: the maximum for the faulty one."""

    answers: int
    faulty: int
    clean_s: float
    faulty_s: float
    limit_s: float
    wrong: list[str]
    reasons: dict[str, int]

    @property
    def holds(self) -> bool:
        return self.faulty_s <= self.limit_s and not self.wrong


def clean_answers(count: int, seed: int) -> list[Answer]:
    """Return answers of which half are right."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        a, b = draw.randrange(2, 99), draw.randrange(2, 99)
        answer, right, wrong = draw.choice(
            [
                (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{3 * a}}}{{{3 * b}}}", rf"\frac{{{a}}}{{{b}}} + 1"),
                (rf"\sqrt{{{a}}} + {b}", rf"{b} + \sqrt{{{a}}}", rf"\sqrt{{{a}}}"),
                (rf"x^2 + {a + b}x + {a * b}", rf"(x + {a})(x + {b})", rf"(x + {a})(x + {b + 1})"),
                (rf"\left({a}, {b}\right)", f"({a}, {b})", "(0, 0)"),
            ]
        )
        is_right = draw.random() < 0.5
        response = rf"So the answer is $\boxed{{{answer}}}$."
        made.append(Answer(response, right if is_right else wrong, float(is_right)))
    return made


def with_faults(clean: list[Answer], share: float, seed: int) -> list[Answer]:
    """Return the same answers with `share` of them faulty, equally many of each kind."""
    mixed, kinds = list(clean), list(FAULTS)
    places = random.Random(seed).sample(range(len(mixed)), round(share * len(mixed)))
    for number, place in enumerate(places):
        mixed[place] = Answer(MARK + kinds[number % len(kinds)], mixed[place].truth, None)
    return mixed


def soak(count: int, share: float, workers: int, timeout_s: float, memory_gb: float) -> Soak:
    """Verify both steps with one environment. `wrong` names the verdicts that are not as they have to be."""
    clean = clean_answers(count, seed=1)
    faulty = with_faults(clean, share, seed=2)
    environment = MathEnvironment(
        {
            "num_workers": workers,
            "verify_timeout_s": timeout_s,
            "verify_memory_gb": memory_gb,
            "math_verify_impl": "benchmarks.faulty_verifier:verify",
        }
    )
    try:
        verify(environment, clean_answers(GROUP * workers, seed=3))  # fills the workers' caches
        clean_s, clean_verdicts = verify(environment, clean)
        faulty_s, faulty_verdicts = verify(environment, faulty)
    finally:
        environment.shutdown()
    verdicts = [*zip(clean, clean_verdicts, strict=True), *zip(faulty, faulty_verdicts, strict=True)]
    return Soak(
        answers=count,
        faulty=sum(answer.reward is None for answer in faulty),
        clean_s=round(clean_s, 2),
        faulty_s=round(faulty_s, 2),
        limit_s=round(timeout_s + 2 * clean_s, 2),
        wrong=[f"{answer}: {verdict}" for answer, verdict in verdicts if not is_due(answer, *verdict)],
        reasons=dict(
            Counter(
                reason for answer, (_, reason) in zip(faulty, faulty_verdicts, strict=True) if answer.reward is None
            )
        ),
    )


def verify(environment: MathEnvironment, answers: list[Answer]) -> tuple[float, list[tuple[float | None, str]]]:
    """Return the seconds for all answers, and the reward and the reason of each."""

    def call(group: list[Answer]) -> list[tuple[float | None, str]]:
        logs: list[Any] = [[{"role": "assistant", "content": answer.response}] for answer in group]
        found = environment.step(logs, [{"ground_truth": answer.truth} for answer in group])
        return list(zip(found.rewards, found.reasons, strict=True))

    groups = [answers[first : first + GROUP] for first in range(0, len(answers), GROUP)]
    start = time.perf_counter()
    with ThreadPoolExecutor(CALLERS) as callers:
        verdicts = list(chain.from_iterable(callers.map(call, groups)))
    return time.perf_counter() - start, verdicts


def is_due(answer: Answer, reward: float | None, reason: str) -> bool:
    """Return whether a verdict is right: a faulty answer has the reason of its fault, and no reward, or 0 if its time
    ran out (env.math.verify_timeout_reward)."""
    if answer.reward is not None:
        return reward == answer.reward
    due = FAULTS[answer.response.removeprefix(MARK)]
    return reward == (0.0 if reason.startswith("timed out") else None) and reason.startswith(due)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--faults", type=float, default=0.01, help="share of the answers that are faulty")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds one verification may take")
    parser.add_argument("--memory", type=float, default=0.5, help="GiB one worker may use")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    found = soak(args.answers, args.faults, args.workers, args.timeout, args.memory)
    if args.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print(
            f"{found.answers} answers: clean {found.clean_s:.2f} s, with {found.faulty} faulty {found.faulty_s:.2f} s, "
            f"limit {found.limit_s:.2f} s; {len(found.wrong)} wrong verdicts"
        )
    return int(not found.holds)


if __name__ == "__main__":
    sys.exit(main())
