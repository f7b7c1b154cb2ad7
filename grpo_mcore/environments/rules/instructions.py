"""Instructions that a program can check, as in IFEval (arXiv 2311.07911), without those about the language.

`followed` is a rule for `env.rules`: the prompt's `instructions` are [{"name": "length_constraints:number_words",
"num_words": 200, "relation": "at least"}, ...], and all of them must be followed ("strict" accuracy per prompt). Also
read are rows as IFEval publishes them, with `instruction_id_list` and `kwargs`, rows of Tulu 3 with an instruction in
`ground_truth` (see tulu_instructions.py), and those of IF-RLVR, with `ground_truth` [{"instruction_id": [name, ...],
"kwargs": [mapping or null, ...]}].
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_mcore.environments.answers import split_response
from grpo_mcore.environments.rules.tulu_instructions import TULU, is_json

_BULLETS = re.compile(r"^\s*(?:\*[^*].*|-.*)$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\[.*?\]")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_WORD = re.compile(r"\w+")
# Where the reference's tokenizer (NLTK's word_tokenize) ends a word, as far as capitals go.
_TOKEN_BREAK = re.compile(r"[\s\[\](){}<>,;:@#$%&\"?!…“”]|--|(?=(?:n't|'(?:s|m|d|ll|re|ve))\b)", re.IGNORECASE)
_ABBREVIATIONS = "".join(rf"(?<!\b{re.escape(word)})" for word in "Mr Mrs Ms Dr Prof St vs e.g i.e".split())
# Behind the end mark: quotation marks, brackets and stars that close, and references such as [1].
_BEHIND = r"[\"'”’)\]*_]*(?:\[\d+\])*"
# An ellipsis, or a letter with a point as in "U.S.", ends no sentence where a small letter follows.
_GOES_ON = r"(?!(?:\.{2,}|…|(?<=\b[A-Za-z])\.)\s+[a-z])"
_SENTENCE_END = re.compile(
    rf"(?:{_ABBREVIATIONS}(?<![.…]){_GOES_ON}[.!?…]+{_BEHIND}(?=\s|$)|[。！？]+[」』]*{_BEHIND})"
)
_ITEM = re.compile(r"^\s*(?:\d+[.)]|[-*+•])\s+(?=\S)", re.MULTILINE)


def followed(reply: str, info: Mapping[str, Any]) -> float:
    """Return 1.0 if the answer, without the reasoning, follows all of the prompt's `instructions`, else 0.0."""
    response = split_response(reply).answer or ""
    if not response.strip():
        return 0.0
    if (checks := _checks(info)) is None:
        raise KeyError("instructions")
    return float(all(_RULES[check["name"]](response, **_arguments(check)) for check in checks))


def row_problem(info: Mapping[str, Any]) -> str | None:
    """Return why no answer to a prompt with these fields can be scored: an instruction is not known, or has other
    arguments. None if answers can be scored."""
    name = ""
    try:
        if (checks := _checks(info)) is None:
            return "the prompt has neither 'instructions' nor 'instruction_id_list' with 'kwargs'"
        unknown = sorted({str(check["name"]) for check in checks} - _RULES.keys())
        if unknown:
            return f"no rule checks the instruction {unknown[0]!r}; those of IFEval without its languages are checked"
        for check in checks:
            name = f" {check['name']!r}"
            _RULES[check["name"]]("a", **_arguments(check))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return f"its instructions{name} cannot be read: {type(error).__name__}: {error}"
    return None if checks else "it has no instruction"


