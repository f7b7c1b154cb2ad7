"""Export a checkpoint of a run: to a Hugging Face folder with a model card, or its adapters alone."""

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_mcore.base.files import (
    CRITIC,
    DIGESTS,
    first_changed,
    first_missing,
    newer_format,
    parse_digests,
    try_to_read,
)
from grpo_mcore.data.datasets.source import is_local
from grpo_mcore.driver.checkpoints.checkpoint_files import INFO, POLICY, policy_folder, rank_of
from grpo_mcore.driver.checkpoints.checkpoints import step_of
from grpo_mcore.driver.run.checks import SetupError, model_folder
from grpo_mcore.observe import read_metrics
from grpo_mcore.parallel.weights.export import ExportError, export_adapter, export_merged
from grpo_mcore.parallel.weights.hf_folder import SHARD_BYTES, put_in_place
from grpo_mcore.recipe import (
    CheckpointingConfig,
    DatasetEntry,
    MasterConfig,
    algorithm_of,
    load_recipe,
    without_secrets,
)
from grpo_mcore.recipe.headline import headline

logger = logging.getLogger(__name__)

RECIPE, CARD = "config.yaml", "README.md"
OF_TRAINING = ("train:reward", "train:loss", "train:accuracy", "train:rewards_margin_mean")
"""Metrics of the card of a run without validations."""
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""Names that a model or data may have on a hub, which refuses cards with others, such as folders."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint of a run. `metrics`: those of its step, with those of its validation as `val:NAME`. `log`:
    the run's folder of logs; None where the checkpoint does not name it."""

    folder: Path
    step: int
    metrics: Mapping[str, Any]
    recipe: MasterConfig
    log: Path | None = None

    def before(self) -> dict[str, float]:
        """Return the metrics of the validation before the first step; none where the logs are not here."""
        file = None if self.log is None else self.log / "metrics.jsonl"
        rows = read_metrics(file, "validation") if file is not None and file.is_file() else []
        return next(({f"val:{name}": value for name, value in row.items()} for row in rows if row["step"] == 0), {})


