"""Which token ends an answer, in the published chat templates' ways of ending one."""

import pytest

from grpo_mcore.rollout.turn_end import end_length, said_already, turn_ends
from tests.unit.rollout.published_templates import GEMMA, GLM, GPT_OSS, tokenizer_of

EOS, MARKS = 7, frozenset({6, 7, 8})

ONLY_EARLIER = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' and not loop.last %}<eos>{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
REFUSES = "{{ raise_exception('a system message first') }}"
OLD_LLAMA = (
    "{% for m in messages %}{{ ' ' + m.content + ' ' }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "eos", "ends"),
    [
        (GEMMA, "<eos>", ["<eos>", "<end_of_turn>"]),
        (GEMMA, "<end_of_turn>", ["<end_of_turn>"]),
        (GLM, "<eos>", ["<eos>", "<|user|>", "<|observation|>"]),
        (GPT_OSS, "<|return|>", ["<|return|>"]),  # <|end|> also ends a thought, which is not the end of the turn
        (ONLY_EARLIER, "<eos>", ["<eos>"]),
        (OLD_LLAMA, "<eos>", ["<eos>"]),
        (PLAIN, "<eos>", ["<eos>"]),
        (REFUSES, "<eos>", ["<eos>"]),
    ],
)
def test_generation_stops_where_the_template_ends_an_answer(template: str, eos: str, ends: list[str]) -> None:
    tokenizer = tokenizer_of(template, eos)
    assert tokenizer.convert_ids_to_tokens(list(turn_ends(tokenizer).stop_ids)) == ends


def test_another_template_of_the_same_tokenizer_has_other_ends() -> None:
    tokenizer = tokenizer_of(GEMMA)
    before = turn_ends(tokenizer)
    tokenizer.chat_template = GLM
    assert before.token is not None and turn_ends(tokenizer).token is None


@pytest.mark.parametrize(
    ("followed", "last", "stop_token", "count"),
    [
        ([7, 9, 4], [7, 9], 7, 1),
        ([6, 9, 4], [6, 9], 6, 1),  # ends a turn, and is not the end of sequence
        ([7, 9, 4], [7, 9], None, 0),
        ([7, 9, 4], [7, 9], 5, 0),
        ([7, 9, 4], [7, 9], 9, 0),  # in the middle of the end
        ([9, 7, 4], [9, 7], 7, 2),  # an end of several tokens
        ([9, 7, 4], [9, 7], 9, 1),  # a stop token that the template has, too
        ([9, 4], [9], 7, 0),  # the template has no mark
        ([6, 4], [], 6, 1),  # the next turn's beginning ends an answer
        ([8, 4], [], 6, 0),  # another turn was announced than comes
        ([6, 4], [], 7, 0),  # end of sequence before a turn's beginning
        ([6, 4], [7], 7, 1),  # what ends the last answer, for what ends earlier ones
        ([6, 4], [6], 7, 0),
    ],
)
def test_an_end_that_was_said_is_not_said_twice(
    followed: list[int], last: list[int], stop_token: int | None, count: int
) -> None:
    assert said_already(followed, last, stop_token, MARKS, EOS) == count


def test_the_end_is_all_up_to_its_mark() -> None:
    assert end_length([9, 7, 4], [9, 7], MARKS) == 2
    assert end_length([9, 9, 7], [9], MARKS) == 0  # the mark belongs to what comes later
    assert end_length([], [], MARKS) == 0
