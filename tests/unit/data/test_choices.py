"""Rows whose question has parts in fields of their own, in the layouts of published data."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_mcore.data import DataError
from grpo_mcore.data.datasets.contexts import unseen_context
from grpo_mcore.data.datasets.files import preference_pair, question_and_answer, settings_for

Row = dict[str, Any]
SHOWN = "Which?\n\nA) red\nB) blue"


def read(row: Row, **keys: str) -> tuple[str, Any]:
    """Return (the text of the question, the truth), read with the keys that are found by the row's fields."""
    found = settings_for(row)
    names = {"question": found.get("input_key", "input"), "answer": found.get("output_key", "output")}
    chat = question_and_answer(row, **(names | keys))
    return chat["messages"][-2]["content"], chat["messages"][-1]["content"]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Which?", "choices": ["red", "blue"], "answer": 1},  # MMLU
        {"question": "Which?", "options": ["red", "blue"], "answer": "B", "answer_index": 1},  # MMLU-Pro, RACE
        {"question": "Which?", "choices": {"text": ["red", "blue"], "label": ["A", "B"]}, "answerKey": "B"},  # ARC
        {"question": "Which?", "choices": {"text": ["red", "blue"], "label": ["1", "2"]}, "answerKey": "2"},
        {"question_stem": "Which?", "choices": {"text": ["red", "blue"], "label": ["A", "B"]}, "answerKey": "B"},
        {"question": "Which?", "options": {"A": "red", "B": "blue"}, "answer": "blue", "answer_idx": "B"},  # MedQA
        {"question": "Which?", "options": [{"key": "A", "value": "red"}, {"key": "B", "value": "blue"}], "answer": "B"},
        {"question": "Which?", "options": ["A)red", "B)blue"], "correct": "B"},  # AQuA-RAT
        {"question": "Which?", "options": ["A. red", "B. blue"], "answer": "(B)"},
        {"question": "Which?", "options": ["red", "blue"], "answer": "B. blue"},
        {"question": "Which?", "choices": "['red', 'blue']", "answer": "blue"},
        {"question": "Which?", "choices": '["red", "blue"]', "answer": 1.0},
        {"question": "Which?", "opa": "red", "opb": "blue", "cop": 1},  # MedMCQA
        {"goal": "Which?", "sol1": "red", "sol2": "blue", "label": 1},  # PIQA
        {"question": "Which?", "option1": "red", "option2": "blue", "answer": "2"},  # Winogrande
        {"Question": "Which?", "A": "red", "B": "blue", "Answer": "B", "Subject": "x"},
        {"question": {"stem": "Which?", "choices": [{"text": "red", "label": "A"}, {"text": "blue", "label": "B"}]},
         "answerKey": "B"},  # ARC and CommonsenseQA as files
        {"question": "Which?", "answers": ["red", "blue"], "label": 1},  # ReClor
        {"question": "Which?", "ans0": "red", "ans1": "blue", "label": 1},  # BBQ
        {"question": "Which?", "options": "a ) red , b ) blue", "correct": "b"},  # MathQA
        {"question": "Which?", "options": "red\nblue", "answer": "B"},
        {"ctx": "Which?", "endings": ["red", "blue"], "label": "1"},  # HellaSwag
        {"question": "Which?", "options": ["1) red", "2) blue"], "answer": "2"},  # numbers in front are labels
        {"question": "Which?", "options": ["1. red", "2. blue"], "answer": "2)"},
        {"question": "Which?", "options": "1) red 2) blue", "answer": "blue"},
        {"question": "Which?", "options": "1) red\n2) blue", "answer": "2"},
        {"question": "Which?", "options": ["0. red", "1. blue"], "answer": "1"},
        {"question": "Which?", "options": ["1) red", "2) blue"], "answer": 2},
    ],
)  # fmt: skip
def test_choices_are_shown_and_the_truth_is_a_letter(row: Row) -> None:
    assert read(row) == (SHOWN, "B")


@pytest.mark.parametrize(
    ("lines", "answer", "ground_truth"),
    [
        ("1) red\n2) blue", 1, "2"),
        ("1) red\n2) blue", "B", "2"),
        ("1) red\n2) blue", "2", "2"),
        ("(1) red (2) blue", 1, "2"),
        ("(a) red\n(b) blue", 1, "B"),
        ("A) red\nB) blue", "B", "B"),
    ],
)
def test_the_ground_truth_is_the_label_that_the_question_shows(lines: str, answer: Any, ground_truth: str) -> None:
    row = {"question": f"Which?\n{lines}", "options": ["red", "blue"], "answer": answer}
    assert read(row) == (row["question"], ground_truth)
    extra = question_and_answer(row | {"ground_truth": answer}, question="question", answer="none")
    assert extra["ground_truth"] == ground_truth


