"""Every instruction with an answer that follows it and one that does not."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from grpo_mcore.environments.rules.instructions import INSTRUCTIONS, followed, row_problem
from grpo_mcore.environments.rules.tulu_instructions import TULU

CASES = [
    ("keywords:existence", {"keywords": ["sun", "moon"]}, "Moon and sun.", "Only the sun."),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "an egg", "a banana"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "A Cat."),
    ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "at least"}, "Zzz", "z"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "One 1.5?", "One. Two."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "Dr. B, e.g. C.", "B. C."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n***\n\n***\nb"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        'We see.\n\n"So" it is.',
        "So.\n\nWe see.",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "Well-known"},
        "well-known, yes",
        "**Well-known**",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] lives in [town]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. Hello", "Bye."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S. Hello", "P.S. Hello"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* only"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1 a Section 2 b",
        "Section 1 a",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>> text", "<< >> text"),
    ("combination:two_responses", {}, "one ****** two", "one ****** one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "say hi. Hi!", "Hi!"),
    ("startend:end_checker", {"end_phrase": "The end."}, "All. the end.", "The end. Or not."),
    ("startend:quotation", {}, '"quoted"', '"'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "THIS IS loud",
        "This IS",
    ),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"}, "U.S.", "DON'T"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "***a***", "**a**"),
    ("change_case:english_capital", {}, "LOUD 1!", "Loud"),
    ("change_case:english_lowercase", {}, "quiet 1!", "Quiet"),
    ("punctuation:no_comma", {}, "a; b", "a, b"),
]


@pytest.mark.parametrize(("name", "settings", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_instruction(name: str, settings: dict, good: str, bad: str) -> None:
    assert followed(good, {"instructions": [{"name": name, **settings}]}) == 1.0
    assert followed(bad, {"instructions": [{"name": name, **settings}]}) == 0.0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('He said "Hi." Then he left.', 2),
        ("**One.** **Two.** **Three.**", 3),
        ("(One.) (Two.)", 2),
        ("One.[1] Two.[2]", 2),
        ("一。二。三。", 3),
        ("1. First\n2. Second\n3. Third", 3),
        ("- One. Two.\n- Three", 3),
        ("It is 1.5 m. Dr. B knows", 2),
        ("Wait... what? The U.S. army", 2),
    ],
)
def test_sentences_are_counted(text: str, count: int) -> None:
    at_least = INSTRUCTIONS["length_constraints:number_sentences"]
    assert [at_least(text, number, "at least") for number in (count, count + 1)] == [True, False]


def test_every_instruction_is_tested_and_all_must_be_followed() -> None:
    assert {case[0] for case in CASES} == INSTRUCTIONS.keys()
    both = [{"name": "punctuation:no_comma"}, {"name": "change_case:english_lowercase"}]
    assert followed("quiet", {"instructions": both}) == 1.0
    assert followed("Loud", {"instructions": both}) == 0.0
    assert followed(" ", {"instructions": both}) == 0.0
    with pytest.raises(ValueError, match="neither 'at least' nor 'less than'"):
        followed("a", {"instructions": [{"name": CASES[4][0], "num_words": 1, "relation": "about"}]})


def test_rows_as_they_are_published() -> None:
    """The arguments are a list beside the names; in tables each has the keys of all instructions."""
    row = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None, "relation": None}, {"num_words": 2, "relation": "at least"}],
    }
    assert [followed(reply, row) for reply in ("one two", "one", "one, two")] == [1.0, 0.0, 0.0]
    assert followed("one", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [None]}) == 1.0
    for text in ({**row, "kwargs": json.dumps(row["kwargs"])}, {**row, "kwargs": [*map(json.dumps, row["kwargs"])]}):
        assert row_problem(text) is None
        assert [followed(reply, text) for reply in ("one two", "one", "one, two")] == [1.0, 0.0, 0.0]
    with pytest.raises(KeyError, match="instructions"):
        followed("one", {})


TULU_CASES: list[tuple[str, dict[str, object], list[str], list[str]]] = [
    ("verify_keywords", {"keyword_list": ["sun", "moon"]}, ["Moon and sun."], ["Only the sun."]),
    ("verify_keyword_frequency", {"word": "cat", "N": 2}, ["Cat, cat; cats"], ["cat", "cat cat cat"]),
    ("validate_forbidden_words", {"forbidden_words": ["cat"]}, ["dog"], ["concatenate", "Cat"]),
    ("verify_letter_frequency", {"letter": "z", "N": 2}, ["zzZ"], ["z"]),
    ("verify_paragraph_count", {"N": 2}, ["a\n* * *\nb"], ["a", "a\n* * *\n", "a * * * b * * * c"]),
    ("validate_word_constraint", {"N": 30, "quantifier": "around"}, ["a " * 27, "a " * 33], ["a " * 26, "a " * 34]),
    ("validate_word_constraint", {"N": 2, "quantifier": "at most"}, ["a b"], ["a b c"]),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at least"}, ["One. Two?", "Hi! Mr. X, e.g. Y."], ["One"]),
    ("validate_paragraphs", {"N": 2, "i": 2, "first_word": "So"}, ["a\n\nSo b"], ["a\n\nb", "So", "a\n\nb\n\nSo"]),
    ("verify_postscript", {"postscript_marker": "P.S."}, ["a\nP.S. b"], ["a", "a P.S. "]),
    ("validate_placeholders", {"N": 2}, ["[a] [b] [c]"], ["[a]"]),
    ("verify_bullet_points", {"N": 2}, ["* a\n - b\nc"], ["* a", "* a\n* b\n* c"]),
    ("validate_title", {}, ["<<a>>\nb"], ["<a>"]),
    ("validate_choice", {"options": ["yes", "no"]}, ["yes"], ["maybe"]),
    ("validate_highlighted_sections", {"N": 2}, ["*a* and *b*"], ["*a*"]),
    ("validate_sections", {"N": 2, "section_splitter": "Part"}, ["Part 1\nPart 2"], ["Part 1", "", "aPartPart"]),
    ("validate_json_format", {}, ['{"a": 1}'], ["a"]),
    ("validate_repeat_prompt", {"original_prompt": "Say a"}, ["Say a. a"], ["a"]),
    ("validate_two_responses", {}, ["a\n******\nb"], ["a", "a ****** a", "a ****** b ****** c"]),
    ("validate_uppercase", {}, ["A 1"], ["a"]),
    ("validate_lowercase", {}, ["a 1"], ["A"]),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "around"}, ["A BC", "AB", "A B C"], ["ab", "A B C D"]),
    ("validate_end", {"end_phrase": "Bye."}, ["a Bye."], ["Bye. a"]),
    ("validate_quotation", {}, ['"a"'], ["a"]),
    ("validate_no_commas", {}, ["a"], ["a, b"]),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), TULU_CASES)
def test_instructions_of_tulu(name: str, arguments: dict[str, object], good: list[str], bad: list[str]) -> None:
    """The truth has the arguments of all functions, null where they are another's."""
    nulls = {key: None for _, others, *_ in TULU_CASES for key in others}
    row = {"ground_truth": json.dumps({"func_name": name, **nulls, **arguments})}
    assert row_problem(row) is None
    assert [followed(f"<think>a, B</think>{text}", row) for text in good + bad] == [1.0] * len(good) + [0.0] * len(bad)


