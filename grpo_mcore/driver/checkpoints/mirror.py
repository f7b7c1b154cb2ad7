"""A copy of a run's checkpoints in an object store (checkpointing.mirror), from which another machine resumes it.

    PREFIX/in_use.json            who writes here
    PREFIX/step_N/...             the files of a checkpoint. `digests.json` makes it whole: written last, deleted first
    PREFIX/ledger.jsonl           the ledger, at least as far as the newest checkpoint counts it
    PREFIX/logs/exp_NNN/...       the run's log folder with metrics and samples, as of the newest checkpoint

Consumes: the checkpoints that the run has published, newest first.
Waits for: the store, in one thread of the driver. What fails is tried again for as long as the run goes on.
Unblocked by: the next checkpoint, or the end of the wait before the next attempt.

No outage of the store stops training: `status` and the summary say which checkpoints are not mirrored, and why.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from grpo_mcore.base.clock import REAL, Clock
from grpo_mcore.base.file_digests import DIGESTS, first_missing, parse_digests
from grpo_mcore.driver.checkpoints.checkpoint_files import GB, INFO
from grpo_mcore.driver.checkpoints.lease import FolderInUse, Holder, lives_here
from grpo_mcore.driver.checkpoints.object_store import RemoteStore, StoreError, Version

logger = logging.getLogger(__name__)

LEASE = "in_use.json"
ABANDONED = "abandoned_digests.json"
"""Name of a checkpoint's `digests.json` once a run went back to an older one."""
LOGS = "logs"
LEFT_OUT = ("workers", "ray", "profile")
"""Folders in a run's log folder that are not mirrored: the output of processes, and traces."""

BEAT_S = 20.0
"""Seconds between two beats of the lease."""
STALE_S = 90.0
"""Seconds without a beat after which a holder on another machine is dead."""
WAITS_S = (5.0, 10.0, 20.0, 40.0, 60.0)
"""Seconds before each further attempt after a failure; the last one counts for all that follow."""


class _Closed(Exception):
    """The run ends: a transfer under way is given up."""


class MirrorLease:
    """Holds a prefix of a store for one run. Each beat replaces the object that was read or written last, so two runs
    cannot both hold it where the store compares versions; elsewhere the later of two starts within a beat wins, and the
    other one mirrors nothing more."""

    def __init__(self, store: RemoteStore, clock: Clock = REAL) -> None:
        self._store, self._clock = store, clock
        self._me, self._beats = Holder.this_process(), 0
        self._version: Version = {}
        self._end_beat: Callable[[], None] | None = None
        self._beating = threading.Lock()
        self.lost: str | None = None
        """Why this run may write no more."""

    @property
    def held(self) -> bool:
        return self._end_beat is not None

    def refuse_other(self) -> tuple[Holder, Version] | None:
        """Return the dead run that holds the prefix, and the version of its lease; None if no run holds it. Raises
        FolderInUse if it lives: a process of this machine can be asked, one of another is watched."""
        if (seen := self._holder()) is None:
            return None
        holder, version = seen
        if (lives := lives_here(holder)) is None:
            logger.info("%s is held by %s; watching it for %g s", self._store.address, holder, STALE_S)
            lives, deadline = False, self._clock.now() + STALE_S
            while not lives and self._clock.now() < deadline:
                self._clock.sleep(STALE_S / 20)
                if (now := self._holder()) is None:
                    return None
                lives = now[1] != version
        if lives:
            raise FolderInUse(
                f"checkpointing.mirror {self._store.address} is in use by {holder}; wait for its end, end it, or "
                "choose another prefix"
            )
        return seen

    def take(self) -> None:
        """Hold the prefix from now on. Raises FolderInUse."""
        while (version := self._store.create(LEASE, self._body())) is None:
            if (dead := self.refuse_other()) is None:
                continue
            if (version := self._store.replace(LEASE, self._body(), dead[1])) is not None:
                logger.info("%s was held by %s, which is dead; this run takes it over", self._store.address, dead[0])
                break
        self._version = version
        self._end_beat = self._clock.beat(BEAT_S, self.beat, "mirror lease")

    def beat(self) -> None:
        """Say that this run lives, and see whether another has taken its place. An outage costs only that beat."""
        with self._beating, suppress(StoreError):
            self._beats += 1
            version = self._store.replace(LEASE, self._body(), self._version)
            if version is None:
                holder = self._holder()
                if holder is None or holder[0].token != self._me.token:
                    self.lost = f"another run has taken it over ({'which has ended' if holder is None else holder[0]})"
                    return
                version = holder[1]  # an earlier beat has arrived, only its answer has not
            self._version = version

    def release(self) -> None:
        if self._end_beat is None:
            return
        self._end_beat()
        self._end_beat = None
        holder = self._holder()
        if holder is not None and holder[0].token == self._me.token:
            self._store.delete([LEASE])

    def _body(self) -> bytes:
        return json.dumps(asdict(self._me) | {"beat": self._beats}).encode()

    def _holder(self) -> tuple[Holder, Version] | None:
        if (got := self._store.read(LEASE)) is None:
            return None
        try:
            fields = json.loads(got[0])
            return Holder(**{name: value for name, value in fields.items() if name != "beat"}), got[1]
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreError(f"{self._store.address}/{LEASE} is no lease of a run ({error}); delete it") from None


