"""SFT on the chat templates of today, written down in small: what is trained on, where an answer begins and ends.

The templates behave as the published ones do: Qwen3 and DeepSeek drop earlier thoughts, Qwen3 gives the last answer an
empty one, Nemotron 3 begins a thought in its generation prompt, gpt-oss has channels, GLM-4.5 ends a turn by the mark
of the next, Gemma 3 and Phi end it by a token that is not the tokenizer's eos. Calls of tools: DeepSeek takes arguments
as JSON text and shows later calls without a header, Llama 3.1 and gpt-oss one call a message, Llama 3 and Gemma 3 none.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_mcore.data import DataError, TaskDataSpec
from grpo_mcore.data.answers import warn_of_reasoning_left_out
from grpo_mcore.data.processors import math_hf_data_processor, sft_processor
from grpo_mcore.data.turn_tokens import TurnTemplate, answer_end
from grpo_mcore.rollout.chat_form import ChatForm, chat_form
from tests.unit.rollout.published_templates import GPT_OSS_TOOLS

TURN = "<|im_start|>{{ m.role }}\n"
LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
SAID = (
    "{% set parts = m.content.split('</think>') %}{% set said = parts[-1].lstrip('\n') %}"
    "{% set thought = m.reasoning_content if m.reasoning_content else "
    "parts[0].split('<think>')[-1].strip('\n') if parts|length > 1 else '' %}"
)
RESULT = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
TOOL_OR_ASSISTANT = (
    LAST_QUESTION + "{% for m in messages %}{% if m.role == 'tool' %}" + RESULT + "{% else %}" + TURN
    + "{% if m.role == 'assistant' %}"
)  # fmt: skip
OTHER_AND_END = "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
QWEN3 = (
    TOOL_OR_ASSISTANT
    + SAID
    + "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ said }}{% for c in m.tool_calls or [] %}{{ '\n' if said or not loop.first }}"
    '<tool_call>\n{"name": '
    '"{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}\n</tool_call>{% endfor %}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
XML_CALL = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments|items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n"
    "</tool_call>\n{% endfor %}"
)
QWEN35 = (
    TOOL_OR_ASSISTANT + SAID + "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n"
    "{% endif %}{{ said }}" + XML_CALL + OTHER_AND_END + PROMPT
)
NEMOTRON3 = (
    TOOL_OR_ASSISTANT + "{% if m.reasoning_content %}{% if loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n{{ m.content }}{% else %}<think></think>{{ m.content }}{% endif %}"
    "{% elif '<think>' in m.content or '</think>' in m.content %}{{ m.content }}"
    "{% else %}<think></think>{{ m.content }}{% endif %}" + XML_CALL + OTHER_AND_END + PROMPT
)
GLM = (
    LAST_QUESTION
    + "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    + SAID
    + "<think>{{ thought if loop.index0 > ns.last }}</think>{{ '\n' + said if said }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA_TURN = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
LLAMA_PROMPT = "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}" + LLAMA_TURN + "{{ m.content }}<|eot_id|>{% endfor %}" + LLAMA_PROMPT
)
LLAMA31 = (
    "<|begin_of_text|>{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls|length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    + LLAMA_TURN
    + '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments|tojson }}}'
    "<|eot_id|>{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content|tojson }}<|eot_id|>{% else %}"
    + LLAMA_TURN
    + "{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
    + LLAMA_PROMPT
)
MISTRAL = (
    "{% set refuses = 'Tool call IDs should be alphanumeric strings with length 9!' %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS]{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception(refuses) }}{% endif %}"
    "{{ c.function.name }}{{ c.function.arguments|tojson }}{{ c.id }}{% endfor %}<eos>"
    "{% elif m.role == 'assistant' %}{{ m.content }}<eos>{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id|length != 9 %}{{ raise_exception(refuses) }}{% endif %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}={{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
GEMMA3 = (
    "<bos>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    "<bos>{% set ns = namespace(called=false, told=false, open=false) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.open = false %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' and 'tool_calls' in m %}{% set ns.open = false %}{% for c in m.tool_calls %}"
    "{% if ns.called %}{{ '\n' }}{% else %}<|Assistant|>{{ m.content if m.content is not none }}"
    "<|tool_calls_begin|>{% endif %}<|tool_call_begin|>{{ c.type + '<|tool_sep|>' + c.function.name }}\n```json\n"
    "{{ '' + c.function.arguments }}\n```"
    "<|tool_call_end|>{% set ns.called = true %}{% endfor %}<|tool_calls_end|><eos>"
    "{% elif m.role == 'assistant' and ns.open %}<|tool_outputs_end|>{{ m.content }}<eos>{% set ns.open = false %}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<eos>"
    "{% elif m.role == 'tool' %}{% if not ns.told %}<|tool_outputs_begin|>{% endif %}<|tool_output_begin|>"
    "{{ m.content }}<|tool_output_end|>{% set ns.told = true %}{% set ns.open = true %}{% endif %}{% endfor %}"
    "{% if ns.open %}<|tool_outputs_end|>{% endif %}"
    "{% if add_generation_prompt and not ns.open %}<|Assistant|><think>\n{% endif %}"
)
SPECIAL = (
    "<bos> <eos> <|im_start|> <|im_end|> <think> </think> [gMASK] <sop> <|user|> <|system|> <|assistant|> <|start|> "
    "<|end|> <|return|> <|channel|> <|message|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
    "<start_of_turn> <end_of_turn> <|User|> <|Assistant|> <|call|> <|observation|>"
).split()
ADDED = (
    "<tool_call> </tool_call> <tool_response> </tool_response> <|tool_calls_begin|> <|tool_call_begin|> <|tool_sep|> "
    "<|tool_call_end|> <|tool_calls_end|> <|tool_outputs_begin|> <|tool_output_begin|> <|tool_output_end|> "
    "<|tool_outputs_end|>"
).split()


def tokenizer(template: str, eos: str) -> Any:
    """Characters and special tokens."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, additional_special_tokens=SPECIAL)
    made.add_tokens(ADDED)
    made.chat_template = template
    return made


