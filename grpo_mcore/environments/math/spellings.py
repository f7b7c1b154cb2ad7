r"""The spellings of an answer: a table from what people and models write to the form that math-verify reads.

Each row has an example, which the tests check. The rows of CHARACTERS hold anywhere in a response; those of FORMULAS
hold in one answer, in their order: a row sees what the rows above it made.
"""

import json
import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

from grpo_mcore.environments.math.units import COMPOUND, OTHER_SCRIPTS, as_one_unit, split_unit

Match = re.Match[str]
Spelling = tuple[str, str | Callable[[Match], str], str, str]
"""A pattern of what is written, what it is read as, and an example: as written, and as read."""

_SIGNS = str.maketrans({
    **dict.fromkeys("\u2212\ufe63\u2011\u2010", "-"), **dict.fromkeys("÷∕⁄", "/"), **dict.fromkeys("·⋅", r"\cdot "),
    **dict.fromkeys("°º", r"^\circ "), **dict.fromkeys("′’", "'"), "×": r"\times ", "π": r"\pi ", "∞": r"\infty ",
    "≡": r"\equiv ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∅": r"\emptyset ", "±": r"\pm ", 
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∠": r"\angle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "٪": "%", "٫": ".", "٬": ",", "。": ".", "、": ", ", "，": ", ",
})  # fmt: skip
INVISIBLE = dict.fromkeys(
    [*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0x00AD, 0x061C, 0xFEFF, 0x180E], ""
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_LOST = {"\x08": r"\b", "\x0c": r"\f", "\t": r"\t"}  # the escapes of LaTeX in JSON or Python with single backslashes

_STRUCK_OUT = re.compile(
    r"~~.+?~~|<(s|del|strike)>.*?</\1>|\\(?:[bx]?cancel|sout|st)\s*\{[^{}]*\}|(?<=[\w)}$])\s\[\d{1,2}\](?=[.\s]*$)|"
    r"\$?\\(?:blacksquare|qed)(?![a-zA-Z])\$?|\$\\[sS]quare\$|[∎■]|\bQ\.?E\.?D\.?(?=\s*$)|"
    r"</s>|<\|(?!begin_of_b|end_of_b)\w+\|>|<end_of_turn>|\s\((?:and )?not (?:[oi]n )?(?:\$?-?\d|[A-Z]\w)[^()]*\)|"
    r"\b(?:not|nicht|pas|no) \$?(?:-?[\d.]+|\(?[A-J]\)?)\$?,? "
    r"(?:but|sondern|mais|sino) (?=rather |\$?[\dA-J(-])",
    re.DOTALL | re.MULTILINE,
)
_EMOJI = re.compile("[\u2600-\u2668\u2670-\u2794\u2798-\u27bf\U0001f000-\U0001faff\ufe0f\u20e3]")

_SPACE = r"(?:\\[,;:! ]|\\(?:thinspace|q?quad)(?![a-zA-Z])|~|\s|\{\s*\})"
_INSIDE = r"((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)"  # of a pair of braces
_TEXT = (
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|normal)|bold(?:symbol)?|bm|mbox|emph|uline|underline|operatorname)"
    rf"\s*\{{{_INSIDE}\}}"
)
_ONES = "one two three four five six seven eight nine".split()
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_VALUES = {word: value for value, word in enumerate(["zero", *_ONES, *_TEENS])}
_VALUES |= {word: 10 * value for value, word in enumerate(_TENS, 2)} | {"a": 1, "an": 1}
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_CJK_SCALES = "百千万亿萬億백천만억"
_SCALES |= dict(zip(_CJK_SCALES, (2, 3, 4, 8, 4, 8, 2, 3, 4, 8), strict=True))
_BELOW_100 = rf"(?:(?:{'|'.join(_TENS)})(?:[\s-](?:{'|'.join(_ONES)}))?|{'|'.join(['zero', *_TEENS, *_ONES])})"
_BELOW_1000 = rf"(?:(?:(?:{_BELOW_100}|a)\s)?hundred(?:\s(?:and\s)?{_BELOW_100})?|{_BELOW_100})"
_THOUSANDS = rf"(?:(?:{_BELOW_1000}|a)\s)?(?:thousand|million|billion|trillion)"
_PARTS = "half third fourth fifth sixth seventh eighth ninth tenth".split()
_PART = rf"halves|quarters?|hundredths?|(?:{'|'.join(_PARTS)})s?"
_NUMBER = rf"(?:{_THOUSANDS}(?:,?\s(?:and\s)?{_THOUSANDS})*(?:,?\s(?:and\s)?{_BELOW_1000})?|{_BELOW_1000})"
_GREEK = "alpha|beta|gamma|delta|varepsilon|epsilon|theta|lambda|mu|omega|varphi|phi|rho|sigma|tau"
_INTEGER = r"(?:(?:where|for|with)\s)?[a-zA-Z]\s*\\in\s*(?:\\mathbb\s*\{?\s*)?Z\s*\}?"
_BOUND = r"[^()\[\],;]+"


