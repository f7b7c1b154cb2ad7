"""One refit, as the driver runs it: open the plan on every worker, stage the buckets, commit the new version.

If a refit fails, all workers leave it together, on the old weights.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from grpo_mcore.refit.delivery import bytes_to, engine_ranks, readers_by_node
from grpo_mcore.refit.plan import RefitError, RefitPlan
from grpo_mcore.refit.proof import Sums, Verify, first_difference
from grpo_mcore.rollout.workers import Future, Worker

ABORT_TIMEOUT_S = 60.0


class Timer(Protocol):
    def time(self, label: str) -> AbstractContextManager[Any]: ...


class RefitState(Enum):
    IDLE = "idle"
    PLANNED = "planned"  # every worker has opened the same plan on the same buffer
    STAGING = "staging"  # buckets move; the engines may generate with the old weights
    STAGED = "staged"  # the engines hold the new weights, checked, in addition to the old ones
    COMMITTING = "committing"  # the engines pause and swap old for new; each can still go back
    COMMITTED = "committed"
    ABORTED = "aborted"  # every living engine is on the old weights


_ORDER = (
    RefitState.IDLE,
    RefitState.PLANNED,
    RefitState.STAGING,
    RefitState.STAGED,
    RefitState.COMMITTING,
    RefitState.COMMITTED,
)
NEXT: dict[RefitState, frozenset[RefitState]] = {
    **{state: frozenset({after, RefitState.ABORTED}) for state, after in zip(_ORDER, _ORDER[1:], strict=False)},
    RefitState.COMMITTED: frozenset(),
    RefitState.ABORTED: frozenset(),
}


class RefitProtocol:
    """The state of one refit to `version`; only the transitions in `NEXT` are allowed."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.state = RefitState.IDLE

    def advance(self, to: RefitState) -> None:
        """Change the state. Raises RefitError for a transition that does not exist."""
        if to not in NEXT[self.state]:
            raise RefitError(
                f"refit to weight version {self.version}: no way from {self.state.value} to {to.value}; "
                f"possible: {sorted(state.value for state in NEXT[self.state]) or 'none, it has ended'}"
            )
        self.state = to


@dataclass(frozen=True, eq=False)
class Call:
    """A call whose answer has not been taken."""

    worker: Worker
    what: str
    future: Future


@dataclass(frozen=True)
class EngineNodes:
    """Placement of the engines. `engines`: the node numbers of each engine, over which its ranks are spread evenly and
    in order. `hosts`: for each node a worker there that can receive."""

    engines: Sequence[Sequence[int]]
    hosts: Sequence[Worker]


@dataclass(frozen=True)
class RefitReport:
    """The result of a committed refit.

    `bytes`: weights that moved, without gaps. `seconds`: whole refit. `pause_seconds`: time in which the engines could
    not generate. `stage_seconds`: open, stage, commit on the driver's clock; fill, load: the slowest rank's, summed
    over the buckets (they overlap). `checked`: number of copies whose checksums were compared. `in_place`: engines that
    had no memory to stage in; their whole refit was a pause. `fallbacks`: tensors that were sent whole, for vLLM's own
    loading. `mult_prob_error`: the largest mean over an engine's tokens of exp|its log-prob - the policy's|; None if
    they were not compared."""

    version: int
    bytes: int
    seconds: float
    pause_seconds: float
    buckets: int
    checked: int
    in_place: tuple[str, ...]
    fallbacks: tuple[str, ...]
    stage_seconds: dict[str, float]
    mult_prob_error: float | None = None


def refit(
    policy_workers: Sequence[Worker],
    engines: Sequence[Worker],
    plan: RefitPlan,
    version: int,
    *,
    verify: Verify = "sample",
    recompute_kv: bool = False,
    nodes: EngineNodes | None = None,
    node_of_rank: Sequence[int] = (),
    timeline: Timer | None = None,
    timeout_s: float = 600.0,
) -> RefitReport:
    """Make every engine's weights equal the policy's, as weight version `version`: stage and commit a `Refit`.

    Raises RefitError. Every living engine is then on its old weights and can generate, except one that had to replace
    layers in place.
    """
    run = Refit(
        policy_workers,
        engines,
        plan,
        version,
        verify=verify,
        nodes=nodes,
        node_of_rank=node_of_rank,
        timeline=timeline,
        timeout_s=timeout_s,
    )
    run.stage()
    return run.commit(recompute_kv=recompute_kv)


