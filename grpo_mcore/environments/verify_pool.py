"""Verifications in the processes of a WorkerPool; a plain number needs none."""

from __future__ import annotations

import time
from collections.abc import Sequence

from grpo_mcore.environments.plain_numbers import compare_plain_numbers
from grpo_mcore.environments.verifiers import HF_MATH_VERIFY, Verdict, reason_for
from grpo_mcore.environments.worker_pool import WorkerPool
from grpo_mcore.environments.worker_process import Forks, Work
from grpo_mcore.environments.worker_turns import Result

HARD_LIMITS = 6.0  # deadlines after which a worker's own timer ends it, when nobody else has


class VerifyPool:
    """`num_workers` processes that run `verifier` (a name or an import path). `timeout_s`: the limit of one
    verification, in seconds. `memory_gb`: the limit of one worker, in GiB. Usable from several threads.

    Raises EnvironmentConfigError where the verifier cannot be loaded.
    """

    def __init__(
        self,
        num_workers: int = 8,
        timeout_s: float = 5.0,
        memory_gb: float = 2.0,
        verifier: str = HF_MATH_VERIFY,
    ) -> None:
        self.verifier = verifier
        work = Work(
            what=f"math verifier {verifier!r}",
            maker="grpo_mcore.environments.verifiers:make_verifier",
            arguments=(verifier,),
            hard_s=HARD_LIMITS * timeout_s,
            memory_gb=memory_gb,
        )
        self._pool = WorkerPool(Forks(work), num_workers, timeout_s, spare=spare_workers(num_workers))

    def verify(self, responses: Sequence[str], truths: Sequence[str]) -> list[Verdict]:
        """One verdict a pair, in order; returns when the last is in."""
        pairs = list(zip(responses, truths, strict=True))
        plain = [self._without_worker(response, truth) for response, truth in pairs]
        left = [pair for pair, verdict in zip(pairs, plain, strict=True) if verdict is None]
        results = iter(self._pool.run(left))
        return [verdict or _verdict(next(results), truth) for (_, truth), verdict in zip(pairs, plain, strict=True)]

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, as of now."""
        return self._pool.worker_pids()

    def close(self) -> None:
        """Ends the workers, whatever they are doing."""
        self._pool.close()

    def _without_worker(self, response: str, truth: str) -> Verdict | None:
        if self.verifier != HF_MATH_VERIFY:
            return None
        start = time.perf_counter()
        plain = compare_plain_numbers(response, truth)
        if plain is None:
            return None
        correct, answer = plain
        reason = reason_for(float(correct), answer, truth)
        return Verdict(float(correct), answer, reason, time.perf_counter() - start)


def spare_workers(num_workers: int) -> int:
    """How many to start ahead, for the places of those that hang or die."""
    return 1 + num_workers // 4


def _verdict(result: Result, truth: str) -> Verdict:
    if result.failure is not None:
        return Verdict(None, None, result.failure, result.seconds)
    reward, answer = result.value
    return Verdict(reward, answer, reason_for(reward, answer, truth), result.seconds)
