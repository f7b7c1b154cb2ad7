"""The letter of a multiple choice, in English and in other languages."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from grpo_mcore.environments.math.multiple_choice import english_choice, multilingual_choice


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("Answer: B", "B"),
        ("so\nANSWER : b.", "B"),
        ("**Answer:** (C)", "C"),
        (r"Answer: $\boxed{D}$", "D"),
        ("Answer: A\nno, Answer: J", "J"),
        ("Answer: Because", None),
        ("Answer: K", None),
        ("B", "B"),
        ("The answer is B", "B"),
        ("The answer is most likely (B).", "B"),
        ("The answer is likely not B", None),
        ("So it is 5.\n\nB is the correct answer.", "B"),
        ("B is not correct.", None),
        ("Let me see.\n\n**B)** five", "B"),
        ("", None),
    ],
)
def test_english(response: str, letter: str | None) -> None:
    assert english_choice(response, "B") == (letter == "B", letter)
    assert multilingual_choice(response, "B") == (letter == "B", letter)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("Antwort: C", "C"),
        ("Réponse : A", "A"),
        ("RESPUESTA: b", "B"),
        ("答案：Ｄ", "D"),
        ("答え: (B)", "B"),
        ("정답: A", "A"),
        ("الإجابة: ب", "B"),
        ("উত্তর: খ", "B"),
        ("Ответ: **C**", "C"),
        ("Trả lời: D", "D"),
        ("Đáp án: A", "A"),
        ("Svar: B", "B"),
        ("Die richtige Antwort ist: B", "B"),
        ("La respuesta correcta es: B", "B"),
        ("La bonne réponse est B.", "B"),
        ("因此，故选：B。", "B"),
        ("答案是：B", "B"),
        ("正确答案是 B", "B"),
        ("정답은: B", "B"),
        ("Vastaus: B", "B"),
        ("Răspuns: B", "B"),
        ("答案是B。", "B"),
        ("答案为B", "B"),
        ("因此，正确答案是B。", "B"),
        ("有人认为答案：A。但是正确答案是B。", "B"),
        ("答案：B选项", "B"),
        ("答えはBです", "B"),
        ("答え：Bです", "B"),
        ("정답은 B입니다.", "B"),
        ("정답은 B 입니다.", "B"),
        ("정답: B번", "B"),
    ],
)
def test_other_languages(response: str, letter: str) -> None:
    assert multilingual_choice(response, letter) == (True, letter)
    assert multilingual_choice(response, "J") == (False, letter)
    assert english_choice(response, letter) == (False, None)


CASES = yaml.safe_load((Path(__file__).parent / "choice_cases.yaml").read_text())


@pytest.mark.parametrize("verifier", [english_choice, multilingual_choice])
def test_a_letter_that_stands_alone(verifier) -> None:
    read = [(response, verifier(response, "A")) for response, _ in CASES]
    assert read == [(response, (letter == "A", letter)) for response, letter in CASES]


@pytest.mark.parametrize(
    "response",
    [
        "Antwort: A oder B",
        "答案：A或B",
        "Respuesta: A o B",
        "정답: A 또는 B",
        "Ответ: A или B",
        "Die Antwort ist A oder B",
        "答案是A或B都可以",
        "정답은 A와 B입니다",
        "答えはAまたはBです",
        "答えはAではない",
        "정답은 A가 아닙니다",
        "答案是A吗？",
        "Réponse: Dès lors",
        "الإجابة: بسبب",
    ],
)
def test_several_letters_in_other_languages_are_none(response: str) -> None:
    assert multilingual_choice(response, "A") == (False, None)


@pytest.mark.parametrize("truth", ["c", " C ", "(C)", "C.", "**C**", "Ｃ"])
def test_a_truth_may_be_written_in_several_ways(truth: str) -> None:
    assert multilingual_choice("Answer: C", truth) == (True, "C")


@pytest.mark.parametrize("truth", ["", "K", "CD", "42"])
def test_a_truth_that_is_no_letter_is_an_error(truth: str) -> None:
    with pytest.raises(ValueError, match="a letter from A to J"):
        english_choice("Answer: C", truth)
