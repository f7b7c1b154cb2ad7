"""Copies of a run's checkpoints at a URL (checkpointing.mirror), from which it goes on where its folder is not.

    URL/run_001_3f2a9c/step_N/...         a checkpoint; `digests.json`, which is written last, makes it whole
    URL/run_001_3f2a9c/ledger.jsonl       the ledger, at least as far as the newest checkpoint counts it
    URL/run_001_3f2a9c/logs/exp_NNN/...   the run's log folder, as of the newest checkpoint or of the run's end

A folder of checkpoints has an id of its own, so that one run alone writes below it. A run that goes on in another
folder, or from a checkpoint older than its newest copy, takes the next number. `--resume` and `grpo-mcore fetch` read
the run with the highest number that has a whole checkpoint. Versions up to 0.2 wrote right below the URL: number 0.
"""

import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_mcore.base.files import DIGESTS, first_missing, parse_digests
from grpo_mcore.driver.checkpoints.checkpoint_files import GB, damage, refuse_full_disk, sync_folder
from grpo_mcore.observe import LEDGER_FILE

logger = logging.getLogger(__name__)

ID_FILE = "copied_as.txt"
"""File in a folder of checkpoints with the id below which they are copied."""
NOT_COPIED = ("workers", "ray", "profile")
"""Folders of the log folder that stay here: the output of processes, and traces."""
PIECE_BYTES = 16 * 2**20
"""Bytes that a request carries. S3 allows 10,000 pieces of a file, so those of very large ones are larger."""
WAIT_S, LONGEST_WAIT_S = 5.0, 60.0
"""Seconds before a checkpoint is tried again; they double with each failure."""

ADVICE = {
    "NoSuchBucket": "there is no such bucket; make it, or correct the address",
    r"169\.254\.|metadata\.google|InvalidAccessKeyId|SignatureDoesNotMatch|401 Unauthorized|ExpiredToken": (
        "no valid credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (Google: "
        "GOOGLE_APPLICATION_CREDENTIALS; Azure: AZURE_STORAGE_*)"
    ),
    "AccessDenied|403 Forbidden": (
        "access denied; the credentials must be allowed to list the bucket, and to read, write and delete objects"
    ),
    "error sending request|operation timed out|dns error|connection closed": (
        "the store does not answer; see its endpoint (AWS_ENDPOINT_URL) and the network"
    ),
}
"""Pattern of an error of obstore -> what it means and what to do. The first that fits counts."""


class CopyError(RuntimeError):
    """A store cannot be reached, or does not hold what is wanted; the message says what to do."""


def advice(error: Exception) -> str:
    """Return what an error of obstore means. Signatures in addresses, which are secrets, are left out."""
    for pattern, meaning in ADVICE.items():
        if (match := re.search(pattern, str(error))) is not None:
            return f"{meaning} ({match[0].strip()})"
    first = " ".join(str(error).partition("\n\nDebug source")[0].partition("<?xml")[0].split())
    return re.sub(r"(://[^\s?]+)\?\S+", r"\1?...", first)[:300]


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn an error of obstore into a CopyError that names the URL and says what to do."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        raise CopyError(f"{url}: {advice(error)}") from None


def open_store(url: str, options: Mapping[str, str] | None = None) -> Any:
    """Return obstore's store at a URL: s3:// and what speaks its protocol, gs://, az://, or file:///FOLDER. Credentials
    come from the environment. `options`: settings by obstore's names, such as region. Raises CopyError."""
    from obstore.store import from_url

    options = options or {}
    if special := re.search("[?#%]", url):  # obstore drops what follows, or decodes it; it may be a secret
        raise CopyError(f"{url[: special.start()]}: {special[0]!r} is not allowed in an address; choose another")
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = options.get("endpoint") or next(filter(None, map(os.environ.get, variables)), "")
    with explained(url):
        if url.startswith("file://"):
            return from_url(url, mkdir=True)
        return from_url(
            url,
            client_options={"timeout": "60s", "allow_http": endpoint.startswith("http://")},
            retry_config={"max_retries": 3},
            **options,
        )


