"""Multiple choice: the letter after the last "Answer:" or "the answer is" is compared with the ground truth's; reward 1
or 0. Where there is no such letter, the first of these counts: the last box with a letter; the whole response, if it is
one letter; the letter that the last sentence settles on ("so I pick B"); the letter of an option that is the first line
or the last paragraph ("(B) Paris"). Of several right letters the answer must name all and no other.

A letter stands alone: "Answer: a better look", "Answer: A or B" and "Answer: E = mc^2" name none. Without a colon it is
a capital. The multilingual verifier knows the word for answer in the languages below, and letters in their scripts.
"""

import re
from pathlib import Path
from typing import NamedTuple

import yaml

from grpo_mcore.environments.math.spellings import INVISIBLE, as_said
from grpo_mcore.environments.math.statement import BETWEEN_BOXES, boxes, is_asserted, without_boxes

_WORDS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("answer_words.yaml").read_text(encoding="utf-8"))
_LATIN = "ABCDEFGHIJ"
_SCRIPTS = (_LATIN, "ＡＢＣＤＥＦＧＨＩＪ", "أبجد", "কখগঘ")  # Latin, full width, Arabic, Bengali
_LETTER = {letter: latin for script in _SCRIPTS for latin, letter in zip(_LATIN, script, strict=False)}
# What may stand between the colon and the letter, and behind the letter.
_OPENING = (
    r"(?:\s|[*_$\"'`“‘„«<(（\[【{]|\\[(\[]|\\(?:boxed|fbox|text(?:bf|it|rm|sf)?|math(?:bf|rm|sf|it)|mbox|bm|boldsymbol)\s*\{|"
    r"(?:option|choice|letter|opción|opção|réponse)\s)*"
)
_CLOSING = r"(?:[*_$\"'`”’“»>)）\]】}]|\\[)\]])*+"
_OPENED_BY = {"*": "*", "'": "'", "’": "‘"}
# Chinese, Japanese and Korean write what follows a letter without a space: there it stands alone.
_CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
# What follows a letter that is a variable, a function, a programming language or a genus, instead of an option.
_SPECIES = "coli elegans subtilis cerevisiae aureus difficile albicans cereus sapiens familiaris latrans lupus"
_ALONE = (
    rf"(?![^\W{_CJK}]|['’]\w|-\w|\.[\w.]|\s*(?:=|≠|≤|≥|\\[lgn]e)|\s+[<>]\s|[(\[#^_♭♯]|"
    r"\+(?!\s?[A-J]\b)|-(?=[\s.]|$)|/(?!\s?[A-J]\b)|"
    rf"\.\s(?:{'|'.join(_SPECIES.split())})\b)"
)
_OR = (
    "or and oder und ou et o u y e eller och of en или и або та lub nebo veya ve atau dan hoặc và hoặc ή "
    "또는 또 または 或 或者 和 と یا و أو או या और"
)
_OR_HERE = "还是|或者|[或和とか와과및]|または|이나|또는"
_OTHER = (
    rf"[\s.(]*(?:[,;/&+|、،→⇒]|-+>|=+>|\b(?:{'|'.join(_OR.split())})\b(?:\s+(?:maybe|perhaps|possibly))?|{_OR_HERE}|"
    r"\\text\s*\{\s*(?:and|or)\s*\}|\s(?=[(\[<]\w))\s*"
    rf"{_OPENING}"
)
_NOT = "ではな ではあり じゃな でない 아니 아닙 不对 不正确 不正確 错 錯"
_DENIED = rf"[{_CJK}\s]{{0,6}}?(?:{'|'.join(_NOT.split())}|[{_CJK}]{{0,5}}\s*[?\uff1f])"
_BECAUSE = "because since as which that due for given rather instead not"
_IS = "is are be ist es est è é är er jest este je on to adalah ni là هي هو lautet"
_IS_RIGHT = r"is\s+(?:(?:the|my)\s+)?(?:correct|right|best|true|answer|final)\b"
_SO = "therefore thus hence clearly indeed simply probably likely most definitely certainly"
_LABELS = (
    rf"(?:['’]s\b|\s+(?:{'|'.join(f'{_IS} {_SO}'.split())}|are|the|only|choice|option|letter|would|should|must|here|"
    r"key|final|answer|correct|correcta|correcte|correta|corretta|giusta|yang benar|الصحيحة|corect|juste|"
    r"richtig|đúng)\b|"
    r"[是为為は은는选選擇择应應])*"
)
_SIGN = r"(?:\W{0,3}[:：](?:\s*\})?|\s*(?:=|→|⇒)|\s+[-–—])"
_ARTICLE = r"(?:(?<=\s)(?:la|le|el|die|das|a|o|la letra|la lettre|a letra)\s)?"
_AFTER_WORD = "|".join(rf"(?<= {word})" for word in f"{_IS} {_SO}".split()) + "|(?<=['’]s)"
_AFTER_IS = rf"(?:(?:{_AFTER_WORD})\W{{0,3}}(?<=\W)|(?<=[是为為は은는选選择擇])\W{{0,3}})"
_HEADING = r"(?:^[^\w\n]*(?:final )?answer[^\w\n]*\n|####\s)"
_CORRECT = r"is\s+(?:the\s+|my\s+)?(?i:correct|right|best|true|answer|one|only)\b"
_AT_END = (
    rf"(?!\w|['’]\w|-\w){_CLOSING}(?!{_OTHER}[{_LATIN}]{_ALONE})\s*(?:$|[,;:!。，]|\.(?![\w.])|"
    rf"\b(?:{'|'.join(_BECAUSE.split())})\b|{_CORRECT})"
)
_SO_IS = (
    r"(?:\b(?i:choose|pick|select|say|go(?:ing)? with|it['’]?s|(?:it|which) is|must be|should be|leaves|under|"
    r"correspond(?:s|ing)|match(?:es|ing)?|answer to|so|therefore|thus|hence|daher|donc|only)[\s,:]+(?:to\s|with\s)?|"
    r"(?<![不别])[选選][择擇]?\s*)"
)


