"""Multiple choice: the letter after the last "Answer:" is compared with that of the truth; reward 1 or 0.

The multilingual verifier knows the word for answer in the languages below, and letters in their scripts.
"""

from __future__ import annotations

import re

_WORDS = {
    "en": "answer",
    "ar": "الإجابة الاجابة الجواب إجابة",
    "bn": "উত্তর",
    "cs": "odpověď",
    "de": "antwort",
    "el": "απάντηση",
    "es": "respuesta",
    "fa": "پاسخ",
    "fr": "réponse",
    "he": "תשובה",
    "hi": "उत्तर",
    "id": "jawaban",
    "it": "risposta",
    "ja": "答え 回答 解答 答案",
    "ko": "정답 답변 답",
    "nl": "antwoord",
    "pl": "odpowiedź",
    "pt": "resposta",
    "ru": "ответ",
    "sv": "svar",
    "sw": "jibu",
    "ta": "பதில்",
    "te": "సమాధానం",
    "th": "คำตอบ",
    "tr": "cevap yanıt",
    "uk": "відповідь",
    "ur": "جواب",
    "vi": "đáp_án trả_lời",
    "yo": "ìdáhùn",
    "zh": "答案 答",
}
_LATIN = "ABCDEFGHIJ"
_SCRIPTS = (_LATIN, "ＡＢＣＤＥＦＧＨＩＪ", "أبجد", "কখগঘ")  # Latin, full width, Arabic, Bengali
_LETTER = {letter: _LATIN[place] for script in _SCRIPTS for place, letter in enumerate(script)}
_BEFORE = r"(?:\s|\*|\$|\\boxed\{|\\text\{|[(（\[])*"  # what may stand between the colon and the letter


def _pattern(words: str, letters: str) -> re.Pattern[str]:
    """Match a word, a colon and a letter that is not the beginning of another word."""
    names = "|".join(word.replace("_", r"\s") for word in sorted(words.split(), key=len, reverse=True))
    return re.compile(rf"(?:{names})\W{{0,3}}[:：]{_BEFORE}([{letters}])(?!\w)", re.IGNORECASE)


_ENGLISH = _pattern(_WORDS["en"], _LATIN)
_ANY_LANGUAGE = _pattern(" ".join(_WORDS.values()), "".join(_LETTER))
_TRUTH = re.compile(rf"{_BEFORE}([{''.join(_LETTER)}])\W*", re.IGNORECASE)


def english_choice(response: str, truth: str) -> tuple[bool, str | None]:
    """Return (right, the letter). Raises ValueError where the truth is no letter from A to J."""
    return _choice(_ENGLISH, response, truth)


def multilingual_choice(response: str, truth: str) -> tuple[bool, str | None]:
    """Return (right, the letter, as a Latin one). Raises ValueError where the truth is not such a letter."""
    return _choice(_ANY_LANGUAGE, response, truth)


def _choice(pattern: re.Pattern[str], response: str, truth: str) -> tuple[bool, str | None]:
    right = _TRUTH.fullmatch(truth.strip())
    if right is None:
        raise ValueError(f"the ground truth of a multiple choice is a letter from A to J, got {truth!r}")
    found = pattern.findall(response)
    if not found:
        return False, None
    letter = _latin(found[-1])
    return letter == _latin(right[1]), letter


def _latin(letter: str) -> str:
    return _LETTER[letter.upper()]
