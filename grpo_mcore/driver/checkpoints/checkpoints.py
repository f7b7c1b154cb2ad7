"""Checkpoints of a run: each is a folder `step_N` that appears complete or not at all; the best are kept."""

import errno
import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_mcore.base.clock import REAL, Clock
from grpo_mcore.base.files import DIGESTS, UNREADABLE, Digest, parse_digests
from grpo_mcore.driver.checkpoints.checkpoint_files import (
    GB,
    INFO,
    POLICY,
    GRPOSaveState,
    ResumeError,
    damage,
    is_write_failure,
    metrics_of,
    rank,
    read_info,
    refuse_full_disk,
    refuse_newer_format,
    saved_recipe,
    size_of,
    sync_folder,
    write_digests,
)
from grpo_mcore.driver.checkpoints.copy_to_url import BackgroundCopy, CopyError, open_store
from grpo_mcore.driver.checkpoints.lease import Lease, dead_holder
from grpo_mcore.observe import Logger
from grpo_mcore.recipe import Algorithm, Change, CheckpointingConfig, MasterConfig, changes

logger = logging.getLogger(__name__)

AUTO = "auto"

MODEL_FOLDERS = ("hf", "hf_step_*")
"""Folders with models in Hugging Face's format: the last weights of SFT and DPO, and checkpointing.save_hf."""


class NotWritten(OSError):
    """A checkpoint could not be written, mostly because the disk is full. The run can go on without it."""


@dataclass(frozen=True)
class SavedPosition:
    """Where a run stood when a checkpoint was saved. `stream`: state of the prompt stream; `in_flight`: prompt uid ->
    weight version that generated it, in the order of dispatch; `ledger_entries`: length of the ledger;
    `ledger_digest`: digest of the ledger's last entry (None in older checkpoints)."""

    folder: Path
    stream: Mapping[str, Any]
    in_flight: Mapping[str, int]
    ledger_entries: int
    ledger_digest: str | None = None

    @property
    def followed(self) -> int:
        """Length of the ledger of the run that this one followed; of its own ledger if it followed none."""
        return int(self.stream.get("followed", self.ledger_entries))