def trained(template: str, eos: str, messages: list[dict[str, Any]], train_on: Any = "all") -> list[str]:
    """Return the texts that are trained on, and check that all tokens are those of the rendered text."""
    there = tokenizer(template, eos)
    row = {"messages": messages, "task_name": "t", "uid": "u"}
    datum = sft_processor(row, TaskDataSpec("t", train_on=train_on), there, None, 0)
    whole = "".join(there.decode(message["token_ids"]) for message in datum["message_log"])
    rendered = there.apply_chat_template(chat_form(there).messages(messages), tokenize=False)
    assert whole.startswith(rendered)
    assert whole.removeprefix(rendered) in ("", answer_end(there), eos)
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
    "Qwen3.5": (QWEN35, "<|im_end|>", ["\n</think>\n\ntwo<|im_end|>\n"],
                ["two<|im_end|>\n", "\n</think>\n\nthree<|im_end|>\n"], ["\n</think>\n\nthree<|im_end|>\n"]),
    "Nemotron 3": (NEMOTRON3, "<|im_end|>", ["</think>two<|im_end|>\n"],
                   ["</think>two<|im_end|>\n", "</think>three<|im_end|>\n"], ["</think>three<|im_end|>\n"]),
    "GLM-4.5": (GLM, "<eos>", ["\n<think></think>\ntwo<|user|>"],
                ["\n<think></think>\ntwo<|user|>", "\n<think></think>\nthree<|user|>"],
                ["\n<think></think>\nthree<|user|>"]),
    "gpt-oss": (GPT_OSS_TOOLS, "<|return|>", ["<|channel|>final<|message|>two<|return|>"],
                ["<|channel|>final<|message|>two<|end|>", "<|channel|>final<|message|>three<|return|>"],
                ["<|channel|>final<|message|>three<|return|>"]),
    "Llama 3": (LLAMA3, "<|eot_id|>", ["two<|eot_id|>"], ["two<|eot_id|>", "three<|eot_id|>"], ["three<|eot_id|>"]),
    "Llama 3.1": (LLAMA31, "<|eot_id|>", ["two<|eot_id|>"], ["two<|eot_id|>", "three<|eot_id|>"], ["three<|eot_id|>"]),
    "Gemma 3": (GEMMA3, "<eos>", ["two<end_of_turn>\n"], ["two<end_of_turn>\n", "three<end_of_turn>\n"],
                ["three<end_of_turn>\n"]),
    "DeepSeek": (DEEPSEEK, "<eos>", ["two<eos>"], ["two<eos>", "three<eos>"], ["three<eos>"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_answers_are_trained_with_the_token_that_ends_them(name: str) -> None:
    template, eos, plain, both, last = CASES[name]
    assert trained(template, eos, PLAIN) == trained(template, eos, PLAIN, "last") == plain
    assert plain[0].partition("two")[2] == answer_end(tokenizer(template, eos))
    assert trained(template, eos, TWO) == both
    assert trained(template, eos, TWO, "last") == last


@pytest.mark.parametrize(
    ("name", "last", "earlier"),
    [
        ("Qwen3", "<think>\nso\n</think>\n\nthree<|im_end|>\n", "two<|im_end|>\n"),
        ("Qwen3.5", "so\n</think>\n\nthree<|im_end|>\n", "two<|im_end|>\n"),
        ("Nemotron 3", "so\n</think>\n\nthree<|im_end|>\n", "hm\n</think>\n\ntwo<|im_end|>\n"),
        ("DeepSeek", "\n\nthree<eos>", "\n\ntwo<eos>"),
    ],
)
def test_thoughts_are_trained_where_the_template_shows_them(name: str, last: str, earlier: str) -> None:
    template, eos = CASES[name][:2]
    assert trained(template, eos, THOUGHT, "last") == [last]
    assert trained(template, eos, THOUGHT) == [earlier, last]


@pytest.mark.parametrize("given", [{"shout": True}, '{"shout": true}'])
def test_a_row_may_have_variables_of_the_template(given: Any) -> None:
    template = "{% if shout %}!{% endif %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    there = tokenizer(template, "<|im_end|>")
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    for processor in (sft_processor, math_hf_data_processor):
        datum = processor({**row, "chat_template_kwargs": given}, TaskDataSpec("t"), there, None, 0)
        assert there.decode(datum["message_log"][0]["token_ids"]).startswith("!q")
    for wrong, message in (([1], "must be an object"), ("{", "not JSON"), ({"tokenize": True}, "template rejects it")):
        with pytest.raises(DataError, match=message):
            sft_processor({**row, "chat_template_kwargs": wrong}, TaskDataSpec("t"), there, None, 0)


def test_a_template_without_any_mark_gets_the_eos_token() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert answer_end(tokenizer(plain, "<eos>")) == "\n<eos>"


def test_an_end_in_plain_text_is_not_said_twice() -> None:
    turns = "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}</turn>\n{% endfor %}"
    assert trained(turns, "<eos>", TWO, "last")[0].endswith("three</turn>\n<eos>")


def test_a_template_that_always_begins_another_answer_is_refused() -> None:
    """It would be trained on."""
    always = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}<|assistant|>"
    with pytest.raises(DataError, match="the chat template begins another turn behind the last answer: '<eos><.assi"):
        trained(always, "<eos>", TWO)


def test_a_system_prompt_goes_into_the_question_where_a_template_knows_none() -> None:
    """Gemma 2 refuses it, others do not show it."""
    messages = [{"role": "system", "content": "Be brief."}, *TWO]
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    turns = "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    for template in (refuses + turns, turns):
        shown = chat_form(tokenizer(template, "<eos>")).messages(messages)
        assert shown == [{"role": "user", "content": f"Be brief.\n\n{TWO[0]['content']}"}, *TWO[1:]]
    assert chat_form(tokenizer(QWEN3, "<|im_end|>")).messages(messages) == messages


def test_a_second_system_prompt_is_shown_where_a_template_shows_one_alone() -> None:
    """Agents send a prompt of the developer behind the system's, and reminders later on. Qwen 3.5 and Mistral refuse
    them; gpt-oss, MiniMax and Qwen 3-VL left them out without a word, R1's distilled models the first one."""
    system = [{"role": "system", "content": text} for text in ("Be brief.", "Use tools.", "Two turns are left.")]
    messages = [*system[:2], *TWO[:2], system[2], *TWO[2:]]
    turns = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    others = turns.replace("in messages", "in messages if m.role != 'system'")
    refuses = "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('not here') }}{% endfor %}" + turns
    drops = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + others
    gathers = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}" + others
    last = (
        "{% for m in messages if m.role == 'system' %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}" + others
    )
    for template in (refuses, drops, last):
        there = tokenizer(template, "<eos>")
        shown = chat_form(there).messages(messages)
        assert [(m["role"], m["content"]) for m in shown] == [
            ("system", "Be brief.\n\nUse tools."),
            *((m["role"], m["content"]) for m in TWO[:2]),
            ("user", "Two turns are left."),
            *((m["role"], m["content"]) for m in TWO[2:]),
        ]
        text = there.apply_chat_template(shown, tokenize=False)
        assert all(message["content"] in text for message in messages)
    for template in (turns, gathers):  # as DeepSeek's does
        assert chat_form(tokenizer(template, "<eos>")).messages(messages) == messages