def test_choices_without_labels_get_letters() -> None:
    row = {"question": "Which?\n- red\n- blue", "options": ["red", "blue"], "answer": 1}
    assert read(row) == (f"{row['question']}\n\nA) red\nB) blue", "B")


def test_wrong_answers_are_choices_in_an_order_of_the_question() -> None:
    row = {"question": "Which?", "correct_answer": "blue", **{f"distractor{i}": f"c{i}" for i in (3, 1, 2)}}
    text, letter = read(row)
    assert (text, letter) == read(row) and f"{letter}) blue" in text and text.count("\n") == 5
    assert read({"Question": "Which?", "Correct Answer": "blue", "Incorrect Answer 1": "red"})[0].count(") ") == 2


@pytest.mark.parametrize("names", [("answer0", "answer1", "answer2"), ("A", "B", "C"), ("sol1", "sol2", "sol3")])
def test_every_column_of_a_choice_is_shown(names: tuple[str, ...]) -> None:
    row = {"question": "Which?", **dict(zip(names, ("red", "blue", "green"), strict=True)), "label": 2}
    assert read(row) == (f"{SHOWN}\nC) green", "C")
    assert read(row | {names[2]: None, "label": 1}) == (SHOWN, "B")


def test_choices_that_the_question_shows_stay_as_they_are() -> None:
    row = {"question": "Which?\nA) red\nB) blue", "options": ["red", "blue"], "answer": "B"}
    assert read(row) == (row["question"], "B") and read(row | {"answer": 1})[1] == "B"
    assert read({"question": "Which of a and b?", "options": ["a", "b"], "answer": 1})[0].endswith("\n\nA) a\nB) b")
    row["question"] = "Which?"
    assert read(row, choices="none") == ("Which?", "B")
    assert read(row | {"options": 5, "c": ["red", "blue"]}, choices="c") == (SHOWN, "B")
    assert read(row | {"answer": "Blue, like the sky."})[1] == "Blue, like the sky."  # an answer to train on
    assert question_and_answer(row | {"ground_truth": 0}, question="question", answer="none")["ground_truth"] == "A"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"answer": "E"}, "the answer 'E' is none of its 2 choices (A, B)"),
        ({"answer": 2}, "the answer 2 is none"),
        ({"answer": "1", "choices": ["1", "2"]}, "the answer '1' could be several of its 2 choices"),
        ({"answer": 2, "choices": [2, 3, 4]}, "the answer 2 could be several"),
        ({"answer": 1, "choices": ["1) red", "2) blue"]}, "the answer 1 could be several"),
        ({"answer": "B", "choices": [str(i) for i in range(11)]}, "11 choices"),
        ({"answer": float("nan"), "choices": None}, "'answer' is nan, which is no answer"),
    ],
)
def test_answers_that_no_choice_is_are_refused(more: Row, said: str) -> None:
    with pytest.raises(DataError) as error:
        read({"question": "Which?", "choices": ["red", "blue"], **more})
    assert said in str(error.value)


def test_a_choices_key_that_leads_to_none_is_refused() -> None:
    with pytest.raises(DataError, match="'level' .choices_key. has no choices: expected a list"):
        read({"question": "Which?", "level": 5, "answer": "2"}, choices="level")


def test_lists_and_records_of_other_meanings_are_no_choices() -> None:
    aliases = {"question": "Which?", "answers": ["red", "the red one"], "answer": "red"}
    assert read(aliases) == ("Which?", "red")
    for options in (
        {"temperature": 1, "seed": 2},
        ["alone"],
        [{"message": "a"}, {"message": "b"}],
        [["a"], ["b"]],
        "one or the other",
    ):
        assert read({"question": "Which?", "options": options, "answer": "2"}) == ("Which?", "2")


def test_columns_that_the_answer_is_none_of_are_no_choices() -> None:
    row = {"question": "Why?", "answer_a": "red", "answer_b": "blue", "answer": "for the light"}
    assert read(row) == ("Why?", "for the light")


def test_other_parts_of_a_question() -> None:
    alpaca = {"instruction": "Translate.", "input": "Hello", "output": "Bonjour"}
    assert read(alpaca) == ("Translate.\n\nHello", "Bonjour") and read(alpaca | {"input": ""})[0] == "Translate."
    race = {"article": "A text.", "question": "Which?", "options": ["red", "blue"], "answer": "B"}
    assert settings_for(race)["context_key"] == "article" and read(race)[0] == SHOWN
    assert read(race, context="article") == (f"A text.\n\n{SHOWN}", "B")
    orca = question_and_answer(
        {"system_prompt": "Be brief.", "question": "q", "response": "a"}, question="question", answer="response"
    )
    assert orca["messages"][0] == {"role": "system", "content": "Be brief."} and len(orca["messages"]) == 3


