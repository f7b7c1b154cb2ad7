"""Instructions whose following a program can check, as in IFEval (arXiv 2311.07911), without the language ones.

`followed` is a rule for `env.rules`: the prompt's `instructions` are [{"name": "length_constraints:number_words",
"num_words": 200, "relation": "at least"}, ...], and all of them must be followed ("strict" accuracy per prompt). Also
read are rows as IFEval publishes them, with `instruction_id_list` and `kwargs`, and rows of Tulu 3 with an instruction
in `ground_truth` (see tulu_instructions.py).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_mcore.environments.answers import split_response
from grpo_mcore.environments.rules.tulu_instructions import TULU

_BULLETS = re.compile(r"^\s*(?:\*[^*].*|-.*)$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\[.*?\]")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_WORD = re.compile(r"\w+")
# Where the reference's tokenizer (NLTK's word_tokenize) ends a word, as far as capitals go.
_TOKEN_BREAK = re.compile(r"[\s\[\](){}<>,;:@#$%&\"?!…“”]|--|(?=(?:n't|'(?:s|m|d|ll|re|ve))\b)", re.IGNORECASE)
_ABBREVIATIONS = "".join(rf"(?<!\b{re.escape(one)})" for one in "Mr Mrs Ms Dr Prof St vs e.g i.e".split())
# Behind the end mark: quotation marks, brackets and stars that close, and references such as [1].
_BEHIND = r"[\"'”’)\]*_]*(?:\[\d+\])*"
# An ellipsis, or a letter with a point as in "U.S.", ends no sentence where a small letter follows.
_GOES_ON = r"(?!(?:\.{2,}|…|(?<=\b[A-Za-z])\.)\s+[a-z])"
_SENTENCE_END = re.compile(
    rf"(?:{_ABBREVIATIONS}(?<![.…]){_GOES_ON}[.!?…]+{_BEHIND}(?=\s|$)|[。！？]+[」』]*{_BEHIND})"
)
_ITEM = re.compile(r"^\s*(?:\d+[.)]|[-*+•])\s+(?=\S)", re.MULTILINE)


def followed(reply: str, info: Mapping[str, Any]) -> float:
    """Return 1.0 where the answer, without a thought, follows every one of the prompt's `instructions`, else 0.0."""
    response = split_response(reply).answer or ""
    if not response.strip():
        return 0.0
    checks = _checks(info)
    return float(all(_RULES[check["name"]](response, **_arguments(check)) for check in checks))


def row_problem(info: Mapping[str, Any]) -> str | None:
    """Return why no answer to a prompt with these fields can be judged: an instruction that is not known, or has other
    arguments; None where one can."""
    if "instructions" not in info and "instruction_id_list" not in info and _of_tulu(info) is None:
        return "the prompt has neither 'instructions' nor 'instruction_id_list' with 'kwargs'"
    try:
        checks = _checks(info)
        unknown = sorted({str(check["name"]) for check in checks} - _RULES.keys())
        if unknown:
            return f"no rule checks the instruction {unknown[0]!r}; those of IFEval without its languages are checked"
        for check in checks:
            _RULES[check["name"]]("a", **_arguments(check))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return f"its instructions cannot be read: {type(error).__name__}: {error}"
    return None if checks else "it has no instruction"