@pytest.mark.parametrize(
    ("name", "stop", "rest"),
    [
        ("GLM-4.5", "<|user|>", "\nand?<|assistant|>"),
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
    with pytest.raises(DataError, match="u: the chat template does not show message 1"):
        trained(forgetful, "<eos>", TWO)


def calls(*arguments: Any) -> list[dict[str, Any]]:
    functions = [{"name": "add", "arguments": one} for one in arguments]
    return [{"id": f"c{n}", "type": "function", "function": function} for n, function in enumerate(functions)]


USING_TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls({"a": 1, "b": "x"})},
    {"role": "tool", "tool_call_id": "c0", "content": "2"},
    {"role": "assistant", "content": "", "tool_calls": calls({"a": 3}, {"a": 4})},
    {"role": "tool", "tool_call_id": "c0", "content": "3"},
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
    {"role": "assistant", "content": "two", "reasoning_content": "ok"},
]


def hermes(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


def xml(*values: tuple[str, Any]) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<tool_call>\n<function=add>\n{parameters}</function>\n</tool_call>\n"


def glm(*values: tuple[str, Any]) -> str:
    shown = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values)
    return f"\n<tool_call>add\n{shown}</tool_call>"


def deepseek(arguments: str) -> str:
    return f"<|tool_call_begin|>function<|tool_sep|>add\n```json\n{arguments}\n```<|tool_call_end|>"


