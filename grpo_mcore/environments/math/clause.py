"""The formula that a clause states: 6 tickets, of "Tom can buy 6 tickets at $5 each".

The grammar rests on words of closed classes, as prepositions and copulas. All others are nouns, verbs or adjectives; of
these only a few are known, since they change the value of a number beside them: "exceeds 5", "5 dozen".
"""

import itertools
import re

from grpo_mcore.environments.math.units import OTHER_SCRIPTS, split_unit

_COPULAS = set(
    "is are was were be been being worth it's that's there's he's she's ist sind est es son sono è é são".split()
)
_PREPOSITIONS = set(
    "of in at on for with during from by to as per after before since until once within without between among under "
    "into than over through towards toward against across around like vs von vom im am auf mit für bei zu nach aus als "
    "de du des dans en pour avec par sur con por para da do di su que if when while where because so although".split()
)
_RELATIVE = set("that which who whose whom where when while if because so once after before until although".split())
_CLOSED = set(
    "the this that these those his her its our their my your and or but then i we you he she it they there who every "
    "whom whose which has have had do does did will would must should can shall not no und et".split()
)
_NO_NOUN = _PREPOSITIONS | _CLOSED | _COPULAS
# What may stand between a verb and the number that it governs.
_FILLERS = set(
    "the only just now also still thus therefore hence indeed equal number value integer answer result total each all "
    "both already always us him her them me you my this these those it they other another some additional further "
    "together altogether instead again namely then so length donc also quindi exactly precisely simply finally dus "
    "clearly consequently accordingly certainly actually definitely about approximately roughly around ihre".split()
)
# A verb with which a bare number states a value: "yields 5". With others it may be anything: "tests 5", "precedes 5".
_YIELDS = re.compile(
    r"equals?|gives?|gave|giving|yields?|gets?|got|obtain(?:ed)?|finds?|found|ha[sd]|have|having|mak(?:es?|ing)|made|"
    r"becomes?|became|totals|leav(?:es?|ing)|left|need(?:s|ed)?|pa(?:ys?|id)|costs?|takes?|took|spent|reach(?:es|ed)?|"
    r"scored|measures?|reads?|vaut|reste|bleib(?:en|t)|quedan?|hat|ont|tienen?|beträgt|gilt|lautet|осталось|равн[ао]|что"
)
# Words of arithmetic, of trial and of measure: the number beside one is not the value of what the clause is about.
_CHANGES = re.compile(
    r"(?:exceed|reduc|add|subtract|multipl|divid|doubl|tripl|squar(?=ed)|halv|round(?=[ei])|lack|miss|los|exclud|"
    r"consider|recount|expect|want|hop|suppos|assum|substitut|check|test|tr[iy](?=[eyi]))(?:e?s|e?d|ing|e|y|ies|ied|ying)?|let|lost|try|rais(?:es?|ing)|"
    r"plus|minus|less|fewer|least|most|almost|off|short|below|above|up|out|too|twice|every|(?:back|up|down)wards|"
    r"zeroe?s|ones|nines|tens|dozens?|gross|digits|percentage|factorial|modulo|factor|case|option"
)
_COMBINES = re.compile("add|subtract|multipl|divi[ds]|compar|round|bound|(?:in|de)crease$|raise$")
_PLURAL = re.compile(r".*(?:s|people|children|men|women|feet|mice|teeth|fish|sheep|percent|money)")
_COMPARATIVE = re.compile(r"more|fewer|less|(?!altogether|together)[a-z]{3,}er")
_BEHIND = set("left remaining back altogether together overall total exactly each all square cubic now again".split())
_UNIT = re.compile(r"(?:[mck]m|kg|mg|ml|m[Ll]|ft|lbs?|oz|yd|hrs?)[.,;]?")
_MODAL = re.compile(r"ha[sd]|have|need(?:s|ed)?|able|manage[sd]?|going|ought|used|required")
_ABOUT = re.compile(r"\b(?:about|approximately|roughly|around)\b|[约約]|大概|接近")
_NOT_ENGLISH = set("dus ist sind est es son sono è é são hay ont tienen hat haben reste quedan il la le el der".split())
# With one of these a word of Chinese, Japanese or Korean states the number behind it; 接近 and 约 do not.
_BEFORE_A_NUMBER = set("要多少有用剩了で是为為有于於共计計得到即成案值はがも은는이가")
_SHORT_WORDS = {word for word in _NO_NOUN | _FILLERS if len(word) < 3} - {"i", "am"} | {"up", "un", "le", "la"}
_LISTED = {"and": ",", "和": ",", "と": ",", "와": ",", "과": ","}
_LISTED |= dict.fromkeys(("or", "或", "または", "또는", "oder", "ou", "o", "или"), " or")