def sizes_of(store: Any, prefix: str = "") -> dict[str, int]:
    """Return the bytes of each object below `prefix`, a folder with its slash, by its name there."""
    import obstore

    listed = [meta for batch in obstore.list(store, prefix.rstrip("/") or None) for meta in batch]
    return {meta["path"].removeprefix(prefix): meta["size"] for meta in listed if meta["path"].startswith(prefix)}


def read(store: Any, name: str) -> bytes | None:
    """Return the contents of a small object; None if there is none."""
    import obstore

    try:
        return bytes(obstore.get(store, name).bytes())
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise
        return None


def fetch_files(store: Any, prefix: str, sizes: Mapping[str, int], folder: Path) -> None:
    """Write objects to `folder`. `sizes`: their bytes, by their names below `prefix`, which are those of the files."""
    import obstore

    def fetch_piece(piece: tuple[str, int]) -> None:
        name, start = piece
        length = min(PIECE_BYTES, sizes[name] - start)
        data = obstore.get_range(store, prefix + name, start=start, length=length)
        with (folder / name).open("r+b") as file:
            file.seek(start)
            file.write(data)

    for name in sizes:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fetch_piece, [(name, start) for name in sizes for start in range(0, sizes[name], PIECE_BYTES)]))


def run_number(prefix: str) -> int:
    """Return the number of a run, of its prefix "run_001_3f2a9c/"; 0 for "", which versions up to 0.2 wrote to."""
    return int(prefix.split("_")[1]) if prefix else 0


def whole_steps(store: Any) -> dict[str, list[int]]:
    """Return the steps of the whole checkpoints by the prefix of their run, the newest run and step last."""
    names = (re.fullmatch(rf"(run_\d+_[0-9a-f]+/)?step_(\d+)/{DIGESTS}", name) for name in sizes_of(store))
    runs: dict[str, list[int]] = {}
    for prefix, step in sorted((match[1] or "", int(match[2])) for match in names if match):
        runs.setdefault(prefix, []).append(step)
    return dict(sorted(runs.items(), key=lambda run: run_number(run[0])))


def fetch_checkpoint(store: Any, prefix: str, step: int, folder: Path) -> str | None:
    """Fetch a checkpoint of the run with this prefix into `folder`, as its step_N, whole or not at all. Return what is
    wrong with the copy, None if nothing is."""
    source = f"{prefix}step_{step}/"
    sizes, digests = sizes_of(store, source), read(store, source + DIGESTS)
    if digests is None:
        return f"{DIGESTS} is missing"
    try:
        files = parse_digests(digests)
    except ValueError as error:
        return str(error)
    if outside := [name for name in files if _leaves(name)]:
        return f"{DIGESTS} names {outside[0]!r}, which is no file of a checkpoint"
    if (problem := first_missing(files, sizes)) is not None:
        return problem
    part = folder / f"tmp_fetched_step_{step}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        nbytes = sum(sizes[name] for name in files)
        refuse_full_disk(folder, nbytes)
        logger.info("fetching step_%d (%.2f GB) to %s", step, nbytes / GB, folder)
        fetch_files(store, source, {name: sizes[name] for name in files}, part)
        (part / DIGESTS).write_bytes(digests)
        if (problem := damage(part)) is None:
            os.replace(part, folder / f"step_{step}")
            sync_folder(folder)
        return problem
    finally:
        shutil.rmtree(part, ignore_errors=True)


def fetch_ledger(store: Any, prefix: str, folder: Path) -> None:
    """Fetch the ledger of a run into `folder`. One that has other entries than the copy is kept beside it."""
    path, copied = folder / LEDGER_FILE, read(store, prefix + LEDGER_FILE)
    if copied is None:
        return
    if path.exists() and not copied.startswith(path.read_bytes()):
        aside = path.with_name(f"{path.name}.before-{time.time():.0f}")
        path.rename(aside)
        logger.warning("%s has other entries than its copy: it is now %s", path, aside.name)
    part = path.with_name(f".{path.name}.fetched")
    part.write_bytes(copied)
    part.replace(path)


def fetch_logs(store: Any, prefix: str, folder: Path) -> None:
    """Fetch the files of a run's log folders (exp_NNN/...) that are missing or shorter in `folder`."""
    sizes = {name: size for name, size in sizes_of(store, f"{prefix}logs/").items() if not _leaves(name)}
    known = {name: (folder / name).stat().st_size for name in sizes if (folder / name).exists()}
    missing = {name: size for name, size in sizes.items() if known.get(name, -1) < size}
    fetch_files(store, f"{prefix}logs/", missing, folder)


