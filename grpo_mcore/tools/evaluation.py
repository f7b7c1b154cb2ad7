"""`grpo-mcore eval`: evaluate models and checkpoints, one after the other, and write the report."""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from grpo_mcore.algorithms.evaluate import EvalError, SampleLog, TaskScore, evaluate_model, task_scores
from grpo_mcore.base.files import DIGESTS, digest_file, make_folder
from grpo_mcore.driver.checkpoints.lease import Lease
from grpo_mcore.observe import write_summary
from grpo_mcore.recipe import MasterConfig, scoring_settings, without_secrets
from grpo_mcore.tools.export import export, find_checkpoint, is_checkpoint

logger = logging.getLogger(__name__)

SAMPLES, SETTINGS, REPORT_JSON, REPORT = "samples.jsonl", "settings.json", "report.json", "report.md"
LATER: dict[str, Any] = {"tokenizer": None, "hf_config_overrides": {}, "vllm_kwargs": {}}
"""Settings that older folders do not record, with their defaults."""


@dataclass(frozen=True)
class EvalReport:
    """`folder` holds samples.jsonl, report.json and report.md. `scores` are ordered by model, then by task."""

    folder: Path
    scores: list[TaskScore]
    table: list[str]


def evaluate(config: MasterConfig, models: Sequence[str]) -> EvalReport:
    """Evaluate every model on data.validation and write the report into eval.save_path. `models`: folders, names on the
    hub, checkpoints, or folders of checkpoints (the newest); none: policy.model_name.

    A checkpoint is exported to a folder `models` there first. Raises EvalError if the folder holds samples of other
    settings, FolderInUse if another evaluation writes there; ExportError, and what `evaluate_model` raises.
    """
    if not config.data.validation:
        raise EvalError("data.validation is empty: there is nothing to evaluate on")
    folder = Path(config.eval.save_path)
    make_folder(folder, "eval.save_path")
    sources = models_by_name(models or [config.policy.model_name])
    with Lease(folder, key="eval.save_path"):
        _check_settings(folder, config, sources)
        return _evaluate(config, sources, folder)


def _evaluate(config: MasterConfig, sources: Mapping[str, str], folder: Path) -> EvalReport:
    """Evaluate models, each under its name, into a folder that this process holds."""
    evaluation = config.eval
    with closing(SampleLog(folder / SAMPLES, evaluation.num_tests_per_prompt)) as log:
        uids = {
            name: evaluate_model(_config_for(config, _local(source, folder)), name, log, folder / "logs")
            for name, source in sources.items()
        }
        seeds = range(evaluation.seed, evaluation.seed + evaluation.num_seeds)
        kept = [
            sample
            for name in sources
            for key in sorted(log.groups)
            if key[0] == name and key[1] in seeds and key[2] in uids[name]
            for sample in log.groups[key]
        ]
    scores = task_scores(kept, evaluation.samples_per_prompt, evaluation.k_value)
    table = report_table(scores, evaluation.metric, evaluation.k_value)
    write_summary(folder / REPORT_JSON, {"scores": [score.plain() for score in scores]})
    (folder / REPORT).write_text(report_page(config, table, sources), encoding="utf-8")
    return EvalReport(folder, scores, table)


def report_table(scores: Sequence[TaskScore], metric: str, k: int) -> list[str]:
    """Return the lines of a table in Markdown: the chosen metric last."""
    chosen = metric.replace("@k", f"@{k}")
    names = [*dict.fromkeys(name for score in scores for name in score.metrics if score.metrics[name] is not None)]
    names = [name for name in names if name not in (chosen, "pass@1", "cons@1")] + [chosen]
    head = [
        "model",
        "task",
        "prompts",
        "samples",
        "accuracy",
        "95 % interval",
        "reward",
        *names,
        "failed",
        "truncated",
        "tokens",
    ]
    rows = [head]
    for score in scores:
        mean, low, high = score.accuracy or (None, None, None)
        interval = "-" if low is None else f"{low:.3f} .. {high:.3f}"
        rows.append(
            [
                score.model,
                score.task,
                f"{score.prompts}",
                f"{score.samples}",
                _number(mean),
                interval,
                _number(score.reward),
            ]
            + [_number(score.metrics.get(name)) for name in names]
            + [f"{score.failed}", f"{score.truncated:.3f}", f"{score.tokens:.1f}"]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def models_by_name(models: Sequence[str]) -> dict[str, str]:
    """Return models by their names in the report. Raises EvalError if one is given twice."""
    for parts in range(2, 12):
        sources = {_name(model, parts): model for model in models}
        if len(sources) == len(models):
            return sources
    raise EvalError(f"two of the models have the same name: {', '.join(models)}")


def _name(model: str, parts: int) -> str:
    """Return a model's name in the report: of a checkpoint its run's folder and step, or more `parts` of its path where
    those of two runs are alike."""
    path = Path(model)
    if path.is_dir() and is_checkpoint(path):
        folder = find_checkpoint(path).folder.resolve()
        return "/".join(folder.parts[-parts:])
    return model.rstrip("/")


def _local(model: str, folder: Path) -> str:
    """Return the model itself, or of a checkpoint the folder that it is exported to."""
    path = Path(model)
    if not (path.is_dir() and is_checkpoint(path)):
        return model
    checkpoint = find_checkpoint(path).folder
    key = sha256(f"{checkpoint.resolve()} {_content(model)}".encode()).hexdigest()[:8]
    target = folder / "models" / f"{checkpoint.name}-{key}"
    if not target.is_dir():
        logger.info("exporting %s to %s", checkpoint, target)
        export(checkpoint, target)
    return str(target)


def _content(location: str) -> str | None:
    """Return what differs once a model or a data file at a path of this machine has other contents: of a checkpoint its
    digests, of a folder names, sizes and times, of a file its digest. None for what is not here."""
    path = Path(location)
    if path.is_file():
        return digest_file(path)[1]
    if not path.is_dir():
        return None
    if is_checkpoint(path):
        digests = find_checkpoint(path).folder / DIGESTS
        return digest_file(digests)[1] if digests.is_file() else None
    stats = sorted((file.name, file.stat()) for file in path.iterdir() if file.is_file())
    return sha256(repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]).encode()).hexdigest()


