"""Multiple choice: the letter after the last "Answer:" or "the answer is" is compared with that of the truth; reward 1
or 0. Where there is no such letter, the first of these counts: the last box with a letter; the whole response, if it is
one letter; the letter that the last sentence settles on ("so I pick B"); the letter of an option that is the last
paragraph ("(B) Paris").

A letter stands alone: "Answer: a better look" and "Answer: A or B" name none. Without a colon it is a capital. The
multilingual verifier knows the word for answer in the languages below, and letters in their scripts.
"""

from __future__ import annotations

import re

from grpo_mcore.environments.math.math_text import BETWEEN_BOXES, INVISIBLE, boxes, without_boxes

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
    "ja": "答え 回答 解答 答案 正解",
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
    "zh": "答案 答 故选 应选 我选 所以选 因此选 本题选 正确选项",
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
# Chinese, Japanese and Korean write what follows a letter without a space: there it stands alone.
_CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_ALONE = rf"(?![^\W{_CJK}]|['’]\w|-\w)"
_OR = (
    "or and oder und ou et o u y e eller och of en или и або та lub nebo veya ve atau dan hoặc và hoặc ή "
    "또는 또 または 或 或者 和 と یا و أو או या और"
)
_OR_HERE = "或者|[或和とか와과및]|または|이나|또는"
_OTHER = (
    rf"[\s.(]*(?:[,;/&+|、،→⇒]|-+>|=+>|\b(?:{'|'.join(_OR.split())})\b(?:\s+(?:maybe|perhaps|possibly))?|{_OR_HERE}|"
    r"\\text\s*\{\s*(?:and|or)\s*\}|\s(?=[(\[<]\w))\s*"
    rf"{_OPENING}"
)
_NOT = "ではな ではあり じゃな でない 아니 아닙 不对 不正确 不正確 错 錯"
_DENIED = rf"[{_CJK}\s]{{0,6}}?(?:{'|'.join(_NOT.split())}|[{_CJK}]{{0,5}}\s*[?\uff1f])"
_BECAUSE = "because since as which that due for given rather instead not"
_IS = "is be ist es est è é är er jest este je on to adalah ni là"
_IS_RIGHT = r"is(?!\s+(?:not|wrong|incorrect|false)\b)"
_SO = "therefore thus hence clearly indeed simply probably likely most definitely certainly"
_LABELS = (
    rf"(?:\s+(?:{'|'.join(f'{_IS} {_SO}'.split())}|are|the|choice|option|letter|would|should|must|here|key|final|"
    r"answer|correct|correcta|correcte|correta|corretta|corect|juste|richtig|đúng)\b|[是为為は은는选選])*"
)
_SIGN = r"(?:\W{0,3}[:：](?:\s*\})?|\s*=|\s+[-–])"
_AFTER_WORD = "|".join(rf"(?<= {word})" for word in f"{_IS} {_SO}".split())
_AFTER_IS = rf"(?:(?:{_AFTER_WORD})\W{{0,3}}(?<=\W)|(?<=[是为為は은는选選])\W{{0,3}})"
_HEADING = r"(?:^[^\w\n]*(?:final )?answer[^\w\n]*\n|####\s)"