TO_ADD = " to=functions.add<|channel|>commentary json<|message|>"
TOOL_CASES = {
    "Qwen3": ["<think>\nhm\n</think>\n\n" + hermes('{"a": 1, "b": "x"}') + "<|im_end|>\n",
              hermes('{"a": 3}') + "\n" + hermes('{"a": 4}') + "<|im_end|>\n",
              "<think>\nok\n</think>\n\ntwo<|im_end|>\n"],
    "Qwen3.5": ["hm\n</think>\n\n" + xml(("a", 1), ("b", "x")) + "<|im_end|>\n",
                "\n</think>\n\n" + xml(("a", 3)) + xml(("a", 4)) + "<|im_end|>\n", "ok\n</think>\n\ntwo<|im_end|>\n"],
    "Nemotron 3": ["hm\n</think>\n" + xml(("a", 1), ("b", "x")) + "<|im_end|>\n",
                   "</think>" + xml(("a", 3)) + xml(("a", 4)) + "<|im_end|>\n", "ok\n</think>\ntwo<|im_end|>\n"],
    "GLM-4.5": ["\n<think>hm</think>" + glm(("a", 1), ("b", "x")) + "<|observation|>",
                "\n<think></think>" + glm(("a", 3)) + glm(("a", 4)) + "<|observation|>",
                "\n<think>ok</think>\ntwo<|user|>"],
    "gpt-oss": [TO_ADD + '{"a": 1, "b": "x"}<|call|>', TO_ADD + '{"a": 3}<|call|>', TO_ADD + '{"a": 4}<|call|>',
                "<|channel|>analysis<|message|>ok<|end|><|start|>assistant<|channel|>final<|message|>two<|return|>"],
    "Llama 3": [hermes('{"a": 1, "b": "x"}') + "<|eot_id|>",
                hermes('{"a": 3}') + "\n" + hermes('{"a": 4}') + "<|eot_id|>", "two<|eot_id|>"],
    "Llama 3.1": [f'{{"name": "add", "parameters": {one}}}<|eot_id|>' for one in
                  ('{"a": 1, "b": "x"}', '{"a": 3}', '{"a": 4}')] + ["two<|eot_id|>"],
    "Gemma 3": [hermes('{"a": 1, "b": "x"}') + "<end_of_turn>\n",
                hermes('{"a": 3}') + "\n" + hermes('{"a": 4}') + "<end_of_turn>\n", "two<end_of_turn>\n"],
    "DeepSeek": ["<|tool_calls_begin|>" + deepseek('{"a": 1, "b": "x"}') + "<|tool_calls_end|><eos>",
                 "\n" + deepseek('{"a": 3}') + "\n" + deepseek('{"a": 4}') + "<|tool_calls_end|><eos>", "two<eos>"],
}  # fmt: skip