@pytest.mark.parametrize(
    ("context", "shown"),
    [
        (["One.", "Two. "], "One.\n\nTwo."),
        ({"contexts": ["One.", "Two."], "labels": ["A", "B"], "meshes": ["m"]}, "One.\n\nTwo."),  # PubMedQA
        ({"title": ["T", "U"], "sentences": [["One.", " And."], ["Two."]]}, "T\nOne. And.\n\nU\nTwo."),  # HotpotQA
        ([["T", ["One.", " And."]], ["U", ["Two."]]], "T\nOne. And.\n\nU\nTwo."),  # its file; 2WikiMultihopQA
        ([{"idx": 0, "title": "T", "paragraph_text": "One.", "is_supporting": True}], "T\nOne."),  # MuSiQue
        ({"is_selected": [0, 1], "passage_text": ["One.", "Two."], "url": ["a", "b"]}, "One.\n\nTwo."),  # MS MARCO
        ([{"title": "T", "text": "One."}, {"title": "", "text": "Two."}], "T\nOne.\n\nTwo."),
        ({"title": "T", "text": "One."}, "T\nOne."),
    ],
)
def test_passages_of_every_form_are_a_context(context: Any, shown: str) -> None:
    row = {"question": "Which?", "context": context, "answer": "red"}
    assert settings_for(row)["context_key"] == "context"
    assert "context_key: context puts it above" in str(unseen_context(row, None, "question"))
    assert read(row, context="context")[0] == f"{shown}\n\nWhich?"


@pytest.mark.parametrize("context", [5, {"cells": ["a"]}, [{"role": "user", "content": "Hi"}], [{"text": 1}]])
def test_what_has_no_text_is_no_context(context: Any) -> None:
    row = {"question": "Which?", "context": context, "answer": "red"}
    assert "context_key" not in settings_for(row) and unseen_context(row, None, "question") is None
    with pytest.raises(DataError, match="'context' .context_key. must be text, a list of texts or passages"):
        read(row, context="context")


def test_pairs_show_their_choices_and_context_too() -> None:
    row = {"question": "Which?", "options": ["red", "blue"], "passage": "A text.", "chosen": "A", "rejected": "B"}
    keys = {"prompt": "question", "chosen": "chosen", "rejected": "rejected"}
    assert preference_pair(row, **keys, context="passage")["messages"][0]["content"] == f"A text.\n\n{SHOWN}"
    answers = {name: {"from": "gpt", "value": name} for name in ("chosen", "rejected")}  # LLaMA-Factory's
    row = {"conversations": [{"from": "human", "value": "q"}], **answers}
    assert settings_for(row) == {"dataset_name": "BinaryPreferenceDataset", "prompt_key": "conversations"}
    text = "\n\nHuman: one\n\nAssistant: two\n\nHuman: three\n\nAssistant: "  # HH-RLHF
    pair = preference_pair({"chosen": f"{text}four", "rejected": f"{text}five"}, **keys)
    assert [message["content"] for message in pair["messages"]] == ["one", "two", "three"]
    assert (pair["chosen"], pair["rejected"][0]["content"]) == ([{"role": "assistant", "content": "four"}], "five")
    pair = preference_pair(row, **keys | {"prompt": "conversations"})
    assert (pair["messages"][0]["content"], pair["chosen"][0]["content"]) == ("q", "chosen")


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ({"images": ["a.png"]}, "no file a.png for an image"),
        ({"image": "a.JPG"}, "no file a.JPG for an image"),
        ({"image": "https://example.org/a.jpg"}, "images are not fetched"),
        ({"video": "data:video/mp4;base64,"}, "only text and images are supported"),
        ({"images": []}, None),
        ({"image": None}, None),
        ({"image": "swebench/sweb.eval.x86_64:latest"}, None),  # of a container
    ],
)
def test_rows_whose_media_cannot_be_read_are_refused(media: Row, message: str | None) -> None:
    row = {"question": "How many?", "answer": "3", **media}
    if message is not None:
        with pytest.raises(DataError, match=message):
            read(row)
    else:
        assert read(row) == ("How many?", "3")


def test_the_label_of_a_judged_completion_is_no_answer() -> None:
    assert settings_for({"prompt": "q", "completion": "a", "label": True})["output_key"] == "completion"