def test_all_of_tulu_are_tested_and_the_language_is_named() -> None:
    assert TULU.keys() == {name for name, *_ in TULU_CASES}
    language = {"ground_truth": {"func_name": "validate_response_language", "language": "hi"}}
    assert "no rule checks the instruction 'validate_response_language'" in str(row_problem(language))
    unclear = {"ground_truth": {"func_name": "validate_word_constraint", "N": 3, "quantifier": "about"}}
    assert "quantifier 'about' is none of" in str(row_problem(unclear))


@pytest.mark.parametrize("written", [repr, json.dumps, list])
def test_instructions_of_if_rlvr(written: Callable[[object], object]) -> None:
    names = ["punctuation:no_comma", "length_constraints:number_words"]
    arguments = [None, {"num_words": 3, "relation": "at least", "num_sentences": None}]
    row = {"ground_truth": written([{"instruction_id": names, "kwargs": arguments}])}
    assert row_problem(row) is None
    assert [followed(reply, row) for reply in ("one two three", "one, two three", "one two")] == [1.0, 0.0, 0.0]
    unknown = {"ground_truth": written([{"instruction_id": ["count:pronouns"], "kwargs": [{"N": 3}]}])}
    assert "no rule checks the instruction 'count:pronouns'" in str(row_problem(unknown))


def test_prompts_that_cannot_be_scored_are_named() -> None:
    assert row_problem({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [None]}) is None
    unknown = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "hi"}]}
    assert "'language:response_language'" in str(row_problem(unknown))
    missing = {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": 3}]}
    assert "instructions 'length_constraints:number_words' cannot be read: TypeError: " in str(row_problem(missing))
    assert "instructions cannot be read: JSONDecodeError" in str(row_problem({"instructions": "["}))
    assert "neither" in str(row_problem({"ground_truth": "5"}))
