"""The prompt of a later turn begins with exactly the tokens of the earlier turns."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.data.tokenizer import load_tokenizer
from grpo_mcore.generation.chat.prompt import ChatPrompts
from grpo_mcore.generation.chat.request import ChatRequest, RequestError
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.rollout.chat_form import chat_form
from grpo_mcore.rollout.trajectory import Sampling
from grpo_mcore.tools.demo.colours import make_colour_task
from tests.pictures import noise, reader_of
from tests.unit.rollout.published_templates import GEMMA, GEMMA4_TOOLS, GLM, GPT_OSS_TOOLS, tokenizer_of

CONFIG = ChatConfig("policy", (Sampling(8),))
# Strips the reasoning of earlier answers, as templates of reasoning models do.
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('/')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def prompts(tokenizer: Any, template: str | None = None, vocab_size: int = 64) -> ChatPrompts:
    sampling = Sampling(8, stop_token_ids=(tokenizer.eos_token_id,))
    return ChatPrompts(tokenizer, ChatConfig("policy", (sampling,), template), vocab_size)


def request(*messages: dict[str, Any], **more: Any) -> ChatRequest:
    return ChatRequest.read({"messages": list(messages), **more}, CONFIG)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


USER = {"role": "user", "content": "ab"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def test_a_first_turn_follows_the_template(tokenizer: Any) -> None:
    assert prompts(tokenizer).turn(request(USER))[0].token_ids.tolist() == ids(tokenizer, "<bos><user>ab<assistant>")
    parts = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    assert prompts(tokenizer).turn(request(parts))[0].token_ids.tolist() == ids(
        tokenizer, "<bos><system>a\nb<assistant>"
    )


@pytest.mark.parametrize(
    ("shown", "joint"),
    [
        ("{% if m.content is string %}{{ m.content }}{% endif %}", "\n"),
        ("{{ m['content'] | trim }}", "\n"),
        ("{{ m.content | tojson }}", "\n"),
        ("{{ m.content + 'x' }}", "\n"),
        ("{% if m.content is string %}?{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}", ""),
    ],
)
def test_several_texts_of_a_message_are_joined_as_in_vllm(shown: str, joint: str) -> None:
    """They ran together: "Solve it.Use Python."."""
    assert chat_form(tokenizer_of("{% for m in messages %}" + shown + "{% endfor %}")).joint == joint


@pytest.mark.parametrize("ended", [True, False])
def test_recorded_tokens_are_kept(tokenizer: Any, ended: bool) -> None:
    """The recorded tokens differ from those of the same text: `<action>` letter by letter."""
    eos = [tokenizer.eos_token_id]
    asked, said = ids(tokenizer, "<bos><user>ab<assistant>"), [ids(tokenizer, c)[0] for c in "<action>"]
    assert said != ids(tokenizer, "<action>")
    answer = {"role": "assistant", "content": "<action>", "generation_log_probs": [-1.0]}
    answer |= {"prompt_token_ids": asked, "generation_token_ids": said + (eos if ended else [])}
    found = prompts(tokenizer).turn(request(USER, answer, {"role": "user", "content": "cd"}))[0].token_ids.tolist()
    assert found == [*asked, *said, *eos, *ids(tokenizer, "<user>cd<assistant>")]


def test_reasoning_that_the_template_strips_is_kept(tokenizer: Any) -> None:
    asked, said = ids(tokenizer, "<user>ab<assistant>"), ids(tokenizer, "think/yes<eos>")
    answer = {"role": "assistant", "content": "think/yes", "prompt_token_ids": asked, "generation_token_ids": said}
    later = {"role": "assistant", "content": "x/no"}  # written by the environment: it has no tokens
    found = prompts(tokenizer, THINKING).turn(request(USER, answer, USER, later, USER))[0].token_ids.tolist()
    assert found == [*asked, *said, *ids(tokenizer, "<user>ab<assistant>no<eos><user>ab<assistant>")]
    plain = {"role": "assistant", "content": "think/yes"}
    without = prompts(tokenizer, THINKING).turn(request(USER, plain, USER))[0].token_ids.tolist()
    assert without == ids(tokenizer, "<user>ab<assistant>yes<eos><user>ab<assistant>")


@pytest.mark.parametrize("ended", [True, False])
def test_an_answer_is_kept_where_the_template_requires_its_calls(ended: bool) -> None:
    """gpt-oss's template refuses a tool's message that no call came before."""
    tokenizer = tokenizer_of(GPT_OSS_TOOLS, "<|return|>")
    sampling = Sampling(8, stop_token_ids=(tokenizer.convert_tokens_to_ids("<|call|>"),))
    prompts = ChatPrompts(tokenizer, ChatConfig("policy", (sampling,)), len(tokenizer))
    asked = ids(tokenizer, "<|start|>user<|message|>ab<|end|><|start|>assistant")
    said = ids(tokenizer, "<|channel|>analysis<|message|>I look" + ("<|call|>" if ended else ""))
    answer = {"role": "assistant", "content": "look", "tool_calls": [CALL]}
    answer |= {"prompt_token_ids": asked, "generation_token_ids": said}
    tool = {"role": "tool", "tool_call_id": "1", "content": "cd"}
    reply = '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"cd"<|end|><|start|>assistant'
    end = ids(tokenizer, "<|call|>")
    assert prompts.turn(request(USER, answer, tool))[0].token_ids.tolist() == [
        *asked, *(said[:-1] if ended else said), *end, *ids(tokenizer, reply)
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "look"])
def test_results_are_shown_where_the_template_writes_them_by_their_calls(text: str) -> None:
    """Shown behind an answer without calls, they would be left out without a word."""
    tokenizer = tokenizer_of(GEMMA4_TOOLS, "<end_of_turn>")
    sampling = Sampling(8, stop_token_ids=tuple(tokenizer.convert_tokens_to_ids(["<end_of_turn>", "<|observation|>"])))
    prompts = ChatPrompts(tokenizer, ChatConfig("policy", (sampling,)), len(tokenizer))
    asked = ids(tokenizer, "<|user|>ab<end_of_turn>\n<|assistant|>")
    said = ids(tokenizer, 'call:f{"x": 1}<|observation|>')
    answer = {"role": "assistant", "content": text, "tool_calls": [CALL]}
    answer |= {"prompt_token_ids": asked, "generation_token_ids": said}
    turn, *_ = prompts.turn(request(USER, answer, {"role": "tool", "tool_call_id": "1", "content": "12"}))
    assert turn.token_ids.tolist() == [*asked, *said, *ids(tokenizer, "1=12<|end|>")]


def test_a_thought_that_a_later_question_hides_does_not_cost_the_tokens() -> None:
    """MiniMax-M2's template hides thoughts before the last question: behind a result and a question of the user, what
    the template wrote up to the call was no beginning of the whole."""
    template = (
        "{% set ns = namespace(called=false) %}{% for m in messages %}{% if m.role == 'tool' and not ns.called %}"
        "{{ raise_exception('no call before') }}{% endif %}"
        "<|{{ m.role }}|>{% if m.reasoning_content and 'user' not in messages[loop.index:]|map(attribute='role') %}"
        "({{ m.reasoning_content }}){% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments|tojson }}{% set ns.called = true %}{% endfor %}<eos>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    there = tokenizer_of(template)
    asked, said = ids(there, "<|user|>ab<eos><|assistant|>"), ids(there, '(so)f{"x": 1}<eos>')
    answer = {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [CALL]}
    answer |= {"prompt_token_ids": asked, "generation_token_ids": said}
    result = {"role": "tool", "tool_call_id": "1", "content": "12"}
    found = prompts(there, vocab_size=len(there)).turn(request(USER, answer, result, USER))[0].token_ids.tolist()
    assert found == [*asked, *said, *ids(there, "<|tool|>12<eos><|user|>ab<eos><|assistant|>")]


def test_a_later_system_prompt_that_the_template_shows_first_is_not_lost() -> None:
    """DeepSeek's template gathers them: behind the recorded tokens, it was nowhere."""
    template = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    )
    there = tokenizer_of(template)
    answer = {"role": "assistant", "content": "x", "prompt_token_ids": [1], "generation_token_ids": [2]}
    reminder = {"role": "developer", "content": "cd"}
    found = prompts(there, vocab_size=len(there)).turn(request(USER, answer, reminder, USER))[0].token_ids.tolist()
    assert there.decode(found).replace(" ", "") == "cd<|user|>ab<|assistant|>x<|user|>ab".replace(" ", "")