def whole_steps(store: RemoteStore) -> list[int]:
    """Return the steps that are whole in the store, in order."""
    return [step for step, names in _folders(store).items() if DIGESTS in names]


def _folders(store: RemoteStore) -> dict[int, dict[str, tuple[int, float]]]:
    """Return the objects of each step in the store, whole or not."""
    numbers = (name.removeprefix("step_") for name in store.folders() if name.startswith("step_"))
    return {step: store.objects(f"step_{step}") for step in sorted(int(n) for n in numbers if n.isdigit())}


def fetch_step(store: RemoteStore, step: int, folder: Path) -> str | None:
    """Write a checkpoint of the store to an empty folder, `digests.json` last. Return what is wrong with it, if
    anything is missing; the contents are not compared."""
    there = store.objects(f"step_{step}")
    if (read := store.read(f"step_{step}/{DIGESTS}")) is None:
        return f"{DIGESTS} is missing"
    try:
        files = parse_digests(read[0])
    except ValueError as error:
        return str(error)
    if outside := [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]:
        return f"{DIGESTS} names {outside[0]!r}, which is no file of a checkpoint"
    if (problem := first_missing(files, {name: size for name, (size, _) in there.items()})) is not None:
        return problem
    nbytes = sum(size for size, _ in files.values())
    logger.info("fetching step_%d (%.2f GB) from %s", step, nbytes / GB, store.address)
    store.download({f"step_{step}/{name}": (folder / name, size) for name, (size, _) in files.items()}, _ignore)
    (folder / DIGESTS).write_bytes(read[0])
    return None