class _Patterns(NamedTuple):
    """How one letter is stated after a word for answer, how a list of letters is, and how a sentence picks one."""

    letter: re.Pattern[str]
    several: re.Pattern[str]
    picked: re.Pattern[str]


def _patterns(words: str, letters: str, article: str = "") -> _Patterns:
    """`letter` matches a word, a colon and a `letter`, or "is" and a `capital`, with `several` where more letters
    follow and `word` where the letter begins a phrase instead of standing alone. `several` matches a statement's
    `rest`, and each group of `picked` a letter."""
    ordered = [word.replace("_", r"\s") for word in sorted(words.split(), key=len, reverse=True)]
    # Words stand alone, too, but for those of scripts without spaces.
    whole = [word if re.match(rf"[{_CJK}\u0e00-\u0e7f]", word) else rf"(?<![^\W_]){word}" for word in ordered]
    names = rf"(?<![不能别可])(?:{'|'.join(whole)})"
    lone = rf"(?-i:[{letters}])"
    lines = rf"\s*\n(?!\s*(?P=letter)){_OPENING}{lone}{_ALONE}{_CLOSING}[ \t]*(?:\n|\Z)"
    letter = (
        rf"(?:(?:{names}{_LABELS}{_SIGN}|{_HEADING}){_OPENING}(?P<letter>[{letters}])|"
        rf"{names}{_LABELS}{_AFTER_IS}{article}{_OPENING}(?P<capital>{lone}|[a-j](?=\))))"
        rf"{_ALONE}{_CLOSING}(?:(?<=\))(?=\d)|(?![^\W{_CJK}]))"
        rf"(?:(?P<several>{_OTHER}[{letters}]{_ALONE}{_CLOSING}(?!\s+\w)|[\s!]*[?？]|{_DENIED}|{lines}|"
        rf"(?:\.[ \t]*{lone}{_ALONE})+\.?[ \t]*(?:\n|\Z))|"
        rf"(?P<word>(?<![)\]）】}}>*])[ \t]+(?!(?:{'|'.join(_BECAUSE.split())}|{_IS_RIGHT}|and not)\b)[^\W{_CJK}]))?"
    )
    several = rf"(?:{names}{_LABELS}(?:{_SIGN}|{_AFTER_IS})|{_HEADING})\s*(?P<rest>[^\n]*)"
    noun = rf"(?:(?i:{names}|\b(?:option|choice|letter))\.?\s*[:：]?\s+)"
    picked = (
        rf"(?:{_SO_IS}(?i:the\s)?{noun}?|(?P<named>{noun})|"
        rf"\b(?i:option|choice|letter|answer|solution|statement|response|pick|one)\b[^.\n]{{0,30}}\bis\s+)"
        rf"{_OPENING}(?P<letter>[{_LATIN}]|(?<=\()[a-j](?=\)))(?:{_AT_END}|(?<=\([{_LATIN}])\)\s(?![a-z]))"
        rf"|{_SO_IS}\*\*\(?(?P<bold>[{_LATIN}])[.):](?!\W*[a-z])"
        rf"|(?<!\w)\((?P<labelled>[{_LATIN}])\){_CLOSING}\s+{_CORRECT}"
        rf"|\b[oO]nly\s(?P<only>[A-HJ])\s(?!and\b|or\b)(?=[a-z])"
        rf"|(?:^|(?<=,\s))(?P<first>[{_LATIN}])[).]?(?:,?\s+(?i:{'|'.join(_BECAUSE.split())})\b|\s+{_CORRECT})"
    )
    any_case = re.IGNORECASE | re.MULTILINE
    return _Patterns(re.compile(letter, any_case), re.compile(several, any_case), re.compile(picked))