def _flat(match: Match) -> str:
    return f" {re.sub(_TEXT, _flat, match[1])} "


def _root(match: Match) -> str:
    return (r"\sqrt" if match[1] == "√" else r"\sqrt[3]") + "{" + (match[2] or match[3] or match[4]) + "}"


def _one_character_fraction(match: Match) -> str:
    above, _, below = unicodedata.normalize("NFKC", match[2]).partition("\u2044")
    return rf"{match[1] or ''}\frac{{{above}}}{{{below}}}"


def _spelled_number(match: Match) -> str:
    total = current = 0
    for word in re.findall("[a-z]+", match[0].lower()):
        if word == "hundred":
            current = (current or 1) * 100
        elif word in _SCALES:
            total, current = total + (current or 1) * 10 ** _SCALES[word], 0
        else:
            current += _VALUES.get(word, 0)
    return str(total + current)


def _scaled(match: Match) -> str:
    return f"{Decimal(f'{match[1]}e{_SCALES[(match[2] or match[3]).lower()]}'):f}"


def _spelled_fraction(match: Match) -> str:
    name = match[2].lower()
    below = next((number for number, part in enumerate(_PARTS, 2) if name.startswith(part[:3])), None)
    return f"{match[1] if match[1].isdecimal() else 1}/{100 if name.startswith('hun') else below or 4}"


def _mixed(match: Match) -> str:
    sign, whole, above, below = match[1], int(match[2]), int(match[3]), int(match[4])
    return rf"{sign}\frac{{{whole * below + above}}}{{{below}}}" if 0 < above < below else match[0]


def _repeating(match: Match) -> str:
    sign, whole, digits, *blocks = match.groups()
    block = re.sub(r"\D", "", next(filter(None, blocks)))
    value = Fraction(int((whole or "") + digits or "0"), 10 ** len(digits))
    value += Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(digits))
    return rf"{sign}\frac{{{value.numerator}}}{{{value.denominator}}}"


def _scientific(match: Match) -> str:
    exponent = match[2] or match[3] or match[4]
    return f"{Decimal(f'{match[1]}e{exponent}'):f}" if abs(int(exponent)) <= 1000 else match[0]


def _system(match: Match) -> str:
    lines = match[2].replace("&", "").strip().removesuffix(r"\\").strip()
    parts = re.split(r"\s*\\\\\s*", re.sub(r"\s*\\\\\s*(?==)", " ", lines))
    is_value = [re.match(r"[a-zA-Z]\s*=", part) is not None for part in parts]
    return ", ".join(parts if all(is_value) or not is_value[-1] else parts[-1:])  # a derivation ends with its answer