def is_formula(token: str) -> bool:
    """Return whether a token between spaces is part of a formula instead of a word."""
    if re.search(r"[\d\\]", token):
        return not re.fullmatch(r"\d+-[a-z]{2,}(?:-[a-z]+)*,?", token)  # "a 520-page book"
    if re.search(f"[{OTHER_SCRIPTS}]", token):
        return False
    word = re.fullmatch(r"[^\w\\]*([^\W\d_]+)((?:[/'’-][^\W\d_]+)*)['’]?[^\w\\]*", token)
    if word is None or len(word[2]) > 3:
        return word is None
    return len(word[1]) < 3 and word[1].lower() not in _SHORT_WORDS


def has_words(text: str) -> bool:
    """Return whether there are words beside the formulas of a text and its unit."""
    number, unit = split_unit(text)
    return not all(map(is_formula, (number if unit else text).split()))


def has_verb(text: str) -> bool:
    """Return whether a verb of a text may state a value; the left of "3 left over" is none."""
    return any(_states(word) for word in text.split() if word != "left")


def changes_value(text: str) -> bool:
    """Return whether a clause may change the value of the number before it: "plus tax"."""
    return any(_CHANGES.fullmatch(word) for word in text.split())


def is_known(word: str) -> bool:
    """Return whether a number behind this word is known already, or part of a circumstance: "these 5", "of 5"."""
    return word.lower() in _PREPOSITIONS - {"by"} | {"the", "these", "those", "all", "both"}


def is_cut_off(text: str) -> bool:
    """Return whether a text ends within a clause: "we have to divide by"."""
    return text.split()[-1] in _NO_NOUN


def _states(word: str) -> bool:
    return word in _COPULAS or _YIELDS.fullmatch(word) is not None


