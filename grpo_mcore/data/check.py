"""Can a run use this file? Every row goes the way that it goes in a run: parsed, made a conversation, rendered by the
chat template, tokenised, measured against the recipe's limits. Without a recipe only its fields are looked at."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from grpo_mcore.data.check_report import CheckReport
from grpo_mcore.data.datasets import DEFAULT_PROCESSOR, rows_of_file
from grpo_mcore.data.gym.disk_sort import DiskSort
from grpo_mcore.data.gym.lines import LineReader
from grpo_mcore.data.gym.run import Progress
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.data.jsonl import parse
from grpo_mcore.data.mapped import MappedDataset, name_of, setting
from grpo_mcore.data.processors import find_processor
from grpo_mcore.data.source import Source
from grpo_mcore.recipe.data import FILE_DATASETS, dataset_by_name
from grpo_mcore.recipe.master import runs_grpo
from grpo_mcore.rollout.datum import DatumSpec

_LOOK_EVERY = 64  # lines between two looks at the clock
_SHOWN_LINES = 5
_REWARDS = ("reward", "chosen_reward", "rejected_reward")
_ALONE = {"split_validation_size": 0.0, "repeat": 1}  # a file is checked as it is

Row = dict[str, Any]


class Unusable(Exception):
    """A row that a run cannot use: the kind of its problem, and what it is in this row."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(kind, what)
        self.kind, self.what = kind, what


def check_file(path: Path, config: Any = None, samples: int = 2) -> CheckReport:
    """`config`: a recipe's MasterConfig. `samples`: rows that the report shows as the model will see them.

    Raises DataError where no row can be looked at: no such file, no tokenizer, a dataset that is no file of its own.
    """
    report = CheckReport(str(path))
    check: _RowCheck | None = None
    prompts = DiskSort(Path(tempfile.gettempdir()), "qqq", keys=3)
    try:
        with LineReader(path) as lines:
            progress = Progress(lines.size, path.name)
            for number, line in lines:
                if line is not None and not line.strip():
                    continue
                report.rows += 1
                try:
                    row = _parsed(line, f"line {number}")
                    report.fields.update(row.keys())
                    check = check or _RowCheck(path, config, row, report)
                    _count_rewards(row, report)
                    prompt, answer, shown = check(row, number)
                except Unusable as problem:
                    report.add_problem(problem.kind, f"line {number}: {problem.what}")
                else:
                    report.usable_rows += 1
                    prompts.add(prompt, answer, number)
                    if len(report.samples) < samples:
                        report.samples.append(f"line {number}\n{shown()}")
                if not number % _LOOK_EVERY:
                    progress.show(lines.position, report.rows)
            progress.end()
        _count_repeated(prompts, report)
    finally:
        prompts.close()
    return report


