"""Rows of random shape, read by the settings that `settings_for` finds: every text that belongs to the prompt or the
answer is in the messages, or the row is refused by name."""

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_mcore.data.datasets.files import openai_row, preference_pair, question_and_answer, settings_for
from grpo_mcore.data.datasets.rows import DataError
from grpo_mcore.rollout.messages import MessageError

COUNTER = iter(range(10**9))
WORD = st.builds(lambda: f"text{next(COUNTER)}end")
PARTS = st.lists(st.one_of(WORD, st.builds(lambda text: {"type": "text", "text": text}, WORD)), min_size=1, max_size=3)
CONTENT = st.one_of(WORD, PARTS, st.none(), st.just(""), st.integers(10**6, 10**7))
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": CONTENT})
CHAT = st.lists(MESSAGE, min_size=1, max_size=4)
VALUE = st.one_of(
    WORD, CHAT, PARTS, st.none(), st.just(""), st.integers(10**6, 10**7), st.lists(st.lists(WORD, max_size=3))
)
FIELDS = ("instruction", "input", "output", "question", "answer", "prompt", "messages", "history", "system")
ROW = st.dictionaries(st.sampled_from((*FIELDS, "chosen", "rejected", "conversations")), VALUE, min_size=1, max_size=6)


def texts_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, part in value.items() if key not in ("role", "type") for text in texts_in(part)]
    if isinstance(value, list):
        return [text for part in value for text in texts_in(part)]
    return [str(value)] if isinstance(value, str | int) and value != "" else []


def read(row: dict[str, Any], keys: dict[str, str]) -> dict[str, Any]:
    match keys["dataset_name"]:
        case "openai_format":
            return openai_row(row, chat=keys.get("chat_key", "messages"))
        case "BinaryPreferenceDataset":
            return preference_pair(row, prompt=keys.get("prompt_key", "prompt"), chosen="chosen", rejected="rejected")
        case _:
            question, answer = keys.get("input_key", "input"), keys.get("output_key", "output")
            return question_and_answer(row, question=question, answer=answer, context=keys.get("context_key"))


def spoken(row: dict[str, Any], keys: dict[str, str]) -> set[str]:
    """Return the fields that the model is shown."""
    match keys["dataset_name"]:
        case "openai_format":
            return {keys.get("chat_key", "messages"), "system"}
        case "BinaryPreferenceDataset":
            return {keys.get("prompt_key", "prompt"), "chosen", "rejected", "system"}
        case _:
            question = keys.get("input_key", "input")
            return {question, "system", *(["input"] if question == "instruction" else [])}


@example({"conversations": [{"role": "user", "content": "text1end"}], "messages": "text2end"})
@example({"conversations": [{"role": "user", "content": "text1end"}], "messages": ["text2end"]})
@settings(max_examples=300, deadline=None)
@given(ROW)
def test_no_text_of_a_row_vanishes(row: dict[str, Any]) -> None:
    keys = settings_for(row)
    if not keys or "messages" in row and keys["dataset_name"] != "openai_format":  # the name of what is read
        return
    try:
        found = read(row, keys)
    except (DataError, MessageError) as error:
        assert str(error)
        return
    kept = json.dumps(found, ensure_ascii=False)
    said = json.dumps([found.get(key) for key in ("messages", "chosen", "rejected")], ensure_ascii=False)
    for key, value in row.items():  # other fields stay the row's own, and an answer that is no text is the ground truth
        missing = [text for text in texts_in(value) if text not in (said if key in spoken(row, keys) else kept)]
        assert not missing, f"{key} of {row} loses {missing}: {found}"
