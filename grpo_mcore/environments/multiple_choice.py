"""Multiple choice: the letter after the last "Answer:" is compared with that of the truth; reward 1 or 0. Where there
is no such letter, the last box with a letter counts.

A letter stands alone: "Answer: a better look" and "Answer: A or B" name none. The multilingual verifier knows the word
for answer in the languages below, and letters in their scripts.
"""

from __future__ import annotations

import re

from grpo_mcore.environments.math_text import INVISIBLE, boxes, without_boxes

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
# What may stand between the colon and the letter, and behind the letter.
_OPENING = (
    r"(?:\s|[*_$\"'`“‘„«<(（\[【{]|\\[(\[]|\\(?:boxed|fbox|text(?:bf|it|rm|sf)?|math(?:bf|rm|sf|it)|mbox|bm|boldsymbol)\s*\{|"
    r"(?:option|choice|letter|opción|opção|réponse)\s)*"
)
_CLOSING = r"(?:[*_$\"'`”’“»>)）\]】}]|\\[)\]])*"
_OR = (
    "or and oder und ou et o u y e eller och of en или и або та lub nebo veya ve atau dan hoặc và hoặc ή "
    "또는 또 または 或 或者 和 と یا و أو או या और"
)
_OTHER = rf"\s*(?:[,/&+、،]|\b(?:{'|'.join(_OR.split())})\b|[或和と])\s*{_OPENING}"
_BECAUSE = "because since as is which that due for given"
_LABELS = r"(?:\s+(?:is|are|choice|option|letter|would|should|must|be|here|key))*"


def _pattern(words: str, letters: str) -> re.Pattern[str]:
    """Match a word, a colon and a letter, with `several` where more letters follow and `word` where the letter begins a
    phrase instead of standing alone."""
    names = "|".join(word.replace("_", r"\s") for word in sorted(words.split(), key=len, reverse=True))
    return re.compile(
        rf"(?:{names}){_LABELS}\W{{0,3}}[:：]{_OPENING}(?P<letter>[{letters}])(?![\w'’]|-\w){_CLOSING}"
        rf"(?:(?P<several>{_OTHER}[{letters}](?!\w){_CLOSING}(?!\s+\w)|\s*[?？])|"
        rf"(?P<word>(?<![)\]）】}}>])[ \t]+(?!(?:{'|'.join(_BECAUSE.split())})\b)\w))?",
        re.IGNORECASE,
    )


_ENGLISH = _pattern(rf"\b{_WORDS['en']}", "".join(_SCRIPTS[:2]))
_ANY_LANGUAGE = _pattern(" ".join(_WORDS.values()), "".join(_LETTER))
_TRUTH = re.compile(rf"{_OPENING}([{''.join(_LETTER)}])\W*", re.IGNORECASE)


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
    letter = _last_letter(pattern, response)
    return letter is not None and letter == _latin(right[1]), letter


def _last_letter(pattern: re.Pattern[str], response: str) -> str | None:
    text = response.translate(INVISIBLE)
    stated = [match for match in pattern.finditer(text) if match["word"] is None]
    if stated:
        return None if stated[-1]["several"] else _latin(stated[-1]["letter"])
    for box in reversed(boxes(text)):
        letter = _TRUTH.fullmatch(without_boxes(box.content or "").strip())
        if letter is not None:
            return _latin(letter[1])
    return None


def _latin(letter: str) -> str:
    return _LETTER[letter.upper()]