def _checks(info: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """Return a prompt's instructions as {"name", and its arguments}; None if it has none. Raises ValueError."""
    if "instructions" in info:
        return list(_parsed(info["instructions"]))
    names, each = info.get("instruction_id_list"), info.get("kwargs")
    if names is None:
        match _ground_truth(info):
            case {"func_name": name, **arguments}:  # Tulu 3
                names, each = [name], [arguments]
            case [{"instruction_id": names, "kwargs": each}]:  # IF-RLVR
                pass
            case _:
                return None
    return [  # tables have the arguments of all instructions, null for those of others
        {"name": name} | {key: value for key, value in (_parsed(arguments) or {}).items() if value is not None}
        for name, arguments in zip(_parsed(names), _parsed(each), strict=True)
    ]


def _ground_truth(info: Mapping[str, Any]) -> Any:
    try:
        return _parsed(info.get("ground_truth"))
    except ValueError:
        return None


def _parsed(value: Any) -> Any:
    """Return a list or a mapping, which a table may hold as text, in JSON or as Python writes it. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise error from None


def _arguments(check: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in check.items() if key != "name"}


def _compare(count: int, relation: str, limit: int) -> bool:
    """Compare a count with its limit. `relation`: "at least" or "less than"."""
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation {relation!r} is neither 'at least' nor 'less than'")
    return count >= limit if relation == "at least" else count < limit


def _find(word: str, text: str) -> list[str]:
    return re.findall(re.escape(word), text, re.IGNORECASE)


def _paragraphs(text: str, separator: str) -> list[str] | None:
    """Return the paragraphs between separators; None if one inside is empty. Empty ones at the ends do not count."""
    parts = [part.strip() for part in re.split(separator, text)]
    inner = parts[1:-1]
    return None if not all(inner) else [part for part in parts if part]


def _number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """Count an item of a list as a sentence also without an end mark; its number or bullet is none."""
    parts = [part for block in _ITEM.split(text) for part in _SENTENCE_END.split(block)]
    return _compare(sum(bool(_WORD.search(part)) for part in parts), relation, num_sentences)


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Count paragraphs, which are separated by ***."""
    paragraphs = _paragraphs(text, r"\s?\*\*\*\s?")
    return paragraphs is not None and len(paragraphs) == num_paragraphs


def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Compare the first word of a paragraph. Paragraphs are separated by blank lines."""
    parts = re.split(r"\n\n", text)
    count = sum(bool(part.strip()) for part in parts)
    paragraph = parts[nth_paragraph - 1].split() if 0 < nth_paragraph <= count else []
    word = re.split("[.,?!'\"]", paragraph[0].lstrip("'").lstrip('"'))[0] if paragraph else ""
    return count == num_paragraphs and bool(paragraph) and word.lower() == first_word.lower()


def _postscript(text: str, postscript_marker: str) -> bool:
    marks = {"P.S.": r"\s*p\.\s?s\.", "P.P.S": r"\s*p\.\s?p\.\s?s"}
    mark = marks.get(postscript_marker, r"\s*" + re.escape(postscript_marker.lower()))
    return re.search(mark, text.lower()) is not None


def _number_highlighted_sections(text: str, num_highlights: int) -> bool:
    single = [part.strip("*") for part in re.findall(r"\*[^\n*]*\*", text)]
    double = [part[2:-2] for part in re.findall(r"\*\*[^\n*]*\*\*", text)]
    return sum(bool(part.strip()) for part in single + double) >= num_highlights


def _json_format(text: str) -> bool:
    return is_json(re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE))


def _two_responses(text: str) -> bool:
    responses = _paragraphs(text, r"\*\*\*\*\*\*")
    return responses is not None and len(responses) == 2 and responses[0] != responses[1]


def _quotation(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_find(word, text) for word in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: _compare(
        len(_find(keyword, text)), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _compare(
        Counter(text.lower())[letter.lower()], let_relation, let_frequency
    ),
    "length_constraints:number_words": lambda text, num_words, relation: _compare(
        len(_WORD.findall(text)), relation, num_words
    ),
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(_PLACEHOLDER.findall(text)) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: len(_BULLETS.findall(text)) == num_bullets,
    "detectable_format:constrained_response": lambda text: any(option in text for option in _CONSTRAINED),
    "detectable_format:number_highlighted_sections": _number_highlighted_sections,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) >= num_sections
    ),
    "detectable_format:json_format": _json_format,
    "detectable_format:title": lambda text: any(line.strip() for line in re.findall(r"<<([^\n]+)>>", text)),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: _compare(
        sum(word.isupper() for word in _TOKEN_BREAK.split(text)), capital_relation, capital_frequency
    ),
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda text: "," not in text,
}
_RULES = INSTRUCTIONS | TULU
followed.row_problem = row_problem  # type: ignore[attr-defined]
