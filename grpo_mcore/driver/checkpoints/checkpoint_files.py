"""The files of one checkpoint: what they hold, how they are written, and whether they are intact."""

import errno
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from grpo_mcore.base.files import (
    CRITIC,
    DIGESTS,
    FORMATS,
    Digest,
    collect_digests,
    digest_file,
    digest_of,
    first_changed,
    first_missing,
    newer_format,
    parse_digests,
    try_to_read,
)
from grpo_mcore.recipe import CheckpointingConfig, MasterConfig

INFO = "training_info.json"
"""Save state and metrics of a checkpoint."""

POLICY = "policy"
"""Folder of the ranks' part of a checkpoint. The ranks compute the digests of what they write, and check what they
read."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EISDIR)
TORCH_WRITER = ("inline_container.cc", "iostream error")
"""Parts of the messages of torch.save after a failed write; they do not name the cause."""
GB = 1e9


class ResumeError(FileNotFoundError):
    """There is no checkpoint to resume from."""


class GRPOSaveState(TypedDict, total=False):
    """The counters of a run, from its start. All of them are in every checkpoint's training_info.json."""

    consumed_samples: int  # prompts
    current_step: int
    current_epoch: int
    total_steps: int
    total_valid_tokens: int
    val_reward: float
    val_metrics: dict[str, float | None]  # of the validation after current_step, if there was one
    log_run: str  # the run's folder in logger.log_dir, which a resumed run continues
    algorithm: str  # one of FINE_TUNING


def first_save_state() -> GRPOSaveState:
    """Return the save state of a run that has not begun."""
    return GRPOSaveState(consumed_samples=0, current_step=0, current_epoch=0, total_steps=0, total_valid_tokens=0)


@dataclass(frozen=True)
class RunSnapshot:
    """The contents of a checkpoint besides the policy. `data_state`: position in the data, prompts in flight and length
    of the ledger; `metrics`: those of the last step, by which checkpoints are ranked."""

    save_state: GRPOSaveState
    data_state: dict[str, Any]
    metrics: dict[str, float]


def rank_of(folder: Path, config: CheckpointingConfig) -> tuple[float, int]:
    """Return what checkpoints are ranked by, to keep the best and to export it: the metric, then the step."""
    return rank(metrics_of(folder), config), int(folder.name.removeprefix("step_"))


def metrics_of(folder: Path) -> Mapping[str, float]:
    """Return the metrics of a checkpoint, none of a damaged one: only a resume needs it whole."""
    try:
        return dict(read_info(folder)["metrics"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def rank(metrics: Mapping[str, float], config: CheckpointingConfig) -> float:
    """Return the metric for the ranking: higher is better. A checkpoint without the metric, or with NaN, ranks last.
    Graded rewards have no accuracy; their mean takes its place, which equals it for rewards of 0 and 1."""
    if (name := config.metric_name) is None:
        return 0.0
    value = metrics.get(name)
    if value is None and name.endswith("accuracy"):
        value = metrics.get(f"{name.removesuffix('accuracy')}reward")
    if value is None or math.isnan(value):
        return float("-inf")
    return value if config.higher_is_better else -value


def policy_folder(folder: Path) -> str:
    """Return the absolute path of the ranks' part of a checkpoint, for processes in another working directory."""
    return str((folder / POLICY).resolve())


def recipe_text(recipe: MasterConfig) -> str:
    """Return config.yaml, which every checkpoint has."""
    return "".join(_section_text(json.dumps(section)) for section in recipe.model_dump(mode="json").items())


@lru_cache(maxsize=64)  # runs of one process, such as those of a simulation, share most sections
def _section_text(section: str) -> str:
    """Return the YAML of a section, from the JSON of its name and its value."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(dict([json.loads(section)]), Dumper=dumper, sort_keys=False)


def saved_recipe(folder: Path) -> dict[str, Any]:
    """Return the recipe of a checkpoint, as its config.yaml has it."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), Loader=loader)


def write_driver_files(folder: Path, snapshot: RunSnapshot, config_yaml: str) -> dict[str, Digest]:
    """Write the driver's part of a checkpoint: data.pt, training_info.json and config.yaml. Return their digests."""
    from grpo_mcore.base import tensor_files

    info = {"format": FORMATS["checkpoint"], "save_state": snapshot.save_state, "metrics": snapshot.metrics}
    return {
        "data.pt": tensor_files.save(snapshot.data_state, folder / "data.pt"),
        INFO: _write(folder / INFO, _json(info)),
        "config.yaml": _write(folder / "config.yaml", config_yaml.encode()),
    }


def _json(value: Any) -> bytes:
    """Return JSON for people too. A number that is none is null."""
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=float), indent=1)


