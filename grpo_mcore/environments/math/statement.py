r"""The statement of a response that is its answer, and the formula in it: "so the total is 5 apples" states 5.

Only what is certain is read: a number in words that the lists below do not know is no answer.
"""

import re
from typing import NamedTuple

from grpo_mcore.environments.math.clause import (
    Clause,
    changes_value,
    has_verb,
    has_words,
    is_cut_off,
    is_formula,
    is_known,
)
from grpo_mcore.environments.math.spellings import normalized
from grpo_mcore.environments.math.units import split_unit

_BOX = re.compile(
    r"\\?(?:\\(?:boxed|fbox|framebox|Boxed|ovalbox|shadowbox|doublebox|tcboxmath|bbox|mathbox|colorbox\s*\{[^{}]*\}|"
    r"fcolorbox\s*\{[^{}]*\}\s*\{[^{}]*\})|(?<![a-zA-Z\\])boxed(?=\{))\s*(?:\[[^\]]*\]\s*){0,2}"
    r"(?:(\{)|([-+]?\d+(?:[.,/]\d+)*|[^\s{}\\a-zA-Z]))"  # TeX boxes the first digit of "\boxed 42", nobody else does
)
BETWEEN_BOXES = re.compile(
    r"(?:\s|[,;&$]|\\[,;:!()\[\] ]|\\q?quad(?![a-zA-Z])|\\\\|\band\b|\bor\b|\\text\{\s*,?\s*(?:and|or)?\s*\}|"
    r"(?<![a-zA-Z])[a-zA-Z](?:_\{?\w\}?)?\s*=)*"
)
_BEHIND_A_BOX = re.compile(r"[ \t$]*(?:\\\)|\\\])?(\s*(?:_\{?\d+\}?|\\?%|percent\b))?([^\n]*)")
# A box that is part of a formula, as in "-\boxed{5}" and "\boxed{5} + C"; "2 + \boxed{5} = 7" fills a gap.
_FORMULA_BEFORE = re.compile(r"(?:\d|-|\w\s*[*/^<>]\s*|[\d)}=]\s*[-+]\s+|\\(?:times|cdot|[lg]eq?)\s*)(?<!=>)(?<!=> )\Z")
_FORMULA_BEHIND = re.compile(
    r"\s*(?:\^(?!\s*\{?\s*\\circ)|\\pm(?!od)|/\s*\d|(?:[-+*]|\\times|\\cdot)\s*(?:[\d\\(]|[a-zA-Z]\b))"
)
_CASE = re.compile(r"(?:\A|[.;,\n])\W*(?:if|when|for)\b[^.;\n]*\Z", re.IGNORECASE)
_LIMITED = re.compile(r"[^.,;!?]*\b(?:if|unless|otherwise|bound|at (?:least|most)|or (?:more|less|fewer))\b")
_OR = re.compile(
    r"(?:\s*\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:or|oder|ou)\s*\}|,?(?<![a-zA-Z\\])\s*\b(?:or|oder|ou)\b|"
    r"\\(?:lor|vee)(?![a-zA-Z])|或者?)\s*"
)
_ANSWER_WORD = re.compile(
    r"(?:\banswer's(?= [-$\d\\])|\b(?:answers?|antwort|antwoord|réponse|respuesta)\b[^\n.:=\\$]{0,60}?"
    r"(?:\b(?:is|are|equals|be|ist|lautet|est|es)\b|[:=→⇒]|\s[-–—](?=\s))|"
    r"\bfinal (?:result|total|amount)(?: is|\s*[:=→])(?=[\s*]*[-$\d\\])|"
    r"^[^\w\n]*(?:final )?answer(?:[^\w\n]*$| (?=[-$\d]))|####|"
    r"(?:答案|答え|正解|정답|답)[\s*]*(?:就?是|[为為]|は|은|는)?)[\s:*_=}]*",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(
    r"([.!?])(?=[*_]*(?:\s|$))(?!(?<=\d!)\s*[-=+*/\\^<>()]|(?<=\b[A-J]\.)[\s*]+[-\d\\$])|[\n。！？；]"
)

# The words with which a response states an answer in its own name: "So our final answer", "Die richtige Antwort".
_OF_AN_ASSERTION = set(
    "so then thus hence therefore and but however now finally overall ultimately consequently in conclusion summary "
    "short as expected required result amount claimed computed shown above before indeed total the our my this a "
    "final correct right best required desired requested needed exact numerical simplified complete that is means "
    "gives we i it get have find found see change conclude obtain say think believe only clearly obviously definitely "
    "d ll s am m confident sure certain convinced you re looking for follows know can must answer option choice "
    "letter key let me to question problem exercise task be are equals would should will been het il o der die das "
    "lautet also daher somit deshalb damit ist richtige korrekte endgültige la le les el los donc ainsi alors bonne "
    "correcte correcta bonnes finale réponse est por lo tanto así que entonces respuesta es resposta correta risposta "
    "corretta".split()
)
_CONDITION = re.compile(
    r"\b(?:if|unless|suppose|assum\w+|let(?! me\b)|were|when|whether|provided|according|"
    r"imagine|pretend|for (?:instance|example|\$?[a-z] ?=)|wenn|falls|angenommen|"
    r"si|supposons|supongamos)\b|如果|假[如设]|[若当]",
    re.IGNORECASE,
)
_HAN_OF_AN_ASSERTION = set(
    "所以因此故则综上述最终后正确的是我们得到可知这道题本问应該该选择为结论从而那么答案最終結論正確但"
)
_ANSWER = set("answer answers antwort réponse respuesta resposta risposta antwoord".split())
_NO_ANSWER = re.compile(
    r"\b(?:no answer|give up|(?:don't|do not|cannot|can't|not) (?:know|say|sure|determine|be determined|solve|find|"
    r"tell|compute))\b",
    re.IGNORECASE,
)
_DISPLAYED = re.compile(r"\\begin\s*\{(\w+\*?)\}.*?\\end\s*\{\1\}|\$\$.*?\$\$|\\\[.*?\\\]", re.DOTALL)
_END_OF_DISPLAY = re.compile(r"(?<!\\)[.,;]\s*(?=(?:\$\$|\\\]|\\end\s*\{\w+\*?\})\Z)")
_CHECK = re.compile(
    r"(?<=\S)(?:\s*\n\W*|;\s)(?:verification|check|to (?:verify|check)|explanation|reason(?:ing)?|why|proof)\b"
    r".*?(?=\n\s*\n|\Z)",
    re.IGNORECASE | re.DOTALL,
)
_REASON = re.compile(r"(?:(?:this|that|it)(?:'s| is) )?because\b[^,]*\Z|\((?:indeed|check)\b[^()]*\)\Z", re.I)
_GOES_ON = re.compile(
    r"^(?:so|therefore|hence|thus|then|next|now),? (?:we|I|let) (?!are)\D*$|\b(?:how|what)\b.*\?$|"
    r"\b(?:need|have|want|remains?|going) to (?:compute|find|calculate|determine|solve|check|get)\b",
    re.I,
)
_LIST_ITEM = re.compile(r"\n\s*\d+[.)](?:\s+\S+)?\s*\Z")  # one of several candidates, or of the steps
_ROOTS = re.compile(r"(?:\n\s*[-*•]\s+(?P<name>\$?[a-zA-Z](?:_\S+)? = )\S+){2,}\s*\Z")
_COURTESY = re.compile(
    r"(?<=[.!)$*\n])\s*[^.!?\n]*\b(?:let me know|feel free|hope (?:this|that|it)|happy to|would you like|thank)\b"
    r"[^\n]*\Z",
    re.IGNORECASE,
)
_CONCLUSION = re.compile(r"[,:;]\s|[，：；]|\b(?:so|hence|thus|therefore|and)\s", re.IGNORECASE)
_REFUSED = "wrong|incorrect|rejected|discarded|extraneous|impossible"
_DENIED = rf"(?:not|false|mistaken|invalid|{_REFUSED}|(?:a|an|my|the) (?:mistake|error)|falsch|fausse?|falsa|falso)\b"
# What a response says behind its answer where it takes it back: "No, that fails.", "Wait ...", "which is false".
_TAKEN_BACK = re.compile(
    rf"(?:^|[.!?:;,(\n—–-])[\W_]*(?:(?:no,? )?wait|hold on|edit\b|though|nope|hmm+|oops|sorry|correction|actually|"
    rf"wrong\b|scratch that|on second thought|just kidding|or rather|i disagree|i (?:made|was)|"
    r"let me (?:re|correct|fix|try)|(?:but|however,?) (?:that|this|it|i|the|he|she|they)\b|"
    r"(?<!^)(?:no|nein|non)(?=\s*[,.;:!—–]))|"
    rf"(?:^(?:\W*|[ $]*\w+ )|\b(?:this|that|which|it|he|she|they|book|answer|result|value)\s+)"
    rf"(?:is|are|was|were|ist|est|es)\s+{_DENIED}|"
    rf"\((?!\W*[A-J]\b)[^()]{{0,20}}\b(?:wrong|incorrect|false|not)\b|"
    rf"\b(?:this|that|it|which|check\w*)(?:: this)? fails\b|[不错錯]对?",
    re.IGNORECASE,
)
# A later value: "The answer is 5. Oh, ... so it is 6"
_CORRECTED = re.compile(
    r"\b(?:oh|wait|alternatively|correction|hmm+|sorry|actually)\b.*\b(?:so|hence|thus|therefore)[^\n]{0,20}? "
    r"[-$\d][^\n]*\Z",
    re.IGNORECASE | re.DOTALL,
)
# A denial or a doubt: no answer is read from a clause with one of these.
_DOUBT = re.compile(
    r"\A(?:[Ii]nitially|[Oo]riginally|[Ss]o far)\b|\b(?i:not|(?<!with )no|never|neither|nor|cannot|fails?|failed|"
    r"can be(?! [a-z]{3,} in\b)|maybe|perhaps|possibly|might|could|guess|bound|hoped|tried|at first|without|"
    rf"counterexample|1 of (?:the|these|those)|let(?! me\b|'s)|ends? in|estimates?|depends?|doubt|{_REFUSED}|your|"
    r"whether|if|unless|unknown|unclear|otherwise|thinks|believes|claims|says|except|give or take|note|recall|prove|"
    r"assume|suppose|too (?:much|many|large|big|small|high|low)|want(?! (?:is|are)\b)|would (?:require|mean|imply)|"
    r"könnte|pourrait|podría|vielleicht|nicht|kein|pas|non(?!-)|não|не|niet|inte|nie)\b|\bmay\b|"
    r"n't\b|\?|\\[lc]?dots(?![a-zA-Z])|\.\.\.|[不没沒非未吗]|ではな|ではあ|じゃな|아니|아닙|않|至少|至多|最多|最少|"
    r"大于|小于|多于|少于|超过|超過|可能|也许|以上|以下|이상|이하|초과|미만|보다|(?<=\d) ?[的の]"
)
# A denial or a doubt that is about the box behind it; that of "the number that are not prime is \boxed{5}" is not.
_DENIED_BOX = re.compile(
    r"(?:\b(?i:not|never|cannot|neither|nor|no|might|could)\b|n't\b)(?!.*\b(?:is|are|was|were|equals?|gives?|so)\b)|"
    r"[不没沒非未吗]|\b(?i:maybe|perhaps|possibly|guess|whether|unless|your|tried|otherwise|wrong|incorrect)\b"
)
_CLAUSE = re.compile(
    r"(?<=\w):\s+|[,;:]\s+(?!(?:and|or)\b(?!\s(?:not|it)\b))(?=i\.e|[^\W\d_A-Z]{2}|\S+ (?:more|fewer|less|of) )|"
    r"\sand (?=(?:so|finally|hence|thus|therefore)\b)|"
    r"\s(?=(?:because|since|so(?! (?:far|that|many|much)\b)|but|and not|rather than|instead of|which|compared|meaning|"
    r"(?:al)?though|while|whereas)\b)"
)
_ASIDE = re.compile(
    r"(?:who(?:m|se)?|of wh(?:om|ich)|because|since|as|with(?! an? (?:total|sum))|including|like|unlike|"
    r"compared|the same|twice|not|and not|(?:even )?though|although|while|whereas|despite|given|now that|about|"
    r"approximately|roughly|\$?\d+ (?:more|fewer|less) than|\d+ of (?:them|whom|which) \w+|"
    r"which (?!(?:is|are|was|were) \\?\$?-?[\d\\]\S*(?: [a-z]+)?$)"
    r"(?:(?:is|are|was|were)\b|(?!(?:gives?|means?|makes?|leaves?|yields?|equals?|shows?|implies|tells|.* is|.* are)\b)"
    r"\w+)|weil|denn|parce|car|porque|protože|omdat|"
    r"where(?= \S+ (?:is|are|=|denotes)\b)|rather than|instead of|"
    r"(?:and )?it (?:occurs|happens)|attained|achieved|reached)\b"
)
_REMARK = re.compile(r"\s(?:\((?=[^()]*(?<![\\a-zA-Z])[^\W\d_]{3})([^()]*)\)|[—–-] (?=which)([^—–]*) [—–-](?= ))")
_DENIES_OTHERS = re.compile(rf"\s\((?:the other [^()\d]*)?\$?-?\d[^()]*\b(?:fails?|too|not|{_REFUSED})\b")
_NAMED_TERMS = re.compile(r"^.* [-+*] [A-Za-z]+(?: [a-z]+)* \\?\$?[\d.]+ = (?=\\?\$?[\d.]+ )")
_ARTICLE = re.compile(r"\b[aA]n? (?!and\b|or\b)(?=[^\W\d_]{2}|\d)")
_OPENING = re.compile(
    r"^(?:(?:in (?:conclusion|summary|short|total|all|the end)|finally|overall|to (?:summarize|conclude)),?|"
    r"[综上所述因此以故答于是由此得可知最终后したがって]+,|(?:since|after|with|by|of|out of|in|from|"
    r"if(?=[^,]*\d)(?!.*\b(?:would|could|might)\b)|[a-z]+ing)\s(?:[^\\,=]|,(?=\d))+,(?: then)?)\s",
    re.IGNORECASE,
)
_NO_SOLUTION = re.compile(r"\b(no|infinitely many) (?:integer |real )?solutions?$")
_YES_OR_NO = re.compile(
    r"(?:\A|[.!?\n]\s*|,\s|\b(?:so|hence|thus|therefore),? )[*_]*(yes|no)[*_]*,(?!.*\b(?:yes|no|but)\b)"
    r"(?:[^.!?]|\.\d)*[.!]?\Z",
    re.IGNORECASE,
)
_IMPLIES = re.compile(r"=>|[∴⇒⟹→⇔]|\\(?:implies|(?:Long)?[rR]ightarrow|iff|therefore)(?![a-zA-Z])")
_MONTH = "(January|February|March|April|May|June|July|August|September|October|November|December)"
_DATE = re.compile(rf"\b(?:the )?(\d\d?)(?:st|nd|rd|th)?(?: of)? {_MONTH}\b")
_IN_ONE_PIECE = re.compile(rf"\\\{{.*?\\\}}|\b{_MONTH} \d\d?\b")
_NTH = re.compile(r"\$?\d+(?:[\^{}\\$]|text)*(?:st|nd|rd|th)\b[}$]*(?= [a-z])")
ORDINAL = re.compile(r"\d(?:\W|text)*(?:st|nd|rd|th)\b")
_ABOUT_THE_ANSWER = re.compile(r"\banswers?\b.*\d|^(?:If|Unless)\b")
# "a total of 5", "adds up to 5": what stands before the value that an amount or a verb gives.
_AMOUNT_OF = re.compile(
    r"\b(?:[aA]n?|[tT]he(?= (?:grand )?total)) (?:[a-z-]+ ){0,2}?(?!multipl|factor|divisor|power|root|half|third|"
    r"quarter|fraction|percent|part|square|cube|product|range|lot|set|subset|group|choice|pair|m[ai][xn]imum|function|"
    r"term|one|difference)[a-z]+ of (?=\D?\d|\\)"
)
_COMES_TO = re.compile(
    r"\b(?:consist[a-z]* of|(?:com(?:e|ing)|add|sum|turn|boil|work|amount|evaluat|simplif|converg|diverg|tend|reduc|"
    r"bring|lead)(?:e?s|ies|ed)?(?: us)? (?:(?:out|up|down) )?to(?: be)?|arrives? at|left with|results? in|"
    r"(?:is|are) (?:given|described) by|(?:est|es|è)(?: donc)? d[ei]|I(?:'d| would) say|that(?:'s| is) to say,?|"
    r"(?:exactly|precisely|if and only) (?:for|when|at)(?: all| every)?|(?<=, )written)\b"
)
# "must draw at least 5", "at most 5 can be bought": the least of what is needed is what one needs.
_NEEDED = re.compile(
    r"(?<=\bmust )(\w+ )at least |\bat most (?=[^,]*\bcan\b)|, (?:or )?(?:about|roughly) [^,]+$|"
    r",? (?:and|which) [^,\d]*\b(?:satisf|works|holds)[^,\d]*$| for (?:all|any)(?: real)? [a-z](?=,|$)"
)
_IN_ALL = re.compile(r"\bin (?:all|total)\b|(?<=equal )to\b|(?<=\d )(?:it is\Z|o'clock\b)")
_AMOUNT = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")
_NOT_SO_FAR = re.compile(
    r"\b(?:would|should|expect\w*|let (?:me|us)|will now|verify|was|before|after|until|but|except|another)\b", re.I
)
_COMPUTED = re.compile(
    r"(?:[-+*/]|\\times|\\cdot|\\div) *\\?\$?[\d.,]+ ?(?:%|[a-z]+)? *(?:=|\b(?:is|equals|makes)\b) *\\?\$?"
    rf"({_AMOUNT.pattern})(?![\d/]|\s*[-+*/=\\])"
)


class Statement(NamedTuple):
    """The answer of a response, as written."""

    text: str
    kind: str
    """`box`; `answer`, behind "the answer is"; or `text`, of a response without either."""


class Box(NamedTuple):
    """A box in a text; `content` is None where it is not closed."""

    start: int
    end: int
    content: str | None


def closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace that closes one before `start`; None where there is none."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def boxes(text: str) -> list[Box]:
    """Return the outermost boxes of a text, in order."""
    result: list[Box] = []
    position = 0
    while (match := _BOX.search(text, position)) is not None:
        end = closing_brace(text, match.end()) if match[1] else match.end() - 1
        content = None if end is None else match[2] or text[match.end() : end]
        position = len(text) if end is None else end + 1
        result.append(Box(match.start(), position, content))
    return result


def without_boxes(text: str) -> str:
    """Return the text with each box replaced by its content."""
    parts, position = [], 0
    for box in boxes(text):
        parts += [text[position : box.start], " " if box.content is None else without_boxes(box.content)]
        position = box.end
    return "".join(parts) + text[position:]


def last_statement(text: str, members: int = 1) -> Statement:
    """Return what a response says last: its last box, with the boxes right before it, or what follows "the answer is",
    "Answer:" or "####" where that comes later; else its last sentence with a formula. A box that is empty or not closed
    is an empty statement. Where the ground truth has several `members` and there are as many boxes, all count."""
    text = _COURTESY.sub("", _DISPLAYED.sub(lambda match: _END_OF_DISPLAY.sub("", match[0].replace("\n", " ")), text))
    boxed = boxes(text)
    end = boxed[-1].end if boxed else 0
    for match in reversed(list(_ANSWER_WORD.finditer(text))):
        behind = text[match.end() :]
        if match.end() < end or behind.lstrip("$\\([ ").startswith(("boxed", "fbox")):
            break
        content, mark, *_ = _SENTENCE_END.split(behind, maxsplit=1) + [None]
        content = content.strip() if content.count("**") == 2 else content.strip().strip("*_ ")
        if _CORRECTED.search(behind) or mark and re.match(r"not\b", content):
            return Statement(_last_sentence(behind), "text")
        if not content or mark == "?" or _DOUBT.search(match[0]):  # "the answer is 5? No, ..." states nothing
            continue
        if not is_asserted(text, match[0], match.start(), match.end()):
            return Statement("", "answer")
        is_final = text[: match.start()].endswith("final ")
        if boxed and (not re.search(r"[\d\\]", content) or has_words(normalized(content)) and not is_final):
            continue  # "this answer is 100% correct" is no other answer than the box
        return Statement(content, "answer")
    return _last_boxes(text, boxed, members) if boxed else Statement(_last_sentence(text), "text")


def is_asserted(text: str, introduction: str | None, start: int, end: int) -> bool:
    """Return whether a response states an answer in its own name, without a condition, and does not take it back.
    text[start:end] states it. The words of its `introduction` ("answer is") and those before it in its clause must be
    of the closed list above. A box needs no introduction (None): then nothing may deny it in its clause."""
    sentence = _SENTENCE_END.split(text[:start])[-1]
    clause = re.sub(r"\\[a-zA-Z]+", "", _CONCLUSION.split(sentence)[-1])
    if introduction is not None:
        words = set(re.findall(r"[a-zà-ÿ]+", (clause + introduction).lower())) - _ANSWER
        words |= set(re.findall(r"[\u4e00-\u9fff]", clause)) - _HAN_OF_AN_ASSERTION
        if words - _OF_AN_ASSERTION or _CONDITION.search(sentence) or re.search('["“”„«»]', clause):
            return False
    elif _DENIED_BOX.search(clause) or re.search(r"\b[pP]rovided\b", sentence):
        return False
    return not _TAKEN_BACK.search(text[end:]) or bool(re.search(r"\b(?:my|the) answer (?:still )?stands\W*\Z", text))


def _last_boxes(text: str, boxed: list[Box], members: int) -> Statement:
    first = len(boxed) - 1 if len(boxed) != members else 0
    while first and BETWEEN_BOXES.fullmatch(text, boxed[first - 1].end, boxed[first].start):
        first -= 1
    chosen = boxed[first:]
    contents = [without_boxes(box.content or "").strip() for box in chosen]
    if not all(contents):
        return Statement("", "box")
    joined = contents[0]
    for before, box, previous, content in zip(chosen, chosen[1:], contents, contents[1:], strict=False):
        is_choice = _OR.search(text[before.end : box.start]) is not None
        if content != previous or is_choice:
            joined += (" or " if is_choice else ", ") + content
    end = chosen[-1].end
    inside = _FORMULA_BEFORE.search(text, 0, chosen[0].start) or _FORMULA_BEHIND.match(text, end)
    cases = {box.content for box in boxed[max(first - 1, 0) : first + 1] if _CASE.search(text, 0, box.start)}
    is_part = inside and "=" not in text[end:].partition("\n")[0]
    behind = _BEHIND_A_BOX.match(text, end)
    is_limited = behind is not None and _LIMITED.match(behind[2]) is not None
    if is_part or is_limited or len(cases) > 1 or not is_asserted(text, None, chosen[0].start, end):
        return Statement("", "box")
    sign, unit = (behind[1] or "", behind[2].strip(" $.")) if behind else ("", "")
    return Statement(
        joined + (sign.strip() or (f" {unit}" if unit and split_unit(f"1 {unit}")[0] == "1" else "")), "box"
    )


def _last_sentence(text: str) -> str:
    """Return the last sentence with a formula, or the last of all where one behind it takes it back."""
    if _LIST_ITEM.search(text):
        return ""
    text = _ROOTS.sub(lambda match: "\n" + re.sub(r"\s*\n[-*•\s]*", ", ", match[0].strip(" \n-*•")), text)
    text = _CHECK.sub(lambda match: match[0] if _TAKEN_BACK.search(match[0]) else "", text)
    sentences = [part.strip() for part in re.split(r"(?<=[.!?])\s+(?!= )|\n", text) if part.strip()]
    if any(map(_NO_ANSWER.search, sentences)) or sentences and is_cut_off(sentences[-1]):
        return ""
    for sentence in reversed(sentences):
        if _GOES_ON.search(sentence):
            return ""
        sentence = re.sub(r"(?<=[a-z])!$", "", sentence)  # "nine!" is no factorial
        is_reason = _REASON.match(sentence) and not _TAKEN_BACK.search(sentence)
        if (sentence.endswith("?") or is_reason) and len(sentences) > 1:
            continue
        plain = normalized(sentence.rstrip(".;"))
        if re.search(r"[\d\\]", plain) or _DOUBT.search(plain) or len(sentences) == 1:
            return sentence.rstrip(".;")
    return ""


def stated_formula(statement: Statement) -> str | None:
    """Return the formula that a statement gives, with its unit, or its words where it has no formula; None where it
    gives none, or not for certain."""
    written = _NTH.sub("nth", _DATE.sub(r"\2 \1", statement.text))
    text = normalized(re.sub(r"^#+ |^> (?=\*)|^\\\[|\\\]$|(?<!\\right)(?<!\.)\.$|[,;]+$", "", written.strip()))
    text = _COMES_TO.sub("is", _IN_ALL.sub("altogether", _OPENING.sub("", text)))
    text = re.sub(r"(?:n't|\bnot) [^.;]*,? but (?:rather )?(?=\$?-?[\d\\])", " is ", text)
    text = _ARTICLE.sub("the ", _AMOUNT_OF.sub("", _NEEDED.sub(r"\1", text)))
    links = _IMPLIES.split(text)
    if all(re.search(r"[=<>]|\\[lg]e", link) for link in links) and not has_words(" ".join(links)):
        text = links[-1].strip()  # "2x = 6 ⇒ x = 3"
    if text.endswith("?") or not text or statement.kind != "box" and ORDINAL.search(written):
        return None
    if not has_words(text) or not any(map(is_formula, text.split())):
        return text
    if ORDINAL.search(written) or statement.kind == "text" and _ABOUT_THE_ANSWER.search(text):
        return None
    text = _IN_ONE_PIECE.sub(lambda match: match[0].replace(" ", "~"), text)
    remarks = [match[0] for match in _REMARK.finditer(text)]
    denied = [remark for remark in remarks if _DENIES_OTHERS.match(remark)]
    if any(_OR.search(remark) or _DOUBT.search(remark) for remark in remarks if remark not in denied):
        return None
    text = _NAMED_TERMS.sub("", _REMARK.sub("", text))
    head, _, details = text.partition(": ")
    formulas = [sum(map(is_formula, part.split())) for part in (head, details)]
    if formulas[0] and formulas[1] > 1 and not re.search("[<=>]", details):
        text = head if has_verb(head) or "altogether" in head else text  # "14 bricks are needed: 7 rows with 2 each"
    clauses = [clause.strip() for clause in _CLAUSE.split(text) if clause.strip()]
    clauses = [clause for clause in clauses if not _ASIDE.match(clause) or clause[:5] == "with " and has_verb(clause)]
    if statement.kind == "text":  # what is said last counts, and nothing may follow it
        *before, last = clauses or [""]
        is_name = last.startswith("the ") and not has_verb(last) and has_verb(" ".join(before[-1:]))
        is_short = before != [] and (is_name or len(last.split()) < 3) and not changes_value(last)
        clauses = before[-1:] if is_short and not any(map(is_formula, last.split())) else clauses[-1:]
        last = re.split(r"[,;]\s(?:not (?=\$?[-\d]))?", re.sub(r"[,;]\snot [a-z].*", "", text))[-1]
        if _DOUBT.search(last) and not last.startswith(("since", "because")):  # "Let me guess: 12"
            return None
    stating = [clause for clause in clauses if any(map(is_formula, clause.split()))]
    if len(stating) != 1 or any(_DOUBT.search(clause) for clause in clauses):
        return None
    if any(map(changes_value, clauses[clauses.index(stating[0]) + 1 :])):
        return None
    formula = Clause(stating[0]).formula()
    if formula is None or any(formula in remark for remark in denied):
        return None
    return normalized(formula.replace("~", " "))


def repeated_result(text: str) -> str | None:
    """Return the result of a text's last computation, with its unit, where what follows names it again and no other
    number: "12 - 5 = 7, so the red team is ahead by 7 points". What it is called then needs no grammar."""
    text = normalized(text)
    computed = [*_COMPUTED.finditer(text)]
    if not computed:
        return None
    value, behind = computed[-1][1], text[computed[-1].end() :]
    repeated = re.search(rf"([^\s.]*) \\?\$?({re.escape(value)}(?: ?%| [a-z/]+)?)(?![\w/]|[.,]\d)\s?(\w*)", behind)
    doubts = (_DOUBT, _TAKEN_BACK, _GOES_ON, _NOT_SO_FAR)
    if repeated is None or {*_AMOUNT.findall(behind)} != {value} or any(doubt.search(behind) for doubt in doubts):
        return None
    word, formula, next_word = repeated.groups()
    if is_known(word) or changes_value(f"{word} {formula} {next_word}"):
        return None
    return formula if split_unit(formula)[1] else value


def alternatives(text: str) -> list[str]:
    """Return the answers of which a statement offers one: "1 or 2" is two."""
    return [part.strip(" ,$") for part in _OR.split(text) if part.strip(" ,$")]


def says(text: str, words: str) -> bool:
    """Return whether the last clause of a text ends with these words, without a formula, and asserts them."""
    asserted = normalized(re.sub(r",? (?:because|since) [^.\n]*", "", text)).strip()
    clause = re.split(r"(?<=[.!?])\s+|\n+|[,;:]\s", asserted)[-1].strip(" .!*_").casefold()
    first = _YES_OR_NO.search(text)
    if first is not None:
        return first[1].casefold() == words.casefold()
    clause, words = (_NO_SOLUTION.sub(r"\1", text.removesuffix(" there")) for text in (clause, words.casefold()))
    before = clause.removesuffix(words)
    compared = r"\W{1,3}\w+ (?:the )?(?:most|first|\w+est|(?:more|\w+er)(?! \w* ?than))\b.*\Z"
    superlative = rf"(?:^|[.!?\n,] ?|so )\W*{re.escape(words)}{compared}"
    if (named := re.search(superlative, text, re.I)) and not is_doubtful(named[0]) and not _NOT_SO_FAR.search(named[0]):
        return True
    is_part = re.search(r"(?:(?:\b(?:and|or)|[^\w\s]) |\S)\Z", before)  # "even and odd", "Ana < Ben", "uneven"
    return before != clause and is_part is None and not is_doubtful(before)


def is_doubtful(text: str) -> bool:
    """Return whether a statement is negated, or in doubt."""
    return _DOUBT.search(re.sub(r"[-+*] ?\\[lc]?dots ?[-+*]", "+", text)) is not None
