"""The rows of published benchmarks as conversations, for evaluation: each function maps one row in the published
schema."""

import random
from collections.abc import Sequence

from grpo_mcore.data.datasets.choices import LETTERS, lettered
from grpo_mcore.data.datasets.mapped import Row, unusable
from grpo_mcore.data.datasets.messages import assistant, user
from grpo_mcore.data.interfaces import DataError


def math500(row: Row) -> Row:
    """HuggingFaceH4/MATH-500: {"problem", "solution", "answer", "subject", "level", "unique_id"}."""
    messages = [user(row["problem"]), assistant(row["solution"])]
    return {"messages": messages, "ground_truth": row["answer"], "subject": row["subject"], "level": row["level"]}


def gpqa(row: Row) -> Row:
    """Idavidrein/gpqa: {"Question", "Correct Answer", "Incorrect Answer 1" .. "3"}. The choices are shuffled by a seed
    made of the question, so that they stand in the same order in every evaluation."""
    right = row["Correct Answer"].strip()
    choices = [right, *(row[f"Incorrect Answer {number}"].strip() for number in (1, 2, 3))]
    question = row["Question"].strip()
    random.Random(question).shuffle(choices)
    return _choice(question, choices, choices.index(right))


def mmlu_pro(row: Row) -> Row:
    """TIGER-Lab/MMLU-Pro: {"question", "options", "answer": a letter, "answer_index", "category"}."""
    choice = _choice(row["question"], row["options"], LETTERS.index(row["answer"]))
    return {**choice, "category": row["category"]}


def mmlu(row: Row) -> Row:
    """MMLU as simple-evals publishes it: {"Question", "A", "B", "C", "D", "Answer": a letter, "Subject"}."""
    choice = _choice(row["Question"], [row[letter] for letter in "ABCD"], LETTERS.index(row["Answer"].strip()))
    return {**choice, "subject": row["Subject"]}


def _choice(question: str, choices: Sequence[str], right: int) -> Row:
    if not 0 <= right < len(choices):
        raise DataError(f"choice {right} of {len(choices)}")
    truth = LETTERS[right]
    return {"messages": [user(lettered(question, choices)), assistant(truth)], "ground_truth": truth}


def human_eval(row: Row) -> Row:
    """openai/openai_humaneval: {"task_id", "prompt": the head of a function, "canonical_solution", "test",
    "entry_point"}. The code environment reads the last two, and `prompt`."""
    question = f"Complete this function, and write it whole:\n\n```python\n{row['prompt'].strip()}\n```"
    kept = {key: row[key] for key in ("task_id", "prompt", "test", "entry_point")}
    return {"messages": [user(question)], **kept}


def mbpp(row: Row) -> Row:
    """google-research-datasets/mbpp, full: {"task_id", "text", "code", "test_list", "test_setup_code",
    "challenge_test_list"}; sanitized has `prompt` and `test_imports` in place of `text` and `test_setup_code`."""
    task = row["text"] if row.get("text") is not None else row["prompt"]
    tests = list(row["test_list"])
    if not tests:
        return unusable("without a test")
    question = "\n".join([task.strip(), "", "It must pass these tests:", *tests])
    optional = ("test_setup_code", "test_imports", "challenge_test_list")
    kept = {key: row[key] for key in optional if row.get(key)}
    return {"messages": [user(question)], "task_id": row["task_id"], "test_list": tests, **kept}


def ifeval(row: Row) -> Row:
    """google/IFEval: {"key", "prompt", "instruction_id_list", "kwargs": a mapping for each instruction}. A table
    fills the keys that an instruction lacks with null. `environments/rules/instructions.py` checks them, except for the
    answer's language."""
    names = list(row["instruction_id_list"])
    if any(name.startswith("language:") for name in names):
        return unusable("with an instruction on the answer's language")
    settings = [{key: value for key, value in (kwargs or {}).items() if value is not None} for kwargs in row["kwargs"]]
    instructions = [{"name": name, **kwargs} for name, kwargs in zip(names, settings, strict=True)]
    return {"messages": [user(row["prompt"])], "instructions": instructions}