def _pattern(words: str, letters: str) -> re.Pattern[str]:
    """Match a word, a colon and a `letter`, or "is" and a `capital`, with `several` where more letters follow and
    `word` where the letter begins a phrase instead of standing alone."""
    names = "|".join(word.replace("_", r"\s") for word in sorted(words.split(), key=len, reverse=True))
    lone = rf"(?-i:[{letters}])"
    lines = rf"\s*\n(?!\s*(?P=letter)){_OPENING}{lone}{_ALONE}{_CLOSING}[ \t]*(?:\n|\Z)"
    return re.compile(
        rf"(?:(?:(?:{names}){_LABELS}{_SIGN}|{_HEADING}){_OPENING}(?P<letter>[{letters}])|"
        rf"(?:{names}){_LABELS}{_AFTER_IS}{_OPENING}(?P<capital>{lone}))"
        rf"{_ALONE}{_CLOSING}"
        rf"(?:(?P<several>{_OTHER}[{letters}]{_ALONE}{_CLOSING}(?!\s+\w)|\s*[?？]|{_DENIED}|{lines}|"
        rf"(?:\.[ \t]*{lone}{_ALONE})+\.?[ \t]*(?:\n|\Z))|"
        rf"(?P<word>(?<![)\]）】}}>*])[ \t]+(?!(?:{'|'.join(_BECAUSE.split())}|{_IS_RIGHT}|and not)\b)[^\W{_CJK}]))?",
        re.IGNORECASE | re.MULTILINE,
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
    rf"|^(?P<first>[{_LATIN}])[).]?\s+(?i:{'|'.join(_BECAUSE.split())}|is\s+(?:the\s+)?(?:correct|right|best))\b"
)
_UNSURE = re.compile(
    r"\b(?:not|never|neither|nor|either|both|all|or|and|incorrect|wrong|maybe|perhaps|possibly|might|could)\b|n['’]t\b|\?",
    re.IGNORECASE,
)
_OPTION = re.compile(
    rf"(?:\*\*|__)?\(?(?P<one>[{_LATIN}])\)[ \t]+\S.*|"
    rf"(?:\*\*|__)(?P<bold>[{_LATIN}])[.:)](?:\*\*|__)?[ \t]+\S.*"
)
_ONLY_OPTION = re.compile(rf"(?P<one>[{_LATIN}])[.:)][ \t]+\S.*(?P<bold>)")
_LISTED = re.compile(rf"[-*_\s]*\(?[{_LATIN}][).:]")
_MOST_OF_AN_OPTION = 200  # characters
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+|,\s+(?=so\b|hence\b|therefore\b|thus\b)")
_TRUTH = re.compile(rf"{_OPENING}([{''.join(_LETTER)}])\W*", re.IGNORECASE)
_LABEL = re.compile(
    rf"(?:\\(?:text|math)(?:bf|it|rm|sf)?\s*\{{)?\s*(?:\(\s*(?P<in_brackets>[{_LATIN}])\s*\)|(?P<plain>[{_LATIN}])[.):](?=[\s~\\}}])(?!.*[,;\s]\(?[{_LATIN}][.):]))",
    re.DOTALL,
)


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
    if boxed := _boxed_letters(text):
        return boxed.pop() if len(boxed) == 1 else None
    if (alone := _TRUTH.fullmatch(text.strip())) is not None:
        return _latin(alone[1])
    return _picked(text) or _option_at_the_end(text)


def _boxed_letters(text: str) -> set[str]:
    """Return the letters in the last box that has one, and in the boxes beside it, as in "\\boxed{A} or \\boxed{B}"."""
    letters, next_start = set[str](), len(text)
    for box in reversed(boxes(text)):
        if letters and not BETWEEN_BOXES.fullmatch(text, box.end, next_start):
            break
        content = without_boxes(box.content or "").strip()
        if (letter := _TRUTH.fullmatch(content) or _LABEL.match(content)) is not None:
            letters.add(_latin(next(filter(None, letter.groups()))))
        next_start = box.start
    return letters


def _option_at_the_end(text: str) -> str | None:
    """Return the letter of an option that is the whole last paragraph, as "(B) Paris" or "**B. Paris**", unless it is
    the last of a list."""
    *before, last = [line.strip() for line in text.strip().split("\n") if line.strip()] or [""]
    option = _OPTION.fullmatch(last)
    if not before and option is None:
        option = _ONLY_OPTION.fullmatch(last)
    is_a_paragraph = not before or re.search(r"\n[ \t]*\n[^\n]*$", text.strip())
    if option is None or not is_a_paragraph or len(last) > _MOST_OF_AN_OPTION:
        return None
    if _UNSURE.search(last) or re.search(rf"[( ][{_LATIN}]\)", last[2:]) or (before and _LISTED.match(before[-1])):
        return None
    return option["one"] or option["bold"]


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