class CheckpointManager:
    """Keeps `step_N` folders under checkpointing.checkpoint_dir.

    A folder holds policy/ (weights, optimizer, RNG by rank), groups/ (finished groups that wait for their step),
    data.pt (position in the data), training_info.json (save state and metrics), config.yaml (the resolved recipe) and
    digests.json (of all these files). It is written as `tmp_step_N` and renamed at the end: `background.py` does it in
    parts, while training goes on.
    """

    def __init__(self, config: CheckpointingConfig, clock: Clock = REAL, *, store: Any = None) -> None:
        """`store`: obstore's store at checkpointing.mirror, where the caller has opened it."""
        self.config, self._clock = config, clock
        self._store = store
        self.copy: BackgroundCopy | None = None
        """Copies the checkpoints to checkpointing.mirror, once the folder is opened."""
        self._copied_run, self._copied = "", list[int]()  # the newest run at that URL, and its steps
        self.folder = Path(config.checkpoint_dir)
        self.resumed_from: Path | None = None
        """The checkpoint that this run resumes; None for a new run."""
        self._lease: Lease | None = None
        self._newest: Path | None = None  # when the folder was opened
        self._warned = False
        self._newest_wanted = False  # the user has not named the checkpoint to resume
        self._renames = True  # damaged checkpoints
        self._undeletable: set[int] = set()  # steps whose failed deletion has been logged

    def open(
        self, resume: str | bool | None, *, trains: bool = True, models: Sequence[str] = (), renames: bool = True
    ) -> None:
        """Choose the checkpoint to resume from, see `find`. Raises ResumeError; also if there is none and the folder
        holds another run's checkpoints. With `trains`, raises FolderInUse if another run is writing there.

        `models`: names (patterns) of the models that this run will write into the folder when it ends. Raises
        ResumeError for one that another run has left there: it would be replaced. `renames`: give a damaged checkpoint
        another name; without it, it may still be on its way here."""
        self._renames = renames
        if trains and self.config.enabled:
            dead_holder(self.folder, clock=self._clock)
        self._open_copy(resume, trains)
        self.resumed_from = self.find(resume, whole=False)
        self._newest_wanted = resume is True or resume == AUTO
        self._newest = self.latest()
        if self.config.enabled and self.resumed_from is None and (newest := self.latest()):
            raise ResumeError(
                f"checkpointing.checkpoint_dir {self.folder} holds {newest.name} of another run: go on from it with "
                "--resume, or choose another folder"
            )
        if not self.goes_on_here and (left := self._models(models)):
            raise ResumeError(
                f"checkpointing.checkpoint_dir {self.folder} holds {left[0].name}, a model of another run, which this "
                "run would replace: choose another folder, or move it away"
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for a run that trains, until the end of the context, and set aside what it does not go on
        from. Raises FolderInUse if another run holds it, ResumeError if one has held it since `open`. Inside another
        context of this object it does nothing."""
        if not self.config.enabled or self._lease is not None:
            yield
            return
        with Lease(self.folder, clock=self._clock) as self._lease:
            try:
                if (newest := self.latest()) != self._newest:
                    raise ResumeError(f"another run has written {newest} while this one started; start it again")
                self._set_newer_aside()
                with self._copying():
                    yield
            finally:
                self._lease = None

    def _open_copy(self, resume: str | bool | None, trains: bool) -> None:
        """Find out which copies there are at checkpointing.mirror, and that it can be written. Raises CopyError. A run
        with checkpoints in its folder goes on by these where the URL cannot be reached."""
        if not self.config.enabled or (url := self.config.mirror) is None:
            return
        store = self._store or open_store(url, self.config.mirror_options)
        self.copy = BackgroundCopy(url, store, self.folder, self.config.mirror_wait_s)
        try:
            self._copied_run, self._copied = self.copy.look(writes=trains)
        except CopyError as error:
            if self.latest() is None and (trains or resume is True or resume == AUTO):
                raise
            logger.warning("%s; the run goes by the checkpoints in %s", error, self.folder)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Copy the checkpoints that are kept, and each new one, to checkpointing.mirror, if the recipe has it."""
        if self.copy is None:
            yield
            return
        with self.copy.running(self._steps(), self.resumed_step()):
            yield

    def mirror_log(self, log: Logger) -> None:
        """Copy the log of the run too, and let the log tell which checkpoints are not copied."""
        if self.copy is not None:
            self.copy.log_dir, log.not_copied = log.log_dir, self.copy.lacking

    def fetch_log(self, log_dir: Path) -> None:
        """Fetch the log of the run that this one resumes into logger.log_dir, if its checkpoint was fetched."""
        if self.copy is not None:
            self.copy.fetch_logs(log_dir)

    def resumed_step(self) -> int | None:
        """Return the step of the checkpoint that this run resumes; None for a new run."""
        if self.resumed_from is None:
            return None
        return int(read_info(self.resumed_from)["save_state"]["current_step"])

    def _set_newer_aside(self) -> None:
        """Rename the checkpoints that are newer than the one that this run resumes, and the models made of them: after
        a rollback, a later `--resume` must not go on from them, and this run's model must not replace theirs."""
        if (resumed := self.resumed_step()) is None:
            return
        if newer := [step for step in self._steps() if step > resumed]:
            names = [self._set_aside(f"step_{step}").name for step in newer]
            models = [path for path in self._models(MODEL_FOLDERS) if path.name == "hf" or step_of(path.name) > resumed]
            names += [self._set_aside(path.name).name for path in models]
            logger.warning(
                "the run goes back to %s: what was saved after step %d is set aside as %s",
                *(self.resumed_from, resumed, ", ".join(names)),
            )

    @property
    def goes_on_here(self) -> bool:
        """Whether this run resumes a checkpoint of this folder, so that the other files there are its own."""
        return self.resumed_from is not None and self.resumed_from.resolve().parent == self.folder.resolve()

    def make_way(self, name: str) -> Path:
        """Return the path of a model that this run is about to write. A model that another run has written there since
        `open` is set aside, with a warning."""
        path = self.folder / name
        if path.exists() and not self.goes_on_here:
            logger.warning(
                "another run has written %s meanwhile: it is set aside as %s", path, self._set_aside(name).name
            )
        return path

    def _models(self, patterns: Sequence[str]) -> list[Path]:
        return sorted(path for pattern in patterns for path in self.folder.glob(pattern))

    def _set_aside(self, name: str) -> Path:
        """Rename a checkpoint or model to the first free abandoned_NAME, abandoned_NAME.2, ... and return that."""
        names = (f"abandoned_{name}" + (f".{number}" if number > 1 else "") for number in itertools.count(1))
        aside = next(path for path in map(self.folder.joinpath, names) if not path.exists())
        os.replace(self.folder / name, aside)
        return aside

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        steps = self._steps()
        return self.folder / f"step_{max(steps)}" if steps else None

    def latest_if_readable(self, otherwise: Path | None = None) -> Path | None:
        """Return the newest complete checkpoint, or `otherwise` if the folder cannot be read at the moment: after a
        failure, whose message must not be replaced by that of another one."""
        try:
            return self.latest()
        except OSError as error:
            logger.warning("%s cannot be looked through: %s", self.folder, error)
            return otherwise

    def find(self, resume: str | Path | bool | None, *, whole: bool = True) -> Path | None:
        """Return the checkpoint that `--resume` names: a folder, True for the newest, "auto" for the newest or None if
        there is none. `whole`: see `damage`.

        A newest checkpoint that is damaged is renamed, and the one before it is returned; one that cannot be read keeps
        its name, as it may be intact. Raises ResumeError."""
        if not resume:
            return None
        if resume is not True and resume != AUTO:
            return _named_checkpoint(Path(resume), whole)
        return self._newest_intact(resume, whole, "")

    def _newest_intact(self, resume: str | bool, whole: bool, known: str) -> Path | None:
        """Return the newest checkpoint that is intact. `known`: damage of the newest one that the caller has found; ""
        if it has not looked."""
        local = self._steps()
        steps = sorted({*local, *self._copied})
        while steps:
            step = steps.pop()
            candidate, message, unreadable = self.folder / f"step_{step}", "", False
            if step in local:
                refuse_newer_format(candidate)
                if (problem := known or damage(candidate, whole)) is None:
                    return candidate
                known = ""
                if unreadable := UNREADABLE in problem:
                    message = f"checkpoint {candidate} is passed over: {problem}; it stays where it is"
                else:
                    renamed = self._renames or step in self._copied  # whose copy comes under its name
                    done = _rename_damaged(candidate) if renamed else "a run renames it"
                    message = f"checkpoint {candidate} is damaged: {problem}; {done}"
            if self.copy is not None and step in self._copied and not candidate.exists():
                if (problem := self.copy.fetch(self._copied_run, step)) is None:
                    if message:
                        logger.warning("%s, and it is fetched from %s", message, self.config.mirror)
                    refuse_newer_format(candidate)
                    return candidate
                message += f"{'; ' if message else ''}step_{step} at {self.config.mirror} is damaged: {problem}"
            if not steps:
                what_to_do = "look after its disk, then resume" if unreadable else "start without --resume"
                raise ResumeError(f"{message}, and there is no older one: {what_to_do}")
            logger.warning("%s, and step_%d is used", message, steps[-1])
        if resume == AUTO:
            return None
        places = f"{self.folder}" + (f" or {self.config.mirror}" if self.copy is not None else "")
        raise ResumeError(f"--resume: there is no step_N folder in {places}; start without --resume")

    def pass_over(self, problem: str) -> Path:
        """Give up the checkpoint that this run resumes, whose weights are damaged, and return the one before it. Raises
        ResumeError if there is none, or if the user has named this one."""
        damaged = self.resumed_from
        assert damaged is not None
        if not self._newest_wanted:
            raise ResumeError(_is_damaged(damaged, problem))
        self.resumed_from = self._newest_intact(True, False, problem)
        assert self.resumed_from is not None
        if self._lease is not None:
            self._set_newer_aside()  # one that cannot be read has kept its name
        return self.resumed_from

    def policy_digests(self) -> dict[str, Digest]:
        """Return the digests of the ranks' files of the checkpoint that this run resumes, by path inside `policy`."""
        assert self.resumed_from is not None
        files = parse_digests((self.resumed_from / DIGESTS).read_bytes())
        start = f"{POLICY}/"
        return {name.removeprefix(start): digest for name, digest in files.items() if name.startswith(start)}

    def log_run(self) -> str | None:
        """Return the log folder (exp_NNN) of the run that this one continues, or None. A run that starts from a
        checkpoint of another folder, or of a copied one, is a branch: the log of the run that wrote it stays as it
        is."""
        if self.resumed_from is None or not self.goes_on_here or self._is_copied():
            return None
        return read_info(self.resumed_from)["save_state"].get("log_run")

    def _is_copied(self) -> bool:
        """Whether the folder is a copy: that which the checkpoint was written to is another one, and still in use."""
        assert self.resumed_from is not None
        written = Path(saved_recipe(self.resumed_from)["checkpointing"]["checkpoint_dir"])
        return written.is_dir() and not written.samefile(self.folder) and any(written.glob(f"step_*/{INFO}"))

    def check_algorithm(self, algorithm: Algorithm) -> None:
        """Raise ResumeError if another algorithm has written the checkpoint that this run resumes: its counters, its
        data and its log are of another kind. Older checkpoints of SFT and DPO do not differ."""
        if self.resumed_from is None:
            return
        state = read_info(self.resumed_from)["save_state"]
        wrote = "grpo" if "consumed_samples" in state else state.get("algorithm")
        if algorithm != wrote and (wrote is not None or algorithm == "grpo"):
            name = {"grpo": "GRPO", "sft": "SFT", "dpo": "DPO", "rm": "a reward model"}
            raise ResumeError(
                f"--resume: {self.resumed_from} is of a run of {name.get(wrote or '', 'SFT or DPO')}, which "
                f"{name[algorithm]} cannot resume. To start from its weights: grpo-mcore export {self.resumed_from} "
                "--output MODEL, then policy.model_name=MODEL without --resume, in another checkpointing.checkpoint_dir"
            )

    def changes(self, recipe: MasterConfig) -> list[Change]:
        """Return the values of the recipe that differ from those of the checkpoint that this run resumes. Raises
        ResumeError if one of them is fixed when a run resumes."""
        if self.resumed_from is None:
            return []
        changed = changes(saved_recipe(self.resumed_from), recipe)
        if refused := [f"{change.key}: {change.saved} -> {change.new}" for change in changed if change.fixed]:
            raise ResumeError(
                f"--resume: {self.resumed_from} was written with other values, which a resumed run keeps; restore "
                f"them, or start a new run from its exported model (grpo-mcore export): {'; '.join(refused)}"
            )
        return changed

    def position(self) -> SavedPosition | None:
        """Return where the run stood in the checkpoint that this one resumes, None for a new run."""
        if self.resumed_from is None:
            return None
        _, data_state = self.read(self.resumed_from)
        in_flight, entries = data_state.get("in_flight", {}), data_state.get("ledger", 0)
        return SavedPosition(self.resumed_from, data_state, in_flight, entries, data_state.get("ledger_digest"))

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Yield the folder that becomes `step_N`. If it cannot be written inside the context, delete what was written
        and raise NotWritten."""
        tmp = self.folder / f"tmp_step_{step}"
        try:
            yield tmp
        except Exception as error:
            if not is_write_failure(error):
                raise
            shutil.rmtree(tmp, ignore_errors=True)
            raise NotWritten(self._what_to_free(step, error)) from error

    def make_room(self, tmp: Path) -> None:
        """Make the folder, empty. Raises OSError if the disk has no room for another checkpoint like the last."""
        shutil.rmtree(tmp, ignore_errors=True)  # left by a run that was killed while it wrote
        tmp.mkdir(parents=True)
        if last := self.latest():
            refuse_full_disk(self.folder, size_of(last))

    def publish(self, step: int, written: Mapping[str, Digest] = {}) -> Path:
        """Write the digests, rename the folder to `step_N`, and delete the checkpoints that keep_top_k leaves out.
        Return the folder. A failure after the renaming is logged and not raised, since the checkpoint is saved; a
        deletion that failed is tried again after the next save. `written`: see `write_digests`."""
        tmp, final = self.folder / f"tmp_step_{step}", self.folder / f"step_{step}"
        write_digests(tmp, written)
        if self._lease is not None:
            self._lease.check()
        if final.exists():
            self._set_aside(final.name)  # not deleted: until the new one has its name, it is the only one
        os.replace(tmp, final)
        try:
            sync_folder(self.folder)
            self._prune(just_saved=step)
        except OSError as error:
            logger.warning("%s is saved, but its folder could not be flushed and tidied up: %s", final, error)
        if self.copy is not None:
            self.copy.published(step)
        return final

    def _what_to_free(self, step: int, error: Exception) -> str:
        reason = str(error).partition("\n")[0]
        message = f"the checkpoint of step {step} was not written to {self.folder}: {reason}\n"
        try:
            kept = ", ".join(
                f"step_{old} ({size_of(self.folder / f'step_{old}') / GB:.2f} GB)" for old in self._steps()
            )
            free = shutil.disk_usage(self.folder).free / GB
        except OSError as unreadable:
            return f"{message}the folder cannot be read either ({unreadable}); the run goes on. Look after its disk"
        if (advice := advice_for(error)) is not None:
            return f"{message}{advice}; the run goes on"
        return (
            f"{message}{free:.2f} GB are free there; the run goes on. Delete what you do not need of "
            f"{kept or 'other files'}" + (", or lower checkpointing.keep_top_k" if kept else "")
        )

    @staticmethod
    def read(folder: Path) -> tuple[GRPOSaveState, dict[str, Any]]:
        """Return (save state, data state) of a checkpoint."""
        from grpo_mcore.base import tensor_files

        return read_info(folder)["save_state"], tensor_files.load(folder / "data.pt")

    def _steps(self) -> list[int]:
        """Return the steps of all folders step_N that hold something, damaged ones too."""
        try:
            with os.scandir(self.folder) as entries:
                steps = [entry for entry in entries if re.fullmatch("step_(0|[1-9][0-9]*)", entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(step.name.removeprefix("step_")) for step in steps if _holds_something(step))

    def _delete(self, step: int) -> None:
        """Rename the folder, then delete it: a half deleted one must not pass for a checkpoint. Raises OSError."""
        doomed = self.folder / f"tmp_old_step_{step}"
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(self.folder / f"step_{step}", doomed)
        shutil.rmtree(doomed)

    def _delete_all(self, steps: Iterable[int]) -> None:
        """Delete these checkpoints, and what failed deletions have left. Warn once of each that cannot be deleted."""
        left = [int(path.name.removeprefix("tmp_old_step_")) for path in self.folder.glob("tmp_old_step_*")]
        for step in sorted(steps):
            self._attempt(step, partial(self._delete, step))
        for step in sorted(left):
            self._attempt(step, partial(shutil.rmtree, self.folder / f"tmp_old_step_{step}"))

    def _attempt(self, step: int, delete: Callable[[], None]) -> None:
        try:
            delete()
        except FileNotFoundError:  # another process has deleted it
            return
        except OSError as error:
            if step not in self._undeletable:
                self._undeletable.add(step)
                logger.warning(
                    "the old checkpoint step_%d cannot be deleted from %s: %s; it is tried again after each save",
                    *(step, self.folder, error),
                )

    def _prune(self, just_saved: int) -> None:
        """Keep the best keep_top_k by the metric, the newest ft_keep_latest_k of all, and always the one just saved and
        the newest."""
        metrics = {step: metrics_of(self.folder / f"step_{step}") for step in self._steps()}
        if not self._warned:
            self._warn_of_equal_ranks(metrics, just_saved)
        self._delete_all(metrics.keys() - self._to_keep(metrics, just_saved))

    def _warn_of_equal_ranks(self, metrics: Mapping[int, Mapping[str, float]], just_saved: int) -> None:
        """Warn if the metric ranks all checkpoints equally, so that it does not tell which to keep."""
        name, keep = self.config.metric_name, self.config.keep_top_k
        ranks = {step: rank(of, self.config) for step, of in metrics.items() if not self._is_for_recovery(step)}
        if name is None or keep is None or len(ranks) <= keep or len(set(ranks.values())) > 1:
            return
        self._warned = True
        missing = rank(metrics.get(just_saved, {}), self.config) == float("-inf")
        names = sorted({known for step in ranks for known in metrics[step] if "val:" in known})
        known = f" (there are {', '.join(names)})" if names and name not in names else ""
        logger.warning(
            "checkpointing.metric_name: %s is %s in steps %s, so the newest are kept; %s (said only once)",
            name,
            "missing" if missing else "the same",
            ", ".join(map(str, sorted(ranks))),
            f"validate more often, name another metric{known}, or set it to null"
            if missing
            else "name a metric that moves, such as val:reward",
        )

    def _to_keep(self, metrics: Mapping[int, Mapping[str, float]], just_saved: int) -> set[int]:
        """Return the steps to keep, of their metrics by step."""
        competing = [step for step in metrics if not self._is_for_recovery(step)]
        ranked = sorted(competing, key=lambda step: (rank(metrics[step], self.config), step), reverse=True)
        newest = sorted(metrics)[-(self.config.ft_keep_latest_k or 1) :]
        return {*ranked[: self.config.keep_top_k], *newest, just_saved}

    def _is_for_recovery(self, step: int) -> bool:
        """Return whether a checkpoint is kept for being new alone: it is none of save_period, and the recipe keeps
        others by their age."""
        ages = (self.config.ft_save_period, self.config.ft_keep_latest_k)
        return step % self.config.save_period != 0 and any(age is not None for age in ages)


def _holds_something(folder: os.DirEntry[str]) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entries)
    except (FileNotFoundError, NotADirectoryError):
        return folder.is_symlink()  # to a disk that is away
    except OSError:  # a disk that cannot be read: `damage` says so
        return True


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint or model, such as hf_step_64; 0 for another name."""
    number = re.fullmatch(r".*step_(\d+)", name)
    return int(number[1]) if number else 0


def _named_checkpoint(folder: Path, whole: bool) -> Path:
    """Return the checkpoint that `--resume` names. Raises ResumeError if it is none, or damaged."""
    if not (folder / INFO).is_file() and not (folder / DIGESTS).is_file():
        inside = max(folder.glob(f"step_*/{INFO}"), key=lambda info: info.stat().st_mtime, default=None)
        hint = f"; name one of the checkpoints in it, such as {inside.parent}" if inside else ""
        raise ResumeError(f"--resume: {folder} is no checkpoint: {INFO} is missing{hint}")
    refuse_newer_format(folder)
    if (problem := damage(folder, whole)) is not None:
        raise ResumeError(_is_damaged(folder, problem))
    return folder


def _is_damaged(folder: Path, problem: str) -> str:
    return f"--resume: {folder} is damaged: {problem}; choose another checkpoint, or --resume alone"


def _rename_damaged(folder: Path) -> str:
    """Rename a damaged checkpoint, so that no later run uses it. Return what was done, for a message."""
    aside = folder.with_name(f"damaged_{folder.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
    except OSError as error:
        return f"it stays where it is, since it cannot be renamed: {error.strerror or error}"
    return f"it is now {aside.name}"


ADVICE = {
    errno.EROFS: "the disk is mounted read-only: mount it writable",
    errno.EACCES: "the user of this run may not write there: chmod or chown {path}",
    errno.ENOENT: "{path} was removed while the run goes on: find out by whom",
    errno.EIO: "the disk fails: look after it",
    errno.ESTALE: "the file server has lost {path}: mount it again",
}
"""Remedies for failures to write that have nothing to do with room on the disk."""


def advice_for(error: BaseException | None) -> str | None:
    """Return what to do about a failed write by the system's error; None for a full disk, and where it is unknown."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in ADVICE:
            return ADVICE[error.errno].format(path=error.filename or "a folder of the checkpoint")
        error = error.__cause__
    return None
