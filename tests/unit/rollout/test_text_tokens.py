"""Texts behind others have the tokens that they have in the whole, where a tokenizer puts a space before a text."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from grpo_mcore.data import TaskDataSpec
from grpo_mcore.data.processors import sft_processor
from grpo_mcore.data.turn_tokens import TurnTemplate
from grpo_mcore.generation.chat.prompt import ChatPrompts
from grpo_mcore.generation.chat.request import ChatRequest
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.rollout.text_tokens import text_of
from grpo_mcore.rollout.trajectory import Sampling
from tests.unit.data.byte_level import make_byte_level
from tests.unit.data.sentence_piece import sentence_piece

# Mistral 7B's first template, and Zephyr's and TinyLlama's, whose answers begin without a space.
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %} [INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.parametrize("kind", ["prepend", "always", "first"])
@pytest.mark.parametrize("template", [MISTRAL, ZEPHYR])
def test_answers_have_the_tokens_that_they_have_in_the_whole(template: str, kind: str) -> None:
    """Each answer had begun with a space more, which no generated one has."""
    tokenizer = sentence_piece(template, kind)
    talk = [
        {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(["1?", "two", "3?", "ten"])
    ]
    whole = tokenizer(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False)["input_ids"]
    row = {"messages": talk, "task_name": "t", "uid": "u"}
    turns = sft_processor(row, TaskDataSpec("t"), tokenizer, None, 0)["message_log"]
    assert [token for turn in turns for token in turn["token_ids"].tolist()] == whole
    first = [turn["token_ids"][0].item() for turn in turns if turn["role"] == "assistant"]
    assert tokenizer.convert_ids_to_tokens(first) == (["▁t"] * 2 if template == MISTRAL else ["t"] * 2)


@pytest.mark.parametrize("kind", ["prepend", "always", "first"])
def test_what_an_environment_says_has_no_further_space(kind: str) -> None:
    """Also where the text of a special token stands in it, and is tokenised apart."""
    tokenizer = sentence_piece(ZEPHYR, kind)
    said = TurnTemplate(tokenizer).turn("a</s>b", "user", tokenizer.eos_token_id)
    tokens = "".join(tokenizer.convert_ids_to_tokens(said.token_ids.tolist()))
    assert "\na</s>b</s>" in tokens


@pytest.mark.parametrize("kind", ["prepend", "always", "first"])
def test_what_follows_a_recorded_answer_has_no_further_space(kind: str) -> None:
    """Where the template puts no special token behind an answer, the endpoint's prompts had one."""
    tokenizer = sentence_piece("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}a:", kind)
    asked, said = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("user:1\na:", "2"))
    answer = {"role": "assistant", "content": "2", "prompt_token_ids": asked, "generation_token_ids": said}
    config = ChatConfig("policy", (Sampling(8, stop_token_ids=(tokenizer.eos_token_id,)),))
    body = {"messages": [{"role": "user", "content": "1"}, answer, {"role": "user", "content": "3"}]}
    shown = ChatPrompts(tokenizer, config, len(tokenizer)).turn(ChatRequest.read(body, config))[0].token_ids.tolist()
    assert shown[: len(asked) + len(said)] == [*asked, *said]
    behind = tokenizer.convert_ids_to_tokens(shown[len(asked) + len(said) :])
    assert "".join(behind) == "\nuser:3\na:"


@pytest.mark.parametrize("marks", [["<think>", "</think>"], ["<answer>", "</answer>"], ["[THINK]", "[/THINK]"]])
def test_special_tokens_that_mark_a_part_of_an_answer_stay(tmp_path: Path, marks: list[str]) -> None:
    """Recipes add them by add_special_tokens. Without them no thought was told apart, and no format was rewarded."""
    tokenizer = make_byte_level(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<s>", "</s>", "<end_of_turn>", *marks]})
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("{0}6 * 7 !{1}\n\n42", "42{1} x", "42", "{0}"):
        text = text.format(*marks)
        ids = loaded(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]
        assert text_of(loaded, ids) == text
        assert text_of(loaded, [*ids, *loaded.convert_tokens_to_ids(["</s>", "<end_of_turn>", "<eos>"])]) == text
    ids = loaded("42<|im_end|>", add_special_tokens=False)["input_ids"]
    assert text_of(loaded, ids, "stopped at") == "stopped at"


@pytest.mark.parametrize(
    ("marks", "text"),
    [
        (["[TOOL_CALLS]", "[ARGS]"], '[TOOL_CALLS]add[ARGS]{"x": 1}'),
        (["<|python_tag|>"], "<|python_tag|>print(1)"),
        (
            ["<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>"],
            "I add.<｜tool▁calls▁begin｜>add<｜tool▁sep｜>{}<｜tool▁calls▁end｜>",
        ),
    ],
)
def test_special_tokens_that_mark_a_call_stay(tmp_path: Path, marks: list[str], text: str) -> None:
    """A custom environment that looks for Mistral's [TOOL_CALLS] or Llama 3's <|python_tag|> never found a call."""
    tokenizer = make_byte_level(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eom_id|>", "[TOOL_RESULTS]", *marks]})
    ids = tokenizer(f"{text}<|eom_id|>[TOOL_RESULTS]", add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, ids, "the engine's text") == text