class _RowCheck:
    """row, line number -> (hash of its prompt, hash of its answer, a function that shows it). Raises Unusable."""

    def __init__(self, path: Path, config: Any, first: Row, report: CheckReport) -> None:
        self._report = report
        entry, name, place = _entry(path, config, first)
        self._pairs = name == "BinaryPreferenceDataset"
        self._trains_on_answers = self._pairs or (name == "openai_format" if config is None else not runs_grpo(config))
        self._rows: list[Row] = [{}]
        self._numbers = [0]
        self._data = MappedDataset(
            entry,
            Source(self._rows, self._numbers, lambda _: f"line {self._numbers[0]}"),
            rows_of_file(entry, name),
            task_name=name_of(str(path)),
            default_processor="sft_processor" if self._trains_on_answers else DEFAULT_PROCESSOR,
        )
        self._of_a_gym = name == "NemoGymDataset"
        if self._of_a_gym:
            self._data.processor = find_processor("nemo_gym_data_processor")
        report.read_as = f"{place}: {name}"
        self._tokenizer = None
        if config is None:
            return
        report.limit, report.longest_sequence = _limits(config, self._trains_on_answers)
        from grpo_mcore.data.tokenizer import load_tokenizer

        names = config.policy.tokenizer
        self._tokenizer = load_tokenizer(names.name, names.chat_template, names.chat_template_kwargs)

    def __call__(self, row: Row, number: int) -> tuple[int, int, Callable[[], str]]:
        self._rows[0], self._numbers[0] = row, number
        try:
            chat = self._data.dataset[0]
        except DataError as error:
            raise Unusable("no conversation can be made of it", _without(f"line {number}: ", error)) from error
        if "unusable" in chat:
            raise Unusable("the dataset leaves it out", chat["unusable"])
        if self._pairs:
            prompt, answers = chat["messages"], [chat["chosen"], chat["rejected"]]
            if chat["chosen"] == chat["rejected"]:
                raise Unusable("no preference", "chosen and rejected are the same")
        elif self._of_a_gym:  # its verifier knows the answer, its environment may ask the question
            prompt, answers = chat["messages"], []
        else:
            prompt, answers = (_prompt_and_answers if self._trains_on_answers else _prompt_and_truth)(chat)
        if not self._of_a_gym and not any(_text(message["content"]).strip() for message in prompt):
            raise Unusable("no question", "the prompt is blank")
        if not all(_text(answer).strip() for answer in answers):
            raise Unusable("no answer", "blank, or not there")
        data = [self._processed(one) for one in self._conversations(chat)] if self._tokenizer is not None else []
        if data:
            self._measure(data)
        asked = chat["gym_task"] if self._of_a_gym else [prompt, chat.get("tools")]
        return _hash(asked), _hash(answers), lambda: _shown(prompt, answers, data)

    def _conversations(self, chat: Row) -> list[Row]:
        """What is tokenised: of a pair, the prompt with each of the answers."""
        if not self._pairs:
            return [chat]
        return [{**chat, "messages": [*chat["messages"], *chat[side]]} for side in ("chosen", "rejected")]

    def _processed(self, chat: Row) -> DatumSpec:
        try:
            return self._data.processor(chat, self._data.task_spec, self._tokenizer, self._report.limit, 0)
        except DataError as error:
            raise Unusable("the processor refuses it", _without(f"{chat['uid']}: ", error)) from error
        except Exception as error:  # a processor may be the user's own program
            raise Unusable("the processor fails", f"{type(error).__name__}: {error}") from error

    def _measure(self, data: list[DatumSpec]) -> None:
        length = max(datum["length"] for datum in data)
        self._report.lengths.add({length: 1})
        if any(datum["loss_multiplier"] == 0 for datum in data):
            raise Unusable("too long", f"{length:,} tokens; the limit is {self._report.limit:,}")


def _entry(path: Path, config: Any, first: Row) -> tuple[Any, str, str]:
    """(how the file is read, its kind of dataset, where that is said)."""
    entries = [
        (f"data.{part}[{index}]", entry)
        for part in ("train", "validation")
        for index, entry in enumerate(getattr(config.data, part) if config is not None else ())
    ]
    named = [(place, entry) for place, entry in entries if _is_file(path, entry.data_path)]
    pairs = not named and {"chosen", "rejected"} <= first.keys()
    if pairs or not entries:
        return {"data_path": str(path)}, _kind(first, pairs), "by the fields of its first row"
    files = [(place, entry) for place, entry in entries if dataset_by_name(entry.dataset_name) in FILE_DATASETS]
    place, entry = (named or files or entries)[0]
    name = dataset_by_name(entry.dataset_name)
    if name not in FILE_DATASETS:
        raise DataError(
            f"{path}: {place} of the recipe is {entry.dataset_name!r}, which has rows of its own. A file like this one "
            f"is {' or '.join(FILE_DATASETS)}: data.train.dataset_name=... data.train.data_path={path}"
        )
    alone = {key: value for key, value in _ALONE.items() if setting(entry, key) is not None}
    return entry.model_copy(update={**alone, "data_path": str(path)}), str(name), place