def _config_for(config: MasterConfig, folder: str) -> MasterConfig:
    """Return the configuration with another model, and its tokenizer unless the recipe names one of its own."""
    policy = config.policy
    is_the_models = policy.tokenizer.name == policy.model_name
    tokenizer = policy.tokenizer.model_copy(update={"name": folder} if is_the_models else {})
    return config.model_copy(
        update={"policy": policy.model_copy(update={"model_name": folder, "tokenizer": tokenizer})}
    )


def _check_settings(folder: Path, config: MasterConfig, sources: Mapping[str, str]) -> None:
    """Record what decides the samples. Raises EvalError if the folder holds samples of other settings."""
    generation, tokenizer = config.policy.generation, config.policy.tokenizer.name
    settings: dict[str, Any] = {
        "data": [entry.model_dump(mode="json") for entry in config.data.validation],
        "env": scoring_settings(config.env),
        "num_tests_per_prompt": config.eval.num_tests_per_prompt,
        "max_new_tokens": generation.max_new_tokens,
        "temperature": generation.val_temperature,
        "top_p": generation.val_top_p,
        "top_k": generation.val_top_k,
        "stop": [generation.stop_token_ids, generation.stop_strings],
        "max_model_len": generation.vllm_cfg.max_model_len,
        "precision": generation.vllm_cfg.precision,
        "turns": config.grpo.max_rollout_turns,
        "tokenizer": None if tokenizer == config.policy.model_name else tokenizer,
        "hf_config_overrides": config.policy.hf_config_overrides,
        "vllm_kwargs": generation.vllm_kwargs,
        "chat_template": [config.policy.tokenizer.chat_template, config.policy.tokenizer.chat_template_kwargs],
    }
    models = {
        name: str(Path(source).resolve()) if Path(source).is_dir() else source for name, source in sources.items()
    }
    paths = {**sources, **{entry.data_path: entry.data_path for entry in config.data.validation if entry.data_path}}
    contents = {name: content for name, path in paths.items() if (content := _content(path)) is not None}
    path, samples = folder / SETTINGS, folder / SAMPLES
    if path.is_file() and samples.is_file() and samples.stat().st_size:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        then = LATER | recorded["settings"]
        then["env"] = scoring_settings(then["env"])  # older folders record how many workers there were, too
        different = [key for key, value in json.loads(json.dumps(settings)).items() if then.get(key) != value]
        different += [name for name, source in models.items() if recorded["models"].get(name, source) != source]
        known = recorded.get("contents", {})
        different += [f"the contents of {name}" for name, now in contents.items() if known.get(name, now) != now]
        if different:
            raise EvalError(
                f"eval.save_path {folder} holds samples that differ in {', '.join(different)}; choose another folder, "
                "or delete it"
            )
        models, contents = recorded["models"] | models, known | contents
    write_summary(path, {"settings": settings, "models": models, "contents": contents})


def report_page(config: MasterConfig, table: Sequence[str], sources: Mapping[str, str]) -> str:
    """Return the text of report.md."""
    shown = without_secrets(config.model_dump(mode="json", exclude={"grpo", "sft", "loss_fn", "launch"}))
    recipe = yaml.safe_dump(shown, sort_keys=False)
    models = [f"- {name}: `{source}`" for name, source in sources.items()]
    lines = ["# Evaluation", "", *table, "", *models, "", "```yaml", recipe.rstrip(), "```", ""]
    return "\n".join(lines)
