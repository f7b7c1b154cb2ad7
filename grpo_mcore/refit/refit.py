"""One refit, as the driver runs it: open the plan on every worker, stage the buckets, commit the new version.

If a refit fails, all workers leave it together, on the old weights.
"""

import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, Concatenate, ParamSpec, Protocol

from grpo_mcore.base.clock import REAL, Clock
from grpo_mcore.base.stopping import StopNow
from grpo_mcore.refit.engine_side.receiver import RefitReceiver
from grpo_mcore.refit.plan.delivery import engine_ranks, readers_by_node
from grpo_mcore.refit.plan.parts import Seat, parts_of
from grpo_mcore.refit.plan.plan import RefitError, RefitPlan
from grpo_mcore.refit.plan.proof import BlockSums, Sums, Verify, first_difference
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.rollout.workers import DeadlineExceeded, Future, Worker, remote_call

P = ParamSpec("P")

ABORT_TIMEOUT_S, LATE_TIMEOUT_S = 60.0, 5.0
"""Seconds in which a worker must leave a refit that failed; the second, if it has missed a deadline of it already."""


class Timer(Protocol):
    def time(self, label: str) -> AbstractContextManager[Any]: ...


class RefitEngine(Protocol):
    """The methods of an engine that a refit calls."""

    def start_refit(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Give every rank its part of the plan. Return {digest, in_place, dtype, verify, transport}."""

    def stage_refit(self) -> dict[str, Any]:
        """Take every bucket. Return {seconds, sums by rank}."""

    def commit_refit(self, version: int, recompute_kv: bool = False) -> dict[str, Any]:
        """Pause, and switch all ranks to the new weights. Return {version, fallbacks}."""

    def finish_refit(self) -> None:
        """Go on generating."""

    def abort_refit(self) -> None:
        """Leave the refit, with the old weights."""


class RefitState(Enum):
    IDLE = "idle"
    PLANNED = "planned"  # every worker has opened the same plan on the same buffer
    STAGING = "staging"  # buckets move; the engines may generate with the old weights
    STAGED = "staged"  # the engines hold the new weights, checked, in addition to the old ones
    COMMITTING = "committing"  # the engines pause and swap old for new; each can still go back
    COMMITTED = "committed"
    ABORTED = "aborted"  # every living engine is on the old weights


_ORDER = tuple(state for state in RefitState if state is not RefitState.ABORTED)
NEXT: dict[RefitState, frozenset[RefitState]] = {
    **{state: frozenset({after, RefitState.ABORTED}) for state, after in zip(_ORDER, _ORDER[1:], strict=False)},
    RefitState.COMMITTED: frozenset(),
    RefitState.ABORTED: frozenset(),
}
"""The states that may follow each."""


def advanced(version: int, state: RefitState, to: RefitState) -> RefitState:
    """Return `to`. Raises RefitError if it may not follow `state`."""
    if to not in NEXT[state]:
        raise RefitError(
            f"refit to weight version {version}: no way from {state.value} to {to.value}; possible: "
            f"{sorted(state.value for state in NEXT[state]) or 'none, it has ended'}"
        )
    return to


@dataclass(frozen=True, eq=False)
class Call:
    """A call whose answer has not been taken."""

    worker: Worker
    what: str
    future: Future


@dataclass(frozen=True)
class EngineNodes:
    """Placement of the engines. `engines`: the node numbers of each engine, over which its ranks are spread evenly and
    in order. `hosts`: a worker on each node that can receive."""

    engines: Sequence[Sequence[int]]
    hosts: Sequence[Worker]


@dataclass(frozen=True)
class RefitReport:
    """The result of a committed refit.

    `bytes`: weights that moved, without gaps. `seconds`: whole refit. `pause_seconds`: time in which the engines
    could not generate. `stage_seconds`: open, stage, commit on the driver's clock; fill, load: the slowest rank's,
    without its waiting (they overlap). `checked`: number of copies whose checksums were compared. `in_place`: engines
    that had no memory to stage in; their whole refit was a pause. `fallbacks`: tensors that were sent whole, for vLLM's
    own loading. `mult_prob_error`: the largest mean over an engine's tokens of exp|its log-prob - the policy's|; None
    if they were not compared."""

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
    recompute_kv: bool = False,
    **options: Any,
) -> RefitReport:
    """Make every engine's weights equal the policy's, as weight version `version`: stage and commit a `Refit`, which
    takes the `options`.

    Raises RefitError. Every living engine is then on its old weights and can generate, except one that had to replace
    layers in place.
    """
    run = Refit(policy_workers, engines, plan, version, **options)
    run.stage()
    return run.commit(recompute_kv=recompute_kv)


class _Seats:
    """The place of each process on its node's board: first the policy ranks, or the receiver, then the engine ranks."""

    def __init__(
        self, rank_nodes: Sequence[int], engine_nodes: Sequence[Sequence[int]], ranks: int, timeout_s: float
    ) -> None:
        """`ranks`: number of ranks of one engine."""
        self._engine_nodes = [
            [nodes[rank * len(nodes) // ranks] for rank in range(ranks)] for nodes in engine_nodes
        ]  # by engine and rank
        self._writers = Counter(rank_nodes)
        self._readers = Counter(node for nodes in self._engine_nodes for node in nodes)
        self._session, self._timeout_s = uuid.uuid4().int >> 65, timeout_s

    def of_writer(self, node: int, place: int) -> Seat:
        writers = self._writers[node] or 1
        return Seat(self._session, place, writers, self._readers[node], self._timeout_s)

    def of_engine(self, engine: int) -> list[Seat]:
        """Return the seat of each rank."""
        seats, taken = [], Counter(node for nodes in self._engine_nodes[:engine] for node in nodes)
        for node in self._engine_nodes[engine]:
            writers = self._writers[node] or 1
            seats.append(Seat(self._session, writers + taken[node], writers, self._readers[node], self._timeout_s))
            taken[node] += 1
        return seats


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
        clock: Clock = REAL,
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
        self._version, self.state = version, RefitState.IDLE
        self._timeline, self._clock, self._timeout_s = timeline, clock, timeout_s
        self._seconds: dict[str, float] = defaultdict(float)
        self._outstanding: list[Call] = []
        self._late: set[str] = set()  # workers that missed a deadline
        self._in_place: tuple[str, ...] = ()
        self._send_arguments: tuple[Any, ...] = ()
        self._sent: BlockSums = {}
        self._arrived: dict[str, Sums] = defaultdict(dict)
        ranks = len(policy_workers)
        self._rank_nodes = self._node_of_rank or [-1 if self._nodes else 0] * ranks
        """The node of each policy rank among those with engines, or -1."""
        self._receiving = [
            ranks + node if self._receivers else self._rank_nodes.index(node)
            for node in range(max(1, len(self._nodes)))
        ]
        """By node: the member of the network that receives there, a policy rank or one of the receivers after them."""
        self._parts = parts_of(
            plan,
            ranks,
            tuple(self._rank_nodes) if self._nodes else (),
            tuple(map(tuple, self._nodes)),
            tuple(self._receiving) if self._nodes else (),
        )
        taken: Counter[int] = Counter()
        self._places = []  # of each policy rank among those of its node
        for node in self._rank_nodes:
            self._places.append(taken[node])
            taken[node] += 1
        self._seats = _Seats(self._rank_nodes, self._engine_nodes, len(self._parts.readers), timeout_s)

    def _advance(self, to: RefitState) -> None:
        self.state = advanced(self._version, self.state, to)

    def stage(self) -> None:
        """Open the plan on every worker and move all buckets. The engines may generate meanwhile."""
        with self._or_abort():
            with self._stage("open"):
                self._open()
            self._advance(RefitState.STAGING)
            with self._stage("stage"):
                self._move()
                self._check()
            self._advance(RefitState.STAGED)

    def commit(self, *, recompute_kv: bool = False) -> RefitReport:
        """Pause the engines, switch all of them to the new weights, then let them go on together."""
        with self._or_abort():
            self._advance(RefitState.COMMITTING)
            with self._stage("commit"):
                fallbacks = self._commit(recompute_kv)
        pause = self._seconds["commit"] + (self._seconds["open"] + self._seconds["stage"] if self._in_place else 0.0)
        return RefitReport(
            version=self._version,
            bytes=self._plan.block_bytes,
            seconds=sum(self._seconds[name] for name in ("open", "stage", "commit")),
            pause_seconds=pause,
            buckets=len(self._plan.buckets),
            checked=sum(map(len, self._arrived.values())),
            in_place=self._in_place,
            fallbacks=fallbacks,
            stage_seconds=dict(self._seconds),
        )

    def _open(self) -> None:
        """Give every process its part of the plan, its seat, and the buffer of its node."""
        version = self._version
        network, opened, transports = self._open_policy()
        waves = [[e for e in self._numbers if self._engines[e] in self._receivers], []]
        waves[1] = [e for e in self._numbers if e not in waves[0]]
        started: dict[int, Any] = {}
        calls = {e: self._start_engine(e, transports, network) for e in waves[0]}
        started |= self._answers(calls)
        for e in waves[0]:
            transports[self._receivers.index(self._engines[e])] = started[e]["transport"]
        calls = {e: self._start_engine(e, transports, network) for e in waves[1]}
        for rank, call in opened.items():
            if isinstance(call, Call):
                (opened[rank],) = self._wait([call])
        started |= self._answers(calls)
        answers = [opened[rank] for rank in range(len(self._policy))] + [started[e] for e in self._numbers]
        for worker, answer in zip([*self._policy, *self._engines], answers, strict=True):
            if answer["digest"] != self._plan.digest:
                raise RefitError(
                    f"refit to weight version {version}: {worker.name} has the plan {answer['digest'][:12]}, "
                    f"the driver {self._plan.digest[:12]}"
                )
        for rank, (planned, worker) in enumerate(zip(self._parts.sent, self._policy, strict=True)):
            if (sent := opened[rank]["bytes"]) != planned:
                raise RefitError(
                    f"refit to weight version {version}: {worker.name} would send {sent:,} bytes, the plan has "
                    f"{planned:,}"
                )
        self._in_place = tuple(self._engines[e].name for e in self._numbers if started[e]["in_place"])
        dtypes = {started[e]["dtype"] for e in self._numbers}
        if len(dtypes) > 1:
            raise RefitError(f"the engines hold their weights in different formats: {sorted(dtypes)}")
        strongest = max((started[e]["verify"] for e in self._numbers), key=("off", "sample", "full").index)
        self._send_arguments = (strongest, version, dtypes.pop())
        self._advance(RefitState.PLANNED)

    @property
    def _numbers(self) -> range:
        return range(len(self._engines))

    def _answers(self, calls: dict[int, Call]) -> dict[int, Any]:
        return dict(zip(calls, self._wait(list(calls.values())), strict=True))

    def _start_engine(self, engine: int, transports: list[Any], network: Any) -> Call:
        manifest = {
            "digest": self._plan.digest,
            "version": self._version,
            "verify": self._verify,
            "parts": list(self._parts.readers),
            "seats": self._seats.of_engine(engine),
            "transports": [transports[node] for node in self._engine_nodes[engine]],
        }
        worker = self._engines[engine]
        if worker in self._receivers:
            manifest["receiver"] = self._receiver_arguments(self._receivers.index(worker), network)
        (call,) = self._start([worker], RefitEngine.start_refit)(manifest)
        return call

    def _receiver_arguments(self, node: int, network: Any) -> tuple[Any, ...]:
        return network, self._parts.receivers[node], node, self._seats.of_writer(node, 0)

    def _open_policy(self) -> tuple[Any, dict[int, Any], list[Any]]:
        """Return (description of the network, the ranks' answers or calls, the buffer of each engine node if it is made
        already)."""
        ranks, network = len(self._policy), None
        if self._nodes:
            (network,) = self._wait(
                self._start(self._policy[:1], RefitSender.host_network)(
                    ranks + len(self._receivers),
                    self._receiving,
                    self._rank_nodes,
                    self._timeout_s,
                )
            )
        others = [node for node, worker in enumerate(self._receivers) if worker not in self._engines]
        receiving = [
            self._start([self._receivers[node]], RefitReceiver.open_receiver)(*self._receiver_arguments(node, network))[
                0
            ]
            for node in others
        ]
        transports: list[Any] = [None] * max(1, len(self._nodes))
        makers = {rank: node for node, rank in enumerate(self._receiving) if rank < ranks}
        opened: dict[int, Any] = self._answers({rank: self._open_rank(rank, None, network) for rank in makers})
        for rank, node in makers.items():
            transports[node] = opened[rank]["transport"]
        for node, answer in zip(others, self._wait(receiving), strict=True):
            transports[node] = answer["transport"]
        for rank in range(ranks):
            if rank not in makers:
                node = self._rank_nodes[rank]
                opened[rank] = self._open_rank(rank, transports[node] if node >= 0 else None, network)
        return network, opened, transports

    def _open_rank(self, rank: int, transport: Any, network: Any) -> Call:
        node = self._rank_nodes[rank]
        seat = self._seats.of_writer(node, self._places[rank]) if node >= 0 else None
        (call,) = self._start([self._policy[rank]], RefitSender.open_refit)(
            self._parts.senders[rank], seat, transport, network
        )
        return call

    def _move(self) -> None:
        """Have the policy ranks send, the receivers receive and the engines stage; they go through the buckets by
        themselves. An error of any ends it for all."""
        receiving = self._start(
            [receiver for receiver in self._receivers if receiver not in self._engines], RefitReceiver.receive_refit
        )()
        # First whoever only waits for its own threads: in one process a call returns when it is done.
        sending = self._start(self._policy, RefitSender.send_refit)(*self._send_arguments)
        staging = self._start(self._engines, RefitEngine.stage_refit)()
        sent, staged = self._wait(sending), self._wait(staging)
        self._wait(receiving)
        self._seconds["fill"] += max(answer["seconds"] for answer in sent)
        self._seconds["load"] += max(answer["seconds"] for answer in staged)
        for answer in sent:
            self._sent |= answer["sums"]
        for answer in staged:
            for rank, sums in answer["sums"].items():
                self._arrived[rank] |= sums

    def _check(self) -> None:
        """Compare the checksums: the engines must hold what the policy ranks hold."""
        if difference := first_difference(self._plan, self._sent, self._arrived):
            raise RefitError(f"refit to weight version {self._version}: {difference}")

    def _commit(self, recompute_kv: bool) -> tuple[str, ...]:
        version = self._version
        commits = self._start(self._engines, RefitEngine.commit_refit)(version, recompute_kv)
        fallbacks: tuple[str, ...] = ()
        answers = self._wait(commits)
        for call, answer in zip(commits, answers, strict=True):
            if answer["quantized"] != answers[0]["quantized"]:
                ranks = zip(answer["quantized"], answers[0]["quantized"], strict=True)
                layers = [path for ours, first in ranks for path in ours if ours[path] != first.get(path)]
                raise RefitError(
                    f"refit to weight version {version}: {call.worker.name} and {commits[0].worker.name} quantised the "
                    f"same weights of {len(layers)} layers into different bytes, first {layers[0]}"
                )
            if answer["version"] != version:
                raise RefitError(f"{call.worker.name} committed weight version {answer['version']}, not {version}")
            if answer["fallbacks"]:
                fallbacks = self._plan.fallbacks
        # The point of no return: an engine that does not answer now is on the new version, or dead.
        self._advance(RefitState.COMMITTED)
        self._wait(self._start(self._engines, RefitEngine.finish_refit)())
        return fallbacks

    @contextmanager
    def _or_abort(self) -> Iterator[None]:
        try:
            yield
        except StopNow:  # the run ends, and whoever takes part with it: nobody is waited for
            self._outstanding.clear()
            raise
        except Exception as error:
            if self.state is RefitState.COMMITTED:
                self._drain(error)
            elif self.state is not RefitState.ABORTED:
                self._abort(error)
            raise

    def _abort(self, error: Exception) -> None:
        """Close what is open on every worker. Failures here become notes of `error`."""
        staging = self.state is RefitState.STAGING
        self._advance(RefitState.ABORTED)
        if not staging:  # open calls end by themselves; those that stage may wait for somebody who was never called
            self._drain(error)
        self._leave([(engine, RefitEngine.abort_refit) for engine in self._engines], error)
        if self._nodes:  # the next refit cannot use a network that lost a message
            closing: list[tuple[Worker, Callable[[Any], None]]]
            closing = [(worker, RefitSender.close_refit) for worker in self._policy]
            closing += [(receiver, RefitReceiver.close_receiver) for receiver in self._receivers]
            self._leave(closing, error)

    def _leave(self, calls: Sequence[tuple[Worker, Callable[[Any], None]]], error: Exception) -> None:
        """Make the calls, then wait for all that are open. Failures become notes of `error`."""
        for worker, method in calls:
            try:
                limit_s = LATE_TIMEOUT_S if worker.name in self._late else ABORT_TIMEOUT_S
                self._start([worker], method, min(self._timeout_s, limit_s))()
            except Exception as failure:
                error.add_note(f"{method.__name__} could not be sent to {worker.name}: {failure}")
        self._drain(error)

    def _start(
        self, workers: Sequence[Worker], method: Callable[Concatenate[Any, P], Any], timeout_s: float | None = None
    ) -> Callable[P, list[Call]]:
        """Return a function that starts a method of these workers. `timeout_s`: limit in place of the refit's."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        purpose = f"{method.__name__} of the refit to weight version {self._version}"

        def start(*args: P.args, **kwargs: P.kwargs) -> list[Call]:
            calls = []
            for worker in workers:
                future = remote_call(worker, method, timeout_s=limit_s, purpose=purpose)(*args, **kwargs)
                calls.append(Call(worker, purpose, future))
                self._outstanding.append(calls[-1])
            return calls

        return start

    def _wait(self, calls: list[Call]) -> list[Any]:
        """Return all answers in order. Raises RefitError for the first that fails, naming the worker and the call."""
        answers = []
        for call in calls:
            self._outstanding.remove(call)
            try:
                answers.append(call.future.result())
            except StopNow:
                raise
            except Exception as error:
                self._note_late(call, error)
                raise RefitError(f"{call.what} failed on {call.worker.name}: {error}") from error
        return answers

    def _drain(self, error: Exception) -> None:
        while self._outstanding:
            call = self._outstanding.pop(0)
            try:
                call.future.result()
            except Exception as failure:
                self._note_late(call, failure)
                error.add_note(f"{call.what} failed on {call.worker.name} too: {failure}")

    def _note_late(self, call: Call, error: Exception) -> None:
        if isinstance(error, DeadlineExceeded):
            self._late.add(call.worker.name)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started_at = self._clock.now()
        with self._timeline.time(f"refit/{name}") if self._timeline else nullcontext():
            yield
        self._seconds[name] += self._clock.now() - started_at