def _leaves(name: str) -> bool:
    """Return whether a name leads out of the folder that it is put into."""
    return Path(name).is_absolute() or ".." in Path(name).parts


class BackgroundCopy:
    """Copies the checkpoints of a folder to a store, newest first, in one thread, and deletes there what the folder
    does not keep. A failure is tried again for as long as the run goes on, and ends nothing."""

    def __init__(self, url: str, store: Any, folder: Path, wait_s: float) -> None:
        """`wait_s`: seconds that `finish` waits while attempts fail."""
        self._url, self._store, self._folder, self._wait_s = url, store, folder, wait_s
        self.log_dir: Path | None = None
        """The run's log folder, once it is open."""
        self.fetched: str | None = None
        """Prefix of the run whose checkpoint was fetched into the folder."""
        self._prefix = ""
        self._copies: dict[str, list[int]] = {}  # what `look` has seen
        self._waiting: set[int] = set()
        self._copied_logs: dict[Path, tuple[int, int]] = {}  # bytes and time of the files of the log folder
        self._failure: str | None = None
        self._failing_since = 0.0
        self._closed, self._changed = threading.Event(), threading.Condition()

    def look(self, *, writes: bool) -> tuple[str, list[int]]:
        """Return the prefix of the newest run at the URL, and its whole steps; none if the folder's own is newer.
        `writes`: write and delete a small object, so that a missing right shows before it is needed. Raises CopyError.
        """
        import obstore

        with explained(f"checkpointing.mirror {self._url}"):
            if writes:
                name = f"probe-{os.getpid()}-{secrets.token_hex(3)}"
                obstore.put(self._store, name, b"grpo-mcore")
                obstore.delete(self._store, name)
            self._copies = whole_steps(self._store)
        prefix, steps = next(reversed(self._copies.items()), ("", []))
        own_prefix = self._own_prefix()
        return (prefix, steps) if own_prefix is None or run_number(prefix) >= run_number(own_prefix) else ("", [])

    def fetch(self, prefix: str, step: int) -> str | None:
        """Fetch a checkpoint and the ledger into the folder. Return what is wrong with the copy, None if nothing is.
        Raises CopyError."""
        with explained(f"checkpointing.mirror {self._url}"):
            if (problem := fetch_checkpoint(self._store, prefix, step, self._folder)) is None:
                fetch_ledger(self._store, prefix, self._folder)
                self.fetched = prefix
        return problem

    def fetch_logs(self, folder: Path) -> None:
        """Fetch the log folders of the run whose checkpoint was fetched. Raises CopyError."""
        if self.fetched is not None:
            with explained(f"checkpointing.mirror {self._url}"):
                fetch_logs(self._store, self.fetched, folder)

    @contextmanager
    def running(self, steps: Iterable[int], resumed: int | None) -> Iterator[None]:
        """Copy the checkpoints `steps` and each that is published, until the end of the context. `resumed`: the step
        that the run goes on from; None for a new run."""
        self._prefix = self._choose_prefix(resumed)
        self._waiting = set(steps)
        thread = threading.Thread(target=self._work, name="copy", daemon=True)  # an upload must not hold an error up
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._closed.set()
                self._changed.notify_all()
        if self._failure is not None:
            return
        thread.join()
        try:
            self._copy_logs()
        except Exception as error:  # of the store or the disk
            logger.warning("the end of the run's log is not copied: %s", advice(error))

    def published(self, step: int) -> None:
        """Copy a checkpoint that is complete in the folder, in the background."""
        with self._changed:
            self._waiting.add(step)
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until everything is copied, or attempts have failed for `wait_s` seconds. Name what is not copied."""
        started_at = time.monotonic()
        with self._changed:
            while self._waiting:
                failing_s = time.monotonic() - max(started_at, self._failing_since)
                if self._failure is not None and failing_s >= self._wait_s:
                    break
                self._changed.wait(min(1.0, self._wait_s))
        for name, problem in self.lacking().items():
            logger.warning("%s %s", name, problem)

    def lacking(self) -> dict[str, str]:
        """Return which checkpoints of the folder are not copied at the moment, and why; nothing if all are."""
        with self._changed:
            steps = [f"step_{step}" for step in sorted(self._waiting) if (self._folder / f"step_{step}").is_dir()]
        reason = self._failure or "the upload goes on"
        return {f"checkpointing.mirror {self._url}": f"lacks {', '.join(steps)}: {reason}"} if steps else {}

    def _own_prefix(self) -> str | None:
        """Return the prefix below which the folder was copied, None if it was not."""
        file = self._folder / ID_FILE
        text = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
        return f"{text}/" if re.fullmatch(r"run_\d+_[0-9a-f]+", text) else None

    def _choose_prefix(self, resumed: int | None) -> str:
        """Return the folder's own prefix if this run goes on from what was copied below it, else a new one."""
        own_prefix = self._own_prefix()
        if own_prefix is not None and resumed is not None and self.fetched in (None, own_prefix):
            if max(self._copies.get(own_prefix, []), default=0) <= resumed:
                return own_prefix
        number = 1 + max(map(run_number, [own_prefix or "", *self._copies]))
        run_id = f"run_{number:03d}_{secrets.token_hex(3)}"
        (self._folder / ID_FILE).write_text(f"{run_id}\n", encoding="utf-8")
        return f"{run_id}/"

    def _work(self) -> None:
        """Copy what waits, newest first, and try again after each failure, until the run ends."""
        wait_s = WAIT_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed.is_set())
                if self._closed.is_set():
                    return
                step = max(self._waiting)
            folder = self._folder / f"step_{step}"
            try:
                if folder.is_dir():
                    self._copy(folder)
            except Exception as error:  # of the store or the disk
                if not folder.is_dir():
                    continue  # keep_top_k has just deleted it
                if self._failure is None:
                    self._failing_since = time.monotonic()
                    logger.warning("%s is not copied: %s; it is tried again, the run goes on", folder, advice(error))
                self._failure = advice(error)
                self._closed.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            else:
                self._failure, wait_s = None, WAIT_S
                with self._changed:
                    self._waiting.discard(step)
                    self._changed.notify_all()

    def _copy(self, folder: Path) -> None:
        """Copy a checkpoint, its `digests.json` last, unless it is there; then delete what the folder does not keep."""
        import obstore

        target = f"{self._prefix}{folder.name}/"
        digests = (folder / DIGESTS).read_bytes()
        if (copied := read(self._store, target + DIGESTS)) != digests:
            if copied is not None:  # of an older checkpoint of this step
                obstore.delete(self._store, target + DIGESTS)
            for name in parse_digests(digests):
                self._upload(folder / name, target + name)
            self._copy_logs()
            obstore.put(self._store, target + DIGESTS, digests)
        names = [name for name in sizes_of(self._store, self._prefix) if re.match(r"step_\d+/", name)]
        pruned = [self._prefix + name for name in names if not (self._folder / name.split("/")[0]).is_dir()]
        obstore.delete(self._store, [name for name in pruned if name.endswith(f"/{DIGESTS}")])
        obstore.delete(self._store, pruned)

    def _copy_logs(self) -> None:
        """Copy the ledger, and the files of the log folder that have changed since they were copied. A file that
        cannot be read, or whose name no store takes, is left out, and named until it changes no more."""
        if (ledger := self._folder / LEDGER_FILE).is_file():
            self._upload(ledger, self._prefix + LEDGER_FILE)
        if (log_dir := self.log_dir) is None:
            return
        for path in sorted(log_dir.rglob("*")):
            name = path.relative_to(log_dir.parent)
            if name.parts[1] in NOT_COPIED or path.name.startswith(".") or path.suffix == ".tmp" or not path.is_file():
                continue
            try:
                state = path.stat().st_size, path.stat().st_mtime_ns
                if self._copied_logs.get(path) != state:
                    self._upload(path, f"{self._prefix}logs/{name.as_posix()}")
            except FileNotFoundError:
                continue  # samples have just been deleted to make room
            except (OSError, ValueError) as error:
                logger.warning("the copy lacks %r of the run's log: %s", name.as_posix(), error)
            self._copied_logs[path] = state

    def _upload(self, path: Path, name: str) -> None:
        import obstore

        obstore.put(self._store, name, path, chunk_size=max(PIECE_BYTES, path.stat().st_size // 9_000))
