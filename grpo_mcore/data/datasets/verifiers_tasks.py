"""The tasks of the package `verifiers` as a dataset: whatever a taskset gives, a task a row."""

import importlib.util
from typing import Any

from pydantic import ValidationError

from grpo_mcore.data.datasets.mapped import Entry, MappedDataset, Row, setting
from grpo_mcore.data.datasets.source import Source
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.data.processors import find_processor
from grpo_mcore.rollout.images import inline_image
from grpo_mcore.rollout.messages import read_messages, with_instructions


class VerifiersDataset(MappedDataset):
    """The tasks that `dataset_kwargs` names: `environment`, the id of a taskset, and its options `taskset`, which the
    recipe fills in from the section of its environment; `select`: which of the tasks, as verifiers has it (`limit`,
    `skip`, `shuffle`, `seed`, `include`, `exclude`)."""

    def __init__(self, entry: Entry, default_processor: str) -> None:
        options = dict(setting(entry, "dataset_kwargs", {}))
        name = str(options.get("environment") or "")
        tasks = _tasks(name, options)
        rows, numbers = [task.data.model_dump(mode="json") for task in tasks], [task.data.idx for task in tasks]
        source = Source(rows, numbers, lambda index: f"{name}, task {numbers[index]}")
        super().__init__(entry, source, verifiers_task, task_name=name, default_processor=default_processor)
        self.processor = find_processor("nemo_gym_data_processor")  # data.default is for other datasets


def verifiers_task(row: Row) -> Row:
    """Convert a task of verifiers, which its harness gets unchanged. The messages only measure the prompt; a task may
    leave it to its environment."""
    prompt = row.get("prompt") or []
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = with_instructions(prompt, row.get("system_prompt"))
    return {"messages": read_messages(messages, "prompt", inline_image) if messages else [], "agent_task": row}


def _tasks(name: str, options: dict[str, Any]) -> list[Any]:
    """Return the tasks of a taskset. Raises DataError if there are none, no such taskset, or no end of them."""
    if importlib.util.find_spec("verifiers") is None:
        raise DataError(
            "dataset_name Verifiers: the package verifiers is not installed: pip install 'grpo-mcore[verifiers]'"
        )
    if not name:
        raise DataError("dataset_name Verifiers: name the taskset in env.NAME.verifiers.environment")
    from verifiers.v1 import SelectConfig
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    if unknown := set(options) - {"environment", "taskset", "select"}:
        raise DataError(f"dataset_kwargs.{min(unknown)}: unknown; known are environment, taskset, select")
    try:
        config = taskset_config_type(name).model_validate({**(options.get("taskset") or {}), "id": name})
        taskset = load_taskset(config).select(SelectConfig(**(options.get("select") or {})))
        if not taskset.bounded:
            raise DataError(f"the taskset {name} has no end: set dataset_kwargs.select.limit")
        tasks = list(taskset)
    except DataError:
        raise
    except Exception as error:  # a taskset is others' code
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, ValidationError):
            [first, *_] = error.errors(include_url=False)
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DataError(f"the taskset {name} of env.NAME.verifiers: {reason}") from error
    if not tasks:
        raise DataError(f"the taskset {name} has no tasks")
    return tasks
