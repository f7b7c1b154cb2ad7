"""Multiple choice: the letter after the last "Answer:" or "the answer is" is compared with that of the truth; reward 1
or 0. Where there is no such letter, the last box with a letter counts, a response that is nothing but a letter, or the
one that the last sentence settles on ("so I pick B").

A letter stands alone: "Answer: a better look" and "Answer: A or B" name none. Without a colon it is a capital. The
multilingual verifier knows the word for answer in the languages below, and letters in their scripts.
"""

from __future__ import annotations

import re

from grpo_mcore.environments.math_text import INVISIBLE, boxes, without_boxes

_WORDS = {
    "en": "answer ans correct_option correct_choice",
    "ar": "الإجابة الاجابة الجواب إجابة",
    "bg": "отговор",
    "bn": "উত্তর",
    "cs": "odpověď",
    "de": "antwort",
    "el": "απάντηση",
    "es": "respuesta",
    "fa": "پاسخ",
    "fi": "vastaus",
    "fr": "réponse",
    "he": "תשובה",
    "hi": "उत्तर",
    "hr": "odgovor",
    "hu": "válasz",
    "id": "jawaban",
    "it": "risposta",
    "ja": "答え 回答 解答 答案",
    "ko": "정답 답변 답",
    "nl": "antwoord",
    "pl": "odpowiedź",
    "pt": "resposta",
    "ro": "răspuns răspunsul",
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
_OTHER = (
    rf"[\s.(]*(?:[,;/&+、،]|\b(?:{'|'.join(_OR.split())})\b(?:\s+(?:maybe|perhaps|possibly))?|[或和と])\s*{_OPENING}"
)
_BECAUSE = "because since as which that due for given"
_IS = "is be ist es est è é är er jest este je on to adalah ni là"
_SO = "therefore thus hence clearly indeed simply"
_LABELS = (
    rf"(?:\s+(?:{'|'.join(f'{_IS} {_SO}'.split())}|are|the|choice|option|letter|would|should|must|here|key|final|"
    r"answer|correct|correcta|correcte|correta|corretta|corect|juste|richtig)\b|[是为は은는])*"
)
_SIGN = r"(?:\W{0,3}[:：](?:\s*\})?|\s*=|\s+[-–])"
_AFTER_IS = rf"(?:{'|'.join(rf'(?<= {word})' for word in f'{_IS} {_SO}'.split())}|(?<=[是为は은는]))\W{{0,3}}(?<=\W)"


def _pattern(words: str, letters: str) -> re.Pattern[str]:
    """Match a word, a colon and a `letter`, or "is" and a `capital`, with `several` where more letters follow and
    `word` where the letter begins a phrase instead of standing alone."""
    names = "|".join(word.replace("_", r"\s") for word in sorted(words.split(), key=len, reverse=True))
    return re.compile(
        rf"(?:{names}){_LABELS}"
        rf"(?:{_SIGN}{_OPENING}(?P<letter>[{letters}])|{_AFTER_IS}{_OPENING}(?P<capital>(?-i:[{letters}])))"
        rf"(?!\w|['’]\w|-\w){_CLOSING}"
        rf"(?:(?P<several>{_OTHER}[{letters}](?!\w){_CLOSING}(?!\s+\w)|\s*[?？])|"
        rf"(?P<word>(?<![)\]）】}}>])[ \t]+(?!(?:{'|'.join(_BECAUSE.split())}|is)\b)\w))?",
        re.IGNORECASE,
    )


_ENGLISH = _pattern(rf"\b{_WORDS['en']}", "".join(_SCRIPTS[:2]))
_ANY_LANGUAGE = _pattern(" ".join(_WORDS.values()), "".join(_LETTER))
_AT_END = rf"(?!\w|['’]\w|-\w){_CLOSING}\s*(?:$|[.,;:!]|\b(?:{'|'.join(_BECAUSE.split())}|is|are)\b)"
_PICKED = re.compile(
    rf"(?:\b(?i:answer|ans\.?|option|choice|letter)\s*[:：]?\s+|\b(?i:choose|pick|select|go with|it['’]?s|it is|"
    rf"must be|should be|leaves|so|therefore|thus|hence)[\s,:]+|"
    rf"\b(?i:option|choice|answer|solution|one)\b[^.\n]{{0,30}}\bis\s+)"
    rf"(?i:(?:the )?(?:option|choice|letter)\s+)?{_OPENING}(?P<letter>[{_LATIN}]){_AT_END}"
    rf"|(?<!\w)\((?P<labelled>[{_LATIN}])\){_CLOSING}\s+(?:is|are)\b"
    rf"|^(?P<first>[{_LATIN}])[).]?\s+(?i:{'|'.join(_BECAUSE.split())})\b"
)
_UNSURE = re.compile(
    r"\b(?:not|never|neither|nor|either|both|all|or|and|incorrect|wrong|maybe|perhaps|possibly|might|could)\b|n['’]t\b|\?",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+|,\s+(?=so\b|hence\b|therefore\b|thus\b)")
_TRUTH = re.compile(rf"{_OPENING}([{''.join(_LETTER)}])\W*", re.IGNORECASE)
_LABEL = re.compile(rf"(?:\\text(?:bf|it|rm|sf)?\s*\{{)?\s*\(\s*([{_LATIN}])\s*\)")


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
        return None if stated[-1]["several"] else _latin(stated[-1]["letter"] or stated[-1]["capital"])
    for box in reversed(boxes(text)):
        content = without_boxes(box.content or "").strip()
        letter = _TRUTH.fullmatch(content) or _LABEL.match(content)
        if letter is not None:
            return _latin(letter[1])
    if (alone := _TRUTH.fullmatch(text.strip())) is not None:
        return _latin(alone[1])
    return _picked(text)


def _picked(text: str) -> str | None:
    """Return the letter that the last sentence settles on in its own words, as "so I pick (B)": the only one, neither
    denied nor in doubt."""
    sentences = [sentence for sentence in _SENTENCE.split(text) if sentence.strip()]
    if not sentences or _UNSURE.search(sentences[-1]):
        return None
    letters = {next(filter(None, match.groups())) for match in _PICKED.finditer(sentences[-1].strip())}
    return letters.pop() if len(letters) == 1 else None


def _latin(letter: str) -> str:
    return _LETTER[letter.upper()]
