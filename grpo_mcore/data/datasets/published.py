"""Published datasets by name: their place on the Hugging Face hub, and their rows as conversations.

Each mapping is a pure function of one row in the published schema. Answers that can be verified are `ground_truth`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_mcore.data.datasets.benchmarks import gpqa, human_eval, ifeval, math500, mbpp, mmlu, mmlu_pro
from grpo_mcore.data.datasets.files import placed, preference_pair
from grpo_mcore.data.datasets.mapped import Entry, MappedDataset, Row, ToChat, as_chat, setting, unusable
from grpo_mcore.data.datasets.messages import as_messages, assistant, user
from grpo_mcore.data.datasets.source import Source, Table, is_address, joined, missing, open_source, required
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.data.processors import DEFAULT_PROCESSOR
from grpo_mcore.families.images import image_size
from grpo_mcore.recipe import IMAGE_DATASETS, IMAGE_PROCESSOR, UNSET_KEYS
from grpo_mcore.rollout.datum import field_of
from grpo_mcore.rollout.images import given_image
from grpo_mcore.rollout.messages import read_messages


@dataclass(frozen=True)
class Columns:
    """The mapping of a flat table. A recipe's `input_key` and `output_key` choose other columns for question and
    answer, but not for the truth."""

    question: str = "problem"
    answer: str = "answer"
    truth: str = "answer"
    none: frozenset[str] = frozenset({""})
    """Texts that mean that there is no answer."""
    kept: tuple[str, ...] = ()
    """Further columns, for the environment."""
    checks: tuple[str, ...] = ()
    """Columns that say "Yes" where the dataset's own check of the row passed."""

    def __call__(self, row: Row) -> Row:
        for column in self.checks:
            if row.get(column, "Yes") != "Yes":
                return unusable(f"marked by the dataset ({column} is {row[column]!r})")
        if self.answer == self.truth and row.get("question_type") == "proof":
            return unusable("a proof, which has no answer to check")
        question = required(row, self.question)
        answer, truth = self._text(self._value(row, self.answer)), self._text(self._value(row, self.truth))
        if answer is None:
            return unusable(f"without an answer ({self.answer} is {field_of(row, self.answer)!r})")
        return {
            "messages": [*as_messages(question, self.question), assistant(answer)],
            **({} if truth is None else {"ground_truth": truth}),
            **{column: row[column] for column in self.kept},
        }

    @staticmethod
    def _value(row: Row, column: str) -> Any:
        """Return a value, which may be null but not missing."""
        return row[column] if column in row or "." not in column else required(row, column)

    def _text(self, value: Any) -> str | None:
        text = "" if value is None else str(value).strip()
        return None if text in self.none else text


def dapo(row: Row) -> Row:
    """BytedTsinghua-SIA: {"prompt": [message], "reward_model": {"ground_truth", "style"}, "data_source", "ability"}."""
    truth = str(row["reward_model"]["ground_truth"])
    messages = [*read_messages(row["prompt"], "prompt"), assistant(truth)]
    return {"messages": messages, "ground_truth": truth, "data_source": row["data_source"]}


def gsm8k(row: Row) -> Row:
    """{"question", "answer"}: a worked solution whose last line is "#### " and the number, with commas."""
    messages = [user(row["question"]), assistant(row["answer"])]
    _, mark, number = row["answer"].rpartition("####")
    if not mark or not number.strip():
        return unusable("without a number after '####'")
    return {"messages": messages, "ground_truth": number.strip().replace(",", "")}


def squad(row: Row) -> Row:
    """{"context", "question", "answers": {"text": [...], "answer_start": [...]}}; the context is the system prompt."""
    texts = list(row["answers"]["text"])
    if not texts:
        return unusable("without an answer")
    messages = [{"role": "system", "content": row["context"]}, user(row["question"]), assistant(texts[0])]
    return {"messages": messages, "answers": texts}


def tulu3(row: Row) -> Row:
    """{"id", "messages", "source"}."""
    messages = read_messages(row["messages"], "messages")
    if messages[-1]["role"] != "assistant":
        return unusable("without an answer (the last message is not the assistant's)")
    return {"messages": messages, "source": row["source"]}


