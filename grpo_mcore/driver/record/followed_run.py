"""Follow a recorded run: another run takes what chance decided from its files, and so comes to the same weights.

Chance decides in which order groups finish, which samples a group has, which weights generated each token, when the run
is asked to stop, and when engines die. The ledger has the order, the files of samples have the rest. Everything else
follows from these, the recipe and the data: the schedule's commands, batches, advantages, updates. So the loop is the
same; only its groups come from `RecordedRollouts`, and each entry of the new ledger is held against the recorded one:
where they part for the first time, the run ends with a message.
"""

import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from grpo_mcore.cluster import Future
from grpo_mcore.driver.checkpoints.checkpoints import SavedPosition
from grpo_mcore.driver.policy.policy_group import logprobs_by_sample
from grpo_mcore.driver.record.sample_writer import SampleSink
from grpo_mcore.observe import LEDGER_FILE, audit, read_ledger, read_metrics
from grpo_mcore.observe.ledger.ledger_audit import valid_flags
from grpo_mcore.observe.logger import HYPERPARAMS_FILE, METRICS_FILE
from grpo_mcore.observe.run_folder import damage_raised_as, read_object
from grpo_mcore.observe.samples import Kind, read_samples, sample_steps
from grpo_mcore.recipe import Change, MasterConfig, changes
from grpo_mcore.rollout.group import Group
from grpo_mcore.step.step_batch import TrainTargets

logger = logging.getLogger(__name__)

Entry = dict[str, Any]
Tokens = Literal["recorded"]

CHANCE = ("retried", "restarted")
"""Entries of the ledger about what happened to engines and environments. They decide nothing that the order of the
groups does not tell, and are copied."""
SAVES = ("saved", "not_saved")
"""Entries that come whenever the disk is done."""
OF_THE_MACHINE = ("timing/", "tail/", "refit/", "tokens_per_sec", "policy_training_tokens_per_sec", "train_tflops")
"""Beginnings of the names of metrics that tell of the machine, its engines and the time, not of what was learned."""
_ALSO_OF_THE_MACHINE = ("unix_time", "seconds")


class FollowError(ValueError):
    """A run cannot be followed, or the run that follows has left it; the message says where."""


@dataclass(frozen=True)
class Difference:
    """The first value in which the runs differ."""

    step: int
    text: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}"


@dataclass
class _Compared:
    """Counts of what was compared. `tokens`: number of log-probs; `worst`: their largest difference."""

    steps: list[int] = field(default_factory=list)
    tokens: int = 0
    worst: float = 0.0
    first: Difference | None = None

    def differs(self, step: int, text: str) -> None:
        self.first = self.first or Difference(step, text)


