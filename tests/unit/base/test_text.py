"""Text from outside that is no Unicode, or that a terminal would obey."""

import pytest

from grpo_mcore.base.text import escaped, has_surrogates, not_unicode, replaced, shorten

HALF = "a\ud83db"


def test_halves_of_surrogate_pairs_are_named_and_replaced() -> None:
    assert not_unicode("plain \U0001f600 text") is None
    assert not_unicode(HALF) == "half a surrogate pair, \\ud83d, at character 1"
    assert replaced(HALF) == "a\ufffdb" and replaced("a\U0001f600") == "a\U0001f600"


@pytest.mark.parametrize("value", [HALF, {"a": [1, {"b": HALF}]}, {HALF: 1}, [[None, HALF]]])
def test_they_are_seen_anywhere_in_json(value: object) -> None:
    assert has_surrogates(value)
    assert not has_surrogates({"a": [1, None, True, "b\u2028", {"c": "\U0001f600"}]})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("over\rwritten\b", "over\\x0dwritten\\x08"),
        ("\x9b31m", "\\x9b31m"),
        ("two\u2028lines\x85", "two\\u2028lines\\x85"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("nul\x00", "nul\\x00"),
        (HALF, "a\\ud83db"),
        ("tab\tand\nnewline, ÄÖ 漢字 \U0001f600", "tab\tand\nnewline, ÄÖ 漢字 \U0001f600"),
    ],
)
def test_a_terminal_obeys_nothing(text: str, shown: str) -> None:
    assert escaped(text) == shown
    shown.encode()


def test_a_text_is_shortened_to_one_line() -> None:
    assert shorten("two\n lines") == "two lines"
    assert shorten("abcdef", 3) == "abc ..."
