"""The instructions of Tulu 3's prompts (allenai/RLVR-IFeval), by the names of the functions that check them in
open-instruct: `ground_truth` is {"func_name": "validate_word_constraint", "N": 100, "quantifier": "at least", ...}.
Their rules differ from those of IFEval in details, so each is written here. The one for the answer's language is left
out.
"""

import json
import re
from collections.abc import Callable

_SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?!])\s")


def _compare(count: int, quantifier: str, limit: int, tolerance: int) -> bool:
    """Compare a count with its limit. `quantifier`: "at least", "at most", or "around", which allows a difference of
    `tolerance`."""
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


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _paragraph_count(text: str, N: int) -> bool:
    parts = text.split("* * *")
    return len(parts) == N and all(part.strip() for part in parts)


def _paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    parts = text.split("\n\n")
    return len(parts) == N and 0 < i <= N and parts[i - 1].strip().startswith(first_word)


def _postscript(text: str, postscript_marker: str) -> bool:
    _, marker, behind = text.partition(postscript_marker)
    return bool(marker and behind.strip())


def _two_responses(text: str) -> bool:
    responses = [part.strip() for part in text.split("******")]
    return len(responses) == 2 and responses[0] != responses[1]


TULU: dict[str, Callable[..., bool]] = {
    "verify_keywords": lambda text, keyword_list: all(word.lower() in text.lower() for word in keyword_list),
    "verify_keyword_frequency": lambda text, word, N: re.findall(r"\w+", text.lower()).count(word.lower()) == N,
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(word.lower() in text.lower() for word in forbidden_words)
    ),
    "verify_letter_frequency": lambda text, letter, N: text.count(letter) == N,
    "verify_paragraph_count": _paragraph_count,
    "validate_word_constraint": lambda text, N, quantifier: _compare(len(text.split()), quantifier, N, _tenth(N)),
    "verify_sentence_constraint": lambda text, N, quantifier: _compare(
        len(_SENTENCE_END.split(text)), quantifier, N, 1
    ),
    "validate_paragraphs": _paragraphs,
    "verify_postscript": _postscript,
    "validate_placeholders": lambda text, N: len(re.findall(r"\[.*?\]", text)) >= N,
    "verify_bullet_points": lambda text, N: sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N,
    "validate_title": lambda text: re.search(r"<<.*?>>", text) is not None,
    "validate_choice": lambda text, options: any(
        option in text for option in ([options] if isinstance(options, str) else options)
    ),
    "validate_highlighted_sections": lambda text, N: len(re.findall(r"\*.*?\*", text)) >= N,
    "validate_sections": lambda text, N, section_splitter: (
        text != "" and len(text.removeprefix(section_splitter).split(section_splitter)) == N
    ),
    "validate_json_format": is_json,
    "validate_repeat_prompt": lambda text, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": _two_responses,
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, N, quantifier: _compare(
        len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N, _tenth(N)
    ),
    "validate_end": lambda text, end_phrase: text.endswith(end_phrase),
    "validate_quotation": lambda text: text.startswith('"') and text.endswith('"'),
    "validate_no_commas": lambda text: "," not in text,
}