_ENGLISH = _patterns(_WORDS["en"], "".join(_SCRIPTS[:2]))
_ANY_LANGUAGE = _patterns(" ".join(_WORDS.values()), "".join(_LETTER), _ARTICLE)
_UNSURE = re.compile(
    r"\b(?:not|never|neither|nor|either|incorrect|wrong|maybe|perhaps|possibly|might|could|(?<!\bI )would|though|"
    r"(?:some|many|most) \w+s|if|wenn|fails?|better|see|mistake|trap|eliminated?|excluded?|ruled?)\b|n['’]t\b|\?",
    re.IGNORECASE,
)
_REASON = re.compile(r"[,;]?\s(?:because|since|as)\s")
_ALL_RIGHT = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s)?(?:both\s)?(.*?)(?:,\s|\s)(?:are|is)\s(?:(?:the|all|both)\s)?"
    r"(?:correct|right|true)(?:\s(?:answers?|options?|choices?|ones?|statements?))?\W*", re.IGNORECASE
)  # fmt: skip
_OPTION = re.compile(
    rf"(?:\*\*|__)?\(?(?P<letter>[{_LATIN}])\)[ \t]+\S.*|"
    rf"(?:\*\*|__)(?P<bold>[{_LATIN}])[.:)](?:\*\*|__)?[ \t]+\S.*"
)
_ONLY_OPTION = re.compile(rf"(?P<letter>[{_LATIN}]){_ALONE}[.:)][ \t]+\S.*(?P<bold>)")
_LISTED = re.compile(rf"[-*_\s]*\(?[{_LATIN}][).:]")
_MOST_OF_AN_OPTION = 200  # characters
_SENTENCE = re.compile(r"(?<=[.!?])(?<!\b[Aa]ns\.)(?<!\*[A-J]\.)\s+|\n+|,\s+(?=so\b|hence\b|therefore\b|thus\b)")
_ONLY_LETTER = re.compile(rf"{_OPENING}([{''.join(_LETTER)}])[^\w+#=?？'’]*", re.IGNORECASE)
_DECORATION = re.compile(r"\\(?:boxed|fbox|text(?:bf|it|rm|sf)?|math(?:bf|rm|sf|it)|mbox)|[\s*_$\"'`(){}\[\].\\]")
_SEVERAL = re.compile(rf"(?:[{_LATIN}](?:[,;&+、和]|and)*)+")
_LABEL = re.compile(
    rf"(?:\\(?:text|math)(?:bf|it|rm|sf)?\s*\{{)?\s*(?:\(\s*(?P<in_brackets>[{_LATIN}])\s*\)|(?P<plain>[{_LATIN}])[.):](?=[\s~\\}}])(?!.*[,;\s]\(?[{_LATIN}][.):]))",
    re.DOTALL,
)


def english_choice(response: str, ground_truth: str) -> tuple[bool, str | None]:
    """Return (right, the letter). `ground_truth`: a letter from A to J, or several with commas, all of which an answer
    must name. Raises ValueError where it is neither."""
    return _choice(_ENGLISH, response, ground_truth)


def multilingual_choice(response: str, ground_truth: str) -> tuple[bool, str | None]:
    """Return (right, the letter, as a Latin one), as `english_choice`."""
    return _choice(_ANY_LANGUAGE, response, ground_truth)


def _choice(patterns: _Patterns, response: str, ground_truth: str) -> tuple[bool, str | None]:
    right = [_ONLY_LETTER.fullmatch(part.strip()) for part in ground_truth.split(",")]
    if not all(right):
        raise ValueError(
            f"the ground truth of a multiple choice is a letter from A to J, got {ground_truth!r}; "
            "verifier_type: math compares numbers"
        )
    letters = sorted({_latin(match[1]) for match in right if match is not None})
    text = as_said(response).translate(INVISIBLE)
    letter = _last_letter(patterns, text) if len(letters) == 1 else _last_letters(patterns.several, text)
    return letter == ", ".join(letters), letter


