"""The instructions of Tulu 3's prompts (allenai/RLVR-IFeval), by the names of the functions that check them in
open-instruct: `ground_truth` is {"func_name": "validate_word_constraint", "N": 100, "quantifier": "at least", ...}.
Their rules are not quite those of IFEval, so that each is written here. The one for the answer's language is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

_SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?!])\s")


def _compare(count: int, quantifier: str, limit: int, tolerance: int) -> bool:
    """`quantifier`: "at least", "at most", or "around", which allows a difference of `tolerance`."""
    match quantifier:
        case "at least":
            return count >= limit
        case "at most":
            return count <= limit
        case "around":
            return abs(count - limit) <= tolerance
    raise ValueError(f"quantifier {quantifier!r} is none of 'at least', 'at most', 'around'")


def _tenth(limit: int) -> int:
    return max(round(limit * 0.1), 1)


def _keywords(text: str, keyword_list: Sequence[str]) -> bool:
    return all(word.lower() in text.lower() for word in keyword_list)


def _keyword_frequency(text: str, word: str, N: int) -> bool:
    return re.findall(r"\w+", text.lower()).count(word.lower()) == N


def _forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(word.lower() in text.lower() for word in forbidden_words)


def _letter_frequency(text: str, letter: str, N: int) -> bool:
    return text.count(letter) == N


def _paragraph_count(text: str, N: int) -> bool:
    parts = text.split("* * *")
    return len(parts) == N and all(part.strip() for part in parts)


def _words(text: str, N: int, quantifier: str) -> bool:
    return _compare(len(text.split()), quantifier, N, _tenth(N))


def _sentences(text: str, N: int, quantifier: str) -> bool:
    return _compare(len(_SENTENCE_END.split(text)), quantifier, N, 1)


def _paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    parts = text.split("\n\n")
    return len(parts) == N and 0 < i <= N and parts[i - 1].strip().startswith(first_word)


def _postscript(text: str, postscript_marker: str) -> bool:
    _, marker, behind = text.partition(postscript_marker)
    return bool(marker and behind.strip())


def _placeholders(text: str, N: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= N


def _bullets(text: str, N: int) -> bool:
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N


def _title(text: str) -> bool:
    return re.search(r"<<.*?>>", text) is not None


def _choice(text: str, options: Sequence[str]) -> bool:
    return any(option in text for option in ([options] if isinstance(options, str) else options))


def _highlighted(text: str, N: int) -> bool:
    return len(re.findall(r"\*.*?\*", text)) >= N


def _sections(text: str, N: int, section_splitter: str) -> bool:
    return len(re.findall(rf"{re.escape(section_splitter)}\s?\d+", text, re.IGNORECASE)) >= N


def _json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _repeat(text: str, original_prompt: str) -> bool:
    return text.startswith(original_prompt)


def _two_responses(text: str) -> bool:
    responses = [part.strip() for part in text.split("******")]
    return len(responses) == 2 and responses[0] != responses[1]


def _capital_words(text: str, N: int, quantifier: str) -> bool:
    return _compare(len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N, _tenth(N))


def _end(text: str, end_phrase: str) -> bool:
    return text.endswith(end_phrase)


TULU: dict[str, Callable[..., bool]] = {
    "verify_keywords": _keywords,
    "verify_keyword_frequency": _keyword_frequency,
    "validate_forbidden_words": _forbidden_words,
    "verify_letter_frequency": _letter_frequency,
    "verify_paragraph_count": _paragraph_count,
    "validate_word_constraint": _words,
    "verify_sentence_constraint": _sentences,
    "validate_paragraphs": _paragraphs,
    "verify_postscript": _postscript,
    "validate_placeholders": _placeholders,
    "verify_bullet_points": _bullets,
    "validate_title": _title,
    "validate_choice": _choice,
    "validate_highlighted_sections": _highlighted,
    "validate_sections": _sections,
    "validate_json_format": _json,
    "validate_repeat_prompt": _repeat,
    "validate_two_responses": _two_responses,
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": _capital_words,
    "validate_end": _end,
    "validate_quotation": lambda text: text.startswith('"') and text.endswith('"'),
    "validate_no_commas": lambda text: "," not in text,
}
