r"""Reads the final statement of a mathematical answer, and writes numbers and boxes in one way.

Pure functions on text, without sympy. They say what was written, not whether it is right.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from grpo_mcore.environments.math.math_units import OTHER_SCRIPTS, TEXT_COMMAND, split_unit

INVISIBLE = dict.fromkeys(
    [*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0x00AD, 0x061C, 0xFEFF, 0x180E], ""
)
_SPACES = dict.fromkeys([0x00A0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000], " ")
_FULL_WIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_SYMBOLS = {
    **dict.fromkeys("\u2212\ufe63\u2011\u2010", "-"),
    "×": r"\times ",
    "÷": "/",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "∕": "/",
    "⁄": "/",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "∅": r"\emptyset ",
    "±": r"\pm ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "°": r"^\circ ",
    "º": r"^\circ ",
    "′": "'",
    "’": "'",
    "﹪": "%",
    "٪": "%",
    "٫": ".",
    "٬": ",",
    "，": ",",
    "。": ".",
    "：": ":",
    "、": ", ",
}
_ONLY_WORDS = re.compile(r"[a-zA-Z]+(?:[ -][a-zA-Z]+)*")
_CHARACTERS = {**INVISIBLE, **_SPACES, **_FULL_WIDTH, **{ord(key): value for key, value in _SYMBOLS.items()}}
# A form feed and its like, which come of LaTeX in JSON or Python with single backslashes.
_LOST_BACKSLASH = re.compile(r"([\x08\x0c\t])(rac|inom|frac|ext|imes|heta|ar)(?=\s*\{|\s*[\d\\])")
_ESCAPES = {"\x08": r"\b", "\x0c": r"\f", "\t": r"\t"}
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_RAISED_RUN = re.compile(f"[{''.join(_RAISED)}]+")
_LOWERED_RUN = re.compile(f"[{''.join(_LOWERED)}]+")
_BLANKS = re.compile(r"[ \t]{2,}+")
_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[a-zA-Z]))")
_DASH = re.compile(r"(?<![\w)}\]])[–—](?=\s?[\d.\\])")
_VULGAR = re.compile(r"(\d*)\s?([¼½¾⅐-⅞])")

_SPACING = r"(?:\\[,;:! ]|\\thinspace(?![a-zA-Z])|~|\s|\{\s*\}|\\text\{\s*,?\s*\})"
_GROUPS = re.compile(
    rf"(?<![\d.,])(\d{{1,3}})((?:(?:{_SPACING}+|,\\!|\{{,\}}(?:\\!)?|\\text\{{,\}}|'(?=\d{{3}}(?!\d)))\d{{3}})+)(?![\d])"
)
_NOT_DIGITS = re.compile(r"\\thinspace|[^\d]")
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{[.,]\}(?=\d)")
_OVERLINE = re.compile(
    r"(?<![\d.])(-?)(\d*)\.(\d*)\s*(?:\\(?:overline|bar|overset\{[^{}]*\})\s*(?:\{(\d+)\}|(\d))|\((\d+)\)(?![\d(^])|"
    r"((?:\\dot\s*(?:\{\d\}|\d))\d*(?:\\dot\s*(?:\{\d\}|\d))?)|(\d)[\u0305\u0304])"
)
_DOTS = re.compile(r"(?<![\d.])(-?)(\d+)\.(\d*?)(\d+?)\4{2,}\d?\s*(?:\\[lc]?dots|\.\.\.|…)")
_NARROW_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])|\\nicefrac|\\sfrac|\\tfrac")
_SHORT_ROOT = re.compile(
    r"\\sqrt\s*(\[\w\])?\s*((?(1)\w|(?!))|\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}|\\(?!frac|sqrt|text|math|left)[a-zA-Z]+)"
)
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)")
_MIXED = re.compile(
    rf"(?<![\d.^_}}a-zA-Z/)])(-?)(\d+)(?:{_SPACING}|\\text\{{\s*and\s*\}})*\\frac\s*\{{(\d+)\}}\s*\{{(\d+)\}}"
    r"(?!\s*(?:[\da-zA-Z(]|\^(?!\s*\{?\s*\\circ)|\\(?!text|mathrm|mbox|q?quad|[\\%,;: ])))"
)
_MIXED_PLAIN = re.compile(r"(?<![\d.^_}a-zA-Z/)*+-])(-?)(\d+)(?:\s+and)?\s+(\d+)\s*/\s*(\d+)(?![\d.^a-zA-Z(/])")
_LINES = re.compile(
    r"\\begin\s*\{(aligned|align\*?|gathered|split|equation\*?|cases|array)\}(?:\s*\{[clr|\s]+\})?"
    r"((?:(?!\\begin)[\s\S])*?)(?:\\\\\s*)?\\end\s*\{\1\}"
)
_ARRAY_IN_BRACKETS = re.compile(
    r"\\left\s*[(\[]\s*\\begin\s*\{array\}\s*\{[clr|\s]+\}((?:(?!\\begin)[\s\S])*?)\\end\s*\{array\}\s*\\right\s*[)\]]"
)
_SYSTEM = re.compile(r"\\left\s*\\\{\s*(\\begin(?:(?!\\begin|\\right)[\s\S])*?)\\right\s*\.")
_LAST_IN_TEXT = re.compile(r"(\\(?:text|mathrm|textrm)\s*\{[^{}]*,)\s*and\b")
_MINUS_RAISED = re.compile(r"\^\s*-\s*(\d+|[a-zA-Z](?![a-zA-Z]))")
_POWER = re.compile(r"(?<=[\w)}])\*\*(?=[\w(-])")
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")
_UNION = re.compile(r"(?<=[)\]])\s*U\s*(?=[(\[])")
_STYLE = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|left(?=[(\[|.{\\])|right(?=[)\]|.}\\])|big[lr]?|Big[lr]?|large|Large|"
    r"LARGE|huge|Huge|boldsymbol(?=\s)|bf|rm|limits|checkmark)(?![a-zA-Z])\s*|\\(?:text)?color\s*\{[^{}]*\}\s*"
)
_ORDINAL = re.compile(r"(?<=\d)\s*(?:\^\s*)?(\{\s*)?\\(?:text|mathrm|textrm)\s*\{\s*(?:st|nd|rd|th)\s*\}(?(1)\s*\})")
_TEXT_ORDINAL = re.compile(r"\\(?:text|mathrm|textrm)\s*\{\s*(\d+)(?:st|nd|rd|th)\s*\}")
_UPRIGHT_CONSTANT = re.compile(r"\\(?:mathrm|operatorname)\s*\{\s*([ei])\s*\}")
_SPACE_BEFORE_PERCENT = re.compile(rf"(?<=[\d}}]){_SPACING}+(?=\\%)")
_WRAPPERS = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathnormal|mbox|textbf|textit|emph|underline|uline)\s*\{"
)
_TEXT_NUMBER = re.compile(
    r"\\(?:text|mathrm|textrm|textnormal|textsf|texttt|operatorname)\s*\{\s*([-+]?[\d.,]+%?)\s*\}"
)
_TEXT_LETTERS = re.compile(r"\\(?:text|mathrm|textrm)\s*\{[\s~]*((?:[A-Z]\s*(?:,|\band\b)\s*)+[A-Z])\s*\}")
_TEXT_DIGITS = re.compile(r"\\(?:text|mathrm|textrm)\s*\{\s*([0-9A-F]+)\s*\}(?=\s*_)")
_RESIDUE = re.compile(
    r"(?:\\?[a-zA-Z]\w*(?:_\{?\w+\}?)?\s*\\equiv\s*)?(?P<value>[^\\=]+?)\s*(?:\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\s)*"
    r"(?:\(\s*)?(?:\\[pb]?mod(?![a-zA-Z])|\\(?:text|mathrm)\{\s*\(?\s*mod\s*\}|mod\b)(?:\\[,;: ]|~|\s)*"
    r"\{?\s*(?P<modulus>\d+)\s*\}?\s*\)?"
)
_UNSURE = re.compile(
    r"\b(?:at (?:least|most)|(?:more|less|fewer|greater|larger|smaller) than|(?:could|might|may) be|maybe|perhaps|"
    r"possibly)\s[^\d.!?\n]*[-+]?[\d.,]*\d[^\d]*$",
    re.IGNORECASE,
)
_TEXT_MONEY = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*(\\\$|[$€£¥₹])\s*\}")
_TEXT_QUANTITY = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*([-+]?\d[\d.,]*)\s+([a-zA-Z][a-zA-Z .]*)\}")
_CLOCK = re.compile(
    r"(?<![\d:])(\d{1,2}:\d\d)\s*(?:\\[,;: ]|~)?\s*(\\(?:text|mathrm|textrm)\s*\{\s*)?"
    r"([apAP])\.?\s?[mM]\b\.?(?(2)\s*\})"
)
_SCALE = re.compile(
    r"(?<![\w.])(\d+(?:\.\d+)?)\s*(?:\\[,;: ]|~)?\s*(\\(?:text|mathrm|textrm)\s*\{\s*)?"
    r"(thousand|million|billion|trillion)\b(?(2)\s*\})",
    re.IGNORECASE,
)
_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_GREEK = "alpha|beta|gamma|delta|varepsilon|epsilon|theta|lambda|mu|omega|varphi|phi|rho|sigma|tau"
_VARIABLE = rf"(?P<name>(?:[a-zA-Z]|\\(?:{_GREEK})(?![a-zA-Z]))(?:_\{{?\w+\}}?)?)"
_LESS, _MORE = r"(?:<|\\le(?![a-zA-Z]))", r"(?:>|\\ge(?![a-zA-Z]))"
_ONE_SIDED = re.compile(rf"{_VARIABLE}\s*(?P<sign>{_LESS}|{_MORE}|\\ne(?![a-zA-Z]))\s*(?P<bound>[^<>=,;]+)")
_BOUND_FIRST = re.compile(rf"(?P<bound>[^<>=,;]+?)\s*(?P<sign>{_LESS}|{_MORE})\s*{_VARIABLE}")
_CHAIN = re.compile(
    rf"(?P<low>[^<>=]+?)\s*(?P<first>{_LESS}|{_MORE})\s*{_VARIABLE}\s*(?P<second>{_LESS}|{_MORE})\s*(?P<high>[^<>=]+)"
)
_BUILDER = re.compile(
    rf"\\\{{\s*(?:{_VARIABLE}\s*(?:\\in\s*(?:\\mathbb\s*\{{?R\}}?|R)\s*)?(?:\\mid(?![a-zA-Z])|\||:)(?P<condition>.+))\\\}}"
)
_MORE_SIGNS = (">", r"\ge")
_RELATION = re.compile(r"\\(?:le|ge|ne|in)(?![a-zA-Z])")
_SIGN = re.compile(r"(?<![<>=!])([<>!])=(?![<>=])|\\([lgn])eq(?:slant|q)?(?![a-zA-Z])")
_SIGNS = {"<": r"\le ", "l": r"\le ", ">": r"\ge ", "g": r"\ge ", "!": r"\ne ", "n": r"\ne "}
_PLAIN_NAME = re.compile(
    rf"(?:\\(?:operatorname|mathrm|text)\s*(\{{)\s*)?(?<![a-zA-Z\\])(?P<name>pi|infinity|infty|inf|oo|sqrt(?!\s*\()|"
    rf"(?:arc)?(?:sin|cos|tan)h?|cot|(?:sec|csc|exp)(?=\s*[(^])|ln|log|{_GREEK})(?![a-zA-Z])(?(1)\s*\}})"
)
_PLAIN_ROOT = re.compile(r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)")
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])(?:\s*\^\s*(?:\{\d+\}|\d))?)\s*(?:([({])\s*)?(\d+(?:\.\d+)?)\s*"
    r"(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z]))\s*(?(2)[)}])"
)
_FRENCH_INTERVAL = re.compile(r"([\[\]])([^()\[\],;]+),([^()\[\],;]+)([\[\]])")
_SEMICOLON = re.compile(r"([(\[\]])([^()\[\],;]+);([^()\[\],;]+)(?=[)\[\]])")
# Possessive, so that no run of spaces makes it backtrack.
_INTEGERS = re.compile(
    r"(?<![\s~,])(?:[\s~,]|\\[,;: ]|\\q?quad(?![a-zA-Z]))*+\(?\s*+(?:\\text\s*+\{\s*+(?:where|for|with)?\s*+\}\s*+)?"
    r"[a-zA-Z]\s*+\\in\s*+(?:\\math(?:bb|bf|rm)\s*+\{?\s*+Z\s*+\}?|Z)\s*+\)?$"
)
_NUMBERS_APART = re.compile(r"[-+]?\d+(?:\.\d+)?(?:\s+\d+(?:\.\d+)?)+")
_LETTERS_APART = re.compile(r"[A-H](?:(?:\s*,\s*|\s+and\s+|\s+)[A-H])+")
_SCIENTIFIC = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])")

_BOX_NAMES = (
    r"\\(?:boxed|fbox|framebox|Boxed|ovalbox|shadowbox|doublebox|tcboxmath|bbox|mathbox|colorbox\s*\{[^{}]*\}|"
    r"fcolorbox\s*\{[^{}]*\}\s*\{[^{}]*\})|(?<![a-zA-Z\\])boxed(?=\{)|\x08oxed(?=\s*\{)"
)
_BOX = re.compile(rf"\\?(?:{_BOX_NAMES})\s*(?:\[[^\]]*\]\s*){{0,2}}(?:(\{{)|([^\s{{}}\\a-zA-Z]))")
BETWEEN_BOXES = re.compile(
    r"(?:\s|[,;&$]|\\[,;:!()\[\] ]|\\q?quad(?![a-zA-Z])|\\\\|\band\b|\bor\b|\\text\{\s*,?\s*(?:and|or)?\s*\}|"
    r"(?<![a-zA-Z])[a-zA-Z](?:_\{?\w\}?)?\s*=)*"
)
_OR = re.compile(
    r"\\(?:text|mathrm|textrm|mbox|quad\\text)\s*\{\s*,?\s*(?:or|oder|ou)\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\lor(?![a-zA-Z])|\\vee(?![a-zA-Z])|或"
)
_NOT = re.compile(
    r"不是|不[为為]|ではな|じゃな|아니|아닙|(?<![a-zA-Z\\])(?:not|cannot|neither|nor|isn't|aren't|can't)(?![a-zA-Z])|\\ne(?:q|g)?(?![a-zA-Z])|\\not(?![a-zA-Z])|(?<![!<>=])!="
)

_ANSWER_WORD = re.compile(
    r"(?:\banswer\b[^\n.:=\\$]{0,60}?(?:\bis\b|\bequals\b|\bbe\b|[:=])|"
    r"^[^\w\n]*final answer[^\w\n]*$|####|(?:答案|答え|正解|정답|답)[\s*]*(?:就?是|[为為]|は|은|는)?)[\s:*_=]*",
    re.IGNORECASE | re.MULTILINE,
)
_CORRECTION = re.compile(r"(?<=[\d})$])\s*,?\s+(?:and |but )?(?:not|rather than|instead of)\s.*$", re.DOTALL)
_NEGATED = re.compile(
    r"(?:certainly |definitely |obviously |clearly )?(?:not|never|neither|wrong|incorrect)\b", re.IGNORECASE
)
_PERCENT_BEHIND = re.compile(r"[\s$]*(?:\\\)|\\\])?\s*(?:\\?%|percent\b)")
_SENTENCE_END = re.compile(r"(?:[.;!?](?=\s|$)|\n)")


@dataclass(frozen=True)
class Statement:
    """The final answer of a response. `is_boxed`: `text` comes from a box or a tag and is the whole answer; otherwise
    `text` begins with the answer, and more may follow."""

    text: str
    is_boxed: bool
    after: str = ""
    """The text behind a box, to the end of its line: where a unit may stand."""


def plain_characters(text: str) -> str:
    """Return the text without invisible characters, and with ASCII digits, signs and spaces, and LaTeX for the rest."""
    text = text.replace("\\\\boxed", "\\boxed").replace("<|begin_of_box|>", r"\boxed{").replace("<|end_of_box|>", "}")
    text = _LOST_BACKSLASH.sub(lambda match: _ESCAPES[match[1]] + match[2], text)
    text = _ROOT.sub(_root, text)
    text = _VULGAR.sub(_vulgar, text)
    text = text.translate(_CHARACTERS)
    text = _RAISED_RUN.sub(lambda run: "^{" + "".join(_RAISED[one] for one in run[0]) + "}", text)
    text = _LOWERED_RUN.sub(lambda run: "_{" + "".join(_LOWERED[one] for one in run[0]) + "}", text)
    text = _DASH.sub("-", text)
    return text if text.isascii() else "".join(_ascii_digit(one) for one in text)


def normalized(text: str) -> str:
    """Return the text with numbers, signs and fractions written in the way that math-verify reads."""
    text = _BLANKS.sub(" ", plain_characters(text))
    if "\\" in text or "{" in text:
        text = _NARROW_FRACTION.sub(r"\\frac", text)
        text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
        text = _SHORT_ROOT.sub(r"\\sqrt\1{\2}", text)
        text = _ARRAY_IN_BRACKETS.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", _SYSTEM.sub(r"\1", text))
        text = _LINES.sub(lambda match: re.sub(r"\s*\\\\\s*", ", ", match[2].replace("&", "")), text)
        text = _without_wrappers(_STYLE.sub("", text)).replace(r"\langle", "(").replace(r"\rangle", ")")
        text = _TEXT_QUANTITY.sub(r"\1 \\text{ \2}", text)
        text = _ORDINAL.sub("", _TEXT_ORDINAL.sub(r"\1", text))
        text = _TEXT_NUMBER.sub(r"\1", text).replace(r"\varnothing", r"\emptyset").replace("{:}", ":")
        text = _TEXT_MONEY.sub(r"\1", text)
        text = _SPACE_BEFORE_PERCENT.sub("", _UPRIGHT_CONSTANT.sub(r" \1", text))
        text = _LAST_IN_TEXT.sub(r"\1", text)
        text = _TEXT_DIGITS.sub(r"\1", _TEXT_LETTERS.sub(r"\1", text))
    text = _GROUPS.sub(lambda match: match[1] + _NOT_DIGITS.sub("", match[2]), text)
    text = _DECIMAL_COMMA.sub(".", text)
    text = _OVERLINE.sub(_repeating, text)
    text = _DOTS.sub(lambda match: _as_fraction(match[1], match[2], match[3], match[4]), text)
    text = _CLOCK.sub(lambda match: rf"{match[1]}\text{{ {match[3].lower()}m}}", text)
    text = _SCALE.sub(_scaled, text)
    text = _MIXED.sub(_mixed, text)
    text = _MIXED_PLAIN.sub(_mixed, text)
    return _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)


def as_formula(text: str) -> str:
    r"""Return a normalised answer that is a formula as LaTeX: with \pi for pi, \le for <= and \leqslant, angles in
    radians where a function is taken of them, intervals with round brackets and commas, and without k \in \mathbb{Z}
    behind it."""
    text = _PLAIN_ROOT.sub(r"\\sqrt{\1}", text)
    if not _ONLY_WORDS.fullmatch(text) or _PLAIN_NAME.fullmatch(text):
        text = _PLAIN_NAME.sub(_latex_name, text)
    text = _MINUS_RAISED.sub(r"^{-\1}", _POWER.sub("^", text))
    text = _TIMES_TEN.sub(r" \\times ", _UNION.sub(r" \\cup ", text))
    text = _SIGN.sub(lambda sign: _SIGNS[sign[1] or sign[2]], text)
    text = _DEGREES.sub(r"\1(\\frac{\3\\pi}{180})", text)
    text = _SEMICOLON.sub(r"\1\2,\3", text)
    text = _FRENCH_INTERVAL.sub(_round_brackets, text)
    any_integer = _INTEGERS.search(text)
    if any_integer and any_integer.start() and not re.search(r"[<>]|\\[lgn]e(?![a-zA-Z])", text):
        text = text[: any_integer.start()]
    if _NUMBERS_APART.fullmatch(text):
        return re.sub(r"\s+", ", ", text)
    return text


def choice_letters(text: str) -> str | None:
    """Return "AC" of "A, C", "C and A" and "AC"; None of any other text, such as the label CA."""
    if _LETTERS_APART.fullmatch(text):
        return "".join(sorted(re.sub(r"\W|and", "", text)))
    return text if re.fullmatch("[A-H]{2,}", text) and list(text) == sorted(set(text)) else None


def _latex_name(match: re.Match[str]) -> str:
    name = match["name"]
    return r"\infty " if name in ("infinity", "infty", "inf", "oo") else rf"\{name} "


def _round_brackets(match: re.Match[str]) -> str:
    opening, low, high, closing = match.groups()
    return f"{'[' if opening == '[' else '('}{low},{high}{']' if closing == ']' else ')'}"


def _ascii_digit(one: str) -> str:
    return str(unicodedata.digit(one)) if not one.isascii() and unicodedata.category(one) == "Nd" else one


def _scaled(match: re.Match[str]) -> str:
    value = Fraction(match[1]) * 10 ** _ZEROS[match[3].lower()]
    return str(value) if value.denominator == 1 else match[0]


def as_interval(text: str) -> tuple[str, str] | None:
    """Return the variable and the set of a condition: ("x", "[0, 1)") of "0 \\le x < 1", ("x", "(3, \\infty)") of
    "x > 3"; unions of "x < 1 or x > 3", "x \\ne 2" and "\\{x | x > 3\\}" too. None of any other text."""
    text = text.strip()
    if (builder := _BUILDER.fullmatch(text)) is not None:
        inside = as_interval(builder["condition"])
        return inside if inside is not None and inside[0] == builder["name"] else None
    if len(parts := alternatives(text)) > 1:
        several = [as_interval(part) for part in parts]
        found = [one for one in several if one is not None]
        if len(found) < len(parts) or len({name for name, _ in found}) > 1:
            return None
        return found[0][0], r" \cup ".join(interval for _, interval in found)
    if (match := _CHAIN.fullmatch(text)) is not None:
        low, first, second, high = match["low"], match["first"], match["second"], match["high"]
        if (first in _MORE_SIGNS) != (second in _MORE_SIGNS):
            return None
        if first in _MORE_SIGNS:
            low, first, second, high = high, second, first, low
        opening, closing = "(" if first in "<>" else "[", ")" if second in "<>" else "]"
        return match["name"], f"{opening}{low.strip()}, {high.strip()}{closing}"
    match = _ONE_SIDED.fullmatch(text) or _BOUND_FIRST.fullmatch(text)
    if match is None or _RELATION.search(match["bound"]):
        return None
    bound, sign = match["bound"].strip(), match["sign"]
    if sign == r"\ne":
        return match["name"], rf"(-\infty, {bound}) \cup ({bound}, \infty)"
    is_below = (sign in _MORE_SIGNS) == (match.re is _BOUND_FIRST)
    if is_below:
        return match["name"], rf"(-\infty, {bound}{')' if sign in '<>' else ']'}"
    return match["name"], rf"{'(' if sign in '<>' else '['}{bound}, \infty)"


def as_residue(text: str) -> tuple[str, int] | None:
    """Return ("3", 7) of "3 \\pmod{7}" and "n \\equiv 3 \\pmod 7"; None of any other text."""
    match = _RESIDUE.fullmatch(text.strip().strip("$").strip())
    return None if match is None or int(match["modulus"]) == 0 else (match["value"].strip(), int(match["modulus"]))


def is_unsure(text: str) -> bool:
    """Return whether the last number of a text is only a bound or a guess: "it is at least 5"."""
    return _UNSURE.search(text) is not None


def _root(match: re.Match[str]) -> str:
    inside = next(part for part in match.groups()[1:] if part is not None)
    return (r"\sqrt" if match[1] == "√" else r"\sqrt[3]") + "{" + inside + "}"


def _vulgar(match: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", match[2]).partition("\u2044")
    return rf"{match[1]}\frac{{{above}}}{{{below}}}"


def _mixed(match: re.Match[str]) -> str:
    sign, whole, above, below = match[1], int(match[2]), int(match[3]), int(match[4])
    if not 0 < above < below:
        return match[0]
    return rf"{sign}\frac{{{whole * below + above}}}{{{below}}}"


def _repeating(match: re.Match[str]) -> str:
    sign, whole, digits = match[1], match[2] or "0", match[3]
    if match[7] is not None:
        block = re.sub(r"\D", "", match[7])
    elif match[8] is not None:
        block = match[8]
    else:
        block = match[4] or match[5] or match[6]
    return _as_fraction(sign, whole, digits, block)


def _as_fraction(sign: str, whole: str, digits: str, block: str) -> str:
    value = Fraction(int(whole + digits or "0"), 10 ** len(digits))
    value += Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(digits))
    return rf"{sign}\frac{{{value.numerator}}}{{{value.denominator}}}"


def _without_wrappers(text: str) -> str:
    """Return the text without \\mathbf{...} and its like, but with what is in them."""
    while (match := _WRAPPERS.search(text)) is not None:
        end = closing_brace(text, match.end())
        if end is None:
            return text[: match.start()] + text[match.end() :]
        text = text[: match.start()] + text[match.end() : end] + text[end + 1 :]
    return text


def closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace that closes one before `start`; None where there is none."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        if match[0] in "{}":
            depth += 1 if match[0] == "{" else -1
            if depth == 0:
                return match.start()
    return None


@dataclass(frozen=True)
class _Box:
    start: int
    end: int
    content: str | None
    """None: the box is not closed."""


def boxes(text: str) -> list[_Box]:
    """Return the outermost boxes of a text, in order."""
    result: list[_Box] = []
    position = 0
    while (match := _BOX.search(text, position)) is not None:
        if match[1] is None:
            result.append(_Box(match.start(), match.end(), match[2]))
            position = match.end()
            continue
        end = closing_brace(text, match.end())
        if end is None:
            result.append(_Box(match.start(), len(text), None))
            break
        result.append(_Box(match.start(), end + 1, text[match.end() : end]))
        position = end + 1
    return result


def without_boxes(text: str) -> str:
    """Return the text with each box replaced by its content."""
    parts, position = [], 0
    for box in boxes(text):
        parts += [text[position : box.start], " " if box.content is None else without_boxes(box.content)]
        position = box.end
    return "".join(parts) + text[position:]


def last_statement(text: str) -> Statement | None:
    """Return what a normalised response says last: its last box, with the boxes right before it, or what follows
    "answer is", "Answer:" or "####" where that comes later. None where it says nothing of the kind: then any text may
    be the answer. A box that is empty or not closed is an empty statement."""
    boxed = boxes(text)
    end = boxed[-1].end if boxed else 0
    for match in reversed(list(_ANSWER_WORD.finditer(text))):
        if match.end() < end or boxed and text[match.end() :].lstrip("$\\([ ").startswith(("boxed", "fbox")):
            break
        content, *rest = _SENTENCE_END.split(text[match.end() :], maxsplit=1)
        if rest and text[match.end() + len(content)] == "?":  # "the answer is 5? No, ..." states nothing
            continue
        content = content.strip()
        content = content.replace("**", "").replace("__", "").strip()
        if is_negated(match[0]) or _NEGATED.match(content) or not content:
            continue
        if not re.search(r"[\d$\\]", content) and (boxed or not _ONLY_WORDS.fullmatch(content)):
            continue
        if boxed and not is_pure(content):  # "the answer is 100% correct" is no other answer than the box
            continue
        return Statement(content, is_boxed=False)
    if not boxed:
        return None
    first = len(boxed) - 1
    while first and BETWEEN_BOXES.fullmatch(text, boxed[first - 1].end, boxed[first].start):
        first -= 1
    chosen = boxed[first:]
    after = text[end:].partition("\n")[0]
    percent = _PERCENT_BEHIND.match(after) is not None
    if any(box.content is None or not box.content.strip() for box in chosen):
        return Statement("", is_boxed=True)
    parts = [without_boxes(str(chosen[0].content)).strip()]
    for before, box in zip(chosen, chosen[1:], strict=False):
        content = without_boxes(str(box.content)).strip()
        between = text[before.end : box.start]
        if content != parts[-1] or _OR.search(between):
            parts.append((r" \text{ or } " if _OR.search(between) else ", ") + content)
    return Statement("".join(parts) + (r"\%" if percent else ""), is_boxed=True, after=after)


def alternatives(text: str) -> list[str]:
    """Return the answers of which a statement offers one: "1 or 2" is two."""
    return [part.strip(" ,$") for part in _OR.split(text) if part.strip(" ,$")]


def without_correction(text: str) -> str:
    """Return "5" of "5, not 6"."""
    return _CORRECTION.sub("", text)


def is_negated(text: str) -> bool:
    return _NOT.search(text) is not None


_LATEX = re.compile(r"\\[a-zA-Z]+|\\.")
_FUNCTIONS = "sin cos tan cot sec csc log ln exp sqrt pi max min gcd lcm mod inf infinity and or"
_WORD = re.compile(r"[a-zA-Z]{2,}")


def is_pure(text: str) -> bool:
    """Return whether a text is a formula alone, with a unit at most, without words of a sentence."""
    number, unit = split_unit(text.strip().strip("$"))
    plain = _LATEX.sub(" ", TEXT_COMMAND.sub(" ", number if unit else text))
    words = _WORD.findall(plain)
    return all(word.lower() in _FUNCTIONS.split() for word in words) and not re.search(f"[{OTHER_SCRIPTS}]", plain)


_BASE = re.compile(
    r"^\(?\s*(?P<digits>[0-9A-Fa-f]+)\s*\)?\s*(?:_\s*\{?\s*(?:\\text\s*\{)?\s*(?P<base>\d{1,2}|two|three|four|five|six|seven|"
    r"eight|nine|ten|twelve|sixteen)\s*\}?\s*\}?|(?:\\text\s*\{)?\s*\(?\s*(?:in\s+)?base[\s-]*\}?\s*(?P<named>\d{1,2}|two|three|"
    r"four|five|six|seven|eight|nine|ten|twelve|sixteen)\s*\)?\s*\}?)$"
)
_BASES = dict(
    zip(
        "two three four five six seven eight nine ten twelve sixteen".split(),
        (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16),
        strict=True,
    )
)


def in_base(text: str) -> tuple[str, int] | None:
    """Return the digits and the base of a number such as 101_2; None for any other text, such as the name F_{10}."""
    match = _BASE.match(text.strip().strip("$").strip())
    if match is None:
        return None
    written = str(match["base"] or match["named"])
    base = _BASES.get(written) or int(written)
    if not all(int(digit, 16) < base for digit in match["digits"]):
        return None
    return match["digits"].lstrip("0").upper() or "0", base