class Refit:
    """One refit in two steps: `stage` while the engines generate, `commit` in a short pause.

    Both raise RefitError, after all workers have left the refit.
    """

    def __init__(
        self,
        policy_workers: Sequence[Worker],
        engines: Sequence[Worker],
        plan: RefitPlan,
        version: int,
        *,
        verify: Verify = "sample",
        nodes: EngineNodes | None = None,
        node_of_rank: Sequence[int] = (),
        timeline: Timer | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """`policy_workers`: all policy ranks. Each call waits at most `timeout_s`.

        `verify`: "sample" checks everything in an engine's first refit and a rotating sample of parameters later.
        `nodes`: placement of the engines; None: all of them share one node with all policy ranks. `node_of_rank`: the
        number in `nodes` of each policy rank's node, or -1; the first rank of each node then creates its buffer and
        receives for it. Empty: no policy rank is on a node with engines, and the node's host does both.
        `timeline` times the stages refit/open, refit/stage and refit/commit.
        """
        if not policy_workers or not engines:
            raise RefitError(f"a refit needs policy ranks and engines, got {len(policy_workers)} and {len(engines)}")
        self._policy, self._engines, self._plan = policy_workers, engines, plan
        self._verify = verify
        self._engine_nodes = nodes.engines if nodes else [(0,)] * len(engines)
        self._nodes = readers_by_node(nodes.engines, engine_ranks(plan)) if nodes else []  # engine ranks, by node
        if len(self._engine_nodes) != len(engines) or (nodes and len(nodes.hosts) != len(self._nodes)):
            raise RefitError(f"{len(engines)} engines need one placement each, and each node one host; got {nodes}")
        self._node_of_rank = list(node_of_rank)
        if missing := set(range(len(self._nodes))) - set(node_of_rank) if node_of_rank else None:
            raise RefitError(f"no policy rank is on the engine nodes {sorted(missing)}")
        self._receivers = list(nodes.hosts) if nodes and not node_of_rank else []
        self._protocol = RefitProtocol(version)
        self._timeline, self._timeout_s = timeline, timeout_s
        self._seconds: dict[str, float] = defaultdict(float)
        self._outstanding: list[Call] = []
        self._in_place: tuple[str, ...] = ()
        self._fill_arguments: tuple[Any, ...] = ()
        self._sent: Sums = {}
        self._found: dict[str, Sums] = defaultdict(dict)

    @property
    def state(self) -> RefitState:
        return self._protocol.state

    def stage(self) -> None:
        """Open the plan on every worker and move all buckets. The engines may generate meanwhile."""
        with self._or_abort():
            with self._stage("open"):
                self._open()
            self._protocol.advance(RefitState.STAGING)
            with self._stage("stage"):
                self._move()
                self._check()
            self._protocol.advance(RefitState.STAGED)

    def commit(self, *, recompute_kv: bool = False) -> RefitReport:
        """Pause the engines, switch all of them to the new weights, then let them go on together."""
        with self._or_abort():
            self._protocol.advance(RefitState.COMMITTING)
            with self._stage("commit"):
                fallbacks = self._commit(recompute_kv)
        pause = self._seconds["commit"] + (self._seconds["open"] + self._seconds["stage"] if self._in_place else 0.0)
        return RefitReport(
            version=self._protocol.version,
            bytes=self._plan.block_bytes,
            seconds=sum(self._seconds[name] for name in ("open", "stage", "commit")),
            pause_seconds=pause,
            buckets=len(self._plan.buckets),
            checked=sum(map(len, self._found.values())),
            in_place=self._in_place,
            fallbacks=fallbacks,
            stage_seconds=dict(self._seconds),
        )

    def _open(self) -> None:
        """Give every worker the plan and the buffer, and compare their digests of the plan."""
        text, version = self._plan.to_json(), self._protocol.version
        manifest = {"plan": text, "digest": self._plan.digest, "version": version, "verify": self._verify}
        made, opening, transports = self._open_policy(text)
        starting = [
            call
            for engine, nodes in zip(self._engines, self._engine_nodes, strict=True)
            for call in self._start(
                [engine], "start_refit", manifest | {"transports": [transports[node] for node in nodes]}
            )
        ]
        others = iter(self._wait(opening))
        opened = [made[rank] if rank in made else next(others) for rank in range(len(self._policy))]
        started = self._wait(starting)
        for worker, answer in zip([*self._policy, *self._engines], opened + started, strict=True):
            if answer["digest"] != self._plan.digest:
                raise RefitError(
                    f"refit to weight version {version}: {worker.name} has the plan {answer['digest'][:12]}, "
                    f"the driver {self._plan.digest[:12]}"
                )
        if (sent := sum(answer["bytes"] for answer in opened)) != (planned := self._planned_bytes()):
            raise RefitError(
                f"refit to weight version {version}: the {len(self._policy)} policy ranks would send {sent:,} bytes, "
                f"the plan has {planned:,} for {max(1, len(self._nodes))} node(s)"
            )
        self._in_place = tuple(
            worker.name for worker, answer in zip(self._engines, started, strict=True) if answer["in_place"]
        )
        dtypes = {answer["dtype"] for answer in started}
        if len(dtypes) > 1:
            raise RefitError(f"the engines hold their weights in different formats: {sorted(dtypes)}")
        strongest = max((answer["verify"] for answer in started), key=("off", "sample", "full").index)
        self._fill_arguments = (strongest, version, dtypes.pop())
        self._protocol.advance(RefitState.PLANNED)

    def _planned_bytes(self) -> int:
        """Return the bytes that the plan brings to all nodes together."""
        if not self._nodes:
            return self._plan.block_bytes
        alike = Counter(tuple(ranks) for ranks in self._nodes)
        return sum(count * bytes_to(self._plan, ranks) for ranks, count in alike.items())

    def _open_policy(self, text: str) -> tuple[dict[int, Any], list[Call], list[Any]]:
        """Return (answers of the ranks that made a buffer, calls of the others, the buffer of each engine node)."""
        ranks, network = range(len(self._policy)), None
        if self._receivers:
            node_of_rank = [-1] * len(ranks)
            receivers = [len(ranks) + node for node in range(len(self._nodes))]
        else:
            node_of_rank = self._node_of_rank or [0] * len(ranks)
            receivers = [node_of_rank.index(node) for node in range(max(1, len(self._nodes)))]
        if self._nodes:
            members = len(ranks) + len(self._receivers)
            (network,) = self._all(
                self._policy[:1], "host_network", members, receivers, node_of_rank, self._nodes, self._timeout_s
            )
        receiving = [
            call
            for node, receiver in enumerate(self._receivers)
            for call in self._start([receiver], "open_receiver", network, text, node)
        ]
        makers = [rank for rank in receivers if rank in ranks]
        made = self._all([self._policy[rank] for rank in makers], "open_refit", None, text, network)
        transports = [answer["transport"] for answer in (self._wait(receiving) or made)]
        opening = [
            call
            for rank in ranks
            if rank not in makers
            for call in self._start(
                [self._policy[rank]],
                "open_refit",
                transports[node_of_rank[rank]] if node_of_rank[rank] >= 0 else None,
                text,
                network,
            )
        ]
        return dict(zip(makers, made, strict=True)), opening, transports

    def _move(self) -> None:
        """Move all buckets: bucket i + 1 is filled in one half of the buffer while the engines read bucket i."""
        filling, receiving = self._fill(0)
        for index in range(len(self._plan.buckets)):
            self._wait(receiving)
            filled = self._wait(filling)
            self._seconds["fill"] += max(answer["seconds"] for answer in filled)
            for answer in filled:
                self._sent |= answer["sums"]
            loading = self._start(self._engines, "stage_bucket", index)
            if index + 1 < len(self._plan.buckets):
                filling, receiving = self._fill(index + 1)
            loaded = self._wait(loading)
            self._seconds["load"] += max(answer["seconds"] for answer in loaded)
            for answer in loaded:
                for rank, sums in answer["sums"].items():
                    self._found[rank] |= sums

    def _fill(self, index: int) -> tuple[list[Call], list[Call]]:
        filling = self._start(self._policy, "fill_bucket", index, *self._fill_arguments)
        return filling, self._start(self._receivers, "receive_bucket", index)

    def _check(self) -> None:
        """Compare the checksums: the engines must hold what the policy ranks hold."""
        if difference := first_difference(self._plan, self._sent, self._found):
            raise RefitError(f"refit to weight version {self._protocol.version}: {difference}")

    def _commit(self, recompute_kv: bool) -> tuple[str, ...]:
        version = self._protocol.version
        commits = self._start(self._engines, "commit_refit", version, recompute_kv)
        fallbacks: tuple[str, ...] = ()
        for call, answer in zip(commits, self._wait(commits), strict=True):
            if answer["version"] != version:
                raise RefitError(f"{call.worker.name} committed weight version {answer['version']}, not {version}")
            if answer["fallbacks"]:
                fallbacks = self._plan.fallbacks
        # The point of no return: an engine that does not answer now is on the new version, or dead.
        self._protocol.advance(RefitState.COMMITTED)
        self._all(self._engines, "finish_refit")
        return fallbacks

    @contextmanager
    def _or_abort(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._protocol.state is RefitState.COMMITTED:
                self._drain(error)
            elif self._protocol.state is not RefitState.ABORTED:
                self._abort(error)
            raise

    def _abort(self, error: Exception) -> None:
        """Close what is open on every worker. Failures here become notes of `error`."""
        self._protocol.advance(RefitState.ABORTED)
        # Wait for open calls first: nobody may fill or read a bucket when an engine closes its update.
        self._drain(error)
        self._timeout_s = min(self._timeout_s, ABORT_TIMEOUT_S)
        leaving = [(engine, "abort_refit") for engine in self._engines]
        if self._nodes:  # the next refit cannot use a network that lost a message
            leaving += [(worker, "close_refit") for worker in self._policy]
            leaving += [(receiver, "close_receiver") for receiver in self._receivers]
        for worker, method in leaving:
            try:
                self._start([worker], method)
            except Exception as failure:
                error.add_note(f"{method} could not be sent to {worker.name}: {failure}")
        self._drain(error)

    def _start(self, workers: Sequence[Worker], method: str, *args: Any) -> list[Call]:
        bucket = f" {args[0]} ({self._tensors(args[0])})" if method.endswith("_bucket") else ""
        what = f"{method}{bucket} of the refit to weight version {self._protocol.version}"
        calls = []
        for worker in workers:
            calls.append(Call(worker, what, worker.call(method, *args, timeout_s=self._timeout_s, what=what)))
            self._outstanding.append(calls[-1])
        return calls

    def _tensors(self, bucket: int) -> str:
        """Name the first and last policy parameter of a bucket, for an error."""
        names = list(dict.fromkeys(block.param for block in self._plan.buckets[bucket].blocks))
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    def _wait(self, calls: list[Call]) -> list[Any]:
        """Return all answers in order. Raises RefitError for the first that fails, naming the worker and the call."""
        answers = []
        for call in calls:
            self._outstanding.remove(call)
            try:
                answers.append(call.future.result())
            except Exception as error:
                raise RefitError(f"{call.what} failed on {call.worker.name}: {error}") from error
        return answers

    def _all(self, workers: Sequence[Worker], method: str, *args: Any) -> list[Any]:
        return self._wait(self._start(workers, method, *args))

    def _drain(self, error: Exception) -> None:
        while self._outstanding:
            call = self._outstanding.pop(0)
            try:
                call.future.result()
            except Exception as failure:
                error.add_note(f"{call.what} failed on {call.worker.name} too: {failure}")

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        with self._timeline.time(f"refit/{name}") if self._timeline else nullcontext():
            yield
        self._seconds[name] += time.perf_counter() - began
