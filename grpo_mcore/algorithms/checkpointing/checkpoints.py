"""Checkpoints of a run: each a folder `step_N` that appears whole or not at all, the best of them kept."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mcore.algorithms.checkpointing.checkpoint_files import (
    GB,
    could_not_write,
    damage,
    refuse_full_disk,
    size_of,
    write_digests,
)
from grpo_mcore.recipe import MasterConfig

AUTO = "auto"


class ResumeError(FileNotFoundError):
    """There is no checkpoint to go on from."""


class NotWritten(OSError):
    """A checkpoint could not be written, mostly because there is no room for it. The run can go on without it."""


@dataclass(frozen=True)
class RunSnapshot:
    """What a checkpoint holds besides the policy. `save_state`: counters of the run, see GRPOSaveState; `data_state`:
    the position in the data, the prompts in flight and the length of the ledger; `metrics`: of the last step."""

    save_state: dict[str, Any]
    data_state: dict[str, Any]
    metrics: dict[str, float]


@dataclass(frozen=True)
class SavedPosition:
    """Where a run stood when a checkpoint was saved. `stream`: state of the prompt stream; `in_flight`: prompt uid ->
    weight version that generated it, in the order of dispatch; `ledger_entries`: length of the ledger."""

    folder: Path
    stream: Mapping[str, Any]
    in_flight: Mapping[str, int]
    ledger_entries: int


class CheckpointManager:
    """Keeps `step_N` folders under checkpointing.checkpoint_dir.

    A folder holds policy/ (weights, optimizer, RNG by rank), groups/ (finished groups that wait for their step),
    data.pt (place in the data), training_info.json (save state and metrics), config.yaml (the resolved recipe) and
    digests.json (of all these files). It is written as `tmp_step_N` and renamed at the end. `save` waits for all of
    it; the loop's may be written beside its next steps (`background_checkpoints.py`).
    """

    def __init__(self, config: Any) -> None:
        """`config`: the recipe's checkpointing section."""
        self.config = config
        self.folder = Path(config.checkpoint_dir)
        self.resumed_from: Path | None = None
        """The checkpoint that this run goes on from; None for a new run."""

    def open(self, resume: str | bool | None) -> None:
        """Choose the checkpoint to go on from, see `find`. Raises ResumeError; also where there is none and the folder
        holds another run's checkpoints."""
        self.resumed_from = self.find(resume)
        if self.resumed_from is None:
            self._refuse_to_mix()

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        steps = self._steps()
        return self.folder / f"step_{max(steps)}" if steps else None

    def _refuse_to_mix(self) -> None:
        """Raises ResumeError where a run that does not resume would write among the checkpoints of another."""
        if self.config.enabled and (found := self.latest()):
            raise ResumeError(
                f"checkpointing.checkpoint_dir {self.folder} holds {found.name} of another run: go on from it with "
                "--resume, or choose another folder"
            )

    def find(self, resume: str | Path | bool | None) -> Path | None:
        """The checkpoint that `--resume` means: True is the newest, "auto" the newest where there is one, None none.

        Where the newest is damaged, the one before it is meant. Raises ResumeError."""
        if not resume:
            return None
        if resume == AUTO and self.latest() is None:
            return None
        found = self.latest() if resume is True or resume == AUTO else Path(resume)
        if found is None:
            raise ResumeError(f"--resume: there is no step_N folder in {self.folder}; start without --resume")
        if not (found / "training_info.json").is_file():
            raise ResumeError(f"--resume: {found} is no checkpoint: training_info.json is missing")
        if (what := damage(found)) is None:
            return found
        if isinstance(resume, str) and resume != AUTO:
            raise ResumeError(f"--resume: {found} is damaged: {what}; choose another checkpoint, or --resume alone")
        return self._before(found, what)

    def _before(self, found: Path, what: str) -> Path:
        """The newest checkpoint that is whole, where `found` is not: it and others like it are set aside."""
        while True:
            aside = found.with_name(f"damaged_{found.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(found, aside)
            told = f"checkpoint {found} is damaged: {what}; it is now {aside.name}"
            older = self.latest()
            if older is None:
                raise ResumeError(f"{told}, and there is no older one: start anew, without --resume")
            print(f"{told}, and {older.name} is used", file=sys.stderr, flush=True)
            if (problem := damage(older)) is None:
                return older
            found, what = older, problem

    def log_run(self) -> str | None:
        """Return the log folder (exp_NNN) of the run that this one goes on with, or None."""
        if self.resumed_from is None:
            return None
        return json.loads((self.resumed_from / "training_info.json").read_text())["save_state"].get("log_run")

    def position(self) -> SavedPosition | None:
        """Return where the run stood in the checkpoint that this one goes on from, None for a new run."""
        if self.resumed_from is None:
            return None
        _, data_state = self.read(self.resumed_from)
        in_flight, entries = data_state.get("in_flight", {}), data_state.get("ledger", 0)
        return SavedPosition(self.resumed_from, data_state, in_flight, entries)

    def save(
        self,
        step: int,
        save_policy: Callable[[str], None],
        snapshot: RunSnapshot,
        recipe: MasterConfig,
    ) -> Path:
        """Write `step_N`, and delete the checkpoints that keep_top_k leaves out. Return the folder. Raises NotWritten;
        nothing is then left of it."""
        with self.writing(step) as tmp:
            self.make_room(tmp)
            write_driver_files(tmp, snapshot, recipe)
            save_policy(policy_folder(tmp))
            return self.publish(step)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Inside, what becomes `step_N` is written to this folder. Where it cannot be written, for want of room or the
        like, nothing is left of it, and NotWritten is raised."""
        tmp = self.folder / f"tmp_step_{step}"
        try:
            yield tmp
        except Exception as error:
            if not could_not_write(error):
                raise
            shutil.rmtree(tmp, ignore_errors=True)
            raise NotWritten(self._what_to_free(step, error)) from error

    def make_room(self, tmp: Path) -> None:
        """Makes the folder, empty. Raises OSError where the disk has no room for another checkpoint like the last."""
        shutil.rmtree(tmp, ignore_errors=True)  # left by a run that was killed while it wrote
        tmp.mkdir(parents=True)
        if last := self.latest():
            refuse_full_disk(self.folder, size_of(last))

    def publish(self, step: int) -> Path:
        """All of it is written: it becomes `step_N`, and what ranks too low is dropped. Returns the folder."""
        tmp, final = self.folder / f"tmp_step_{step}", self.folder / f"step_{step}"
        write_digests(tmp)
        if final.exists():
            self._drop(step)
        os.replace(tmp, final)
        self._prune(just_saved=step)
        return final

    def _what_to_free(self, step: int, error: Exception) -> str:
        kept = ", ".join(f"step_{old} ({size_of(self.folder / f'step_{old}') / GB:.2f} GB)" for old in self._steps())
        free, why = shutil.disk_usage(self.folder).free / GB, str(error).partition("\n")[0]
        return (
            f"the checkpoint of step {step} was not written to {self.folder}: {why}\n"
            f"{free:.2f} GB are free there; the run goes on. Delete what you do not need of {kept or 'other files'}"
            + (", or lower checkpointing.keep_top_k" if kept else "")
        )

    @staticmethod
    def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """(save state, data state) of a checkpoint."""
        import torch

        info = json.loads((folder / "training_info.json").read_text())
        return info["save_state"], torch.load(folder / "data.pt", weights_only=False)

    def _steps(self) -> list[int]:
        whole = (path.parent.name.removeprefix("step_") for path in self.folder.glob("step_*/training_info.json"))
        return sorted(int(name) for name in whole if name.isdigit())

    def _drop(self, step: int) -> None:
        """Under another name first: a folder that is only half deleted must not pass for a checkpoint."""
        doomed = self.folder / f"tmp_old_step_{step}"
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(self.folder / f"step_{step}", doomed)
        shutil.rmtree(doomed)

    def _prune(self, just_saved: int) -> None:
        """Keeps the best keep_top_k by the metric, and always the one just saved and the newest."""
        keep = self.config.keep_top_k
        steps = self._steps()
        if keep is None or len(steps) <= keep:
            return
        ranked = sorted(steps, key=lambda step: (self._metric(step), step), reverse=True)
        for step in set(steps) - set(ranked[:keep]) - {max(steps), just_saved}:
            self._drop(step)

    def _metric(self, step: int) -> float:
        """Higher is better; a checkpoint without the metric ranks last."""
        if self.config.metric_name is None:
            return 0.0
        info = json.loads((self.folder / f"step_{step}" / "training_info.json").read_text())
        value = info["metrics"].get(self.config.metric_name)
        if value is None:
            return float("-inf")
        return value if self.config.higher_is_better else -value


def policy_folder(folder: Path) -> str:
    """Of the ranks' part of a checkpoint, for whoever works in another directory."""
    return str((folder / "policy").resolve())


def write_driver_files(folder: Path, snapshot: RunSnapshot, recipe: MasterConfig) -> None:
    """Write the driver's part of a checkpoint: data.pt, training_info.json and config.yaml."""
    import torch
    import yaml

    torch.save(snapshot.data_state, folder / "data.pt")
    info = {"save_state": snapshot.save_state, "metrics": snapshot.metrics}
    (folder / "training_info.json").write_text(json.dumps(info, indent=1))
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
