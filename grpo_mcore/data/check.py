"""The check of a data file: can a run use it? Every row is parsed, made a conversation, rendered by the chat template,
tokenised and measured against the recipe's limits, as in a run. Without a recipe only its fields are checked."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mcore.data.datasets import DEFAULT_PROCESSOR, needs_answer, rows_of_file, table_options, unseen
from grpo_mcore.data.datasets.files import settings_for
from grpo_mcore.data.datasets.jsonl import JsonLines
from grpo_mcore.data.datasets.mapped import Entry, MappedDataset, name_of, setting
from grpo_mcore.data.datasets.source import Source, open_source
from grpo_mcore.data.gym.summary import Histogram
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.data.processors import find_processor, longest_prompt
from grpo_mcore.recipe import (
    FILE_DATASETS,
    DatasetEntry,
    MasterConfig,
    algorithm_of,
    dataset_by_name,
    runs_grpo,
    uses_images,
)
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.images import images_of
from grpo_mcore.rollout.messages import content_text

_REPEATED_LINES = 5  # line numbers that are named for a repeated prompt
_NAMED = 5  # details shown for each kind of problem, and rows named for each
_FIELDS = 20
_LONGEST_SAMPLE = 3000  # characters
_REWARDS = ("reward", "chosen_reward", "rejected_reward")
_WHOLE_FILE = {"split_validation_size": 0.0, "repeat": 1}

Row = dict[str, Any]


@dataclass
class CheckReport:
    """Counts over a file."""

    file: str
    read_as: str = ""
    unit: str = "line"
    """The unit of the numbers: line, row of a table, or object of a JSON list."""
    rows: int = 0
    """Rows of a table, or lines that are not blank."""
    usable_rows: int = 0
    unseen: str | None = None
    """Note about a text of the first row that the model is not shown, if there is one."""
    fields: Counter[str] = field(default_factory=Counter)
    problems: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Kind of problem -> details -> the first rows with them. `counts` has the number of all."""
    counts: Counter[str] = field(default_factory=Counter)
    lengths: Histogram = field(default_factory=Histogram)
    """Tokens of the prompts, or of whole conversations where answers are trained on."""
    limit: int | None = None
    longest_sequence: int | None = None
    repeated: int = 0
    """Rows whose prompt occurs in an earlier row."""
    with_other_answers: int = 0
    """Prompts that occur with different answers."""
    first_repeated: list[int] = field(default_factory=list)
    """Row numbers of the first duplicate prompt."""
    rewards: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    samples: list[str] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """True if a run can use every row."""
        return self.rows > 0 and self.usable_rows == self.rows

    def add_problem(self, kind: str, number: int, details: str) -> None:
        self.counts[kind] += 1
        by_details = self.problems.setdefault(kind, {})
        if details in by_details or len(by_details) < _NAMED:
            rows = by_details.setdefault(details, [])
            rows += [number] if len(rows) < _NAMED else []

    def __str__(self) -> str:
        lines = [f"{self.file}: {self.rows:,} rows, {self.usable_rows:,} usable"]
        if self.read_as:
            lines.append(f"read as {self.read_as}")
        shown = [f"{name} {count:,}" for name, count in self.fields.most_common(_FIELDS)]
        if shown:
            lines.append("fields: " + ", ".join(shown) + (", ..." if len(self.fields) > _FIELDS else ""))
        if self.unseen:
            lines.append(f"note: {self.unseen}")
        lines += self._length_lines()
        if self.repeated:
            lines.append(
                f"repeated: {self.repeated:,} rows have the prompt of an earlier row, the first of them in "
                f"{self.unit}s {', '.join(map(str, self.first_repeated))}; {self.with_other_answers:,} prompts have "
                "several answers"
            )
        for name, rewards in self.rewards.items():
            lines.append(f"{name}: {rewards.low:.4g} to {rewards.high:.4g}, mean {rewards.mean:.4g}")
            lines += ["    " + line for line in rewards.lines()]
        for kind, count in self.counts.most_common():
            lines.append(f"cannot be used, {count:,} rows: {kind}")
            by_details = self.problems[kind]
            for details, numbers in by_details.items():
                places = f"{self.unit}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
                lines.append(f"    {places}{', ...' if len(numbers) == _NAMED < count else ''}: {details}")
            if len(by_details) == _NAMED < count:
                lines.append("    ...")
        if not self.rows:
            lines.append("cannot be used: it has no rows")
        for number, sample in enumerate(self.samples, start=1):
            cut = sample if len(sample) <= _LONGEST_SAMPLE else sample[:_LONGEST_SAMPLE] + " ..."
            lines.append(f"\nsample {number}, {cut}")
        return "\n".join(lines)

    def _length_lines(self) -> list[str]:
        lengths = self.lengths
        if not lengths.total or self.limit is None or self.longest_sequence is None:
            return []
        steps = ", ".join(f"{name} {lengths.quantile(share):,.0f}" for name, share in (("median", 0.5), ("p95", 0.95)))
        lines = [f"tokens: {lengths.low:,.0f} to {lengths.high:,.0f}, {steps}; the limit is {self.limit:,}"]
        room = self.longest_sequence - int(min(lengths.high, self.limit))
        if self.longest_sequence > self.limit or room > 0:
            lines.append(f"the longest of them leaves {room:,} of {self.longest_sequence:,} tokens")
        return lines + ["    " + line for line in lengths.lines()]