class Mirror:
    """Copies a run's published checkpoints to a store, and deletes there what keep_top_k leaves out."""

    def __init__(
        self,
        store: RemoteStore,
        to_keep: Callable[[Mapping[int, Mapping[str, float]], int], set[int]],
        *,
        wait_s: float,
        clock: Clock = REAL,
    ) -> None:
        """`to_keep`: returns the steps to keep, of the metrics by step and the step just saved. `wait_s`: seconds that
        `finish` waits while nothing moves."""
        self.store, self._to_keep, self._wait_s, self._clock = store, to_keep, wait_s, clock
        self.lease = MirrorLease(store, clock)
        self.log_dir: Path | None = None
        """The run's log folder."""
        self.ledger: Path | None = None
        """The run's ledger, if it keeps one."""
        self.resumed = 0
        """The step that the run goes on from. Newer ones in the store are set aside."""
        self._metrics: dict[int, Mapping[str, float]] = {}  # of the whole steps in the store
        self._waiting: dict[int, Path] = {}
        self._sent: dict[str, tuple[int, float]] | None = None  # files of the log: bytes, time
        self._left_out: set[Path] = set()  # files of the log that cannot be copied
        self._failure: str | None = None
        self._closed, self._changed = threading.Event(), threading.Condition()
        self._moved_at, self._bytes, self._size, self._done = clock.now(), 0, 0, 0
        self._now: int | None = None  # the step that is being uploaded
        self._thread = clock.thread("mirror")

    # Reading

    def fetch_ledger(self, path: Path) -> None:
        """Write the ledger of the store to a file. What that holds is kept beside it, unless the store's begins with
        it."""
        if (got := self.store.read(path.name)) is None:
            return
        if path.exists() and not got[0].startswith(path.read_bytes()):
            aside = path.with_name(f"{path.name}.before-{self._clock.unix():.0f}")
            path.rename(aside)
            logger.warning("%s has other entries than that of %s: it is now %s", path, self.store.address, aside.name)
        partial = path.with_name(f".{path.name}.fetched")
        partial.write_bytes(got[0])
        partial.replace(path)

    def fetch_log(self, folder: Path) -> None:
        """Write the files of a run's log folder that are missing or shorter here."""
        start = f"{LOGS}/{folder.name}"
        wanted = {
            name: size
            for name, (size, _) in self.store.objects(start).items()
            if ".." not in Path(name).parts and _size(folder / name) < size
        }
        self.store.fetch(wanted, folder, f"{start}/")

    # Writing

    @contextmanager
    def running(self, kept: Mapping[int, Path], *, may_wait: bool) -> Iterator[None]:
        """Hold the prefix, and copy to it until the end of the context. `kept`: the checkpoints that are here.
        `may_wait`: a store that cannot be reached now is tried again while the run goes on; else it raises StoreError.
        Raises FolderInUse."""
        try:
            self._hold()
        except StoreError as error:
            if not may_wait:
                raise
            self._failed(error)
        with self._changed:
            self._waiting |= {step: folder for step, folder in kept.items() if step not in self._metrics}
        self._thread.submit(self._work)
        try:
            yield
        except BaseException:
            self._close()
            raise
        self._close(last=True)

    def saved(self, step: int, folder: Path) -> None:
        """Copy a checkpoint that was just published, in the background."""
        with self._changed:
            self._waiting[step] = folder
            self._metrics.pop(step, None)  # an older one of that step
        self._thread.submit(self._work)

    def finish(self) -> None:
        """Wait until everything is copied, or nothing has moved for `wait_s` seconds."""
        self._moved_at = self._clock.now()
        with self._changed:
            while self._waiting and self.lease.lost is None:
                if (left := self._moved_at + self._wait_s - self._clock.now()) <= 0:
                    break
                self._changed.wait(min(left, 1.0))
        for name, what in self.outages().items():
            logger.warning("%s %s", name, what)

    def outages(self) -> dict[str, str]:
        """Return which checkpoints are not mirrored at the moment, and why; nothing if all are."""
        with self._changed:
            missing, failure = self._missing(), self._failure
        if not missing and self.lease.lost is None:
            return {}
        why = self.lease.lost or failure or "it is being uploaded"
        return {f"mirror {self.store.address}": f"lacks {missing or 'the steps from now on'}: {why}"}

    def _missing(self) -> str:
        """Return the checkpoints that are here and wait. keep_top_k may have deleted others meanwhile."""
        with self._changed:
            waiting = sorted(self._waiting.items())
        return ", ".join(f"step_{step}" for step, folder in waiting if folder.is_dir())

    def metrics(self) -> dict[str, float]:
        """Return what a step logs of the mirror."""
        return {"steps_waiting": float(len(self._waiting)), "uploaded_gb": self._done / GB,
                "failing": float(self._failure is not None or self.lease.lost is not None)}  # fmt: skip

    def notes(self) -> list[str]:
        """Return what the table of steps says of the mirror: what is being uploaded or waits for the store."""
        if not self._waiting:
            return []
        if self._failure or self.lease.lost:
            return [f"not mirrored: {self._missing()}"]
        return [f"mirroring step_{self._now}: {self._bytes / GB:.2f} of {self._size / GB:.2f} GB"] if self._now else []

    def _work(self) -> None:
        """Copy all that waits, newest first, and again after each failure, until the run ends."""
        failures = 0
        while self._waiting and not self._closed.is_set() and self.lease.lost is None:
            step, folder = max(self._waiting.items())
            try:
                self._hold()
                if folder.is_dir() and step not in self._metrics:  # it may be there already
                    self._upload(step, folder)
                with self._changed:
                    self._waiting.pop(step, None)
                    if self._failure is not None and not self._waiting:
                        self._failure = None
                        logger.warning("%s can be written again; no checkpoint is missing there", self.store.address)
                    self._changed.notify_all()
                self._prune(step)
            except _Closed:
                return
            except FolderInUse as error:
                self.lease.lost = str(error)
                logger.warning("%s; this run mirrors nothing, and goes on", error)
            except Exception as error:  # whatever goes wrong here must not stop training
                if isinstance(error, OSError) and not folder.is_dir():
                    continue  # keep_top_k has just deleted it
                self._failed(error)
                self._closed.wait(WAITS_S[min(failures, len(WAITS_S) - 1)])
                failures += 1
                continue
            failures = 0

    def _failed(self, error: Exception) -> None:
        why = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
        if self._failure is None:
            logger.warning("not mirrored: %s; it is tried again, and the run goes on", why)
        self._failure = why

    def _hold(self) -> None:
        """Take the lease if this run does not have it yet, then set aside what is newer than the checkpoint that it
        resumes, and delete what a run has left that was killed while it uploaded."""
        if self.lease.held:
            return
        self.lease.take()
        for step, names in _folders(self.store).items():
            if DIGESTS in names and step > self.resumed:
                marker = self.store.read(f"step_{step}/{DIGESTS}")
                self.store.write(f"step_{step}/{ABANDONED}", b"" if marker is None else marker[0])
                self.store.delete([f"step_{step}/{DIGESTS}"])
                logger.warning("step_%d of %s is newer than this run, and is set aside", step, self.store.address)
            elif DIGESTS in names:
                self._metrics[step] = self._read_metrics(step)
            elif ABANDONED not in names:
                self._remove(step)

    def _read_metrics(self, step: int) -> Mapping[str, float]:
        try:
            info = self.store.read(f"step_{step}/{INFO}")
            return {} if info is None else dict(json.loads(info[0])["metrics"])
        except (ValueError, KeyError, TypeError):  # damaged: it ranks last
            return {}

    def _upload(self, step: int, folder: Path) -> None:
        """Copy a checkpoint: what an earlier attempt left is deleted first, `digests.json` comes last."""
        self._check_lease()
        self._remove(step)
        digests = (folder / DIGESTS).read_bytes()
        files = parse_digests(digests)
        self._now, self._bytes, self._size = step, 0, sum(size for size, _ in files.values())
        try:
            for name in files:
                self.store.upload(f"step_{step}/{name}", folder / name, self._moved)
            self._upload_logs()
            self._check_lease()
            self.store.write(f"step_{step}/{DIGESTS}", digests)
        finally:
            self._now = None
        metrics = dict(json.loads((folder / INFO).read_bytes())["metrics"])
        with self._changed:
            self._metrics[step] = metrics

    def _check_lease(self) -> None:
        """Raise StoreError if another run has taken the prefix over: this process may have stood still."""
        self.lease.beat()
        if self.lease.lost is not None:
            raise StoreError(self.lease.lost)

    def _upload_logs(self) -> None:
        """Copy the ledger, and the files of the log that have changed since they were copied. A file of the log that
        cannot be read, or whose name a store refuses, costs itself alone. Raises StoreError for an outage."""
        if self.ledger is not None and self.ledger.is_file():
            self.store.upload(self.ledger.name, self.ledger, self._moved)
        if self.log_dir is None:
            return
        start = f"{LOGS}/{self.log_dir.name}"
        if self._sent is None:
            self._sent = self.store.objects(start)
        for path in sorted(self.log_dir.rglob("*")):
            name = path.relative_to(self.log_dir)
            if name.parts[0] in LEFT_OUT or name.name.startswith(".") or name.suffix == ".tmp" or not path.is_file():
                continue
            if not name.as_posix().isprintable():
                self._leave_out(name, "object stores refuse a name with such characters")
                continue
            try:
                stat = path.stat()
                size, time = self._sent.get(name.as_posix(), (-1, -math.inf))
                if size != stat.st_size or time < stat.st_mtime:
                    self.store.upload(f"{start}/{name.as_posix()}", path, self._moved)
                    self._sent[name.as_posix()] = stat.st_size, stat.st_mtime
            except OSError as error:
                if isinstance(error, FileNotFoundError) and not path.exists():
                    continue  # samples have just been deleted to make room
                self._leave_out(name, error)

    def _leave_out(self, name: Path, why: object) -> None:
        if name not in self._left_out:
            logger.warning("the mirror lacks %r of the run's log: %s", name.as_posix(), why)
            self._left_out.add(name)

    def _prune(self, just_saved: int) -> None:
        with self._changed:
            metrics = dict(self._metrics)
        if metrics:
            for step in sorted(set(metrics) - self._to_keep(metrics, just_saved)):
                self._remove(step)

    def _remove(self, step: int) -> None:
        """Delete a checkpoint of the store, first what makes it whole."""
        names = self.store.objects(f"step_{step}")
        first = [name for name in (DIGESTS, ABANDONED) if name in names]
        self.store.delete(f"step_{step}/{name}" for name in [*first, *(set(names) - set(first))])
        with self._changed:
            self._metrics.pop(step, None)

    def _moved(self, count: int) -> None:
        self._bytes += count
        self._done += count
        self._moved_at = self._clock.now()
        if self._closed.is_set():
            raise _Closed

    def _close(self, last: bool = False) -> None:
        """End the thread and the lease. `last`: the run has come to its end, so copy the last lines of its log."""
        self._closed.set()
        self._thread.shutdown()
        if not self.lease.held:
            return
        try:
            if last and self.lease.lost is None and self._failure is None:
                self._closed.clear()
                self._upload_logs()
        except (StoreError, OSError) as error:  # observation must not change the end of a run
            logger.warning("the end of the run's log is not mirrored: %s", error)
        try:
            self.lease.release()
        except StoreError as error:
            logger.warning("the lease of %s is not released: %s; the next run sees that this one is dead",
                           self.store.address, error)  # fmt: skip


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def _ignore(count: int) -> None:
    """Take the bytes of a piece that nobody counts."""