def _last_letters(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the letters that the last statement lists, and nothing else, as "A, C"; None where it lists none."""
    stated = list(pattern.finditer(text))
    if stated and not is_asserted(text, "", stated[-1].start(), stated[-1].end()):
        return None
    lists = [match["rest"] for match in stated]
    if not lists:
        boxed = boxes(text)
        while len(boxed) > 1 and not BETWEEN_BOXES.fullmatch(text, boxed[0].end, boxed[1].start):
            boxed = boxed[1:]
        lists = [text[boxed[0].start : boxed[-1].end] if boxed else text]
        if (asserted := _ALL_RIGHT.fullmatch(_SENTENCE.split(text.strip())[-1])) is not None:
            lists = [asserted[1]]
    listed = _DECORATION.sub("", lists[-1])
    return ", ".join(sorted({*re.findall(f"[{_LATIN}]", listed)})) if _SEVERAL.fullmatch(listed) else None


def _last_letter(patterns: _Patterns, text: str) -> str | None:
    stated = [match for match in patterns.letter.finditer(text) if match["word"] is None]
    if stated:
        kind = "letter" if stated[-1]["letter"] else "capital"
        before, (mark, *_) = text[: stated[-1].start(kind)].rpartition("\n")[2], (*text[stated[-1].end(kind) :], "")
        is_whole = mark not in _OPENED_BY or _OPENED_BY[mark] in before  # A* and C' are names of something else
        is_certain = (
            is_whole and not stated[-1]["several"] and is_asserted(text, "", stated[-1].start(), stated[-1].end(kind))
        )
        return _latin(stated[-1][kind]) if is_certain else None
    if boxed := _boxed_letters(text):
        return boxed.pop() if len(boxed) == 1 else None
    if (alone := _ONLY_LETTER.fullmatch(re.split(r"\n\s*\n", text.strip())[-1].strip())) is not None:
        return _latin(alone[1])
    return _picked(patterns.picked, text) or _option_alone(text)


def _boxed_letters(text: str) -> set[str]:
    """Return the letters in the last box that has one, and in the boxes beside it, as in "\\boxed{A} or \\boxed{B}"."""
    letters, next_start = set[str](), len(text)
    for box in reversed(boxes(text)):
        if letters and not BETWEEN_BOXES.fullmatch(text, box.end, next_start):
            break
        content = re.split(r"\\(?:Longr|R|r)ightarrow|\\implies", without_boxes(box.content or ""))[-1].strip()
        if not is_asserted(text, None, box.start, box.end):
            return set()
        if _SEVERAL.fullmatch(listed := _DECORATION.sub("", content)):
            letters |= {*re.findall(f"[{_LATIN}]", listed)}
        elif (letter := _ONLY_LETTER.fullmatch(content) or _LABEL.match(content)) is not None:
            letters.add(_latin(next(filter(None, letter.groups()))))
        next_start = box.start
    return letters


def _option_alone(text: str) -> str | None:
    """Return the letter of an option that is the whole last paragraph, as "(B) Paris" or "**B. Paris**", or the first
    line of a text without other options."""
    lines = [line.strip() for line in text.strip().split("\n") if line.strip()] or [""]
    option, line = _OPTION.fullmatch(lines[-1]), lines[-1]
    if option is None and not any(map(_LISTED.match, lines[1:])):
        option, line = _ONLY_OPTION.fullmatch(lines[0]) or _OPTION.fullmatch(lines[0]), lines[0]
    elif len(lines) > 1 and (not re.search(r"\n[ \t]*\n[^\n]*$", text.strip()) or _LISTED.match(lines[-2])):
        return None
    is_unclear = _UNSURE.search(line) or re.search(rf"[( ][{_LATIN}][).:]", line[2:])
    if option is None or len(line) > _MOST_OF_AN_OPTION or is_unclear:
        return None
    return option["letter"] or option["bold"]


def _picked(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the letter that the last sentence settles on in its own words, as "so I pick (B)": the only one, neither
    denied nor in doubt."""
    sentences = [sentence for sentence in _SENTENCE.split(text) if sentence.strip()]
    if not sentences or _UNSURE.search(_REASON.split(sentences[-1])[0]):
        return None
    sentence = sentences[-1].strip()
    letters = {
        _latin(match["letter"] or match["bold"] or match["labelled"] or match["only"] or match["first"])
        for match in pattern.finditer(sentence)
        if is_asserted(sentence, "" if match["named"] else None, match.start(), match.end())
    }
    return letters.pop() if len(letters) == 1 else None


def _latin(letter: str) -> str:
    return _LETTER[letter.upper()]