class Clause:
    """The words of a clause in lower case, and which of its tokens are formulas."""

    def __init__(self, text: str) -> None:
        self.tokens = text.split()
        self.words = [token.strip(".,;:!()\"'").lower() for token in self.tokens]
        self.is_formula = [is_formula(token) and not _UNIT.fullmatch(token) for token in self.tokens]

    def formula(self) -> str | None:
        """Return the formula, or the list of formulas, that the clause states, with its unit: the object of its last
        verb; without one its subject; without either what a preposition gives, as in "sells for $5"."""
        words, chosen, role = self.words, slice(0, 0), ""
        for start, end in self._formulas():
            new, between = self._role(start, end), words[chosen.stop : start]
            if start > 1 and words[start - 1] in ("and", "or"):  # "15 boys and 8 girls"
                role = "unclear"
            elif role == "object" and (_RELATIVE & {*between} or new == "noun" and _PREPOSITIONS & {*between}):
                continue
            elif new in ("object", "noun") or new == "given" and role != "object" or new == "subject" and not role:
                chosen, role = slice(start, end), "object" if new == "noun" else new
            elif new == "unclear" and (role != "object" or "and" in between):
                role = new
        if role in ("", "unclear") or not self._is_tail(chosen.stop, " ".join(self.tokens[chosen]), role):
            return None
        is_plural = words[chosen.stop : chosen.stop + 1] in (["are"], ["were"], ["remain"])
        if role == "subject" and chosen.stop < len(words) and not is_plural and not self._is_counted(chosen.stop):
            behind = [word for word in words[chosen.stop : chosen.stop + 6] if word not in ("only", "other")]
            is_named = {"number", "value", "integer", "only", "other", "answer"} & {*words[: chosen.start], *behind}
            if not is_named and "=" not in "".join(self.tokens[chosen]):
                return None  # "5 is ruled out"
        formula = self.tokens[chosen.start]
        for index in range(chosen.start + 1, chosen.stop):
            token = self.tokens[index]
            formula = f"{formula} {token}" if self.is_formula[index] else formula.rstrip(",") + _LISTED[words[index]]
        formula = formula.rstrip(".,;:")
        if re.fullmatch(r"-?\d+", formula) and _ABOUT.search(" ".join(words[: chosen.start])):
            return None  # a decimal may be rounded as the question asks; about 5 is a guess
        nouns = itertools.takewhile(lambda noun: noun not in _PREPOSITIONS or noun is words[-1], words[chosen.stop :])
        stripped = (token.strip(".,;:!") for token, _ in zip(self.tokens[chosen.stop :], nouns, strict=False))
        with_nouns = [*itertools.accumulate([formula, *stripped], "{} {}".format)]
        return next((text for text in reversed(with_nouns) if split_unit(text)[1] and not has_words(text)), formula)

    def _formulas(self) -> list[tuple[int, int]]:
        """Return the start and end of each formula and of each list of formulas, without those of "the 2 of them" and
        "whose digits add up to 5"; of "the square of 3 = 9" the 9."""
        words, found, end = self.words, [], 0
        while True in self.is_formula[end:]:
            start = self.is_formula.index(True, end)
            end = start + 1
            while end < len(words) and (
                self.is_formula[end] or words[end] in _LISTED and any(self.is_formula[end + 1 : end + 2])
            ):
                end += 1
            if "=" in words[start:end] and words[start - 1 : start] == ["of"] and words[start].isdecimal():
                start = end - words[start:end][::-1].index("=")
            is_known = words[start - 1 : start] == ["the"] and words[end : end + 1] == ["of"]
            is_of_whose = "whose" in words[:start] and sum(map(_states, words[words.index("whose") : start])) < 2
            if start < end and not is_known and not is_of_whose:
                found.append((start, end))
        return found

    def _is_counted(self, end: int) -> bool:
        """Return whether a noun, or a part of something, follows a formula that ends there."""
        word = "" if end >= len(self.words) or self.is_formula[end] else self.words[end]
        return word != "" and (word not in _NO_NOUN or word == "of")

    def _role(self, start: int, end: int) -> str:
        """Return what a formula is in its clause, by the word that governs it: `object`; `subject`; `noun`, the object
        of a verb unless a preposition comes before; `given`, by a preposition; `unclear`, or nothing."""
        words, formula, head = self.words, " ".join(self.tokens[start:end]), start - 1
        while head >= 0 and (words[head] in _FILLERS or not words[head].strip("$=:")):
            if self.tokens[head].endswith(("=", ":")):
                return "object"
            if words[head] == "number" and words[max(head - 1, 0)] in {*_COPULAS, "number"}:
                return "unclear"
            head -= 1
        if head >= 0 and words[head] in ("equation", "line", "point", "interval"):
            is_or_at = [at for at in range(head) if words[at] in {*_COPULAS, "at", "on"}]  # "is the line x = 5"
            head = max(is_or_at, default=head - 1)
        if head < 0:  # "the 9 players" are known already
            return "unclear" if words[start - 1 : start] == ["the"] and end < len(words) else "subject"
        word, before = words[head], words[head - 1] if head else ""
        verb = next((other for other in reversed(words[:head]) if other not in _FILLERS), "")
        is_counted = self._is_counted(end) or split_unit(formula)[1] or ":" in formula
        if word in _COPULAS or self.tokens[head].endswith(("=", ":")):
            return "object"
        if word.endswith("ly") or _CHANGES.fullmatch(word):
            return "unclear"
        if word in _PREPOSITIONS or word == "year":
            behind = words[end] if self._is_counted(end) else ""
            time = r"(?:second|minute|hour|day|week|month|year)s?|(?:1[5-9]|20)\d\d"
            is_given = (
                word in ("for", "to", "with", "into", "at") and is_counted
                or word == "by" and not _CHANGES.fullmatch(before)
                or word in ("in", "after", "year") and re.fullmatch(time, behind or formula)
                or word in ("at", "on", "in") and re.search(r"[<=>]|\d:\d\d|^[(\[]", formula)
                or word == "with" and re.search(r"\\[lg]e|[<>]", formula)
            )  # fmt: skip
            return "given" if is_given and not any(map(_COMBINES.match, words[:head])) else ""
        if re.search(f"[{OTHER_SCRIPTS}]", word):
            return "object" if word[-1] in _BEFORE_A_NUMBER or _YIELDS.fullmatch(word) else "unclear"
        if _YIELDS.fullmatch(word) or not is_counted and word not in _CLOSED and _YIELDS.fullmatch(verb):
            return "object"  # "yields 5", "has perimeter 6a"
        if before == "to" and not _MODAL.fullmatch(words[max(head - 2, 0)]):
            return "unclear"  # "hopes to sell 5"
        if word.endswith("ing") and (head == 0 or before in _PREPOSITIONS):
            return ""
        if words[end : end + 1] == ["times"] or "=" in formula or is_counted:
            return "object" if "=" in formula else "noun"
        return "given" if verb == "with" and end == len(words) else "unclear"  # "with probability 1/2"

    def _is_tail(self, start: int, formula: str, role: str) -> bool:
        """Return whether the words from `start` on leave the value of the formula before them as it is: what is counted
        ("red apples"), a unit, and circumstances. A word that counts ("zeros", "tenths") does not."""
        words, is_formula = self.words[start:], self.is_formula[start:]
        if words[:3] == ["out", "of", "the"]:
            words, is_formula = words[1:], is_formula[1:]
        size = next((index for index, word in enumerate(words) if word in _NO_NOUN), len(words))
        nouns, rest, goes_on = words[:size], words[size:], any(is_formula[size:])
        preposition = rest[0] if rest else ""
        if nouns[:1] == ["times"]:  # "4 times", "3 times as many as", "3 times more than"
            is_rate = re.match(r"(?:(?:the|per) (?:day|week|month|year|hour)|in|over|during)\b", " ".join(rest))
            return not words[1:] or rest.count("as") == 2 or preposition == "than" or is_rate is not None
        is_share = len(nouns) == 1 and formula.endswith("%")  # "a 40% increase"
        if preposition == "than":  # a difference; "30 minutes more than an hour" is none
            is_more = len(nouns) == 1 and _COPULAS & {*self.words[:start]} and split_unit(formula)[1] is None
            is_difference = any(map(_COMPARATIVE.fullmatch, nouns)) and not is_more  # not "is 5 more than needed"
            return role == "object" and not goes_on and is_difference and split_unit(f"1 {rest[-1]}")[1] is None
        if any(is_formula[:size]) or any(map(_CHANGES.fullmatch, nouns)) and not is_share:
            return False
        if len(nouns) > 1 and _PLURAL.fullmatch(nouns[-2]) and _COMPARATIVE.fullmatch(nouns[-1]):
            return False  # "30 minutes longer"
        is_noun = (  # a plural, which is known in English alone
            noun in _BEHIND
            or _NOT_ENGLISH & {*self.words}
            or not noun.isascii()
            or _PLURAL.fullmatch(noun)
            or split_unit(f"1 {noun}")[1]
            for noun in nouns[:3]
        )
        if nouns and not any(is_noun) and not re.search(r"^-?1$|/|frac", formula) and split_unit(formula)[1] is None:
            return False
        if preposition == "of" and goes_on and re.search(r"[/%]|frac|percent", " ".join([formula, *nouns])):
            return False
        is_bare = goes_on and is_formula[size + 1] and not any(map(_PLURAL.fullmatch, nouns))
        return not (
            preposition == "or" or preposition == "and" and goes_on
            or preposition in ("to", "by", "in", "for", "over") and is_bare  # "5 in 7"
                and not (preposition == "for" and self._is_counted(start + size + 2))
            or preposition == "to" and _CHANGES.fullmatch(rest[-1]) is not None
        )  # fmt: skip
