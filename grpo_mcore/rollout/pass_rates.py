"""How often the prompts of a run are solved: the pass rate of each prompt, and by columns of the rows. Pure.

The pass rate of a group is the share of its samples that are solved; for graded rewards, their mean between 0 and 1.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mcore.rollout.datum import DatumSpec, field_of
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import accuracy

TASK = "task"
"""Column that every row has: the name of its dataset."""
MOST_VALUES = 30
"""Maximum number of values of a column that metrics tell apart: the most frequent ones."""
_NEWEST = 0.05
"""Weight of the newest group in the moving average of a column's value."""


@dataclass
class PromptRecord:
    """What a run knows of one row of the data. `rate`: pass rate of its last group; `groups`, `samples` and `solved`
    (which graded rewards make fractional) are of all its groups. `solved_in_a_row`: its last groups that were solved by
    every sample. `columns`: values of the columns that are kept."""

    rate: float
    groups: int
    samples: int
    solved: float
    solved_in_a_row: int
    columns: dict[str, str]


class PassRates:
    """The pass rates of the prompts that a run has generated for.

    `columns`: those by which rates are kept too; `task` is the dataset's name. `state`: of `state_dict`.
    """

    def __init__(self, columns: Iterable[str] = (), state: Mapping[str, Any] | None = None) -> None:
        self.columns = tuple(dict.fromkeys(columns))
        state = {"prompts": {}, "by_column": []} if state is None else state
        self.prompts = {uid: PromptRecord(**record) for uid, record in state["prompts"].items()}
        """By uid of the row, which does not count passes over the data."""
        self._by_column = {(column, value): rate for column, value, rate in state["by_column"]}

    def record(self, prompt: DatumSpec) -> PromptRecord | None:
        """Return what is known of a prompt; None before its first group."""
        return self.prompts.get(row_uid(prompt["uid"]))

    def of_column(self, prompt: DatumSpec, column: str) -> float | None:
        """Return the pass rate of the prompts with the same value in a column: a moving average over their groups.
        None before the first one."""
        return self._by_column.get((column, column_value(prompt, column)))

    def add(self, group: Group) -> float | None:
        """Take in a finished group. Return its pass rate; None if no sample has a reward."""
        scores = [score for score in group.scores if score.reward is not None]
        if not scores:
            return None
        correct = accuracy(scores)
        rewards = [min(max(score.reward or 0.0, 0.0), 1.0) for score in scores]
        rate = sum(rewards) / len(rewards) if correct is None else correct
        columns = {column: column_value(group.prompt, column) for column in self.columns}
        before = self.record(group.prompt) or PromptRecord(rate, 0, 0, 0.0, 0, columns)
        self.prompts[row_uid(group.uid)] = PromptRecord(
            rate,
            before.groups + 1,
            before.samples + len(scores),
            before.solved + rate * len(scores),
            before.solved_in_a_row + 1 if rate == 1.0 else 0,
            columns,
        )
        for key in columns.items():
            old = self._by_column.get(key, rate)
            self._by_column[key] = old + _NEWEST * (rate - old)
        return rate

    def metrics(self) -> dict[str, float]:
        """Return `pass_rate/by/COLUMN/VALUE`."""
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for record in self.prompts.values() if self.columns else ():
            for key in record.columns.items():
                counts[key] += 1
        return {f"pass_rate/by/{column}/{value}": self._by_column[column, value] for column, value in _frequent(counts)}

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        by_column = [[column, value, rate] for (column, value), rate in self._by_column.items()]
        return {"prompts": {uid: dict(vars(record)) for uid, record in self.prompts.items()}, "by_column": by_column}


def row_uid(uid: str) -> str:
    """Return the uid without the number of the pass over the data."""
    return re.sub(r"@\d+$", "", uid)


def column_value(prompt: DatumSpec, column: str) -> str:
    """Return a column of a prompt's row as text; "none" where the row does not have it. Dots lead into records."""
    value = prompt["task_name"] if column == TASK else field_of(prompt["extra_env_info"], column)
    return "none" if value is None else str(value)[:60]


def rewards_by_column(groups: Sequence[Group], columns: Iterable[str]) -> dict[str, float]:
    """Return the mean reward of the samples as `reward/by/COLUMN/VALUE`, for the values of each column."""
    rewards: dict[tuple[str, str], list[float]] = defaultdict(list)
    for column in columns:
        for group in groups:
            scored = [score.reward for score in group.scores if score.reward is not None]
            if scored:
                rewards[column, column_value(group.prompt, column)] += scored
    counts = {key: len(values) for key, values in rewards.items()}
    means = {key: sum(values) / len(values) for key, values in rewards.items()}
    return {f"reward/by/{column}/{value}": means[column, value] for column, value in _frequent(counts)}


def _frequent(counts: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
    """Return the most frequent values of each column, in order."""
    kept = []
    for column in dict.fromkeys(column for column, _ in counts):
        values = [key for key in counts if key[0] == column]
        kept += sorted(sorted(values, key=lambda key: (-counts[key], key))[:MOST_VALUES])
    return kept