def open_assistant(row: Row) -> Row:
    """{"thread": messages {"role": prompter or assistant, "text", ...}}: made by `threads`."""
    roles = {"prompter": "user", "assistant": "assistant"}
    messages = [{"role": roles[message["role"]], "content": message["text"]} for message in row["thread"]]
    return {"messages": messages, "lang": row["thread"][0]["lang"]}


def helpsteer3(row: Row) -> Row:
    """Return the conversation with the preferred answer, or with the first one where neither is preferred."""
    context, better, _ = _two_answers(row)
    messages = [*context, assistant(better)]
    return {"messages": messages, "domain": row["domain"], "overall_preference": row["overall_preference"]}


def helpsteer3_pair(row: Row) -> Row:
    """Return the conversation, and both answers as messages."""
    context, better, worse = _two_answers(row)
    if row["overall_preference"] == 0:
        return unusable("a pair of which neither answer is preferred")
    return {"messages": context, "chosen": [assistant(better)], "rejected": [assistant(worse)]}


def _two_answers(row: Row) -> tuple[list[Row], str, str]:
    """Read nvidia/HelpSteer3: {"context", "response1", "response2", "overall_preference": -3 .. 3}. Below 0 the first
    response is the better one."""
    preference = row["overall_preference"]
    if not isinstance(preference, int):
        raise DataError(f"overall_preference must be a whole number, got {preference!r}")
    answers = [row["response1"], row["response2"]]
    better, worse = answers if preference <= 0 else reversed(answers)
    return as_messages(row["context"], "context"), better, worse


# Questions about images.


def clevr(row: Row) -> Row:
    """{"image", "problem", "solution": "<answer> 5 </answer>"}."""
    solution = str(row["solution"])
    answer = re.search(r"<answer>(.*)</answer>", solution, re.DOTALL)
    if answer is None:
        return unusable(f"without an answer in its tags (solution is {solution!r:.60})")
    return _about_images(row["problem"], [row["image"]], answer[1].strip(), "image")


def geometry3k(row: Row) -> Row:
    """{"images", "problem": text with <image>, "answer"}."""
    return _about_images(row["problem"], row["images"], str(row["answer"]), "images")


def refcoco(row: Row, *, folder: Path) -> Row:
    """jxu124/refcoco: {"image_path": "coco/train2014/...", "captions", "bbox": corners in pixels}. The longest caption
    describes the region; the answer has the corners in thousandths of width and height."""
    image = given_image(str(folder / str(row["image_path"]).removeprefix("coco/")))
    width, height = image_size(image)
    corners = [round(side / whole * 1000) for side, whole in zip(row["bbox"], (width, height) * 2, strict=True)]
    question = (
        "Please provide the bounding box coordinate of the region described by the following phrase: "
        f"{max(row['captions'], key=len)}"
    )
    return _about_images(question, [image], str(corners), "image_path")


def mmpr_tiny(row: Row, *, folder: Path) -> Row:
    """OpenGVLab/MMPR-Tiny: {"images": [{"path"}], "extra_info": {"question"}, "reward_model": {"ground_truth"}}."""
    images = [image if image.get("bytes") else str(folder / image["path"]) for image in row["images"]]
    question, truth = (str(required(row, key)) for key in ("extra_info.question", "reward_model.ground_truth"))
    return _about_images(question, images, truth, "images")


def _about_images(question: str, images: Sequence[Any], answer: str, column: str) -> Row:
    return {"messages": placed([user(question), assistant(answer)], images, column), "ground_truth": answer}


# OpenAssistant is published as trees of messages, one message a row.

_TREE_COLUMNS = ("message_id", "parent_id", "role", "deleted")


def threads(source: Source) -> Source:
    """Return a row {"thread": messages} for every path from a first message to a last answer. Raises DataError."""
    ids, parents, roles, deleted = _columns(source)
    paths = conversation_paths(ids, parents, roles, deleted)
    if not paths:
        raise DataError(f"{source.name_of(0)} and later: no conversation with an answer in it")
    last = [path[-1] for path in paths]
    return Source(Threads(source.rows, paths), last, lambda index: source.name_of(last[index]))