def test_the_last_recorded_answer_is_the_prefix(tokenizer: Any) -> None:
    first = {"role": "assistant", "content": "a", "prompt_token_ids": [8], "generation_token_ids": [9]}
    second = {"role": "assistant", "content": "b", "prompt_token_ids": [8, 9, 10], "generation_token_ids": [11, 2]}
    assert tokenizer.eos_token_id == 2
    found = (
        prompts(tokenizer)
        .turn(request(USER, first, USER, second, {"role": "tool", "content": "c"}))[0]
        .token_ids.tolist()
    )
    assert found == [8, 9, 10, 11, 2, *ids(tokenizer, "<tool>c<assistant>")]


def test_a_prefix_may_come_in_a_field_of_its_own(tokenizer: Any) -> None:
    answer = {"role": "assistant", "content": "a"}
    found = (
        prompts(tokenizer).turn(request(USER, answer, USER, required_prefix_token_ids=[8, 9, 2]))[0].token_ids.tolist()
    )
    assert found == [8, 9, 2, *ids(tokenizer, "<user>ab<assistant>")]


def test_a_template_that_hides_earlier_answers_renders_the_whole_prompt(tokenizer: Any) -> None:
    last_only = "<user>{{ messages[-1].content }}{% if add_generation_prompt %}<assistant>{% endif %}"
    answer = {"role": "assistant", "content": "a", "prompt_token_ids": [8], "generation_token_ids": [9]}
    assert prompts(tokenizer, last_only).turn(request(USER, answer, USER))[0].token_ids.tolist() == ids(
        tokenizer, "<user>ab<assistant>"
    )