def _kind(first: Row, pairs: bool) -> str:
    if "messages" in first:
        return "openai_format"
    if "responses_create_params" in first:
        return "NemoGymDataset"
    return "BinaryPreferenceDataset" if pairs else "ResponseDataset"


def _is_file(path: Path, named: str | None) -> bool:
    return named is not None and Path(named).exists() and path.samefile(named)


def _limits(config: Any, trains_on_answers: bool) -> tuple[int, int]:
    """(tokens that a prompt, or a conversation that is trained on, may have; tokens of prompt and answer together)."""
    longest = config.policy.max_total_sequence_length
    if trains_on_answers:
        return longest, longest
    return min(config.data.max_input_seq_length, config.policy.generation.vllm_cfg.max_model_len), longest


def _parsed(line: bytes | None, place: str) -> Row:
    if line is None:
        raise Unusable("not JSON", "the line is too long to be read")
    try:
        return parse(line.rstrip(b"\r\n"), place)
    except DataError as error:
        raise Unusable("not JSON", _without(f"{place}: ", error)) from error


def _without(place: str, error: Exception) -> str:
    return str(error).removeprefix(place)


def _count_rewards(row: Row, report: CheckReport) -> None:
    for field in _REWARDS:
        reward = row.get(field)
        if isinstance(reward, int | float) and abs(reward) < float("inf"):
            report.rewards[field].add({float(reward): 1})


def _count_repeated(prompts: Iterable[tuple[Any, ...]], report: CheckReport) -> None:
    for _, group in groupby(prompts, key=itemgetter(0)):
        rows, others, first_answer = 0, False, None
        first: list[int] = []
        for _, answer, number in group:
            first_answer = answer if first_answer is None else first_answer
            rows, others = rows + 1, others or answer != first_answer
            first = sorted([*first, number])[:_SHOWN_LINES]
        if rows > 1:
            report.repeated += rows - 1
            report.with_other_answers += others
            if not report.first_repeated or first < report.first_repeated:
                report.first_repeated = first


def _prompt_and_truth(chat: Row) -> tuple[list[Row], list[Any]]:
    """As GRPO reads a row: the ground truth, or else the last message, is what answers are compared with."""
    messages, truth = chat["messages"], chat.get("ground_truth")
    if messages[-1]["role"] != "assistant":
        return messages, [truth]
    return messages[:-1], [messages[-1]["content"] if truth is None else truth]


def _prompt_and_answers(chat: Row) -> tuple[list[Row], list[Any]]:
    """As SFT reads a row: it is trained on all that the assistant says and calls."""
    messages = chat["messages"]
    said = [message for message in messages if message["role"] == "assistant"]
    before = messages[: messages.index(said[0])] if said else messages
    return before, [[message["content"] or _calls(message) for message in said]]


def _calls(message: Row) -> str:
    return json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""


def _text(value: Any) -> str:
    """Of an answer, of messages, of a ground truth."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    if isinstance(value, list) and all(isinstance(one, dict) and "content" in one for one in value):
        return "\n".join(str(one["content"]) for one in value)
    return "" if value is None else str(value)


def _hash(value: Any) -> int:
    return hash(json.dumps(value, sort_keys=True, default=str))


def _shown(prompt: list[Row], answers: list[Any], data: list[DatumSpec]) -> str:
    """A row as the model will see it; without a tokenizer, its messages."""
    if not data:
        turns = [(message["role"], _text(message["content"])) for message in prompt]
    else:
        turns = []
        for datum in data:
            for message in datum["message_log"]:
                trained = "token_loss_mask" in message and bool(message["token_loss_mask"].any())
                what = "trained on" if trained else "prompt"
                turns.append((f"{what}, {len(message['token_ids'])} tokens", message["content"]))
    if not data or not any(what.startswith("trained") for what, _ in turns):
        turns += [("answer", _text(answer)) for answer in answers]
    return "\n".join(f"--- {what}\n{text}" for what, text in turns)