class Threads(Sequence[dict[str, Any]]):
    """The conversations of all paths, each a row {"thread": messages}."""

    def __init__(self, rows: Sequence[dict[str, Any]], paths: Sequence[tuple[int, ...]]) -> None:
        self._rows, self._paths = rows, paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return {"thread": [self._rows[position] for position in self._paths[index]]}


def conversation_paths(
    ids: Sequence[str], parents: Sequence[str | None], roles: Sequence[str], deleted: Sequence[bool | None]
) -> list[tuple[int, ...]]:
    """Return the row numbers from each root down to each leaf, without unanswered last questions, each path once.

    A path ends above a deleted message. Roots, and the replies to a message, are in the order of their rows.
    """
    replies: dict[str | None, list[int]] = defaultdict(list)
    for row, parent in enumerate(parents):
        if not deleted[row]:
            replies[parent].append(row)
    paths: dict[tuple[int, ...], None] = {}
    unfinished: list[tuple[int, ...]] = [(row,) for row in reversed(replies[None])]
    while unfinished:
        path = unfinished.pop()
        further = replies.get(ids[path[-1]], [])
        unfinished += [(*path, row) for row in reversed(further)]
        answered = path if roles[path[-1]] == "assistant" else path[:-1]
        if not further and answered:
            paths.setdefault(answered)
    # A path that ends above an unanswered question may be the beginning of a longer one.
    prefixes = {path[:end] for path in paths for end in range(1, len(path))}
    return [path for path in paths if path not in prefixes]


def _columns(source: Source) -> list[list[Any]]:
    """Return the columns that make the tree. The other columns of a table are not read."""
    first = source.rows[0]
    for name in _TREE_COLUMNS:
        if name not in first:
            raise DataError(f"{source.name_of(0)}: {missing(first, name)}")
    if isinstance(source.rows, Table):
        table = source.rows.table.select_columns(list(_TREE_COLUMNS))
        return [list(table[name]) for name in _TREE_COLUMNS]
    return [[row.get(name) for row in source.rows] for name in _TREE_COLUMNS]


@dataclass(frozen=True)
class Published:
    """A dataset on the hub. All `subsets` are read, one after the other. `view` converts the table's rows. A `path`
    that is the address of a file has a place for the subset, {}, and no splits. `by_split`: datasets of their own that
    stand for splits. `has_files`: the images are files in download_dir, which `to_chat` gets as `folder`."""

    path: str
    to_chat: Any
    subsets: tuple[str | None, ...] = (None,)
    split: str = "train"
    view: Callable[[Source], Source] | None = None
    by_split: Mapping[str, str] = field(default_factory=dict)
    has_files: bool = False


class PublishedDataset(MappedDataset):
    """A dataset by name. The entry's `data_path` is a copy to read instead; `subset` and `split` choose other parts."""

    def __init__(self, entry: Entry, default_processor: str, *, name: str, published: Published) -> None:
        to_chat: ToChat = published.to_chat
        if isinstance(to_chat, Columns):
            keys = {"question": setting(entry, "input_key"), "answer": setting(entry, "output_key")}
            to_chat = replace(
                to_chat, **{key: value for key, value in keys.items() if value not in (None, *UNSET_KEYS)}
            )
        copy, subset, split = (setting(entry, key) for key in ("data_path", "subset", "split"))
        if split in published.by_split:
            published, split = replace(published, path=published.by_split[split]), None
        download_dir = setting(entry, "download_dir")
        if published.has_files:
            if not download_dir:
                raise DataError(f"dataset_name {name}: download_dir is missing, the folder with its images' files")
            to_chat, download_dir = partial(published.to_chat, folder=Path(download_dir)), None
        is_file = is_address(published.path) and not copy
        parts = [
            open_source(
                copy or (published.path.format(f"_{part}" if part else "") if is_file else published.path),
                subset=None if is_file else part,
                split=split or published.split,
                download_dir=download_dir,
            )
            for part in ((subset,) if subset or copy else published.subsets)
        ]
        source = joined(parts)
        source = source if published.view is None else published.view(source)
        source.refuse_if_none_passes(partial(as_chat, to_chat))
        if name in IMAGE_DATASETS and default_processor == DEFAULT_PROCESSOR:
            default_processor = IMAGE_PROCESSOR
        super().__init__(entry, source, to_chat, task_name=name, default_processor=default_processor)