def _write(path: Path, data: bytes) -> Digest:
    """Write a file, flush it to the disk, and return its digest."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digest_of(data)


def read_info(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INFO).read_text(encoding="utf-8"))


def refuse_newer_format(folder: Path) -> None:
    """Raise ResumeError for a checkpoint of a newer version. One that cannot be read is damaged, which shows later."""
    try:
        info = read_info(folder)
    except (OSError, ValueError):
        return
    written = info.get("format") if isinstance(info, dict) else None
    if (problem := newer_format("checkpoint", written)) is not None:
        raise ResumeError(f"{folder} was {problem}")


def write_digests(folder: Path, written: Mapping[str, Digest]) -> None:
    """Write the digests of all files in `folder`, after flushing these to disk: a folder with digests is complete.
    `written`: known digests, by path inside the folder. The policy's ranks have left the digests of their files beside
    them; a file without a known digest is read."""
    digests = dict(written)
    for part in (POLICY, f"{POLICY}/{CRITIC}"):
        digests |= {f"{part}/{name}": digest for name, digest in collect_digests(folder / part).items()}
    names = _names(folder)
    digests |= {name: digest_file(folder / name, sync=True) for name in names if name not in digests}
    files = {name: {"bytes": digests[name][0], "sha256": digests[name][1]} for name in names}
    _write(folder / DIGESTS, _json({"files": files}))
    for inner in {folder, *((folder / name).parent for name in names)}:
        sync_folder(inner)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk: without this, a loss of power can undo a rename. Some network file systems
    refuse it for folders, as they have nothing to flush."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(opened)


def damage(folder: Path, whole: bool = True) -> str | None:
    """Return what is wrong with a checkpoint: a file is missing, truncated, unreadable or was changed, or it is a copy
    of another step. None if it is intact. `whole` False: leave the contents of the ranks' files to the ranks."""

    def look() -> str | None:
        if folder.is_symlink():
            os.stat(folder)
        resolved = Path(os.path.realpath(folder))
        stats = [(name, os.stat(resolved / name)) for name in _names(resolved, digests=True)]
        stamps = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
        if not (folder / INFO).is_file():
            return f"{INFO} is missing"
        return _damage(resolved, stamps, whole) or _other_step(folder)

    return try_to_read(look)


def _other_step(folder: Path) -> str | None:
    """Return what is wrong with a step_N that is a copy of another step."""
    held = read_info(folder)["save_state"].get("current_step")
    copied = folder.name.startswith("step_") and held is not None and folder.name != f"step_{held}"
    return f"it holds step {held}" if copied else None


@cache
def _damage(folder: Path, stamps: tuple[tuple[str, int, int], ...], whole: bool) -> str | None:
    """Read all files and compare their digests. Cached, as long as sizes and times of the files stay the same: `stamps`
    holds (name, bytes, time) of each."""
    present = {name: size for name, size, _ in stamps}
    if DIGESTS not in present:
        return f"{DIGESTS} is missing"
    try:
        files = parse_digests((folder / DIGESTS).read_bytes())
    except ValueError as error:
        return str(error)
    read = {name: digest for name, digest in files.items() if whole or not name.startswith(f"{POLICY}/")}
    return first_missing(files, present) or first_changed(folder, read)


def size_of(folder: Path) -> int:
    """Return the bytes of all files of a checkpoint."""
    return sum(os.stat(folder / name).st_size for name in _names(folder))


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Raise OSError if less than `needed` bytes are free, before anything is written."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {free / GB:.2f} GB are free", str(folder))


def is_write_failure(error: BaseException | None) -> bool:
    """Return whether a file could not be written, here or in a worker. The texts are compared too, as torch raises a
    full disk as another error. Lost or late workers do not count."""
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
            return True
        if any(words in str(error) for words in (*map(os.strerror, FULL), *TORCH_WRITER)):
            return True
        error = error.__cause__
    return False


def _names(folder: Path, *, digests: bool = False) -> list[str]:
    """Return the paths of all files inside a checkpoint. `digests`: include DIGESTS itself."""
    root, names = os.fspath(folder), list[str]()
    for parent, _, files in os.walk(root, onerror=_raise):
        inside = parent[len(root) + 1 :]
        names += [f"{inside}/{name}" if inside else name for name in files]
    return sorted(name for name in names if digests or os.path.basename(name) != DIGESTS)


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # a folder that was deleted meanwhile holds nothing
        raise error
