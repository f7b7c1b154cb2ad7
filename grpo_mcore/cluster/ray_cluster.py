"""Workers as Ray actors."""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from grpo_mcore.base.clock import REAL, Clock
from grpo_mcore.cluster.diagnostics import last_line, wait_graph
from grpo_mcore.cluster.environment import chosen
from grpo_mcore.cluster.inspection import (
    Answering,
    Collector,
    ProcessReport,
    current_frames,
    driver_key,
    own_frames,
    reports_here,
)
from grpo_mcore.cluster.local_cluster import LocalFuture
from grpo_mcore.cluster.ray_actor import WorkerActor
from grpo_mcore.cluster.ray_placement import check_room, nodes_of, rank_order, request_text, reserve, resources_text
from grpo_mcore.cluster.ray_session import RaySession
from grpo_mcore.cluster.ray_worker import WATCH_S, RayFuture, RayStore, RayStream, RayWorker
from grpo_mcore.rollout.workers import (
    Cluster,
    DeadlineExceeded,
    ObjectStore,
    Place,
    SpawnOptions,
    SpawnOrder,
    T,
    Worker,
)

CLOSE_S = 3.0
"""Seconds that workers get for their `shutdown` before they are killed; a worker that is in a call does not answer."""

ASK_S = 30.0
"""Seconds that the other nodes get to say what their workers are doing."""

GATHER_S = 0.01
"""Seconds between two returns of a wait that is not patient, where something comes all the time. Events of that time
are taken together; taken one by one, each would wake the driver."""

INSPECT_AT, INSPECT_S = 0.1, 30.0
"""An inspection is made and kept when a call has taken the share INSPECT_AT of its deadline, and at least INSPECT_S
seconds, and again each time as much has passed."""

KEPT = 10
"""Number of inspections that are kept; a later one replaces the oldest."""

STREAMS = "streams"
"""Name of the concurrency group of an actor's streams."""

IGNORE_UNHANDLED = "RAY_IGNORE_UNHANDLED_ERRORS"
"""Ray reads this variable whenever the last reference to an error that nobody has seen is dropped."""

logger = logging.getLogger(__name__)