_NUMINA = Columns(
    none=frozenset({"", "proof", "notfound"}),
    kept=("problem_type", "question_type", "source"),
    checks=("problem_is_valid", "solution_is_valid"),
)
_OPEN_MATH = Columns(answer="expected_answer", truth="expected_answer", kept=("problem_source",))

_SIMPLE_EVALS = "https://openaipublic.blob.core.windows.net/simple-evals/"

_CLEVR = {
    **dict.fromkeys(("train", "trainA"), "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex"),
    "valA": "MMInstruction/Clevr_CoGenT_ValA",
    "valB": "MMInstruction/Clevr_CoGenT_ValB",
}

PUBLISHED: dict[str, Published] = {
    "OpenMathInstruct-2": Published("nvidia/OpenMathInstruct-2", _OPEN_MATH, split="train_1M"),
    "DeepScaler": Published("agentica-org/DeepScaleR-Preview-Dataset", Columns()),
    "DAPOMath17K": Published("BytedTsinghua-SIA/DAPO-Math-17k", dapo),
    "DAPOMathAIME2024": Published("BytedTsinghua-SIA/AIME-2024", dapo),
    "AIME2024": Published("HuggingFaceH4/aime_2024", Columns()),
    "AIME2025": Published(
        "opencompass/AIME2025", Columns(question="question"), subsets=("AIME2025-I", "AIME2025-II"), split="test"
    ),
    "GSM8K": Published("openai/gsm8k", gsm8k, subsets=("main",)),
    "MATH-500": Published("HuggingFaceH4/MATH-500", math500, split="test"),
    "MATH": Published(_SIMPLE_EVALS + "math_test{}.csv", Columns(question="Question", answer="Answer", truth="Answer")),
    "MMLU": Published(_SIMPLE_EVALS + "mmlu{}.csv", mmlu),
    "HMMT2025-Feb": Published("MathArena/hmmt_feb_2025", Columns()),
    "HMMT2025-Nov": Published("MathArena/hmmt_nov_2025", Columns()),
    "HMMT2026-Feb": Published("MathArena/hmmt_feb_2026", Columns()),
    "GPQA": Published("Idavidrein/gpqa", gpqa, subsets=("gpqa_diamond",)),
    "MMLU-Pro": Published("TIGER-Lab/MMLU-Pro", mmlu_pro, split="test"),
    "HumanEval": Published("openai/openai_humaneval", human_eval, split="test"),
    "MBPP": Published("google-research-datasets/mbpp", mbpp, subsets=("full",), split="test"),
    "IFEval": Published("google/IFEval", ifeval),
    "NuminaMath": Published("AI-MO/NuminaMath-1.5", _NUMINA),
    "Squad": Published("rajpurkar/squad", squad),
    "OpenAssistant": Published("OpenAssistant/oasst1", open_assistant, view=threads),
    "Tulu3SftMixture": Published("allenai/tulu-3-sft-mixture", tulu3),
    "HelpSteer3": Published("nvidia/HelpSteer3", helpsteer3, subsets=("preference",)),
    "clevr-cogent": Published(_CLEVR["train"], clevr, by_split=_CLEVR),
    "geometry3k": Published("hiyouga/geometry3k", geometry3k),
    "refcoco": Published("jxu124/refcoco", refcoco, has_files=True),
    "mmpr-tiny": Published("hf://datasets/OpenGVLab/MMPR-Tiny/mmpr_tiny.parquet", mmpr_tiny, has_files=True),
}
TULU3_PAIRS = Published(
    "allenai/llama-3.1-tulu-3-8b-preference-mixture",
    partial(preference_pair, prompt="prompt", chosen="chosen", rejected="rejected"),
)
HELPSTEER3_PAIRS = replace(PUBLISHED["HelpSteer3"], to_chat=helpsteer3_pair)
