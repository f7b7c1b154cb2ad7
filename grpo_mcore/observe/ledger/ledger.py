"""Each prompt's fate, as a run writes it down while it goes: a file that only grows, a JSON object a line.

`audit` (ledger_audit.py) reads it.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from grpo_mcore.base.clock import REAL, Clock
from grpo_mcore.base.files import FORMATS, newer_format
from grpo_mcore.observe.append_file import AppendFile
from grpo_mcore.observe.run_folder import open_file

logger = logging.getLogger(__name__)

LEDGER_FILE = "ledger.jsonl"


class LedgerError(ValueError):
    """A ledger cannot be read; the message says where."""


class Ledger:
    """The ledger of a run, open for writing. Every entry has its `event`:

    started     step (trained so far), kept (entries before it that count: all others before it are void, because the
                run went on from an earlier checkpoint), missing (of these, how many are not in this file), max_age
    dispatched  uids, version (weights that begin them)
    passed_over uids: what the sampler of prompts left out; no end of a prompt, which was not dispatched
    finished    uid, version (the oldest that generated any of its tokens), scored (samples that have a reward), rate
                (pass rate of the group; null without a reward)
    retried     uid, why, times (so far): what was generated is thrown away, and generated anew
    restarted   worker (an engine or an environment that had died or hung), why
    filtered    uid, why            failed  uid, why
    trained     uids, step, version (weights that train)
    returned    uids (they go back to the data, to be generated anew)
    saved       step                not_saved   step, why
    stop_asked  why, at_once (the step that has begun is given up)
    ended       why, data_ended
    """

    def __init__(
        self, path: Path, *, step: int, kept: int, max_age: int, last: str | None = None, clock: Clock = REAL
    ) -> None:
        """`kept`, `last`: results of `sync` and `last_digest` at the time when the checkpoint that this run goes on
        from was saved; 0 and None for a new run. A file that is another run's is set aside."""
        self.path = path
        self.follow: Callable[[dict[str, Any]], Iterable[dict[str, Any]]] | None = None
        """Gets each entry; returns those that are written in its place."""
        self._retries: dict[str, int] = {}
        self._file = AppendFile(path)
        if last is not None and self.entries >= kept and self.last_digest(kept) != last:
            self._file.close()
            aside = path.with_name(f"{path.name}.of-another-run-{clock.unix() * 1e9:.0f}")
            path.rename(aside)
            logger.warning("%s is the ledger of another run: it is now %s, and a new one begins", path, aside.name)
            self._file = AppendFile(path)
        missing = max(0, kept - self.entries)
        if missing:
            logger.warning(
                "%s lacks %d of the %d entries from before the checkpoint: whether every prompt was trained on exactly "
                "once can be told only from here on",
                *(path, missing, kept),
            )
        self.write(
            "started", format=FORMATS["ledger"], step=step, kept=kept - missing, missing=missing, max_age=max_age,
            time=round(clock.unix()),
        )  # fmt: skip

    def write(self, event: str, **fields: Any) -> None:
        """Append an entry, which survives the end of this process; on a full disk it is written later."""
        entry = {"event": event, **fields}
        for line in (entry,) if self.follow is None else self.follow(entry):
            self._file.write_json(line)

    @property
    def entries(self) -> int:
        """Number of entries so far."""
        return self._file.lines

    def retried(self, uid: str, reason: str) -> None:
        self._retries[uid] = self._retries.get(uid, 0) + 1
        self.write("retried", uid=uid, why=reason, times=self._retries[uid])

    def sync(self) -> int:
        """Flush all entries to the disk, in a new file if it was removed. Return their number. Raises OSError on a full
        disk."""
        self._file.restore()
        return self._file.sync()

    def last_digest(self, entries: int) -> str:
        """Return a digest of entry `entries`, the last one that a checkpoint counts. It tells whose ledger it is."""
        return hashlib.sha256(self._file.line(entries)).hexdigest()[:16]

    def close(self) -> None:
        """May be called again."""
        self._file.close()


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The entries, the void ones included; a last line that was cut off is left out. Raises LedgerError, OSError."""
    entries = []
    with open_file(path) as file:
        text = file.read()
    # By bytes: str.splitlines ends a line also at a form feed, which a damaged file may hold.
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise LedgerError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(entries[-1], dict) or "event" not in entries[-1]:
            raise LedgerError(f"{path}:{number}: no entry of a ledger: {line[:80]!r}")
        if (reason := newer_format("ledger", entries[-1].get("format"))) is not None:
            raise LedgerError(f"{path}:{number}: {reason}")
    return entries
