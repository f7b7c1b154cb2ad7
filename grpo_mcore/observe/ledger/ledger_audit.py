"""Audit a ledger: every prompt that was dispatched has exactly one end, and none was passed over. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from grpo_mcore.observe.ledger.ledger import LedgerError

UNDER_WAY, FINISHED, RETURNED = "under way", "finished", "returned to the data"
TRAINED, FILTERED, FAILED = "trained on", "filtered", "failed"
ENDS = (TRAINED, FILTERED, FAILED)


@dataclass(frozen=True)
class Flaw:
    """A violation of the ledger's laws. `uid`: its prompt, empty if it is not about one."""

    uid: str
    violation: str

    def __str__(self) -> str:
        return f"{self.uid}: {self.violation}" if self.uid else self.violation


@dataclass(frozen=True)
class Audit:
    """`fates`: prompts by what has become of them. `steps`: the last one trained. `starts`: 1 and the resumes. `void`:
    entries that a resume has taken back. `retries`: generations that were thrown away. `restarts`: engines and
    environments that were started anew, void entries too: no resume takes that back. `by_age`: groups trained on by
    trajectory age, in weight versions."""

    fates: Mapping[str, int]
    steps: int
    starts: int
    void: int
    retries: int
    restarts: int
    by_age: Mapping[int, int]
    flaws: Sequence[Flaw]


def audit(entries: Sequence[Mapping[str, Any]]) -> Audit:
    """Audit the entries of a ledger (`read_ledger`). Without flaws, nothing was lost and nothing was done twice. Raises
    LedgerError for an entry that no run has written."""
    books = _Books()
    entry: Mapping[str, Any] = {}
    try:
        for entry in (counted := valid_entries(entries)):
            books.enter(entry)
        books.close()
    except (KeyError, TypeError, AttributeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise LedgerError(f"no entry of a ledger ({cause}): {str(entry)[:120]}") from error
    fates = {fate: 0 for fate in (*ENDS, RETURNED, FINISHED, UNDER_WAY)}
    for fate, _ in books.fates.values():
        fates[fate] += 1
    by_age = dict(sorted(books.by_age.items()))
    void = len(entries) - len(counted)
    restarts = sum(entry["event"] == "restarted" for entry in entries)
    return Audit(fates, books.step, books.starts, void, books.retries, restarts, by_age, tuple(books.flaws))


def valid_entries(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries that no later start has declared void."""
    return list(compress(entries, valid_flags(entries)))


def valid_flags(entries: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return, for each entry, whether no later start has declared it void."""
    valid: list[bool] = []
    for entry in entries:
        if entry["event"] == "started":
            kept = min(entry["kept"], len(valid))
            valid[kept:] = [False] * (len(valid) - kept)
        valid.append(True)
    return valid


@dataclass
class _Books:
    """`fates`: state of each prompt and the step of it, by uid. `passed_over`: prompts that others overtook while they
    were returned to the data."""

    fates: dict[str, tuple[str, int]] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)
    versions: dict[str, int] = field(default_factory=dict)
    by_age: dict[int, int] = field(default_factory=dict)
    passed_over: set[str] = field(default_factory=set)
    flaws: list[Flaw] = field(default_factory=list)
    step: int = 0
    starts: int = 0
    retries: int = 0
    max_age: int = 0
    data_ended: bool = False

    def enter(self, entry: Mapping[str, Any]) -> None:
        match entry["event"]:
            case "started":
                self._start(entry)
            case "dispatched":
                self._dispatch(entry["uids"])
            case "retried":
                self.retries += 1
                self._move([entry["uid"]], (UNDER_WAY,), UNDER_WAY)
            case "finished":
                self.versions[entry["uid"]] = entry["version"]
                self._move([entry["uid"]], (UNDER_WAY,), FINISHED)
            case "trained":
                if entry["step"] != self.step + 1:
                    self.flaws.append(Flaw("", f"step {entry['step']} follows step {self.step}"))
                self.step = entry["step"]
                self._move(entry["uids"], (FINISHED,), TRAINED)
                self._note_ages(entry)
            case "filtered":
                self._move([entry["uid"]], (FINISHED,), FILTERED)
            case "failed":
                self._move([entry["uid"]], (UNDER_WAY,), FAILED)
            case "returned":
                self._move(entry["uids"], (UNDER_WAY, FINISHED), RETURNED)
            case "ended":
                self.data_ended = entry["data_ended"]
            case "stop_asked":
                bool(entry["why"] and entry["at_once"])
            case "restarted" | "saved" | "not_saved" | "passed_over":
                pass
            case other:
                raise KeyError(other)

    def close(self) -> None:
        """Check what is still open when the ledger ends."""
        for uid, (fate, _) in self.fates.items():
            if fate in ENDS:
                continue
            if self.data_ended:
                self.flaws.append(Flaw(uid, f"lost: it is {fate}, and the data has ended"))
            elif fate == RETURNED and uid in self.passed_over:
                self.flaws.append(Flaw(uid, "lost: it went back to the data, and others came instead"))

    def _start(self, entry: Mapping[str, Any]) -> None:
        """Expect the prompts that were in flight at the checkpoint to be generated again."""
        self.starts += 1
        self.max_age = entry["max_age"]
        if entry.get("missing"):
            self.flaws.append(Flaw("", f"the {entry['missing']} entries before the resume are not in this ledger"))
            self.step = entry["step"]
        if entry["step"] != self.step:
            self.flaws.append(Flaw("", f"resumed after step {entry['step']}, with entries up to step {self.step}"))
        for uid, (fate, _) in self.fates.items():
            if fate in (UNDER_WAY, FINISHED):
                self.fates[uid] = (RETURNED, self.step)
                self.returned.add(uid)

    def _dispatch(self, uids: Iterable[str]) -> None:
        for uid in uids:
            if uid not in self.fates:
                self.passed_over |= self.returned
                self.fates[uid] = (UNDER_WAY, self.step)
            else:
                self._move([uid], (RETURNED,), UNDER_WAY)

    def _move(self, uids: Iterable[str], sources: tuple[str, ...], target: str) -> None:
        for uid in uids:
            before, step = self.fates.get(uid, ("", 0))
            if before not in sources:
                twice = "twice: " if before in ENDS else ""
                now = "dispatched" if target == UNDER_WAY else target
                earlier = f"after it was {before} at step {step}" if before else "without having been dispatched"
                self.flaws.append(Flaw(uid, f"{twice}{now} at step {self.step}, {earlier}"))
            self.fates[uid] = (target, self.step)
            (self.returned.add if target == RETURNED else self.returned.discard)(uid)

    def _note_ages(self, entry: Mapping[str, Any]) -> None:
        for uid in entry["uids"]:
            age = entry["version"] - self.versions.get(uid, entry["version"])
            self.by_age[age] = self.by_age.get(age, 0) + 1
            if age > self.max_age:
                self.flaws.append(Flaw(uid, f"trained on at age {age}, the limit is {self.max_age}"))