CHARACTERS: list[Spelling] = [
    (r"</?(?:b|strong|i|em|u|p|div|span|center)>", "", "<b>5</b>", "5"),
    (r"\A(?!.*\b(?:the|is|of|and)\b)(?=.*(?:€|\b(?i:euros?|d(?:er|ie|as)|ist|les?|est|el|es|il|è|é|ответ)\b)).*",
     lambda match: re.sub(r"(?<![\d.,(\[{])(\d+),(\d\d?)(?![\d,)\]}])", r"\1.\2", match[0]), "è 2,5", "è 2.5"),
    (r"<\|begin_of_box\|>(.*?)<\|end_of_box\|>", r"\\boxed{\1}", "<|begin_of_box|>5<|end_of_box|>", r"\boxed{5}"),
    (r"([\x08\x0c\t])(?=(?:rac|inom|frac|ext|imes|heta|ar|oxed)(?:\s*\{|\s*[\d\\]))",
     lambda match: _LOST[match[1]], "\x0crac{1}{2}", r"\frac{1}{2}"),
    (r"(\\boxed\s*\{(?:[^{}$]|\{[^{}$]*\})*)(?=(?:\$+|\\[)\]])[.\s]*\Z)", r"\1}", r"$\boxed{5$.", r"$\boxed{5}$."),
    (r"([√∛])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[a-zA-Z]))", _root, "√(x+1)", r"\sqrt{x+1}"),
    (r"(?:(\d+)\s?)?([¼½¾⅐-⅞])", _one_character_fraction, "1½", r"1\frac{1}{2}"),
    ("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda match: "^{" + match[0].translate(_RAISED) + "}", "x⁻¹", "x^{-1}"),
    ("[₀₁₂₃₄₅₆₇₈₉]+", lambda match: "_{" + match[0].translate(_LOWERED) + "}", "a₁", "a_{1}"),
    (r"(?<![\w)}\]])[–—](?=\s?[\d.\\])", "-", "–5", "-5"),
]  # fmt: skip

FORMULAS: list[Spelling] = [
    # What surrounds a formula.
    (r"(?<!\\)\$(?=\d[\d,.]*(?:,?\s[a-z]{2,})+,?\s\$\d)", r"\\$", "$5 more than $4", r"\$5 more than $4"),
    (r"(?<!\\)\$\$?([^$]*[^$\\])\$\$?", r"\1", "$5$ cm", "5 cm"),
    (r"(?<![\w)}*])(\*\*|__|[`*_])(?=\S)([^*]*?\S)\1(?![\w(*-])", r"\2", "**5**", "5"),
    (_TEXT, _flat, r"\textbf{\text{5}}", "5"),
    (r"\\(?:text)?color\s*\{[^{}]*\}\s*(?:\{" + _INSIDE + r"\})?", r"\1", r"\textcolor{red}{5}", "5"),
    (r"\\(?:left|right)(?=\s*[\[\](){}|.\\])|\\(?:(?:display|text|script)style|[bB]ig[lr]?|large|Large|LARGE|huge|Huge|"
     r"boldsymbol|bf|rm|limits|checkmark)(?![a-zA-Z])\s*", "", r"\displaystyle \left( 5 \right)", "( 5 )"),
    (r"\s+", " ", "x +\n 2", "x + 2"),
    (r"(?<=[a-z]) (?=\^)", "", "45 cm ^2", "45 cm^2"),
    (rf"^(?:{_SPACE}|=>?|[∴⇒⟹→]|\\(?:approx|sim(?:eq)?|therefore|implies|Rightarrow)(?![a-zA-Z]))+|"
     rf"(?<!\\)(?:\\[,;:!]|{_SPACE})+$|\\+$", "", r"\, \approx 5\;", "5"),
    (rf"(?<=[{OTHER_SCRIPTS}])(?=[-\d$\\])|(?<=\d)(?=[{OTHER_SCRIPTS}])(?![{_CJK_SCALES}])", " ", "有42个", "有 42 个"),
    # Fractions, roots and environments.
    (r"\\(?:[dtc]frac(?![a-zA-Z])|nicefrac|sfrac)", r"\\frac", r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", r"\frac12", r"\frac{1}{2}"),
    (r"\\sqrt\s*(\[\w\])?\s*(\w|\\[a-z]+)(?![\w{])", r"\\sqrt\1{\2}", r"\sqrt[3]2", r"\sqrt[3]{2}"),
    (r"(?<![a-zA-Z\\])sqrt\s*(?:\(([^()]*)\)|(\d+))", r"\\sqrt{\1\2}", "sqrt(2)", r"\sqrt{2}"),
    (r"[(\[]\s*\\begin\s*\{array\}\s*\{[clr|\s]+\}(.*?)\\end\s*\{array\}\s*[)\]]", r"\\begin{pmatrix}\1\\end{pmatrix}",
     r"(\begin{array}{r}1\\2\end{array})", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\\\{\s*(\\begin.*\\end\s*\{\w+\*?\})\s*\.?", r"\1",
     r"\left\{\begin{cases}x=1\\y=2\end{cases}\right.", "x=1, y=2"),
    (r"\\begin\s*\{(aligned|align\*?|gathered|split|equation\*?|cases|array)\}(?:\s*\{[clr|\s]+\})?(.*?)"
     r"\\end\s*\{\1\}", _system, r"\begin{aligned}x&=1\\y&=2\end{aligned}", "x=1, y=2"),
    # Numbers.
    (r"(?<![\w.,(])\d{1,2}(?:(?:,|\{,\})\d\d)+(?:,|\{,\})\d00(?![\w,)])", lambda match: re.sub(r"\D", "", match[0]),
     "2,50,000", "250000"),
    (rf"(?<![\d.,])(\d{{1,3}})((?:(?:{_SPACE}+|,\\!|\{{,\}}(?:\\!)?|'(?=\d{{3}}(?!\d)))\d{{3}})+)(?!\d)",
     lambda match: match[1] + re.sub(r"\D", "", match[2]), r"1{,}000\,000", "1000000"),
    (r"(?:(?<=[-+*/=$])|(?<=[-+*/=$] )|(?=[\d,]+\s*[-+*/=]))(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])",
     lambda match: match[1].replace(",", ""), "1,000+500=1,500", "1000+500=1500"),
    (r"(?<=\d)\{[.,]\}(?=\d)", ".", "3{,}14", "3.14"),
    (r"(?<![\d.])(-?)(\d*)\.(\d*)\s*(?:\\(?:overline|bar|overset\{[^{}]*\})\s*(?:\{(\d+)\}|(\d))|"
     r"\((\d+)\)(?![\d(^])|((?:\\dot\s*(?:\{\d\}|\d))\d*(?:\\dot\s*(?:\{\d\}|\d))?)|(\d)[\u0305\u0304])",
     _repeating, r"0.1\overline{6}", r"\frac{1}{6}"),
    (r"(?<![\d.])(-?)(\d+)\.(\d{0,30}?)(\d{1,12}?)\4{2,}\d?\s*(?:\\[lc]?dots|\.\.\.|…)",
     _repeating, "0.333...", r"\frac{1}{3}"),
    (rf"(?<![\w.])(\d+(?:\.\d+)?){_SPACE}*(?i:(hundred|thousand|million|billion|trillion)\b|([{_CJK_SCALES}]))",
     _scaled, "2.5 million", "2500000"),
    (rf"(?<![\w-])(?i:{_NUMBER})(?!\w|-(?!(?:{_PART})\b))", _spelled_number, "two thousand and one", "2001"),
    (r"\bDNE\b", "does not exist", "DNE", "does not exist"),
    (r"^(?:[a-zA-Z] ?[=:] ?)?(?:\\(?:emptyset|varnothing)|\\\{ ?\\\})$|\bno (?:real |integer )*solutions?\b",
     "no solution", r"\emptyset", "no solution"),
    (r"^[aA]ll (?:integers (?=[k-n]\b)|real numbers (?=[x-z]\b))(?=.*(?:[<>]|\\[lg]e))", "", "all integers n>2", "n>2"),
    (r"(?<=[^\s,])[\s,]*\bfor (?:all|any) (?:real |constant )?[a-z](?: ?\\in ?(?:\\mathbb ?\{?)?R\}?)?(?=$|,| and\b)",
     "", "f(x) = 2 for all x", "f(x) = 2"),
    (r"(?<=\d )(?:(?:kilo|centi)?met(?:er|re)s?|miles?|feet|inches) per (?:hour|minute|second)\b",
     lambda match: split_unit(f"1 {match[0]}")[1] or "", "60 kilometers per hour", "60 km/h"),
    (r"\bper cent\b", "percent", "5 per cent", "5 percent"),
    (r"\b(?i:(?:an?\s|1[\s-])?half)\b", "1/2", "one-half", "1/2"),
    (rf"(?<![\w.])(\d+|an?)[\s-](?i:({_PART}))\b", _spelled_fraction, "three quarters", "3/4"),
    (r"\b(?i:negative|minus)\s(?=[\d.\\(]|[a-z]\b)|(?:负|マイナス)\s*(?=\d)", "-", "negative seven", "-7"),
    (r"(?i:\b(?:the\s)?square root of)\s(\d+|[a-z]\b)", r"\\sqrt{\1}", "the square root of 2", r"\sqrt{2}"),
    (rf"(?<![\d.^_}}a-zA-Z/)])(-?)(\d+)(?:{_SPACE}|and)*\\frac\s*\{{(\d+)\}}\s*\{{(\d+)\}}"
     rf"(?!\s*(?:[\d(]|[a-zA-Z]\b|\^(?!\s*\{{?\s*\\circ)|\\(?!q?quad|[\\%,;: ])))",
     _mixed, r"3\frac{1}{2}", r"\frac{7}{2}"),
    (r"(?<![\d.^_}a-zA-Z/)*+-])(-?)(\d+)(?:\sand)?\s(\d+)\s*/\s*(\d+)(?![\d.^a-zA-Z(/])",
     _mixed, "3 1/2", r"\frac{7}{2}"),
    (r"(?<=\d)\s*(?:\^\s*)?\{?\s*(?:st|nd|rd|th)\s*\}?$", "", r"5^{\text{th}}", "5"),
    (r"(?<=\d)(?:\\!|\{)?:(?:\\!|\})?(?=\d)|(?<=\d) to (?=\d+$)", ":", "15{:}00", "15:00"),
    (r"\b0?(\d{1,2})(:\d\d)\s*([apAP])\.?\s?[mM]\b\.?",
     lambda match: f"{int(match[1]) % 12 + 12 * (match[3] in 'pP'):02}{match[2]}", "9:30 P.M.", "21:30"),
    (r"(?<!\S)(\S+) \(\1\)$", r"\1", "fifteen (15)", "15"),
    # Operators and names as calculators and programs write them.
    (r"(?<=[\w)}])\*\*(?=[\w(-])", "^", "x**2", "x^2"),
    (r"(?<=\d) [xX] (?=\$?\d)", r" \\times ", "2 x 3", r"2 \times 3"),
    (r"\^\s*-\s*(\d+|[a-zA-Z](?![a-zA-Z]))", r"^{-\1}", "x^-4", "x^{-4}"),
    (r"(?<![\w.^/_*)}])(-?\d+(?:\.\d+)?)\s*(?:(?:[xX*]|\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|(\d+))"
     r"(?![\d^!])|[eE]([+-]?\d+)(?![\w.]))", _scientific, "6.02 x 10^3", "6020"),
    (r"(?<![<>=!])<=(?![<>=])|\\leq(?:slant|q)?(?![a-zA-Z])", r"\\le ", r"x\leqslant 2", r"x\le  2"),
    (r"(?<![<>=!])>=(?![<>=])|\\geq(?:slant|q)?(?![a-zA-Z])", r"\\ge ", "x>=2", r"x\ge 2"),
    (r"(?<![<>=!])!=(?![<>=])|\\neq?q?(?![a-zA-Z])", r"\\ne ", "x!=2", r"x\ne 2"),
    (r"(?<![a-zA-Z\\])(?:infinity|infty|inf|oo)(?![a-zA-Z])", r"\\infty ", "(1,oo)", r"(1,\infty )"),
    (rf"(?<![a-zA-Z\\])(pi|(?:arc)?(?:sin|cos|tan)h?|cot|(?:sec|csc|exp)(?=\s*[(^])|ln|log|{_GREEK})(?![a-zA-Z])",
     r"\\\1 ", "2pi r", r"2\pi  r"),
    (r"(\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])(?:\s*\^\s*(?:\{\d+\}|\d))?)\s*(?:([({])\s*)?(\d+(?:\.\d+)?)\s*"
     r"(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z]))\s*(?(2)[)}])",
     r"\1(\\frac{\3\\pi}{180})", r"\sin 30^\circ", r"\sin(\frac{30\pi}{180})"),
    (r"\(?\s*\\?[pb]?mod(?![a-zA-Z])(?:\\[,;: ]|~|\s)*\{?\s*(\d+)\s*\}?\s*\)?", r"\\mod \1", r"3\pmod{7}", r"3\mod 7"),
    (r"_\s*\{\s*(\d+)\s*\}$|_(\d+)$|[\s(]*(?:in\s)?base[\s-]*(\d+)\)?$", r"_{\1\2\3}", "101 base two", "101_{2}"),
    # Sets, intervals and vectors.
    (r"\\langle(.*?)\\rangle", r"(\1)", r"\langle 1,2\rangle", "( 1,2)"),
    (r"(?<=[)\]])\s*U\s*(?=[(\[])", r" \\cup ", "(0,1) U (2,3)", r"(0,1) \cup (2,3)"),
    (rf"([(\[\]])({_BOUND});({_BOUND})(?=[)\[\]])", r"\1\2,\3", "(0;1]", "(0,1]"),
    (rf"\]({_BOUND},{_BOUND})(?=[\[\])])", r"(\1", "]0,1]", "(0,1]"),
    (rf"([(\[]{_BOUND},{_BOUND})\[", r"\1)", "[0,1[", "[0,1)"),
    (r"^\\\{\s*[a-zA-Z]\s*(?:\\in\s*(?:\\mathbb\s*\{?R\}?|R)\s*)?(?:\\mid(?![a-zA-Z])|\||:)(.+)\\\}$", r"\1",
     r"\{x \mid x>2\}", "x>2"),
    (rf"^(?!.*(?:[<>]|\\[lgn]e(?![a-zA-Z])))(.*[^\s~,(\\])(?:{_SPACE}|,)*\(?\s*{_INTEGER}\s*\)?$", r"\1",
     r"2k\pi\ (k\in\mathbb{Z})", r"2k\pi"),
    (r"^([-+]?\d+(?:\.\d+)?(?:\s\d+(?:\.\d+)?)+)$", lambda match: match[1].replace(" ", ", "), "1 2 3", "1, 2, 3"),
    (COMPOUND, as_one_unit, "2 hours and 30 minutes", "150 min"),
]  # fmt: skip


_CHARACTERS, _FORMULAS = (
    [(re.compile(pattern, re.DOTALL), normal) for pattern, normal, *_ in table] for table in (CHARACTERS, FORMULAS)
)


def as_said(text: str) -> str:
    """Return what a response says: of a JSON object its answer, and no text that is struck out, footnotes or emoji. A
    cross is a word, since it takes back what it stands beside."""
    found = re.search(r"^\s*(\{.*\})\s*(?:```\s*)?\Z", text, re.DOTALL | re.MULTILINE)
    try:
        record = json.loads(found[1]) if found else None
    except ValueError:
        record = None
    if isinstance(record, dict):
        value = record.get("answer", record.get("final_answer"))
        values = value if isinstance(value, list) else [value]
        is_answer = all(isinstance(part, str | int | float) and not isinstance(part, bool) for part in values)
        text = f"Answer: {', '.join(map(str, values))}" if is_answer else ""
    text = _STRUCK_OUT.sub("", text)
    if text.isascii():
        return text
    return _EMOJI.sub("", re.sub("[❌❎✗✘✖🚫]", " wrong ", re.sub("[❓❔🤔🤷]", "?", text)))


def plain_characters(text: str) -> str:
    """Return a text without invisible characters, and with ASCII digits, signs and spaces, and LaTeX for the rest."""
    text = as_said(text)
    for pattern, normal in _CHARACTERS:
        text = pattern.sub(normal, text)
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", text.translate(_SIGNS).translate(INVISIBLE))
    return "".join(str(unicodedata.decimal(letter)) if letter.isdecimal() else letter for letter in text)


def normalized(text: str) -> str:
    """Return an answer with its formulas in the spelling that math-verify reads."""
    for pattern, normal in _FORMULAS:
        text = pattern.sub(normal, text)
    return text.strip()