class RayCluster(Cluster):
    """The Cluster interface over Ray.

    `log_dir`: each worker prints to `log_dir`/NAME.log; when one dies, Ray's own logs are copied to `log_dir`/ray.
    `address`: a running Ray; by default that of RAY_ADDRESS; without one, or with "local", Ray is started here.
    `env_vars`: names of further variables that workers may see; their values are the driver's. `num_cpus`,
    `num_gpus`: resources of a Ray started here, in place of the machine's.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        address: str | None = None,
        env_vars: Sequence[str] = (),
        start_timeout_s: float = 600.0,
        call_timeout_s: float = 3600.0,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
    ) -> None:
        self.log_dir = Path(log_dir).absolute()
        self.call_timeout_s = call_timeout_s
        self.clock: Clock = REAL
        self.store: ObjectStore = RayStore(call_timeout_s)
        self._env_vars = tuple(env_vars)
        self._start_timeout_s = start_timeout_s
        self._workers: dict[str, RayWorker] = {}
        self._groups: list[tuple[PlacementGroup, set[str]]] = []
        self._process = os.getpid()
        self._session: RaySession | None = RaySession(
            address or os.environ.get("RAY_ADDRESS"), num_cpus, num_gpus, start_timeout_s
        )
        self.address, self._node = self._session.address, ray.get_runtime_context().get_node_id()
        # Nobody starts a new node for a Ray that was started here: it has this machine alone.
        self._wait_for_nodes_s = 0.0 if self._session.started_here else start_timeout_s
        self._collectors: dict[str, Any] = {}
        self._inspection = threading.Thread()
        self._inspections, self._next_inspection = 0, 0.0
        self._returned_at = 0.0
        self._answering = Answering(driver_key(self.log_dir), self.inspect)
        atexit.register(self.shutdown)

    def start(
        self, name: str, cls: Callable[..., Any], args: Sequence[Any], options: SpawnOptions, beside: Sequence[Worker]
    ) -> RayWorker:
        check_room(name, 1, options.cpus, options.gpus, self._wait_for_nodes_s, self.watch)
        strategy, visible = _colocated(name, beside)
        worker = self._start_actor(name, options, visible, strategy)
        worker.build(cls, *args)
        return worker

    def start_group(self, order: SpawnOrder) -> Sequence[RayWorker]:
        name, size, cpus, gpus = order.name, len(order.args_per_rank), order.options.cpus, order.options.gpus
        names = [f"{name}-{rank}" for rank in range(size)]
        if order.beside:
            check_room(name, size, cpus, gpus, self._wait_for_nodes_s, self.watch)
            local_ranks = [0] * size
            spots = [_colocated(rank_name, others) for rank_name, others in zip(names, order.beside, strict=True)]
        else:
            place = name, size, cpus, gpus, self._start_timeout_s, order.nodes
            group = reserve(*place, rejoins=self._wait_for_nodes_s > 0, watch=self.watch)
            self._groups.append((group, set(names)))
            places = rank_order(nodes_of(group), size)
            local_ranks = [local for _, local in places]
            spots = [(PlacementGroupSchedulingStrategy(group, bundle), {}) for bundle, _ in places]
        workers = [
            self._start_actor(rank_name, order.options, visible, strategy)
            for rank_name, (strategy, visible) in zip(names, spots, strict=True)
        ]
        meeting_point = workers[0].actor.meeting_point.remote()
        for rank, (worker, local, args) in enumerate(zip(workers, local_ranks, order.args_per_rank, strict=True)):
            worker.build(order.cls, meeting_point, *args, rank=(rank, size, 0 if gpus else local))
        return workers

    def wait(
        self, things: Sequence[T], timeout_s: float, purpose: str, watch: Callable[[], None], patient: bool
    ) -> Sequence[T]:
        if over := [thing for thing in things if isinstance(thing, LocalFuture)]:  # of this process: it has run already
            return over
        calls = {call.handle: call for call in cast("Sequence[RayFuture | RayStream]", things)}
        ready: list[Any] = []
        if not patient:
            time.sleep(min(max(self._returned_at + GATHER_S - time.monotonic(), 0.0), timeout_s))
        deadline = time.monotonic() + timeout_s
        while not ready:
            watch()
            self.watch()
            self._inspect_late(calls.values())
            left_s = max(deadline - time.monotonic(), 0.0)
            fewest = len(calls) if patient else 1
            ready, _ = ray.wait(list(calls), num_returns=fewest, timeout=min(left_s, WATCH_S), fetch_local=False)
            if ready and not patient:  # a look at all of them costs little more than each further wait
                ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0, fetch_local=False)
            if not ready and left_s <= WATCH_S:
                break
        if not ready:
            workers = list({call.whom: call.worker for call in calls.values()}.values())
            names = ", ".join(worker.name for worker in workers)
            states = "\n".join(worker.state() for worker in workers[:4])
            raise DeadlineExceeded(purpose, names, timeout_s, states)
        self._returned_at = time.monotonic()
        for handle in ready:
            calls[handle].seen = True
        return cast("list[T]", [calls[handle] for handle in ready])

    def last_log_line(self, worker: str) -> str:
        log = self.log_dir / f"{worker}.log"
        return last_line(log) or f"its log is {log}"

    def stop(self, workers: Sequence[Worker]) -> None:
        self._print_wait_graph(workers)
        stopped = [self._workers.pop(worker.name) for worker in workers]
        closing = {worker.actor.close.remote(): worker for worker in stopped}
        if closing:
            ended, _ = ray.wait(list(closing), num_returns=len(closing), timeout=CLOSE_S)
            for handle in ended:
                _log_failed_shutdown(closing[handle].name, handle)
        for worker in stopped:
            ray.kill(worker.actor)
        gone = {worker.name for worker in stopped}
        for group, names in self._groups:
            names -= gone
            if not names:
                remove_placement_group(group)
        self._groups = [(group, names) for group, names in self._groups if names]

    def shutdown(self) -> None:
        if self._session is None or os.getpid() != self._process:  # a forked child owns nothing here
            return
        session, self._session = self._session, None
        atexit.unregister(self.shutdown)
        self._answering.close()
        if self._inspection.is_alive():
            self._inspection.join(CLOSE_S)
        with _abandoned_calls_fail_silently():
            try:
                self.stop(list(self._workers.values()))
            except RayError as error:  # Ray has died: its workers end with it, and what the run has done stands
                first = str(error).strip().partition("\n")[0]
                logger.warning("the workers could not be ended in order: %s: %s", type(error).__name__, first)
            finally:
                session.close()

    def _start_actor(self, name: str, options: SpawnOptions, visible: Mapping[str, str], strategy: Any) -> RayWorker:
        """`visible`: variables that name the accelerators of its neighbours; `strategy`: Ray's scheduling strategy for
        its place."""
        if name in self._workers:
            raise ValueError(f"there is a worker called {name} already")
        assert self._session is not None
        self._session.check_files()
        # Ray writes a runtime environment to its logs, but not an actor's arguments, which may have secrets.
        for node in {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {self._node}:
            self._collector(node)
        cpus, gpus, streams, concurrency = options.cpus, options.gpus, options.streams, options.concurrency
        env = {**options.env, **visible}
        variables = {**chosen(os.environ, self._env_vars), **env}
        remote: Any = ray.remote  # its types do not know concurrency groups
        make = remote(concurrency_groups={STREAMS: streams})(WorkerActor) if streams else remote(WorkerActor)
        actor = make.options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_concurrency=concurrency,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": env},
        ).remote(name, str(self.log_dir / f"{name}.log"), self._env_vars, variables, gpus, self._session.umask)
        self._workers[name] = RayWorker(
            name,
            actor,
            start_timeout_s=self._start_timeout_s,
            call_timeout_s=self.call_timeout_s,
            waiting_for=lambda: (
                f"asks for {request_text(1, cpus, gpus)}, free: {resources_text(ray.available_resources())}"
            ),
            on_death=self._save_ray_logs,
            watch=lambda: self.watch(),
            stream_options={"concurrency_group": STREAMS} if streams else {},
        )
        return self._workers[name]

    def _print_wait_graph(self, workers: Sequence[Worker]) -> None:
        """Print who waits for whom if one of `workers`, which are about to be ended, is late."""
        waits = [wait for worker in self._workers.values() for wait in worker.waits()]
        ending = {worker.name for worker in workers}
        if any(wait.late and wait.whom in ending for wait in waits):
            logger.error("%s", wait_graph(waits, self._reports({wait.whom for wait in waits})))

    def inspect(self) -> str:
        """Return what the driver and every worker are doing, and whom the others wait for. For any thread."""
        workers = list(self._workers.values())
        names, waits = [worker.name for worker in workers], [wait for worker in workers for wait in worker.waits()]
        driver = own_frames(current_frames())
        graph = wait_graph(waits, self._reports(names), names)
        return f"the driver (process {os.getpid()}) is at, innermost first:\n{driver}\n{graph}\n"

    def _inspect_late(self, calls: Iterable[RayFuture | RayStream]) -> None:
        """Keep an inspection, made by another thread, if one of `calls` has taken a tenth of its deadline."""
        now = time.monotonic()
        if now < self._next_inspection or self._inspection.is_alive():
            return
        late = next((c for c in calls if now - c.since >= max(c.timeout_s * INSPECT_AT, INSPECT_S)), None)
        self._next_inspection = now + (WATCH_S if late is None else max(late.timeout_s * INSPECT_AT, INSPECT_S))
        if late is not None:
            text = f"{late.whom}: {late.purpose} has taken {now - late.since:.0f} of at most {late.timeout_s:.0f} s"
            self._inspection = threading.Thread(target=self._keep_inspection, args=(text,), daemon=True)
            self._inspection.start()

    def _keep_inspection(self, reason: str) -> None:
        path = self.log_dir / f"inspection_{self._inspections % KEPT}.txt"
        self._inspections += 1
        try:
            inspection = self.inspect()
            path.write_text(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {reason}\n{inspection}", encoding="utf-8")
        except Exception as error:  # the run goes on without it
            logger.warning("%s; what each process does could not be found out: %s", reason, error)
            return
        last = inspection.rstrip().rpartition("\n")[2]
        odd = f"; {last}" if not last.startswith(" ") else ""
        logger.info("%s; what each process does: %s%s", reason, path, odd)

    def _reports(self, names: Collection[str]) -> dict[str, ProcessReport]:
        """Return what these workers are doing, each asked on its own node; see `wait_graph`. Those whose node does not
        answer in time are left out."""
        by_node: dict[str, dict[str, Place]] = {}
        for name in names:
            worker = self._workers.get(name)  # None: it was ended meanwhile
            if worker is not None and (place := worker.known_place()) is not None:
                by_node.setdefault(place.node, {})[name] = place
        local_places = by_node.pop(self._node, {})
        answers = [self._collector(node).reports.remote(places) for node, places in by_node.items()]
        reports = reports_here(local_places)
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=ASK_S) if answers else ([], [])
        for answer in ready:
            try:
                reports |= ray.get(answer)
            except RayError as error:  # the node is gone: what its workers do is not known
                logger.warning(
                    "a node could not be asked what its workers are doing: %s", str(error).partition("\n")[0]
                )
        return reports

    def _collector(self, node: str) -> Any:
        """Return the collector of a node. It is started before it is needed: a node in trouble starts nothing."""
        if node not in self._collectors:
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            collector = ray.remote(Collector).options(num_cpus=0, max_restarts=-1, scheduling_strategy=where)
            self._collectors[node] = collector.remote()
        return self._collectors[node]

    def _save_ray_logs(self) -> None:
        if self._session is not None:
            self._session.copy_logs(self.log_dir / "ray", chosen(os.environ, self._env_vars).values())


def _colocated(name: str, workers: Sequence[Worker]) -> tuple[Any, dict[str, str]]:
    """Return (scheduling strategy, variables that make their accelerators visible) of a worker on the node of these;
    without any, Ray chooses the node."""
    places = [worker.place() for worker in workers]
    if not places:
        return "DEFAULT", {}
    if len({place.node for place in places}) > 1:
        raise ValueError(f"{name} cannot run next to workers of several nodes: {places}")
    shared = dict.fromkeys(gpu for place in places for gpu in place.gpus)
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(shared)} if shared else {}
    return NodeAffinitySchedulingStrategy(places[0].node, soft=False), visible


@contextmanager
def _abandoned_calls_fail_silently() -> Iterator[None]:
    """Keep Ray, inside the block, from printing the errors of calls that nobody waits for any more, since their workers
    are being ended on purpose."""
    before = os.environ.get(IGNORE_UNHANDLED)
    os.environ[IGNORE_UNHANDLED] = "1"
    try:
        yield
    finally:
        del os.environ[IGNORE_UNHANDLED]
        if before is not None:
            os.environ[IGNORE_UNHANDLED] = before


def _log_failed_shutdown(name: str, handle: ray.ObjectRef) -> None:
    try:
        ray.get(handle)
    except RayActorError:  # it has ended already
        pass
    except RayError as error:
        logger.warning("%s: its shutdown failed: %s", name, error)