class FollowedRun:
    """The record of a run, and how far the run that follows it has come.

    `begin` is called once, before the first entry that is to be held against the record. A group is known by its uid
    and the step whose file has its samples: the one that trained on it, or left it out.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: the run's log folder. Raises FollowError, OSError."""
        self.folder = folder
        recipe_file = folder / HYPERPARAMS_FILE
        if (recipe := read_object(recipe_file)) is None:
            raise FollowError(f"{folder} is the log folder of no run: {recipe_file} cannot be read")
        self._recipe = recipe
        with damage_raised_as(FollowError, recipe_file):
            saving, samples = recipe["checkpointing"], recipe["logger"]["samples"]
            self.checkpoints = Path(saving["checkpoint_dir"]) if saving["enabled"] else None
        self.ledger = (self.checkpoints or folder) / LEDGER_FILE
        if samples != "all":
            raise FollowError(
                f"{folder} cannot be followed: its logger.samples was {samples}, which leaves samples out; "
                "all is needed"
            )
        try:
            self._entries: Sequence[Entry] = read_ledger(self.ledger)
            audit(self._entries)  # raises for an entry without what is read of it below
        except FileNotFoundError as error:
            raise FollowError(f"{folder} cannot be followed: its ledger, {self.ledger}, is not there") from error
        except OSError as error:
            raise FollowError(f"{folder} cannot be followed: {self.ledger}: {error.strerror}") from error
        self._valid = valid_flags(self._entries)
        self._steps = _steps_of_groups(self._entries, self._valid)
        self._files: dict[Kind, dict[int, Path]] = {
            kind: sample_steps(folder, kind) for kind in ("train", "validation")
        }
        self._at = self._end = 0
        self._rows: dict[int, dict[str, list[dict[str, Any]]]] = {}  # step -> uid -> samples not taken yet
        self._logprobs: dict[int, dict[str, np.ndarray]] = {}  # step -> sample -> of the policy
        self._metrics: dict[int, dict[str, Any]] = {}  # of the recorded run's steps
        self._saved: dict[int, Entry] = {}  # saves of this run that the record has not come to
        self._is_over = False
        self.compared = _Compared()

    def check(self, config: MasterConfig) -> list[Change]:
        """Return the values of the recipe that differ from the recorded run's. Raises FollowError where this run would
        write into the folders of the recorded one."""
        for key, folder, recorded in (
            ("checkpointing.checkpoint_dir", config.checkpointing.checkpoint_dir, self.checkpoints),
            ("logger.log_dir", config.logger.log_dir, self.folder.parent),
        ):
            if recorded is not None and Path(folder).resolve() == recorded.resolve():
                raise FollowError(f"{key} {folder} is that of the run to follow, {self.folder}: choose another folder")
        if config.logger.samples != "all":
            raise FollowError("logger.samples must be all: the samples are compared")
        return changes(self._recipe, config)

    # Where the run stands in the record.

    def begin(self, position: SavedPosition | None) -> bool:
        """Go to where a run stands that begins, or that goes on from a checkpoint of the recorded run or of one that
        followed it. Return whether the recorded run did not stop there: this one then goes on with the groups in flight
        as they were, not as a resumed run."""
        starts = [i for i, entry in enumerate(self._entries) if entry["event"] == "started"]
        kept = 0 if position is None else position.followed
        resumes = [i for i in starts if self._entries[i]["kept"] == kept and i >= kept and self._valid[i]]
        if position is None and not resumes:
            raise FollowError(f"{self.ledger} does not begin with the start of a run")
        if kept > len(self._entries):
            raise FollowError(
                f"{self.ledger} ends before the checkpoint: it has {len(self._entries)} entries of {kept}"
            )
        self._at = resumes[-1] + 1 if resumes else kept
        later = [i for i in starts if i >= self._at and self._valid[i]]
        self._end = later[0] if later else len(self._entries)
        return not resumes

    def copy_ledger(self, path: Path, entries: int) -> None:
        """Begin a new ledger at `path` with the first entries of the recorded one: the checkpoint is of that run."""
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(self.ledger.read_bytes().splitlines(keepends=True)[:entries]))

    @property
    def end(self) -> str:
        """Why the run ends where the record does."""
        return f"the record of {self.folder} ends"

    @property
    def entries(self) -> int:
        """Number of the record's entries that the run has come past."""
        return self._at

    def _next(self, beyond: tuple[str, ...] = ()) -> Entry | None:
        """Return the next entry, but for those of the kinds `beyond`; None at the end of the record."""
        for index in range(self._at, self._end):
            entry = self._entries[index]
            if self._valid[index] and entry["event"] not in beyond:
                return entry
        return None

    def most_queued(self) -> int:
        """Return the recorded metric num_queued_samples of the step that is trained next."""
        self._metrics = self._metrics or {
            line["step"]: line for line in read_metrics(self.folder / METRICS_FILE, "train")
        }
        trained = self._next((*CHANCE, *SAVES))
        step = trained["step"] if trained is not None and trained["event"] == "trained" else 0
        return int(self._metrics.get(step, {}).get("num_queued_samples") or 0)

    def stop(self) -> tuple[str, bool] | None:
        """Return (why, at_once) where the recorded run was asked to stop at this point, else None."""
        entry = self._next((*CHANCE, *SAVES))
        return (entry["why"], entry["at_once"]) if entry is not None and entry["event"] == "stop_asked" else None

    def next_group(self, under_way: Collection[str]) -> tuple[str, int] | None:
        """Return (uid, step of its samples) of the group that finished or failed next; None where the record ends, or
        where what became of the group, and so its samples, is not recorded. `under_way`: uids of the groups that may
        finish. Raises FollowError if none of them came next."""
        while (entry := self._next((*CHANCE, *SAVES))) is not None and entry["event"] != "ended":
            is_group = entry["event"] in ("finished", "failed")
            if is_group and entry["uid"] in under_way:
                step = self._steps.get(id(entry))
                return None if step is None else (entry["uid"], step)
            if not self._is_over:
                raise FollowError(self._parted(entry, "waits for one of the groups under way"))
            self._pass(entry)
        return None

    def followed_by(self, entry: Entry) -> Iterator[Entry]:
        """Yield what is written in place of an entry of the new ledger: the recorded entries of chance before it, and
        itself. Raises FollowError if the recorded entry is another one."""
        if entry["event"] in SAVES:
            self._saved[entry["step"]] = entry
            return
        if entry["event"] in CHANCE:
            yield entry
            return
        if self._is_over:
            if entry["event"] in ("finished", "failed") and (group := self._next((*CHANCE, *SAVES))) is not None:
                self._pass(group)
            yield entry
            return
        while (recorded := self._next()) is not None and recorded["event"] in (*CHANCE, *SAVES):
            self._pass(recorded)
            if recorded["event"] in CHANCE:
                yield recorded
            elif (saved := self._saved.pop(recorded["step"], None)) is not None:
                yield saved
        if entry["event"] == "ended" or (entry["event"] == "stop_asked" and recorded != _plain(entry)):
            self._is_over = True  # the record ends, or this run is asked to stop
            yield from self._saved.values()
            yield entry
            return
        if recorded is None or recorded != _plain(entry):
            raise FollowError(self._parted(recorded, f"has {json.dumps(entry)}"))
        self._pass(recorded)
        yield entry

    def _pass(self, entry: Entry) -> None:
        while self._entries[self._at] is not entry:
            self._at += 1
        self._at += 1

    def _parted(self, recorded: Entry | None, now: str) -> str:
        record_part = "ends here" if recorded is None else f"has {json.dumps(recorded)} next"
        return (
            f"the run leaves its record: {self.ledger} {record_part}; this run {now}. Recipe, data and code must be "
            "those of the recorded run"
        )

    # What the samples hold.

    def samples(self, uid: str, step: int) -> list[dict[str, Any]]:
        """Return the samples of a group, in their order. Raises FollowError if they are not recorded."""
        self._load(step)
        if (rows := self._rows[step].pop(uid, None)) is None:
            raise FollowError(f"{self.folder}: the samples of {uid} are not among those of step {step}")
        return rows

    def _load(self, step: int) -> None:
        if step in self._rows:
            return
        self._rows[step] = self._read("train", step)
        with damage_raised_as(FollowError, self._files["train"][step]):
            self._logprobs[step] = {
                f"{uid}#{row['generation']}": np.asarray(row["policy_logprobs"], np.float32)
                for uid, rows in self._rows[step].items()
                for row in rows
                if row["policy_logprobs"] is not None
            }

    def validation(self, step: int) -> dict[str, list[dict[str, Any]]]:
        """Return the samples of the validation after `step` by uid, in the order in which their groups finished."""
        return self._read("validation", step)

    def _read(self, kind: Kind, step: int) -> dict[str, list[dict[str, Any]]]:
        if step not in self._files[kind]:
            raise FollowError(
                f"{self.folder}: the {kind} samples of step {step} are not recorded: the run was killed, its disk was "
                "slow or full, or they were deleted by logger.max_samples_gb"
            )
        by_uid: dict[str, list[dict[str, Any]]] = {}
        for row in read_samples(self._files[kind][step]):
            by_uid.setdefault(row["uid"], []).append(row)
        return by_uid

    # How equal the runs are.

    def comparing(self, sink: SampleSink) -> SampleSink:
        """Return what hands the log-probs of a step on to `sink`, and compares them with the recorded ones."""
        return _Comparing(self, sink)

    def compare_logprobs(
        self, step: int, names: Sequence[str], by_index: Mapping[int, Mapping[str, np.ndarray]]
    ) -> None:
        """Compare the policy's log-probs of a step. `names`: the samples' names, by index."""
        self._load(step)  # all its groups may have been in the checkpoint that the run goes on from
        recorded, compared = self._logprobs.pop(step), self.compared
        compared.steps.append(step)
        for index, columns in sorted(by_index.items()):
            name, logprobs = names[index], columns["policy"]
            logged = recorded.get(name)
            if logged is None or len(logged) != len(logprobs):
                compared.differs(
                    step,
                    f"sample {name} has {len(logprobs)} log-probs, recorded are {0 if logged is None else len(logged)}",
                )
                continue
            gaps = np.where(logprobs.view(np.int32) == logged.view(np.int32), 0.0, np.abs(logprobs - logged))
            compared.tokens += len(logprobs)
            if not (worst := float(gaps.max(initial=0.0))) <= 0.0:
                token = int(np.argmax(np.where(np.isnan(gaps), np.inf, gaps) > 0))
                compared.worst = max(compared.worst, math.inf if math.isnan(worst) else worst)
                values = f"{logprobs[token]:.9g}, recorded {logged[token]:.9g}"
                values += " (rounding: another number of threads or layout?)" if worst < 1e-4 else ""
                compared.differs(step, f"the log-prob of token {token} of sample {name}: {values}")
        for old in [number for number in self._rows if number < step]:
            del self._rows[old]
            self._logprobs.pop(old, None)

    def conclude(self, log_dir: Path) -> dict[str, Any]:
        """Compare the metrics of the steps that were followed, but those of the machine, and return the outcome for
        summary.json: run, steps, tokens (whose log-probs were compared), worst_logprob, differs_first (None: nowhere).
        """
        compared = self.compared
        for prefix in ("train", "validation"):
            recorded, lines = (
                {line["step"]: line for line in read_metrics(folder / METRICS_FILE, prefix)}
                for folder in (self.folder, log_dir)
            )
            for step in sorted(lines):
                if step not in recorded or (compared.first is not None and compared.first.step < step):
                    continue
                if (name := _first_difference(lines[step], recorded[step])) is not None:
                    compared.first = None if compared.first and compared.first.step > step else compared.first
                    compared.differs(
                        step, f"{prefix}/{name}: {lines[step].get(name)}, recorded {recorded[step].get(name)}"
                    )
        return {
            "run": str(self.folder),
            "steps": len(compared.steps),
            "tokens": compared.tokens,
            "worst_logprob": compared.worst if math.isfinite(compared.worst) else None,
            "differs_first": None if compared.first is None else str(compared.first),
        }