class Unusable(Exception):
    """A row that a run cannot use. Its arguments are the kind of problem, and the details in this row."""


TruthCheck = Callable[[str | None, list[Row]], list[str | None]]
"""(environment of the dataset, its prompts' `extra_env_info`) -> for each why no answer could be right, or None."""


def check_file(
    path: Path, config: MasterConfig | None = None, samples: int = 2, truths: TruthCheck | None = None
) -> CheckReport:
    """Check every row of a file. The report shows the first `samples` usable rows as the model will see them. `truths`
    looks at the rows that GRPO would use.

    Raises DataError where no row can be checked: no such file, no tokenizer, a recipe whose dataset is not a file.
    """
    report = CheckReport(str(path))
    check: _RowCheck | None = None
    seen: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    """(line, hash of the answer) of every usable row, by the hash of its prompt."""
    infos: list[tuple[int, Row]] = []
    """(line, what the environment gets) of every usable row that it would score."""
    source = _open(path, config)
    report.unit = {JsonLines: "line", list: "object"}.get(type(source.rows), "row")
    for index, number in enumerate(source.numbers):
        report.rows += 1
        try:
            try:
                row = source.rows[index]
            except DataError as error:
                raise Unusable("not JSON", str(error).removeprefix(f"{source.name_of(index)}: ")) from error
            report.fields.update(row.keys())
            check = check or _RowCheck(path, config, row, report)
            _count_rewards(row, report)
            prompt, answer, shown = check(row, number)
        except Unusable as problem:
            kind, details = problem.args
            report.add_problem(kind, number, details)
        else:
            report.usable_rows += 1
            seen[prompt].append((number, answer))
            if check.info is not None:
                infos.append((number, check.info))
            if len(report.samples) < samples:
                report.samples.append(f"{report.unit} {number}\n{shown()}")
    if truths is not None and check is not None and infos:
        problems = truths(check.env_name, [info for _, info in infos])
        for (number, _), reason in zip(infos, problems, strict=True):
            if reason is not None:
                report.usable_rows -= 1
                report.add_problem("no answer could be right", number, reason)
    repeated = [rows for rows in seen.values() if len(rows) > 1]  # in the order of their first lines
    report.repeated = sum(len(rows) - 1 for rows in repeated)
    report.with_other_answers = sum(len({answer for _, answer in rows}) > 1 for rows in repeated)
    report.first_repeated = [line for line, _ in repeated[0][:_REPEATED_LINES]] if repeated else []
    return report


def recipe_files(config: MasterConfig) -> list[Path]:
    """Return the files of a recipe's datasets. Raises DataError if it reads none."""
    entries = [*config.data.train, *config.data.validation]
    names = [entry.data_path for entry in entries if dataset_by_name(entry.dataset_name) in FILE_DATASETS]
    files = [Path(name) for name in dict.fromkeys(names) if name]
    if not files:
        raise DataError("data: no dataset of the recipe is read from a file of its own (data_path)")
    return files


