"""Runs in an object store (checkpointing.mirror), for commands that read a run: what they are given is a path, or an
address such as s3://BUCKET/PREFIX, whose files are fetched into a cache folder and compared there each time."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from grpo_mcore.base.file_digests import DIGESTS
from grpo_mcore.driver.checkpoints.object_store import RemoteStore, StoreError
from grpo_mcore.observe import LEDGER_FILE
from grpo_mcore.observe.logger import HYPERPARAMS_FILE
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.tools.report.run_files import find_run

OF_A_LOG = re.compile(r"(^|/)logs/exp_[^/]+/")
"""Part of the names of all files of a run's log folder."""
SAMPLES = "/samples/"


class NotMirrored(StoreError):
    """An object store does not hold what was asked for."""


def is_address(place: str) -> bool:
    """Return whether `place` is an address of an object store rather than a path or a name on the hub."""
    return "://" in place


def local_checkpoint(place: str) -> Path:
    """Return the checkpoint at `place` as a folder of this machine: a path is returned as it is. An address names a
    step_N or a run's prefix, of which the newest whole checkpoint is taken. Raises StoreError."""
    if (path := _path(place)) is not None:
        return path
    from grpo_mcore.driver.checkpoints.checkpoint_files import damage, refuse_full_disk
    from grpo_mcore.driver.checkpoints.mirror import fetch_step, whole_steps

    address, _, last = place.rstrip("/").rpartition("/")
    named = re.fullmatch(r"step_(\d+)", last)
    address = address if named else place
    store = RemoteStore(address)
    steps = whole_steps(store)
    if not steps or (named and int(named[1]) not in steps):
        there = ", ".join(f"step_{step}" for step in steps)
        what = f"whole are {there}" if there else "give the prefix of a run, as checkpointing.mirror has it"
        raise NotMirrored(f"{place} holds no whole checkpoint; {what}")
    step = int(named[1]) if named else steps[-1]
    folder = _cache(address) / f"step_{step}"
    saved = store.read(f"step_{step}/{DIGESTS}")
    if saved and (folder / DIGESTS).is_file() and (folder / DIGESTS).read_bytes() == saved[0] and not damage(folder):
        return folder
    part = folder.with_name(f".{os.getpid()}.{folder.name}")
    try:
        part.mkdir(parents=True)
        refuse_full_disk(part, sum(size for size, _ in store.objects(f"step_{step}").values()))
        if (problem := fetch_step(store, step, part) or damage(part)) is not None:
            raise NotMirrored(f"step_{step} of {address} is damaged: {problem}; choose another step")
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except OSError as error:
        raise StoreError(f"{place} cannot be fetched to {folder}: {error}; see XDG_CACHE_HOME") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def local_run(place: str, *, samples: bool = True) -> Path:
    """Return a folder of this machine that holds the log folders of the runs at `place`: a path is returned as it is.
    An address names a run's prefix, its log folder, or what lies above several runs. Raises StoreError."""
    if (path := _path(place)) is not None:
        return path
    store, folder = RemoteStore(place), _cache(place)
    end = "/".join(place.rstrip("/").split("/")[-2:])  # the address may be that of a log folder
    there = {
        name: state
        for name, state in store.objects("").items()
        if OF_A_LOG.search(f"{end}/{name}") and ".." not in Path(name).parts and (samples or SAMPLES not in f"/{name}")
    }
    if not there:
        raise NotMirrored(f"{place} holds no run: there is no logs/exp_NNN; give the prefix of a run's mirror")
    here = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    for name, file in here.items():
        if name not in there and OF_A_LOG.search(f"{end}/{name}") and (samples or SAMPLES not in f"/{name}"):
            file.unlink()  # of a run that had this prefix before
    wanted = {name: state for name, state in there.items() if name not in here or _differs(here[name], *state)}
    try:
        store.fetch({name: size for name, (size, _) in wanted.items()}, folder)
        for name, (_, written) in wanted.items():
            os.utime(folder / name, (written, written))
    except OSError as error:
        raise StoreError(f"{place} cannot be fetched to {folder}: {error}; see XDG_CACHE_HOME") from error
    return folder


def recorded_run(place: str) -> tuple[Path, MasterConfig]:
    """Return the log folder of the run at `place`, as a folder of this machine, and the run's recipe. Its
    `checkpointing.checkpoint_dir` is the mirror's prefix where `place` is an address; a relative one lies where the run
    was started, not in the working directory, where another run may have its own. Raises StoreError, NoRun."""
    here = local_run(place)
    folder = find_run(here)
    recipe = MasterConfig.model_validate(json.loads((folder / HYPERPARAMS_FILE).read_text(encoding="utf-8")))
    if _path(place) is None:
        log = f"{place.rstrip('/')}/{folder.relative_to(here).as_posix()}".removesuffix("/.")
        recipe.checkpointing.checkpoint_dir = re.sub(r"/logs/exp_[^/]+$", "", log)
    elif (started := _started_in(folder, Path(recipe.logger.log_dir))) is not None:
        recipe.checkpointing.checkpoint_dir = os.path.relpath(started / recipe.checkpointing.checkpoint_dir)
    return folder, recipe


def _started_in(folder: Path, logs: Path) -> Path | None:
    """Return the working directory of the run whose log folder is `folder`, None where `logs`, its logger.log_dir, does
    not say it: it is absolute, or the folder was moved."""
    above = folder.resolve().parent
    if logs.is_absolute() or above.parts[-len(logs.parts) :] != logs.parts:
        return None
    return above.parents[len(logs.parts) - 1]


def kept_checkpoint(place: str, step: int) -> Path | None:
    """Return the checkpoint of a step in a run's folder of checkpoints or at the address of its mirror, as a folder of
    this machine; None if it is not kept there. Raises StoreError."""
    if (path := _path(place)) is not None:
        return folder if (folder := path / f"step_{step}").is_dir() else None
    return local_checkpoint(f"{place}/step_{step}") if step in kept_steps(place) else None


def kept_steps(place: str) -> list[int]:
    """Return the steps of the checkpoints in a folder, or at the address of a mirror. Raises StoreError."""
    from grpo_mcore.driver.checkpoints.mirror import whole_steps

    if (path := _path(place)) is None:
        return whole_steps(RemoteStore(place))
    return sorted(int(step.name[5:]) for step in path.glob("step_*") if step.name[5:].isdigit())


def local_ledger(place: str) -> Path:
    """Return the ledger at `place`, a run's folder of checkpoints or its ledger, as a file of this machine. An address
    names a run's prefix. Raises StoreError."""
    if (path := _path(place)) is not None:
        return path / LEDGER_FILE if path.is_dir() else path
    address = place.rstrip("/").removesuffix(f"/{LEDGER_FILE}")
    if (got := RemoteStore(address).read(LEDGER_FILE)) is None:
        raise NotMirrored(f"{address} holds no {LEDGER_FILE}; give the prefix of a run's mirror")
    path = _cache(address) / LEDGER_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(got[0])
    return path


def _path(place: str) -> Path | None:
    """Return a place of this machine's file system as a path; None for another one."""
    return None if is_address(place.removeprefix("file://")) else Path(place.removeprefix("file://"))


def _cache(address: str) -> Path:
    """Return the folder for the files of an address."""
    scheme, _, rest = address.partition("://")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "grpo_mcore", scheme, *(part for part in rest.split("/") if part not in ("", ".", "..")))


def _differs(file: Path, size: int, written: float) -> bool:
    stat = file.stat()
    return stat.st_size != size or abs(stat.st_mtime - written) > 0.001