def _checks(info: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if "instructions" not in info and "instruction_id_list" not in info and (given := _of_tulu(info)) is not None:
        return [{"name": given["func_name"]} | {k: v for k, v in given.items() if v is not None and k != "func_name"}]
    if "instructions" in info or "instruction_id_list" not in info:
        return list(_parsed(info["instructions"]))
    pairs = zip(_parsed(info["instruction_id_list"]), _parsed(info["kwargs"]), strict=True)
    return [  # tables have every argument of any instruction, null where it is another's
        {"name": name} | {key: value for key, value in (_parsed(arguments) or {}).items() if value is not None}
        for name, arguments in pairs
    ]


def _of_tulu(info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the truth of a prompt of Tulu 3, {"func_name", and the arguments of any function}; None of another."""
    try:
        truth = _parsed(info.get("ground_truth"))
    except ValueError:
        return None
    return truth if isinstance(truth, Mapping) and "func_name" in truth else None


def _parsed(value: Any) -> Any:
    """Return a list or a mapping, which a table may hold as JSON text. Raises ValueError."""
    return json.loads(value) if isinstance(value, str) else value


def _arguments(check: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in check.items() if key != "name"}


def _compare(count: int, relation: str, limit: int) -> bool:
    """`relation`: "at least" or "less than"."""
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation {relation!r} is neither 'at least' nor 'less than'")
    return count >= limit if relation == "at least" else count < limit


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _count(text: str, word: str) -> int:
    return len(re.findall(rf"\b{re.escape(word)}\b", text, re.IGNORECASE))


def _paragraphs(text: str, separator: str) -> list[str] | None:
    """Return the paragraphs between separators; None where one inside is empty. Empty ones at the ends do not count."""
    parts = [part.strip() for part in re.split(separator, text)]
    inner = parts[1:-1]
    return None if not all(inner) else [part for part in parts if part]


def keywords_exist(text: str, keywords: Sequence[str]) -> bool:
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(len(re.findall(re.escape(keyword), text, re.IGNORECASE)), relation, frequency)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(_count(text, word) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(Counter(text.lower())[letter.lower()], let_relation, let_frequency)


def number_words(text: str, num_words: int, relation: str) -> bool:
    return _compare(len(_words(text)), relation, num_words)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """An item of a list is a sentence also without an end mark; its number or bullet is none."""
    parts = [part for block in _ITEM.split(text) for part in _SENTENCE_END.split(block)]
    return _compare(sum(bool(_WORD.search(part)) for part in parts), relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs are separated by ***."""
    paragraphs = _paragraphs(text, r"\s?\*\*\*\s?")
    return paragraphs is not None and len(paragraphs) == num_paragraphs


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are separated by blank lines."""
    parts = re.split(r"\n\n", text)
    count = sum(bool(part.strip()) for part in parts)
    paragraph = parts[nth_paragraph - 1].split() if 0 < nth_paragraph <= count else []
    word = re.split("[.,?!'\"]", paragraph[0].lstrip("'").lstrip('"'))[0] if paragraph else ""
    return count == num_paragraphs and bool(paragraph) and word.lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    return len(_PLACEHOLDER.findall(text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    marks = {"P.S.": r"\s*p\.\s?s\.", "P.P.S": r"\s*p\.\s?p\.\s?s"}
    mark = marks.get(postscript_marker, r"\s*" + re.escape(postscript_marker.lower()))
    return re.search(mark, text.lower()) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    return len(_BULLETS.findall(text)) == num_bullets


def constrained_response(text: str) -> bool:
    return any(option in text for option in _CONSTRAINED)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    single = [part.strip("*") for part in re.findall(r"\*[^\n*]*\*", text)]
    double = [part[2:-2] for part in re.findall(r"\*\*[^\n*]*\*\*", text)]
    return sum(bool(part.strip()) for part in single + double) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) >= num_sections


def json_format(text: str) -> bool:
    inner = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(inner)
    except ValueError:
        return False
    return True


def title(text: str) -> bool:
    return any(line.strip() for line in re.findall(r"<<([^\n]+)>>", text))


def two_responses(text: str) -> bool:
    responses = _paragraphs(text, r"\*\*\*\*\*\*")
    return responses is not None and len(responses) == 2 and responses[0] != responses[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(sum(word.isupper() for word in _TOKEN_BREAK.split(text)), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    return text.isupper()


def english_lowercase(text: str) -> bool:
    return text.islower()


def no_comma(text: str) -> bool:
    return "," not in text


def quotation(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": keywords_exist,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "length_constraints:number_words": number_words,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
_RULES = INSTRUCTIONS | TULU
followed.row_problem = row_problem  # type: ignore[attr-defined]