class _RowCheck:
    """Checks one row after the other and records lengths in the report."""

    def __init__(self, path: Path, config: MasterConfig | None, first: Row, report: CheckReport) -> None:
        self._report = report
        self.info: Row | None = None
        """Metadata that the last row gives its environment; None if no environment scores it."""
        entry, name, source = _entry(path, config, first)
        self.env_name: str | None = setting(entry, "env_name")
        self._pairs = name == "BinaryPreferenceDataset"
        answered = name == "openai_format" and "ground_truth" not in first
        self._trains_on_answers = self._pairs or (answered if config is None else not runs_grpo(config))
        self._is_rm = config is not None and algorithm_of(config) == "rm"
        default = "sft_processor" if self._trains_on_answers else DEFAULT_PROCESSOR
        default = "reward_model_processor" if self._is_rm else default
        self._needs_answer = self._trains_on_answers or needs_answer(entry)
        self._rows: list[Row] = [{}]
        self._numbers = [0]
        self._data = MappedDataset(
            entry,
            Source(self._rows, self._numbers, lambda _: f"{report.unit} {self._numbers[0]}"),
            rows_of_file(entry, name),
            task_name=name_of(str(path)),
            default_processor=default,
        )
        self._is_gym_task = name == "NemoGymDataset"
        if self._is_gym_task:
            self._data.processor = find_processor("nemo_gym_data_processor")
        guessed = (
            [f"{key}: {value}" for key, value in entry.items() if key.endswith("_key")]
            if isinstance(entry, dict)
            else []
        )
        report.read_as = f"{source}: {', '.join([name, *guessed])}"
        report.unseen = unseen(entry, name, first)
        self._tokenizer = None
        if config is None:
            return
        report.longest_sequence = config.policy.max_total_sequence_length
        report.limit = report.longest_sequence if self._trains_on_answers else longest_prompt(config)
        if uses_images(config):
            if not Path(config.policy.model_name).is_dir():
                return  # lengths need the image processor of the model's folder
            limit = None if self._trains_on_answers else config.policy.generation.vllm_cfg.limit_mm_per_prompt.image
            self._data.task_spec.images = images_of(config.policy.model_name, limit)
        from grpo_mcore.data.tokenizer import load_tokenizer

        names = config.policy.tokenizer
        self._tokenizer = load_tokenizer(
            names.name or config.policy.model_name, names.chat_template, names.chat_template_kwargs
        )

    def __call__(self, row: Row, number: int) -> tuple[int, int, Callable[[], str]]:
        """Return (hash of the prompt, hash of the answer, a function that returns the row as text). Raises Unusable."""
        self._rows[0], self._numbers[0], self.info = row, number, None
        try:
            chat = self._data.dataset[0]
        except DataError as error:
            raise Unusable(
                "no conversation can be made of it", str(error).removeprefix(f"{self._report.unit} {number}: ")
            ) from error
        if "unusable" in chat:
            raise Unusable("the dataset leaves it out", chat["unusable"])
        if self._pairs:
            prompt, answers = chat["messages"], [chat["chosen"], chat["rejected"]]
            if chat["chosen"] == chat["rejected"]:
                raise Unusable("no preference", "chosen and rejected are the same")
        elif self._is_gym_task:  # its verifier knows the answer, its environment may ask the question
            prompt, answers = chat["messages"], []
        else:
            prompt, answers = (_prompt_and_answers if self._trains_on_answers else _prompt_and_truth)(chat)
        if not self._is_gym_task and not _text(prompt).strip():
            raise Unusable("no question", "the prompt is blank")
        if not self._needs_answer and answers == [None]:
            answers = []
        if not all(_text(answer).strip() for answer in answers):
            raise Unusable("no answer", "blank, or not there")
        data = []
        if self._tokenizer is not None:
            two = self._pairs and not self._is_rm  # the processor of a reward model takes a pair as a whole
            sides = [[*prompt, *answer] for answer in answers] if two else [chat["messages"]]
            data = [self._process({**chat, "messages": messages}) for messages in sides]
            data += [{**datum, "message_log": datum["rejected_log"]} for datum in data if "rejected_log" in datum]
            length = max(sum(len(message["token_ids"]) for message in datum["message_log"]) for datum in data)
            self._report.lengths.add(length)
            if any(datum["loss_multiplier"] == 0 for datum in data):
                raise Unusable("too long", f"{length:,} tokens; the limit is {self._report.limit:,}")
        if not self._pairs and not self._trains_on_answers and not self._is_gym_task:
            fields = {name: value for name, value in chat.items() if name != "messages"}
            self.info = (
                data[0]["extra_env_info"] if data else {**fields, "ground_truth": answers[0] if answers else None}
            )
        question = chat["agent_task"] if self._is_gym_task else [prompt, chat.get("tools")]
        return _hash(question), _hash(answers), lambda: _shown(prompt, answers, data)

    def _process(self, chat: Row) -> DatumSpec:
        try:
            return self._data.processor(chat, self._data.task_spec, self._tokenizer, self._report.limit, 0)
        except DataError as error:
            raise Unusable("the processor rejects it", str(error).removeprefix(f"{chat['uid']}: ")) from error
        except Exception as error:  # a processor may be the user's own program
            raise Unusable("the processor fails", f"{type(error).__name__}: {error}") from error