def test_the_template_gets_the_arguments_of_calls_as_objects(tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% for value in c.function.arguments.values() %}{{ value }}{% endfor %}{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": "yes"})}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert prompts(tokenizer, template).turn(request(USER, message))[0].token_ids.tolist() == ids(tokenizer, "abfyes")


@pytest.mark.parametrize(
    ("messages", "more", "why"),
    [
        ([USER, {"role": "assistant", "generation_token_ids": [1]}], {}, "messages.1.prompt_token_ids"),
        ([{"role": "assistant", "prompt_token_ids": [1], "generation_token_ids": [64]}], {},
         "messages.0.generation_token_ids: must be a list of token ids from 0 to 63"),
        ([{"role": "assistant", "prompt_token_ids": [1], "generation_token_ids": [True]}], {}, "token ids"),
        ([USER], {"required_prefix_token_ids": [-1]}, "required_prefix_token_ids"),
        ([USER], {"stop_token_ids": [1, 64]}, "stop_token_ids: must be a list of token ids from 0 to 63"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "an image must be a data URL"),
        ([{"role": "user", "content": 3}], {}, "content must be text"),
    ],
)  # fmt: skip
def test_invalid_messages_are_refused(tokenizer: Any, messages: list[Any], more: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        prompts(tokenizer).turn(request(*messages, **more))[0].token_ids.tolist()


def test_a_thought_and_an_effort_are_shown_under_the_names_of_the_template(tokenizer: Any) -> None:
    """vLLM's clients call a thought `reasoning` today, and `reasoning_content` before."""
    template = "{{ reasoning_effort }}{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{% endfor %}"
    for name in ("reasoning", "reasoning_content", "thinking"):
        said = {"role": "assistant", "content": "", name: "ab"}
        found = prompts(tokenizer, template).turn(request(said, reasoning_effort="c"))[0].token_ids.tolist()
        assert found == ids(tokenizer, "c<assistant>ab"), name


def test_an_error_in_the_template_is_a_refusal(tokenizer: Any) -> None:
    with pytest.raises(RequestError, match="the chat template refuses the messages: TemplateError: no"):
        prompts(tokenizer, "{{ raise_exception('no') }}").turn(request(USER))[0].token_ids.tolist()


def test_a_request_sets_variables_of_the_template_and_nothing_else(tokenizer: Any) -> None:
    """The tokenizer's other arguments, above all another template, stay those of the run."""
    template = THINKING + "{% if brief %}/{% endif %}"
    plain = prompts(tokenizer, template).turn(request(USER))[0].token_ids.tolist()
    brief = (
        prompts(tokenizer, template)
        .turn(request(USER, chat_template_kwargs={"brief": True, "unknown": "x"}))[0]
        .token_ids.tolist()
    )
    assert brief == [*plain, *ids(tokenizer, "/")]
    for name in ("chat_template", "tokenize", "padding", "messages", "conversation", "eos_token", "max_length"):
        if name == "messages":  # the template's own variable, which no keyword reaches
            continue
        with pytest.raises(RequestError, match=f"chat_template_kwargs.{name}: only variables"):
            prompts(tokenizer, template).turn(request(USER, chat_template_kwargs={name: "x"}))[0].token_ids.tolist()
    for value in (["x"], {"a": 1}, "x" * 10_001):
        with pytest.raises(RequestError, match="chat_template_kwargs.brief: must be a boolean, a number or a text"):
            prompts(tokenizer, template).turn(request(USER, chat_template_kwargs={"brief": value}))[
                0
            ].token_ids.tolist()


@pytest.mark.parametrize(
    ("template", "stop", "role", "rest"),
    [
        (GEMMA, "<end_of_turn>", "user", "\n<|user|>cd<end_of_turn>\n<|assistant|>"),
        (GLM, "<|user|>", "user", "\ncd<|assistant|>"),
        (GLM, "<|observation|>", "tool", "\ncd<|assistant|>"),
    ],
)
def test_the_end_of_a_turn_is_not_doubled(template: str, stop: str, role: str, rest: str) -> None:
    """The token that ended the turn need not be the tokenizer's end of sequence."""
    tokenizer = tokenizer_of(template)
    said = [*ids(tokenizer, "yes"), tokenizer.convert_tokens_to_ids(stop)]
    answer = {
        "role": "assistant",
        "content": "yes",
        "prompt_token_ids": ids(tokenizer, "ab"),
        "generation_token_ids": said,
    }
    later = (
        prompts(tokenizer, vocab_size=len(tokenizer))
        .turn(request(USER, answer, {"role": role, "content": "cd", "tool_call_id": "1"}))[0]
        .token_ids.tolist()
    )
    assert later == [*ids(tokenizer, "ab"), *said, *ids(tokenizer, rest)]


def test_images_come_as_data_urls(tmp_path: Path) -> None:
    """Each takes the run of tokens that it has in training; files and addresses are not read for a client."""
    make_colour_task(tmp_path / "task", tmp_path / "model", rows=4)
    reader, tokenizer = reader_of(tmp_path / "model"), load_tokenizer(str(tmp_path / "model"))
    prompts, picture = ChatPrompts(tokenizer, CONFIG, len(tokenizer), reader), noise(64, 96)
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "red"}]
    shown = {"role": "user", "content": parts}
    turn, files = prompts.turn(ChatRequest.read({"messages": [shown]}, CONFIG))
    (span,) = turn.images
    assert files == {span.digest: picture} and span.length == 6
    assert turn.token_ids[span.offset : span.offset + 6].tolist() == [6] * 6
    for url in (str(tmp_path / "a.png"), "https://example.org/a.png"):
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
        with pytest.raises(RequestError, match="message 0 of 'messages': an image must be a data URL"):
            ChatRequest.read(body, CONFIG)
    with pytest.raises(RequestError, match="this policy reads none"):
        ChatPrompts(tokenizer, CONFIG, len(tokenizer)).turn(ChatRequest.read({"messages": [shown]}, CONFIG))