def find_checkpoint(path: Path) -> SavedCheckpoint:
    """Return the checkpoint at `path`: a folder step_N, or the newest of a checkpoint_dir. Raises ExportError."""
    folder = path
    if not (folder / INFO).is_file():
        newest = next(reversed(kept_checkpoints(path)), None)
        if newest is None:
            problem = "holds no checkpoint (step_N with training_info.json)" if path.is_dir() else "does not exist"
            raise ExportError(f"{path} {problem}; give a folder step_N, or the folder of a run's checkpoints")
        folder = newest
    if not (folder / RECIPE).is_file():
        raise ExportError(f"{folder} has no {RECIPE}, which says what model it holds")
    try:
        info = json.loads((folder / INFO).read_text(encoding="utf-8"))
        state = {**info["save_state"], "current_step": int(info["save_state"]["current_step"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ExportError(f"{folder} is damaged: {INFO} cannot be read; choose another checkpoint") from error
    if (newer := newer_format("checkpoint", info.get("format"))) is not None:
        raise ExportError(f"{folder} was {newer}")
    recipe = load_recipe(str(folder / RECIPE)).config
    log = Path(recipe.logger.log_dir) / state["log_run"] if state.get("log_run") else None
    return SavedCheckpoint(folder, state["current_step"], info["metrics"], recipe, log)


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint or a folder of checkpoints, rather than a model."""
    return (path / INFO).is_file() or any(path.glob(f"step_*/{INFO}"))


def export(
    path: Path,
    output: Path,
    *,
    model: str | None = None,
    adapter: bool = False,
    critic: bool = False,
    replace: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the checkpoint at `path` to the folder `output`, which must not exist or be empty. Return the checkpoint.

    `model`: the model that the run started from, if it is no longer where the recipe says; only its config and
    tokenizer are used. `adapter`: write the adapters alone, in PEFT's format. `critic`: write the critic, as a sequence
    classifier. `replace`: overwrite an older export. Raises ExportError and SetupError, and leaves nothing half
    written.
    """
    if not replace and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ExportError(f"--output {output} exists and is not empty; choose another folder, or delete it")
    checkpoint = find_checkpoint(path)
    policy, part = checkpoint.recipe.policy, Path(policy_folder(checkpoint.folder))
    if critic:
        if checkpoint.recipe.value is None or not (part / CRITIC).is_dir():
            raise ExportError(f"{checkpoint.folder} has no critic: its run trained none")
        policy, part = checkpoint.recipe.value, part / CRITIC
    _refuse_damaged(checkpoint.folder)
    name = model or policy.model_name
    try:
        source = Path(model_folder(name))
    except SetupError as error:
        hint = "give the folder that the run started from with --model" if model is None else "see --model"
        raise ExportError(f"{error}; its config and tokenizer are needed: {hint}") from error
    name_of_tokenizer = policy.tokenizer.name
    tokenizer = None if name_of_tokenizer == policy.model_name else name_of_tokenizer
    partial = output.with_name(f"tmp_{output.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by an export that was killed
        partial.mkdir(parents=True)
        if adapter:
            export_adapter(part, policy, source, name, partial, tokenizer=tokenizer)
        else:
            export_merged(part, policy, source, partial, tokenizer=tokenizer, shard_bytes=shard_bytes)
        if not critic:  # a card is of a model that generates
            (partial / CARD).write_text(model_card(checkpoint, "peft" if adapter else "transformers"), encoding="utf-8")
        put_in_place(partial, output)
    except OSError as error:
        raise ExportError(f"{output} could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return checkpoint.folder


def _refuse_damaged(folder: Path) -> None:
    """Raise ExportError if the weights of a checkpoint are not those that were saved, by its digests if it has any."""
    if not (folder / DIGESTS).is_file():
        return

    def look() -> str | None:
        files = parse_digests((folder / DIGESTS).read_bytes())
        read = {name: digest for name, digest in files.items() if name.startswith(POLICY)}
        sizes = {name: (folder / name).stat().st_size for name in read if (folder / name).is_file()}
        return first_missing(read, sizes) or first_changed(folder, read)

    try:
        problem = try_to_read(look)
    except ValueError as error:  # of the file with the digests
        problem = str(error)
    if problem is not None:
        raise ExportError(f"{folder} is damaged: {problem}; choose another checkpoint")


def best_checkpoint(config: CheckpointingConfig) -> Path | None:
    """Return the kept checkpoint that ranks best, as pruning ranks them; without checkpointing.metric_name the newest.
    Checkpoints without the metric are named in a warning. If none has it, the newest is the best."""
    kept = kept_checkpoints(Path(config.checkpoint_dir))
    if lacking := [folder.name for folder in kept if rank_of(folder, config)[0] == float("-inf")]:
        logger.warning(
            "checkpointing.metric_name: %s is missing in %s, %s; validate at the end (val_at_end), or choose a "
            "val_period that divides save_period",
            *(config.metric_name, ", ".join(lacking)),
            "which cannot be the best" if len(lacking) < len(kept) else "so the newest is taken for the best",
        )
    return max(kept, key=lambda folder: rank_of(folder, config), default=None)


def kept_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a checkpoint_dir, oldest first."""
    complete = [path.parent for path in folder.glob(f"step_*/{INFO}")]
    return sorted(
        (path for path in complete if path.name.removeprefix("step_").isdigit()), key=lambda path: step_of(path.name)
    )


def export_run(config: CheckpointingConfig) -> list[Path]:
    """Export what checkpointing.save_hf asks for, as `hf_step_N` beside the checkpoints. Return the folders."""
    kept = kept_checkpoints(Path(config.checkpoint_dir))
    best = best_checkpoint(config)
    folders = {"none": [], "all": kept, "last": kept[-1:], "best": [best] if best else []}[config.save_hf]
    targets = []
    for folder in folders:
        target = folder.with_name(f"hf_{folder.name}")
        export(folder, target, replace=True)
        targets.append(target)
    return targets


def model_card(checkpoint: SavedCheckpoint, library: str) -> str:
    """Return the text of README.md: base model, data, algorithm, the validation before and after, and the recipe."""
    policy = checkpoint.recipe.policy
    on_hub = HUB_NAME.fullmatch(policy.model_name) and not Path(policy.model_name).is_dir()
    base = [f"base_model: {policy.model_name}"] if on_hub else []
    numbers = {name: value for name, value in checkpoint.metrics.items() if isinstance(value, int | float)}
    kept = [name for name in numbers if name.startswith("val:")] or [n for n in numbers if n.endswith(OF_TRAINING)]
    before = checkpoint.before()
    data = ", ".join(map(_data_name, checkpoint.recipe.data.train))
    facts = {"base model": f"`{policy.model_name}`", "training data": data}
    facts |= headline(checkpoint.recipe, algorithm_of(checkpoint.recipe))
    return "\n".join(
        [
            "---",
            *base,
            *_license_of(policy.model_name),
            *([f"datasets: [{', '.join(datasets)}]"] if (datasets := _datasets_of(checkpoint.recipe)) else []),
            f"library_name: {library}",
            "tags: [grpo-mcore, reinforcement-learning]",
            "---",
            "",
            f"# {Path(policy.model_name).name}, step {checkpoint.step}",
            "",
            f"Trained from `{policy.model_name}` with grpo-mcore for {checkpoint.step} steps; weights in "
            f"{policy.precision}.",
            "",
            "| | |",
            "|---|---|",
            *[f"| {name} | {text} |" for name, text in facts.items() if text],
            "",
            f"| metric | before | after {checkpoint.step} steps |",
            "|---|---|---|",
            *[f"| {name} | {_shown(before.get(name))} | {_shown(numbers[name])} |" for name in sorted(kept)],
            "",
            "The recipe, with every value but credentials:",
            "",
            "```yaml",
            yaml.safe_dump(without_secrets(checkpoint.recipe.model_dump(mode="json")), sort_keys=False).rstrip(),
            "```",
            "",
        ]
    )


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _data_name(entry: DatasetEntry) -> str:
    """Return a dataset as the recipe names it; of a file only its name."""
    name = entry.data_path or entry.dataset_name or ""
    return Path(name).name if is_local(name) or name.startswith("/") else name


def _license_of(model: str) -> list[str]:
    """Return the lines of the licence in the card of the model that the run started from, if that has one here."""
    card = Path(model) / CARD
    if not card.is_file():
        return []
    header = card.read_text(encoding="utf-8", errors="replace").split("---")
    return [line.rstrip() for line in header[1].split("\n") if line.startswith("license")] if len(header) > 2 else []


def _datasets_of(recipe: MasterConfig) -> list[str]:
    """Return the names of the training data that a hub could know."""
    paths = [entry.data_path or "" for entry in recipe.data.train]
    return [path for path in paths if HUB_NAME.fullmatch(path) and "/" in path and not is_local(path)]
