r"""The statement of a response that is its answer, and the formula in it: "so the total is 5 apples" states 5.

Only what is certain is read: a number in words that the lists below do not know is no answer.
"""

import itertools
import re
from typing import NamedTuple

from grpo_mcore.environments.math.spellings import normalized
from grpo_mcore.environments.math.units import OTHER_SCRIPTS, split_unit

_BOX = re.compile(
    r"\\?(?:\\(?:boxed|fbox|framebox|Boxed|ovalbox|shadowbox|doublebox|tcboxmath|bbox|mathbox|colorbox\s*\{[^{}]*\}|"
    r"fcolorbox\s*\{[^{}]*\}\s*\{[^{}]*\})|(?<![a-zA-Z\\])boxed(?=\{))\s*(?:\[[^\]]*\]\s*){0,2}"
    r"(?:(\{)|([^\s{}\\a-zA-Z]))"
)
BETWEEN_BOXES = re.compile(
    r"(?:\s|[,;&$]|\\[,;:!()\[\] ]|\\q?quad(?![a-zA-Z])|\\\\|\band\b|\bor\b|\\text\{\s*,?\s*(?:and|or)?\s*\}|"
    r"(?<![a-zA-Z])[a-zA-Z](?:_\{?\w\}?)?\s*=)*"
)
_BEHIND_A_BOX = re.compile(r"[ \t$]*(?:\\\)|\\\])?(\s*(?:_\{?\d+\}?|\\?%|percent\b))?([^\n]*)")
# A box that is part of a formula, as in "-\boxed{5}" and "\boxed{5} + C"; "2 + \boxed{5} = 7" fills a gap.
_FORMULA_BEFORE = re.compile(r"(?:\d|-|\w\s*[*/^<>]\s*|[\d)}=]\s*[-+]\s+|\\(?:times|cdot|[lg]eq?)\s*)(?<!=>)(?<!=> )\Z")
_FORMULA_BEHIND = re.compile(r"\s*(?:\^|\\pm|/\s*\d|(?:[-+*]|\\times|\\cdot)\s*(?:[\d\\(]|[a-zA-Z]\b))")
_CASE = re.compile(r"(?:\A|[.;,\n])\W*(?:if|when|for)\b[^.;\n]*\Z", re.IGNORECASE)
_LIMITED = re.compile(r"[^.,;!?]*\b(?:if|unless|otherwise|bound|at (?:least|most)|or (?:more|less|fewer))\b")
_OR = re.compile(
    r"(?:\s*\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:or|oder|ou)\s*\}|,?(?<![a-zA-Z\\])\s*\b(?:or|oder|ou)\b|"
    r"\\(?:lor|vee)(?![a-zA-Z])|或者?)\s*"
)
_ANSWER_WORD = re.compile(
    r"(?:\b(?:answers?|antwort|réponse|respuesta)\b[^\n.:=\\$]{0,60}?(?:\b(?:is|are|equals|be|ist|lautet|est|es)\b|[:=→⇒])|"
    r"^[^\w\n]*(?:final )?answer[^\w\n]*$|####|(?:答案|答え|正解|정답|답)[\s*]*(?:就?是|[为為]|は|은|는)?)[\s:*_=]*",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(
    r"([.!?])(?=[*_]*(?:\s|$))(?!(?<=\d!)\s*[-=+*/\\^<>()]|(?<=\b[A-J]\.)[\s*]+[-\d\\$])|[\n。！？；]"
)

# The words with which a response states an answer in its own name: "So our final answer", "Die richtige Antwort".
_OF_AN_ASSERTION = set(
    "so then thus hence therefore and but however now finally overall ultimately consequently in conclusion summary "
    "short as expected required claimed computed shown above before indeed "
    "total the our my this a final correct right best required desired requested needed exact numerical "
    "simplified complete that is means gives we i it get have find found see conclude obtain say think believe "
    "only clearly obviously definitely d ll s am m confident sure certain convinced follows know can must answer "
    "option choice letter key to question problem exercise task puzzle be are equals would should will been het il o "
    "der die das lautet also daher somit deshalb damit ist richtige korrekte endgültige "
    "la le les el los donc ainsi alors bonne correcte correcta bonnes finale réponse est por lo tanto así que "
    "entonces respuesta es resposta correta risposta corretta".split()
)
_CONDITION = re.compile(
    r"\b(?:if|unless|suppose|assum\w+|let|were|when|whether|provided|according|"
    r"imagine|pretend|for (?:instance|example|\$?[a-z] ?=)|wenn|falls|angenommen|"
    r"si|supposons|supongamos)\b",
    re.IGNORECASE,
)
_HAN_OF_AN_ASSERTION = set(
    "所以因此故则综上述最终后正确的是我们得到可知这道题本问应該该选择为结论从而那么答案最終結論正確但"
)
# With one of these a word of Chinese, Japanese or Korean states the number behind it; 接近 and 约 do not.
_BEFORE_A_NUMBER = set("剩是为為有于於共计計得到即成案值はがも은는이가")
_ANSWER = set("answer answers antwort réponse respuesta resposta risposta antwoord".split())
_NO_ANSWER = re.compile(
    r"\b(?:no answer|give up|(?:don't|do not|cannot|can't|not) (?:know|say|sure|determine|be determined|solve|find|"
    r"tell|compute))\b",
    re.IGNORECASE,
)
_DISPLAYED = re.compile(r"\\begin\s*\{(\w+\*?)\}.*?\\end\s*\{\1\}|\$\$.*?\$\$|\\\[.*?\\\]", re.DOTALL)
_END_OF_DISPLAY = re.compile(r"(?<!\\)[.,;]\s*(?=(?:\$\$|\\\]|\\end\s*\{\w+\*?\})\Z)")
_CHECK = re.compile(r"(?<=\S)\s*\n\W*(?:verification|check|to (?:verify|check))\b.*\Z", re.IGNORECASE | re.DOTALL)
_PART_OF = re.compile(
    r"(?<=[^/.\d\\]\d)(?<!\bof \d) of (?:the |these |those |his |her |their |all )?\d+(?= [a-z])|"
    r"(?<=[a-z]) (?:in|within) \d+ (?:second|minute|hour|day|week|month|year)s?(?=[.\s]*\Z)"
)
_GOES_ON = re.compile(r"\b(?:need|have|want|remains?|going) to (?:compute|find|calculate|determine|solve|check|get)\b")
_LIST_ITEM = re.compile(r"\n\s*\d+[.)]\s+\S+\s*\Z")  # one of several candidates, or of the steps
_CONCLUSION = re.compile(r"[,:;]\s|\b(?:so|hence|thus|therefore|and)\s", re.IGNORECASE)
_REFUSED = "wrong|incorrect|rejected|discarded|extraneous|impossible"
_DENIED = rf"(?:not|false|mistaken|invalid|{_REFUSED}|(?:a|an|my|the) (?:mistake|error)|falsch|fausse?|falsa|falso)\b"
# What a response says behind its answer where it takes it back: "No, that fails.", "Wait ...", "which is false".
_TAKEN_BACK = re.compile(
    rf"(?:^|[.!?:;,(\n—–-])[\W_]*(?:(?:no,? )?wait|hold on|edit\b|though|nope|hmm+|oops|sorry|correction|actually|"
    rf"scratch that|on second thought|just kidding|or rather|i disagree|i (?:made|was)|let me (?:re|correct|fix|try)|"
    rf"(?:but|however,?) (?:that|this|it|i|the|he|she|they)\b|(?<!^)(?:no|nein|non)(?=\s*[,.;:!—–]))|"
    rf"(?:^\W*|\b(?:this|that|which|it|he|she|they|book|answer|result|value)\s+)(?:is|are|was|were|ist|est|es)\s+{_DENIED}|"
    rf"\((?!\W*[A-J]\b)[^()]{{0,20}}\b(?:wrong|incorrect|false|not)\b|"
    rf"\b(?:this|that|it|which|check\w*)(?:: this)? fails\b|[不错錯]对?",
    re.IGNORECASE,
)

# A denial or a doubt: no answer is read from a clause with one of these.
_DOUBT = re.compile(
    rf"\b(?i:not|no|never|neither|nor|cannot|can be|fails?|failed|without|maybe|perhaps|possibly|might|could|guess|"
    rf"bound|hoped|tried|ends? in|estimates?|depends?|doubt|{_REFUSED}|your|assume|suppose|whether|if|unless|unknown|"
    r"unclear|otherwise|except|give or take|note|recall|want|prove|nicht|kein|pas|non|não|не|niet|inte|nie)\b|\bmay\b|"
    r"n't\b|\?|\\(?:ne|not|[lc]?dots)(?![a-zA-Z])|\.\.\.|[不没沒非未吗]|ではな|ではあ|じゃな|아니|아닙|않|至少|至多|最多|最少|"
    r"大于|小于|多于|少于|超过|超過|可能|也许|以上|以下|이상|이하|초과|미만|보다|(?<=\d) ?[的の]"
)
_CLAUSE = re.compile(
    r"(?<=\w):\s+|[,;:]\s+(?!(?:and|or)\b(?!\s(?:not|it)\b))(?=i\.e|[^\W\d_A-Z]{2})|"
    r"\sand (?=(?:so|hence|thus|therefore)\b)|\s(?=(?:because|since|so|but|and not|rather than|instead of|which)\b)"
)
_ASIDE = re.compile(
    r"(?:because|since|as|which (?:is|are|was|were)|whose|where(?= \S+ (?:is|are|=|denotes)\b)|not|and not|rather than|"
    r"instead of|(?:and )?it (?:occurs|happens)|attained|achieved|reached)\b"
)
# How a clause begins that explains the answer before it. Any other may change it: "5, plus a constant".
_EXPLAINS = re.compile(
    r"(?:so|hence|thus|therefore|by|from|using|given|due|after|and|but|while|i\.?e|that is|namely|meaning|making|"
    r"giving|counting|including|in (?:all|total)|the (?:one|number|value|sum|answer)|it|this|they|we)\b"
)
_REMARK = re.compile(r"\s\((?=[^()]*[^\W\d_]{3})([^()]*)\)")
_ARTICLE = re.compile(r"\b[aA]n? (?!and\b|or\b)(?=[^\W\d_]{2}|\d)")
_TOTAL = re.compile(
    r"\b(?:(?:(?:an?|the) )?(?:grand )?total|an? (?:[a-z]+ )?(?:profit|loss|distance|speed|area|perimeter|volume|"
    r"length|height|width|radius|discount|probability|balance|score|average|cost|price|sum)) of\b|"
    r"\b(?:comes|adds|sums|turns|boils) (?:out|up|down) to\b|\bleft with\b"
)
_PRONOUN = re.compile(r"\bI (?!and\b|or\b)(?=[a-z]{2})")
_OPENING = re.compile(
    r"^(?:(?:in (?:conclusion|summary|short|total|all|the end)|finally|overall|to (?:summarize|conclude)),?|"
    r"[综上所述因此以故答于是由此得可知最终后したがって]+,|(?:since|after|with|by|[a-z]+ing)\s[^\d\\,]+,)\s",
    re.IGNORECASE,
)
ORDINAL = re.compile(r"\d(?:\W|text)*(?:st|nd|rd|th)\b")
_NTH = re.compile(r"\bthe \$?\d+\W{0,3}(?:st|nd|rd|th)\W* (?=\w+\b.* (?:is|equals|=) )", re.I)
_ABOUT_THE_ANSWER = re.compile(r"\banswers?\b.*\d|^(?:If|Unless)\b")

# Words by what they do to the number behind or before them.
_COPULA = re.compile(r"is|are|was|were|be|been|ist|est|es|è|é|(?:it|that|there|s?he)'s")
# A verb that leaves the value of its object as it is, as far as it can be told: "exceeds 5" does not state 5.
_BASE = (
    r"(?!capp|exceed|round|approach|guess|reduc|exclud|shift|increas|decreas|rais|divid|multipli|add|avoid|miss|lack|los|"
    r"differ|call|say|claim|think|believ|consider|subtract|suggest|argu|expect|want|besides|minus|plus|times|less|thus|"
    r"hop|omit|surpass|contradict|perhaps|versus|across|towards|unless|precede|follow|double|triple|square|halve)[a-z]{3,}"
)
_VERB = re.compile(
    r"have|had|gave|get|got|obtain|make|made|making|leave|left|leaving|giving|need|pay|paid|found|that|took|will|would|"
    rf"bought|sold|spent|ate|read|ran|drove|reste|bleib(?:en|t)|quedan?|hat|ont|tienen?|beträgt|gilt|vaut|осталось|равн[ао]|что|{_BASE}ed"
)
_WITH_SUBJECT = re.compile(rf"has|{_BASE}s")
_MODAL = re.compile(
    r"\b(?:we|they|you|will|would|must|should|shall|can|(?:ha[sd]|have|needs?|able|going) to)(?: each| now| still)?$"
)
_FILLERS = set(
    "the a an exactly precisely simply just only now then thus therefore hence so clearly indeed equal to number value "
    "integer answer final result total of in all about approximately roughly around also still finally definitely each "
    "consequently accordingly certainly actually either both that we it there us him her them you me he she they at as "
    "another length namely donc also quindi 따라서".split()
)
_TAIL = set(
    "in all total altogether together overall combined left remaining away long wide high tall old more exactly is are "
    "respectively now today the answer correct required as well per a an of for square cubic us each to do so such "
    "was were".split()
)
_CIRCUMSTANCE = re.compile(
    r"\b(?:of|at|on|for|every|each|per|this|with|during|in [A-Z]\w+|(?:in|from|by) (?:the|an?|his|her|their|its)|"
    r"as (?!many|much|few|well)[a-z]+|to (?!the\b)[a-z]{3,}|satisf(?:y|ies)|works?|suffices?|(?:are|were) (?!the)\w+|"
    rf"(?<=[a-z] ){_BASE}ed)\b.*"
)
_ABOUT = re.compile(r"\b(?:about|approximately|roughly|around)\b|[约約]|大概|接近")
_COUNTS = re.compile(
    r"hal(?:f|ves)|thirds?|quarters?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?|zeroe?s|ones|twos|threes|"
    r"fours|fives|sixes|sevens|eights|nines|tens|dozens?|digits|gross|list|score|percentile|first|off|too|consider|out|of|"
    r"times|least|most|less|fewer|best|or|point|up|than|plus|minus|over|divided|multiplied|added|subtracted|increased|"
    r"decreased|raised|doubled|tripled|halved|squared|cubed|factorial|modulo|spelled|written|read|reversed|inverted|"
    r"appended|(?:back|up|down)wards"
)
_PLURAL = re.compile(r"(?:s|people|children|men|women|feet|mice|teeth|fish|sheep|percent|money)$")
_OTHER_CLAIM = re.compile(r"\b(?:is|was|(?:are|were) the)\b(?!.*\b(?:answer|result|solution|left|remaining)\b)")
_PARTITIVE = re.compile(r"\bof (?:them|these|those|us|it)\b|\bin (?:all|total)\b")
_SHORT_WORDS = set("of to or is it we so he no if as at be us my by in on an up do".split())
_FORMULA_WORDS = set("gcd lcm max min".split())
_LISTED = {"and": ",", "和": ",", "と": ",", "와": ",", "과": ","}
_LISTED |= dict.fromkeys(("or", "或", "または", "또는", "oder", "ou", "o", "или"), " or")


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


def last_statement(text: str) -> Statement:
    """Return what a response says last: its last box, with the boxes right before it, or what follows "the answer is",
    "Answer:" or "####" where that comes later; else its last sentence with a formula. A box that is empty or not closed
    is an empty statement."""
    text = _DISPLAYED.sub(lambda match: _END_OF_DISPLAY.sub("", match[0].replace("\n", " ")), text)
    boxed = boxes(text)
    end = boxed[-1].end if boxed else 0
    for match in reversed(list(_ANSWER_WORD.finditer(text))):
        behind = text[match.end() :]
        if match.end() < end or behind.lstrip("$\\([ ").startswith(("boxed", "fbox")):
            break
        content, mark, *_ = _SENTENCE_END.split(behind, maxsplit=1) + [None]
        content = content.strip() if content.count("**") == 2 else content.strip().strip("*_ ")
        if not content or mark == "?" or _DOUBT.search(match[0]):  # "the answer is 5? No, ..." states nothing
            continue
        if not is_asserted(text, match[0], match.start(), match.end()):
            return Statement("", "answer")
        if boxed and (not re.search(r"[\d\\]", content) or _words(normalized(content))):
            continue  # "this answer is 100% correct" is no other answer than the box
        return Statement(content, "answer")
    return _last_boxes(text, boxed) if boxed else Statement(_last_sentence(text), "text")


def is_asserted(text: str, introduction: str | None, start: int, end: int) -> bool:
    """Return whether a response states an answer in its own name, without a condition, and does not take it back.
    text[start:end] states it. The words of its `introduction` ("answer is") and those before it in its clause must be
    of the closed list above. A box needs no introduction (None): then nothing may deny it in its clause."""
    sentence = _SENTENCE_END.split(text[:start])[-1]
    clause = re.sub(r"\\[a-zA-Z]+", "", _CONCLUSION.split(sentence)[-1])
    if introduction is not None:
        words = set(re.findall(r"[a-zà-ÿ]+", (clause + introduction).lower())) - _ANSWER
        words |= set(re.findall(r"[\u4e00-\u9fff]", sentence)) - _HAN_OF_AN_ASSERTION
        if words - _OF_AN_ASSERTION or _CONDITION.search(sentence) or re.search('["“”„«»]', clause):
            return False
    elif _DOUBT.search(clause) or re.search(r"\b[pP]rovided\b", sentence):
        return False
    return _TAKEN_BACK.search(text[end:]) is None


def _last_boxes(text: str, boxed: list[Box]) -> Statement:
    first = len(boxed) - 1
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
    if is_part or len(cases) > 1 or not is_asserted(text, None, chosen[0].start, end):
        return Statement("", "box")
    behind = _BEHIND_A_BOX.match(text, end)
    if behind and _LIMITED.match(behind[2]):
        return Statement("", "box")
    sign, unit = (behind[1] or "", behind[2].strip(" $.")) if behind else ("", "")
    return Statement(joined + (sign.strip() or (f" {unit}" if split_unit(f"1 {unit}")[1] else "")), "box")


def _last_sentence(text: str) -> str:
    """Return the last sentence with a formula, or the last of all where one behind it takes it back."""
    if _LIST_ITEM.search(text):
        return ""
    text = _PART_OF.sub("", _CHECK.sub(lambda match: match[0] if is_doubtful(match[0]) else "", text))
    sentences = [part.strip() for part in re.split(r"(?<=[.!?])\s+|\n", text) if part.strip()]
    if any(_NO_ANSWER.search(sentence) for sentence in sentences):
        return ""
    for sentence in reversed(sentences):
        if _GOES_ON.search(sentence):
            return ""
        if sentence.endswith("?") and len(sentences) > 1:
            continue
        plain = normalized(sentence.rstrip(".;"))
        if re.search(r"[\d\\]", plain) or _DOUBT.search(plain) or len(sentences) == 1:
            return sentence.rstrip(".;")
    return ""


def stated_formula(statement: Statement) -> str | None:
    """Return the formula that a statement gives, with its unit, or its words where it has no formula; None where it
    gives none, or not for certain."""
    written = _NTH.sub("the ", statement.text)
    text = normalized(re.sub(r"^#+ |(?<!\\right)(?<!\.)\.$|[,;]+$", "", written.strip()))
    text = _OPENING.sub("", text)
    text = _ARTICLE.sub("the ", _PRONOUN.sub("we ", _TOTAL.sub("is", text)))
    if text.endswith("?") or not text:
        return None
    if statement.kind != "box" and ORDINAL.search(written):
        return None
    if not _words(text):
        return text
    if not any(_is_formula(token) for token in text.split()):
        return text
    if ORDINAL.search(written) or statement.kind == "text" and _ABOUT_THE_ANSWER.search(text):
        return None
    remarks = _REMARK.findall(text)
    if any(_OR.search(remark) or _DOUBT.search(remark) for remark in remarks):
        return None
    clauses = [clause.strip() for clause in _CLAUSE.split(_REMARK.sub("", text)) if clause.strip()]
    clauses = [clause for clause in clauses if not _ASIDE.match(clause)]
    if statement.kind == "text":  # what is said last counts, and nothing may follow it
        clauses = [clause for clause in clauses if " " in clause or _is_formula(clause)][-1:]
        if _DOUBT.search(re.split(r"[,;]\s", text)[-1]):  # "Let me guess: 12"
            return None
    stating = [clause for clause in clauses if any(map(_is_formula, clause.split()))]
    if len(stating) != 1 or any(_DOUBT.search(clause) for clause in clauses):
        return None
    if not all(map(_EXPLAINS.match, clauses[clauses.index(stating[0]) + 1 :])):
        return None
    formula = _formula_of_a_clause(stating[0].split(), statement.kind == "text" or text[0].isupper())
    return None if formula is None else normalized(formula)


def _formula_of_a_clause(tokens: list[str], is_sentence: bool) -> str | None:
    """Return the formula, or the list of formulas, behind the last verb of a clause, with its unit."""
    words, is_formula = [_word(token) for token in tokens], [_is_formula(token) for token in tokens]
    if True not in is_formula:
        return None
    end = len(tokens) - is_formula[::-1].index(True)
    start = 0
    for index in range(end - 1):
        word, is_stated = words[index], start and _COPULA.fullmatch(words[start - 1])
        is_verb = _COPULA.fullmatch(word) or _VERB.fullmatch(word)
        if not is_verb and index and is_sentence and not is_stated:
            is_modal = _MODAL.search(" ".join(words[:index])) is not None
            is_verb = re.fullmatch(_BASE, word) if is_modal else _WITH_SUBJECT.fullmatch(word)
        if is_verb or tokens[index] in ("=", ":") and index and not is_formula[index - 1]:
            start = index + 1
    first = is_formula.index(True, start)
    has_object = start and end < len(tokens) and not _COPULA.fullmatch(words[start - 1])  # "It took Anna 8 days"
    before = {_word(token) for token in tokens[start:first] if not (has_object and token.istitle())}
    before = {word for word in before if re.search(r"[^\W\d_]", word)}
    if not all(word[-1] in _BEFORE_A_NUMBER for word in before - _FILLERS):
        return None
    if not all(is_formula[index] or words[index] in _LISTED for index in range(first, end)):
        return None
    formula = tokens[first]
    for index in range(first + 1, end):
        formula = f"{formula} {tokens[index]}" if is_formula[index] else formula.rstrip(",") + _LISTED[words[index]]
    formula, behind = formula.rstrip(".,;:"), " ".join(token.strip(".,;:!()\"'") for token in tokens[end:])
    if re.fullmatch(r"-?\d+", formula) and _ABOUT.search(" ".join(words[:first])):
        return None  # a decimal may be rounded as the question asks; about 5 is a guess
    if _OTHER_CLAIM.search(behind):
        return None
    if not _is_tail(_PARTITIVE.sub("", behind).split(), formula) and behind != "times":
        return None
    with_nouns = [*itertools.accumulate([formula, *(token.strip(".,;:!") for token in tokens[end:])], "{} {}".format)]
    return next((text for text in reversed(with_nouns) if split_unit(text)[1] and not _words(text)), formula)


def _is_tail(words: list[str], formula: str) -> bool:
    """Return whether words behind a formula leave its value as it is: what is counted ("red apples"), a unit, and words
    of a closed list; "every day at the market" does, too. A word that counts ("zeros", "tenths") does not."""
    if any(_COUNTS.fullmatch(word.lower()) and word not in _TAIL for word in words):
        return False
    nouns = [word for word in _CIRCUMSTANCE.sub("", " ".join(words)).split() if word.isascii() and word not in _TAIL]
    return len(nouns) <= 2 and (not nouns or formula in ("1", "-1") or _PLURAL.search(nouns[-1]) is not None)


def _word(token: str) -> str:
    return token.strip(".,;:!()\"'").lower()


def _is_formula(token: str) -> bool:
    """Return whether a token between spaces is part of a formula instead of a word."""
    if re.search(r"[\d\\]", token):
        return True
    if re.search(f"[{OTHER_SCRIPTS}]", token):
        return False
    word = re.fullmatch(r"[^\w\\]*([^\W\d_]+)(?:[/'’-][^\W\d_]+)*['’]?[^\w\\]*", token)
    if word is None:
        return True
    is_variable = len(word[1]) < 3 and word[1].lower() not in _SHORT_WORDS
    return is_variable or word[1].lower() in _FORMULA_WORDS or re.fullmatch("[IVX]+", word[1]) is not None


def _words(text: str) -> bool:
    """Return whether there are words beside the formulas of a text and its unit."""
    number, unit = split_unit(text)
    return not all(map(_is_formula, (number if unit else text).split()))


def alternatives(text: str) -> list[str]:
    """Return the answers of which a statement offers one: "1 or 2" is two."""
    return [part.strip(" ,$") for part in _OR.split(text) if part.strip(" ,$")]


def is_doubtful(text: str) -> bool:
    """Return whether a statement is negated, or in doubt."""
    return _DOUBT.search(text) is not None