@pytest.mark.parametrize("name", TOOL_CASES)
def test_calls_and_thoughts_are_trained_as_the_template_writes_them(name: str, package_log: Any) -> None:
    warn_of_reasoning_left_out.cache_clear()
    template, eos = CASES[name][:2]
    assert trained(template, eos, USING_TOOLS) == TOOL_CASES[name]
    assert trained(template, eos, USING_TOOLS, "last") == TOOL_CASES[name][-1:]
    said = "leaves out the reasoning of answers that are trained on" in package_log.text
    assert said == (name in ("Llama 3", "Llama 3.1", "Gemma 3", "DeepSeek"))


def test_prompts_with_calls_take_the_form_of_the_template() -> None:
    there = tokenizer(DEEPSEEK, "<eos>")
    row = {"messages": USING_TOOLS[:3], "task_name": "t", "uid": "u", "ground_truth": "2"}
    datum = math_hf_data_processor(row, TaskDataSpec("t"), there, None, 0)
    assert datum["message_log"][0]["content"].endswith("<|tool_output_begin|>2<|tool_output_end|><|tool_outputs_end|>")


def test_results_follow_their_calls_where_a_template_shows_one_call_a_message() -> None:
    first, second = ({"role": "tool", "tool_call_id": f"c{n}", "content": str(n)} for n in (0, 1))
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so", "tool_calls": calls({}, {})}]
    unnamed = [{"role": "tool", "content": str(n)} for n in (0, 1, 2)]
    for results, expected in (
        ([second, first], ["0", "1"]), (unnamed[:2], ["0", "1"]), ([second], ["1"]), (unnamed, ["0", "1", "2"])
    ):  # fmt: skip
        shown = ChatForm(one_call=True).messages([*asked, *results])
        roles = [message["role"] for message in shown]
        assert [message["content"] for message in shown if message["role"] == "tool"] == expected
        assert roles[:2] == ["user", "assistant"] and roles.count("assistant") == 2
        assert [message["content"] for message in shown if message["role"] == "assistant"] == ["so", ""]


