"""SFT on the chat templates of today, written down in small: what is trained on, where an answer begins and ends.

The templates behave as the published ones do: Qwen3 and DeepSeek drop earlier thoughts, Qwen3 gives the last answer an
empty one, Nemotron 3 begins a thought in its generation prompt, gpt-oss has channels, GLM-4.5 ends a turn by the mark
of the next, Gemma 3 and Phi end it by a token that is not the tokenizer's eos.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_mcore.data import DataError, TaskDataSpec
from grpo_mcore.data.processors import sft_processor
from grpo_mcore.data.turn_tokens import TurnTemplate, answer_end

TURN = "<|im_start|>{{ m.role }}\n"
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}" + TURN + "{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% set said = parts[-1].lstrip('\n') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts|length > 1 else '' %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEMOTRON3 = (
    "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' %}{% if '</think>' in m.content %}{{ m.content }}"
    "{% else %}<think></think>{{ m.content }}{% endif %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}\n"
    "{% if '</think>' in m.content %}{{ m.content }}{% else %}<think></think>\n{{ m.content }}{% endif %}"
    "{% else %}\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA3 = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    "<bos>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
SPECIAL = (
    *(
        "<bos>",
        "<eos>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "[gMASK]",
        "<sop>",
        "<|user|>",
        "<|system|>",
    ),
    *("<|assistant|>", "<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|message|>", "<|begin_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|User|>"),
    "<|Assistant|>",
)


def tokenizer(template: str, eos: str) -> Any:
    """Characters and special tokens."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, additional_special_tokens=list(SPECIAL))
    made.chat_template = template
    return made


def trained(template: str, eos: str, messages: list[dict[str, str]], train_on: Any = "all") -> list[str]:
    """Return the texts that are trained on, and check that all tokens are those of the rendered text."""
    there = tokenizer(template, eos)
    row = {"messages": messages, "task_name": "t", "uid": "u"}
    datum = sft_processor(row, TaskDataSpec("t", train_on=train_on), there, None, 0)
    whole = "".join(there.decode(message["token_ids"]) for message in datum["message_log"])
    rendered = there.apply_chat_template(messages, tokenize=False)
    assert whole.startswith(rendered)
    assert whole.removeprefix(rendered) in ("", answer_end(there))
    return [there.decode(message["token_ids"]) for message in datum["message_log"] if message["token_loss_mask"].any()]


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


PLAIN, TWO = talk("1+1?", "two"), talk("1+1?", "two", "and 3?", "three")
THOUGHT = talk("1+1?", "<think>\nhm\n</think>\n\ntwo", "and 3?", "<think>\nso\n</think>\n\nthree")

CASES: dict[str, tuple[str, str, list[str], list[str], list[str]]] = {
    # name: template, eos, trained of PLAIN, of TWO with all, of TWO with last
    "Qwen3": (QWEN3, "<|im_end|>", ["<think>\n\n</think>\n\ntwo<|im_end|>\n"],
              ["two<|im_end|>\n", "<think>\n\n</think>\n\nthree<|im_end|>\n"],
              ["<think>\n\n</think>\n\nthree<|im_end|>\n"]),
    "Nemotron 3, Qwen3.5": (NEMOTRON3, "<|im_end|>", ["</think>two<|im_end|>\n"],
                            ["</think>two<|im_end|>\n", "</think>three<|im_end|>\n"], ["</think>three<|im_end|>\n"]),
    "GLM-4.5": (GLM, "<eos>", ["<think></think>\ntwo<|user|>"],
                ["<think></think>\ntwo<|user|>", "<think></think>\nthree<|user|>"],
                ["<think></think>\nthree<|user|>"]),
    "gpt-oss": (GPT_OSS, "<|return|>", ["<|channel|>final<|message|>two<|return|>"],
                ["<|channel|>final<|message|>two<|end|>", "<|channel|>final<|message|>three<|return|>"],
                ["<|channel|>final<|message|>three<|return|>"]),
    "Llama 3": (LLAMA3, "<|eot_id|>", ["two<|eot_id|>"], ["two<|eot_id|>", "three<|eot_id|>"], ["three<|eot_id|>"]),
    "Gemma 3": (GEMMA3, "<eos>", ["two<end_of_turn>\n"], ["two<end_of_turn>\n", "three<end_of_turn>\n"],
                ["three<end_of_turn>\n"]),
    "DeepSeek": (DEEPSEEK, "<eos>", ["two<eos>"], ["two<eos>", "three<eos>"], ["three<eos>"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_answers_are_trained_with_the_token_that_ends_them(name: str) -> None:
    template, eos, plain, both, last = CASES[name]
    assert trained(template, eos, PLAIN) == trained(template, eos, PLAIN, "last") == plain
    assert trained(template, eos, TWO) == both
    assert trained(template, eos, TWO, "last") == last


@pytest.mark.parametrize(
    ("name", "last", "earlier"),
    [
        ("Qwen3", "<think>\nso\n</think>\n\nthree<|im_end|>\n", "two<|im_end|>\n"),
        ("Nemotron 3, Qwen3.5", "so\n</think>\n\nthree<|im_end|>\n", "hm\n</think>\n\ntwo<|im_end|>\n"),
        ("DeepSeek", "\n\nthree<eos>", "\n\ntwo<eos>"),
    ],
)
def test_thoughts_are_trained_where_the_template_shows_them(name: str, last: str, earlier: str) -> None:
    template, eos = CASES[name][:2]
    assert trained(template, eos, THOUGHT, "last") == [last]
    assert trained(template, eos, THOUGHT) == [earlier, last]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("Qwen3", "<|im_end|>\n"),
        ("GLM-4.5", "<|user|>"),
        ("Gemma 3", "<end_of_turn>\n"),
        ("gpt-oss", "<|return|>"),
        ("DeepSeek", "<eos>"),
    ],
)
def test_what_ends_an_answer(name: str, end: str) -> None:
    assert answer_end(tokenizer(*CASES[name][:2])) == end


def test_a_template_without_any_mark_gets_the_eos_token() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert answer_end(tokenizer(plain, "<eos>")) == "\n<eos>"


@pytest.mark.parametrize(
    ("name", "stop", "rest"),
    [
        ("GLM-4.5", "<|user|>", "and?<|assistant|>"),
        ("Gemma 3", "<end_of_turn>", "\n<start_of_turn>user\nand?<end_of_turn>\n<start_of_turn>model\n"),
        ("Llama 3", "<|eot_id|>",
         "<|start_header_id|>user<|end_header_id|>\n\nand?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
    ],
)  # fmt: skip
def test_the_token_that_ended_a_turn_is_not_said_twice(name: str, stop: str, rest: str) -> None:
    there = tokenizer(*CASES[name][:2])
    turn = TurnTemplate(there).turn("and?", "user", there.convert_tokens_to_ids(stop))
    assert there.decode(turn.token_ids) == rest


def test_a_template_that_leaves_earlier_answers_out_trains_the_last() -> None:
    forgetful = (
        "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}<|{{ m.role }}|>{{ m.content }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert trained(forgetful, "<eos>", TWO, "last") == ["three<eos>"]
    with pytest.raises(DataError, match="u: the chat template does not show where the answer of message 1 begins"):
        trained(forgetful, "<eos>", TWO)