class _Comparing:
    """A SampleSink in front of another one."""

    wants_logprobs = True

    def __init__(self, followed: FollowedRun, sink: SampleSink) -> None:
        self._followed, self._sink = followed, sink

    def trained(self, step: int, groups: Sequence[Group], targets: TrainTargets, logprobs: Sequence[Future]) -> None:
        names = [f"{sample.uid}#{sample.generation_index}" for group in groups for sample in group.samples]
        self._followed.compare_logprobs(step, names, logprobs_by_sample(logprobs))
        self._sink.trained(step, groups, targets, logprobs)


def is_of_the_machine(metric: str) -> bool:
    """Return whether a metric tells of the machine, its engines and the time, in which two equal runs may differ."""
    return metric.startswith(OF_THE_MACHINE) or metric in _ALSO_OF_THE_MACHINE


def _first_difference(metrics: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    names = sorted(name for name in metrics.keys() | other.keys() if not is_of_the_machine(name))
    return next((name for name in names if metrics.get(name) != other.get(name)), None)


def _steps_of_groups(entries: Sequence[Entry], valid: Sequence[bool]) -> dict[int, int]:
    """Return, for each entry `finished` or `failed`, by its id, the step in whose file the samples of its group are.
    Those are missing of which nothing is recorded: the run ended before a step trained on them, or left them out."""
    steps: dict[int, int] = {}
    waiting: dict[
        str, list[Entry]
    ] = {}  # uid -> its entries: the first one, and one of each resume that kept the group
    trained = 0
    for entry in compress(entries, valid):
        match entry["event"]:
            case "finished":
                waiting[entry["uid"]] = [*(waiting.get(entry["uid"], ()) if entry.get("kept") else ()), entry]
            case "failed":
                steps[id(entry)] = trained + 1
            case "filtered":
                steps |= dict.fromkeys(map(id, waiting.pop(entry["uid"])), trained + 1)
            case "trained" | "returned" as event:
                trained = entry["step"] if event == "trained" else trained
                for uid in entry["uids"]:  # what returns may not have finished
                    steps |= dict.fromkeys(map(id, waiting.pop(uid, ())), trained)
    return steps


def _plain(entry: Entry) -> Entry:
    """Return an entry as it is read from a file."""
    plain: Entry = json.loads(json.dumps(entry))
    return plain