def test_mistral_gets_ids_of_nine_letters() -> None:
    """It refuses others, such as OpenAI's; each result keeps its own message, though roles alternate."""
    there = tokenizer(MISTRAL, "<eos>")
    assert there.apply_chat_template([{"role": "user", "content": "q"}], tokenize=False) == "[INST]q[/INST]"
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": str(n)} for n in (0, 1)]
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls({}, {})}]
    form = chat_form(there)
    assert form.calls and form.short_ids and form.alternate
    for given in (results, [{"role": "tool", "content": one["content"]} for one in results]):
        shown = form.messages([*asked, *given])
        made = [call["id"] for call in shown[1]["tool_calls"]]
        assert [one["tool_call_id"] for one in shown[2:]] == made and {len(one) for one in made} == {9}
        assert there.apply_chat_template(shown, tokenize=False).endswith(
            f"<eos>[TOOL_RESULTS]{made[0]}=0[/TOOL_RESULTS][TOOL_RESULTS]{made[1]}=1[/TOOL_RESULTS]"
        )
    kept = form.messages([asked[0], {**asked[1], "tool_calls": [{**asked[1]["tool_calls"][0], "id": "Ab3456789"}]}])
    assert kept[1]["tool_calls"][0]["id"] == "Ab3456789"
    unnamed = [{key: value for key, value in one.items() if key != "id"} for one in asked[1]["tool_calls"]]
    shown = form.messages(
        [asked[0], {**asked[1], "tool_calls": unnamed}, *[{**one, "tool_call_id": None} for one in results]]
    )
    assert [one["tool_call_id"] for one in shown[2:]] == [one["id"] for one in shown[1]["tool_calls"]]


@pytest.mark.parametrize("name", CASES)
def test_a_greeting_is_no_answer(name: str) -> None:
    template, eos = CASES[name][:2]
    greeted = [{"role": "assistant", "content": "hello"}, *PLAIN]
    if name == "Gemma 3":
        with pytest.raises(DataError, match="u: the chat template rejects it: .*roles must alternate"):
            trained(template, eos, greeted)
    else:
        assert trained(template, eos, greeted) == CASES[name][2]
    with pytest.raises(DataError, match="u: it begins with an answer, so there is no prompt to answer"):
        trained(template, eos, greeted[:1])


def test_an_answer_that_the_template_hides_is_refused() -> None:
    """It had been trained on as an empty answer."""
    hides = "{% for m in messages %}<|{{ m.role }}|>{{ m.content if m.content != 'secret' }}<eos>{% endfor %}"
    with pytest.raises(DataError, match="u: the chat template does not show the text of message 1"):
        trained(hides + "{% if add_generation_prompt %}<|assistant|>{% endif %}", "<eos>", talk("q", "secret"))


def test_an_unfinished_thought_is_trained_on() -> None:
    assert trained(NEMOTRON3, "<|im_end|>", talk("q", "<think>\nhm")) == ["hm<|im_end|>\n"]


@pytest.mark.parametrize("begin", ["<think>\n", ""])
def test_a_thought_in_the_text_becomes_a_field_where_the_template_looks_for_none_there(begin: str) -> None:
    """gpt-oss had shown it as part of the answer, in its final channel; Qwen3 and the like read it themselves."""
    template, eos = CASES["gpt-oss"][:2]
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>two<|return|>"
    assert trained(template, eos, talk("1+1?", f"{begin}hm\n</think>\n\ntwo")) == [said]
    assert trained(template, eos, talk("1+1?", "<think>\n\n</think>\n\ntwo")) == CASES["gpt-oss"][2]
    text = "The mark </think> ends it."
    assert trained(template, eos, talk("1+1?", text)) == [f"<|channel|>final<|message|>{text}<|return|>"]
    split = [name for name in CASES if chat_form(tokenizer(*CASES[name][:2])).split_reasoning]
    assert split == ["gpt-oss"]


def test_answers_that_no_token_ends_name_what_stands_there() -> None:
    """ChatML for a base model whose tokenizer has none of its marks."""
    turns = "{% for m in messages %}<im_start>{{ m.role }}\n{{ m.content }}<im_end>\n{% endfor %}"
    template = turns + "{% if add_generation_prompt %}<im_start>assistant\n{% endif %}"
    with pytest.raises(DataError, match=r"no token of the tokenizer ends it \('<im_end>.n<im_start>user'\); train_on"):
        trained(template, "<eos>", TWO)
    assert trained(template, "<eos>", TWO, "last") == ["three<im_end>\n<eos>"]