def _open(path: Path, config: MasterConfig | None) -> Source:
    """Open a file as a run reads it."""
    own_entries = [entry for _, entry in _entries(config) if _is_file(path, entry.data_path)]
    return open_source(str(path), parsed=False, **(table_options(own_entries[0]) if own_entries else {}))


def _entries(config: MasterConfig | None) -> list[tuple[str, DatasetEntry]]:
    """Return (key, entry) of all datasets of a recipe."""
    parts = () if config is None else (("train", config.data.train), ("validation", config.data.validation))
    return [(f"data.{part}[{index}]", entry) for part, entries in parts for index, entry in enumerate(entries)]


def _entry(path: Path, config: MasterConfig | None, first: Row) -> tuple[Entry, str, str]:
    """Return (the entry with which the file is read, its kind of dataset, the key that says so)."""
    entries = _entries(config)
    own_entries = [(key, entry) for key, entry in entries if _is_file(path, entry.data_path)]
    pairs = not own_entries and {"chosen", "rejected"} <= first.keys()
    if pairs or not entries:
        keys = {"dataset_name": "ResponseDataset", "data_path": str(path)} | settings_for(first)
        return keys, keys["dataset_name"], "by the fields of its first row"
    files = [(key, entry) for key, entry in entries if dataset_by_name(entry.dataset_name) in FILE_DATASETS]
    key, entry = (own_entries or files or entries)[0]
    name = dataset_by_name(entry.dataset_name)
    if name not in FILE_DATASETS:
        raise DataError(
            f"{path}: {key} of the recipe is {entry.dataset_name!r}, which is not read from a file. This file "
            f"could be {' or '.join(FILE_DATASETS)}: data.train.dataset_name=... data.train.data_path={path}"
        )
    whole = {key: value for key, value in _WHOLE_FILE.items() if setting(entry, key) is not None}
    return entry.model_copy(update={**whole, "data_path": str(path)}), str(name), key


def _is_file(path: Path, data_path: str | None) -> bool:
    return data_path is not None and (str(path) == data_path or Path(data_path).exists() and path.samefile(data_path))


def _count_rewards(row: Row, report: CheckReport) -> None:
    for key in _REWARDS:
        reward = row.get(key)
        if isinstance(reward, int | float) and abs(reward) < float("inf"):
            report.rewards[key].add(reward)


def _prompt_and_truth(chat: Row) -> tuple[list[Row], list[Any]]:
    """Split a row as GRPO reads it: answers are compared with the ground truth, or else with the last message."""
    messages, truth = chat["messages"], chat.get("ground_truth")
    if messages[-1]["role"] != "assistant":
        return messages, [truth]
    return messages[:-1], [messages[-1]["content"] if truth is None else truth]


def _prompt_and_answers(chat: Row) -> tuple[list[Row], list[Any]]:
    """Split a row as SFT reads it: everything that the assistant says or calls is trained on."""
    messages = chat["messages"]
    answers = [message for message in messages if message["role"] == "assistant"]
    return (messages[: messages.index(answers[0])] if answers else messages), [answers]


def _text(value: Any) -> str:
    """Return the text of messages, of a list of texts, or of a ground truth."""
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    if isinstance(value, dict) and "content" in value:
        calls = json.dumps(value["tool_calls"]) if value.get("tool_calls") else ""
        return content_text(value["content"]) or calls
    return "" if value is None else str(value)


def _hash(value: Any) -> int:
    return hash(json.dumps(value, sort_keys=True, default=str))


def _shown(prompt: list[Row], answers: list[Any], data: list[DatumSpec]) -> str:
    """Return a row as the model will see it, or its messages where there is no tokenizer."""
    if not data:
        turns = [(message["role"], _text(message)) for message in prompt]
    else:
        turns = []
        for datum in data:
            for message in datum["message_log"]:
                trained = "token_loss_mask" in message and bool(message["token_loss_mask"].any())
                heading = "trained on" if trained else "prompt"
                turns.append((f"{heading}, {len(message['token_ids'])} tokens", message["content"]))
    if not data or not any(heading.startswith("trained") for heading, _ in turns):
        turns += [("answer", _text(answer)) for answer in answers]
    return "\n".join(f"--- {heading}\n{text}" for heading, text in turns)
