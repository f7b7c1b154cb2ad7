"""One refit, as the driver runs it: open the plan on every side, move the buckets, commit the new version.

The driver holds handles only: a handle has a `name` and `call(method, *args, timeout_s, what)`, whose answer
is waited for with `.result()` (`cluster.Worker`). All sides leave a failed refit together.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_mcore.refit.coverage import check_coverage
from grpo_mcore.refit.plan import RefitError, RefitPlan
from grpo_mcore.refit.protocol import RefitProtocol, RefitState


class Pending(Protocol):
    def result(self) -> Any: ...


class Worker(Protocol):
    name: str

    def call(self, method: str, *args: Any, timeout_s: float | None = None, what: str | None = None) -> Pending: ...


class Timer(Protocol):
    def time(self, label: str) -> AbstractContextManager[Any]: ...


ABORT_TIMEOUT_S = 60.0


@dataclass(frozen=True, eq=False)
class Call:
    """A call under way."""

    worker: Worker
    what: str
    pending: Pending


@dataclass(frozen=True)
class RefitReport:
    """What a committed refit did. `bytes`: weights that moved, without gaps. `seconds`: of the whole refit,
    in which generation stands still. `stage_seconds`: open, stage, commit on the driver's clock; fill, load:
    the slowest rank's, summed over the buckets (they overlap)."""

    version: int
    bytes: int
    seconds: float
    buckets: int
    tensors: int
    stage_seconds: dict[str, float]


def refit(
    policy_workers: Sequence[Worker],
    engines: Sequence[Worker],
    plan: RefitPlan,
    version: int,
    *,
    timeline: Timer | None = None,
    timeout_s: float = 600.0,
) -> RefitReport:
    """Make every engine's weights equal the policy's, as weight version `version`.

    `policy_workers`: all policy ranks; the first creates the buffer. Each call waits at most `timeout_s`.
    `timeline` times the stages refit/open, refit/stage and refit/commit.
    Raises RefitError; the engines that had not committed then refuse to generate until a later refit succeeds,
    unless no bucket had reached them.
    """
    if not policy_workers or not engines:
        raise RefitError(f"a refit needs policy ranks and engines, got {len(policy_workers)} and {len(engines)}")
    run = _Refit(policy_workers, engines, plan, version, timeline, timeout_s)
    try:
        run.open()
        run.stage()
        run.commit()
    except Exception as error:
        run.abort(error)
        raise
    return run.report()


class _Refit:
    def __init__(
        self,
        policy: Sequence[Worker],
        engines: Sequence[Worker],
        plan: RefitPlan,
        version: int,
        timeline: Timer | None,
        timeout_s: float,
    ) -> None:
        self._policy, self._engines, self._plan = policy, engines, plan
        self._protocol = RefitProtocol(version)
        self._timeline, self._timeout_s = timeline, timeout_s
        self._seconds: dict[str, float] = defaultdict(float)
        self._outstanding: list[Call] = []

    def open(self) -> None:
        """Every side takes the plan and maps the buffer; both digests and the policy's pieces are checked."""
        with self._stage("open"):
            text = self._plan.to_json()
            first = self._all(self._policy[:1], "open_refit", None, text)
            transport = first[0]["transport"]
            opened = first + self._all(self._policy[1:], "open_refit", transport, text)
            manifest = {"plan": text, "digest": self._plan.digest, "transport": transport}
            started = self._all(self._engines, "start_refit", manifest)
            for worker, answer in zip([*self._policy, *self._engines], opened + started, strict=True):
                if answer["digest"] != self._plan.digest:
                    raise RefitError(
                        f"refit to weight version {self._protocol.version}: {worker.name} has the plan "
                        f"{answer['digest'][:12]}, the driver {self._plan.digest[:12]}"
                    )
            held = {worker.name: answer["held"] for worker, answer in zip(self._policy, opened, strict=True)}
            check_coverage(self._plan, held)
            self._protocol.advance(RefitState.PLANNED)

    def stage(self) -> None:
        """Bucket i + 1 is filled in one half of the buffer while the engines load bucket i from the other."""
        self._protocol.advance(RefitState.STAGING)
        with self._stage("stage"):
            filling = self._start(self._policy, "fill_bucket", 0)
            for index in range(len(self._plan.buckets)):
                self._seconds["fill"] += max(answer["seconds"] for answer in self._wait(filling))
                loading = self._start(self._engines, "load_bucket", index)
                if index + 1 < len(self._plan.buckets):
                    filling = self._start(self._policy, "fill_bucket", index + 1)
                self._seconds["load"] += max(answer["seconds"] for answer in self._wait(loading))

    def commit(self) -> None:
        """Every engine checks that all of the plan has arrived and takes the new weight version."""
        version = self._protocol.version
        self._protocol.advance(RefitState.COMMITTING)
        with self._stage("commit"):
            commits = self._start(self._engines, "commit_refit", version)
            for call, answer in zip(commits, self._wait(commits), strict=True):
                done, tensors = answer["version"], answer["tensors"]
                if (done, tensors) != (version, len(self._plan.slots)):
                    raise RefitError(
                        f"{call.worker.name} committed weight version {done} with {tensors} tensors; "
                        f"expected version {version} with {len(self._plan.slots)}"
                    )
        self._protocol.advance(RefitState.COMMITTED)

    def abort(self, error: Exception) -> None:
        """Close what is half open on every engine. What fails here is added to `error` as a note."""
        self._protocol.advance(RefitState.ABORTED)
        # First the calls still under way: nobody may fill or load any more when an engine closes its update.
        self._drain(error)
        self._timeout_s = min(self._timeout_s, ABORT_TIMEOUT_S)
        for engine in self._engines:
            try:
                self._start([engine], "abort_refit")
            except Exception as failure:
                error.add_note(f"abort_refit could not be sent to {engine.name}: {failure}")
        self._drain(error)

    def report(self) -> RefitReport:
        return RefitReport(
            version=self._protocol.version,
            bytes=self._plan.tensor_bytes,
            seconds=sum(self._seconds[name] for name in ("open", "stage", "commit")),
            buckets=len(self._plan.buckets),
            tensors=len(self._plan.slots),
            stage_seconds=dict(self._seconds),
        )

    def _start(self, workers: Sequence[Worker], method: str, *args: Any) -> list[Call]:
        bucket = f" {args[0]}" if method in ("fill_bucket", "load_bucket") else ""
        what = f"{method}{bucket} of the refit to weight version {self._protocol.version}"
        calls = []
        for worker in workers:
            calls.append(Call(worker, what, worker.call(method, *args, timeout_s=self._timeout_s, what=what)))
            self._outstanding.append(calls[-1])
        return calls

    def _wait(self, calls: list[Call]) -> list[Any]:
        """All answers, in order. The first that fails is raised, with who and what."""
        answers = []
        for call in calls:
            self._outstanding.remove(call)
            try:
                answers.append(call.pending.result())
            except Exception as error:
                raise RefitError(f"{call.what} failed on {call.worker.name}: {error}") from error
        return answers

    def _all(self, workers: Sequence[Worker], method: str, *args: Any) -> list[Any]:
        return self._wait(self._start(workers, method, *args))

    def _drain(self, error: Exception) -> None:
        while self._outstanding:
            call = self._outstanding.pop(0)
            try:
                call.pending.result()
            except Exception as failure:
                error.add_note(f"{call.what} failed on {call.worker.name} too: {failure}")

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        with self._timeline.time(f"refit/{name}") if self._timeline else nullcontext():
            yield
        self._seconds[name] += time.perf_counter() - began
