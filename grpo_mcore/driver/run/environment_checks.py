"""Check a recipe's environments before anything is started: their sections, and what they make of the first prompts."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_mcore.driver.rollouts.scoring import BatchLimits
from grpo_mcore.driver.run.checks import SetupError
from grpo_mcore.environments import create_env_class
from grpo_mcore.environments.errors import EnvironmentConfigError
from grpo_mcore.environments.interfaces import EnvironmentBase
from grpo_mcore.recipe import FINE_TUNING, MasterConfig, environment_class
from grpo_mcore.rollout.datum import DatumSpec, field_of
from grpo_mcore.rollout.pass_rates import TASK

logger = logging.getLogger(__name__)

VERDICT_TIMEOUT_S = 600.0
"""Seconds that an environment has to score a group, where its section does not set verdict_timeout_s; at most half of
cluster.step_timeout_s."""
CHECKED_ROWS = 32
"""Rows of each dataset whose truths are verified against themselves at the start."""

_MARK_AT_THE_END = re.compile(r"([<\[◁][\w:]+[>\]▷])\s*$")


def check_environments(config: MasterConfig, env_names: Mapping[str, str | None], rows: Sequence[DatumSpec]) -> None:
    """Check the sections of the environments that tasks use, and import the rewards that they name. `rows`: some
    prompts, whose fields must be what their environment asks for. Nothing is started.

    Raises SetupError or EnvironmentConfigError.
    """
    for task, name in env_names.items():
        cls, section, _ = environment_of(task, name, config)
        try:
            cls.check(section)
            calls_of(str(name), cls, section, config)
            of_task = [row for row in rows if row["task_name"] == task]
            for row in of_task:
                cls.check_row(section, row["extra_env_info"])
            _check_truths(cls, section, of_task)
            _warn_of_opened_thoughts(f"env.{name}", section, of_task)
        except EnvironmentConfigError as error:
            if environment_class(str(name), config.env.get(name or "", {}))[0] == name:
                raise
            # The class names its own section, such as env.rules; the recipe has it under another name.
            raise EnvironmentConfigError(f"in the recipe's section env.{name}: {error}") from error


def check_columns(config: MasterConfig, rows: Sequence[DatumSpec]) -> None:
    """Warn about columns that none of some prompts has: all prompts would count as `none` there."""
    sampler = config.data.sampler
    columns_of_key = {"logger.metrics_by": config.logger.metrics_by}
    columns_of_key["data.sampler.column"] = [sampler.column] if sampler.enabled and sampler.column else []
    for key, columns in columns_of_key.items():
        for column in columns:
            if rows and column != TASK and all(field_of(row["extra_env_info"], column) is None for row in rows):
                known = sorted({name for row in rows for name in row["extra_env_info"]})
                logger.warning(
                    "%s: none of the first %d prompts has %r; they have %s", key, len(rows), column, ", ".join(known)
                )


def _warn_of_opened_thoughts(path: str, section: Mapping[str, Any], rows: Sequence[DatumSpec]) -> None:
    """Warn about a pattern that asks for a mark, such as <think> or [THINK], with which the prompts end, as the chat
    templates of thinking models have it: the response begins behind the mark."""
    ends = [_MARK_AT_THE_END.search(str(message["content"])) for row in rows for message in row["message_log"][-1:]]
    marks = sorted({end[1] for end in ends if end is not None})
    for key, value in section.items():
        if isinstance(value, Mapping):
            _warn_of_opened_thoughts(f"{path}.{key}", value, rows)
        elif "pattern" in key and isinstance(value, str):
            for mark in (mark for mark in marks if mark in value.replace("\\", "")):
                logger.warning(
                    "%s.%s asks for %s, which the chat template writes at the end of the prompt: a response begins "
                    "behind it and may never match; leave it out of the pattern, or make it optional",
                    path, key, mark,
                )  # fmt: skip


def _check_truths(cls: type[EnvironmentBase], section: Mapping[str, Any], rows: Sequence[DatumSpec]) -> None:
    """Raise EnvironmentConfigError where no answer to any of these prompts could be right; warn about some of them."""
    problems = cls.check_truths(section, [row["extra_env_info"] for row in rows])
    unsolvable = [f"{row['uid']}: {problem}" for row, problem in zip(rows, problems, strict=True) if problem]
    if unsolvable and len(unsolvable) == len(rows):
        raise EnvironmentConfigError(
            f"no answer could be right, in each of the first {len(rows)} rows. {unsolvable[0]}"
        )
    if unsolvable:
        logger.warning(
            "no answer could be right in %d of the first %d rows; `grpo-mcore data check` names all of the file. %s",
            len(unsolvable), len(rows), "; ".join(unsolvable[:3]),
        )  # fmt: skip


def environment_of(
    task: str, name: str | None, config: MasterConfig
) -> tuple[type[EnvironmentBase], dict[str, Any], float]:
    """Return the class of a task's environment, its section and its deadline."""
    if name is None:
        others = [verb for verb in FINE_TUNING if verb in config.model_fields_set]
        instead = (
            f"; the recipe has a section {others[0]}: `grpo-mcore {others[0]} RECIPE` trains that" if others else ""
        )
        raise SetupError(
            f"dataset {task!r} has no env_name and `env` holds {sorted(config.env) or 'nothing'}; "
            f"name one under data.train / data.validation / data.default{instead}"
        )
    section = dict(config.env.get(name, {}))
    step_timeout_s = config.cluster.step_timeout_s
    timeout_s = section.pop("verdict_timeout_s", min(VERDICT_TIMEOUT_S, step_timeout_s / 2))
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or timeout_s <= 0:
        raise SetupError(f"env.{name}.verdict_timeout_s must be a number of seconds above 0, got {timeout_s!r}")
    if timeout_s >= step_timeout_s:
        raise SetupError(
            f"env.{name}.verdict_timeout_s is {timeout_s} s, which is not below cluster.step_timeout_s of "
            f"{step_timeout_s:g} s: the step would end before the environment is restarted; lower it, or raise "
            "cluster.step_timeout_s"
        )
    class_name, section = environment_class(name, section)
    cls = create_env_class(class_name)[0]
    if cls.config_class is not None:  # which would not know them
        for key in _call_keys(cls):
            section.pop(key, None)
    return cls, section, float(timeout_s)


def _call_keys(cls: type[EnvironmentBase]) -> list[str]:
    """Return the keys of a section that say how an environment is called, unless its class has such a key itself."""
    known = cls.config_class.model_fields if cls.config_class is not None else {}
    return [key for key in ("concurrency", "batch") if key not in known]


def calls_of(
    name: str, cls: type[EnvironmentBase], section: Mapping[str, Any], config: MasterConfig
) -> tuple[int, BatchLimits]:
    """Return how many calls an environment takes at a time and the limits of one call: `env.NAME.concurrency` and
    `env.NAME.batch`, or those of its class. `section`: as `environment_of` returns it. Raises SetupError for a wrong
    value."""
    most_calls, most_samples = cls.call_limits(section)
    keys = {key: config.env.get(name, {}).get(key) for key in _call_keys(cls)}
    calls, batch = keys.get("concurrency"), keys.get("batch")
    calls = most_calls if calls is None else calls
    batch = {} if batch is None else batch
    if not isinstance(calls, int) or isinstance(calls, bool) or calls < 1:
        raise SetupError(f"env.{name}.concurrency must be a number of calls above 0, got {calls!r}")
    if not isinstance(batch, dict) or (unknown := set(batch) - {"max_size", "max_wait_s"}):
        wrong = f"unknown key {min(unknown)!r}" if isinstance(batch, dict) else f"got {batch!r}"
        raise SetupError(f"env.{name}.batch holds max_size and max_wait_s: {wrong}")
    # With the local backend a call blocks the loop: samples that are asked about in small calls go into one together.
    together = most_samples < BatchLimits().max_size and config.cluster.backend == "local"
    limits = replace(BatchLimits(10**6, 3600.0) if together else BatchLimits(most_samples), **batch)
    if not isinstance(limits.max_size, int) or isinstance(limits.max_size, bool) or limits.max_size < 1:
        raise SetupError(f"env.{name}.batch.max_size must be a number of samples above 0, got {limits.max_size!r}")
    wait_s = limits.max_wait_s
    if not isinstance(wait_s, int | float) or isinstance(wait_s, bool) or not 0 <= wait_s < float("inf"):
        raise SetupError(f"env.{name}.batch.max_wait_s must be a number of seconds from 0 on, got {wait_s!r}")
    return calls, limits
