"""The answer is what stands behind the thought, and in <answer>."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_mcore.environments.answers import split_messages, split_response
from grpo_mcore.environments.errors import EnvironmentConfigError
from grpo_mcore.environments.math.math_environment import MathEnvConfig

THINKING_PROMPT = "<|im_start|>assistant\n<think>\n"
CLOSED_PROMPT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("response", "prompt", "answer"),
    [
        ("5", "", "5"),
        ("<think>so 5</think> 6", "", "6"),
        ("<think>so 5</think> <answer>6</answer>", "", "6"),
        ("<think>maybe 6 </think>\n<answer> 5 </answer>\n", "", "5"),
        ("<think>5</think> I say <answer>6</answer> or <answer>7</answer>", "", "7"),
        ("<answer>6</answer>", "", "6"),
        ("<answer>6", "", "6"),  # </answer> was a stop string
        ("so 5\n</think>\n\n6", THINKING_PROMPT, "6"),
        ("so 5\n</think>\n\n6", "", "6"),
        ("so 5", THINKING_PROMPT, None),
        ("so 5", CLOSED_PROMPT, "so 5"),
        ("<think>so 5", "", None),
        ("<think>a</think> 5 <think>no, 6", "", None),
        ("<think>a</think> 5 <think>b</think> 6", "", "6"),
        ("<think><answer>5</answer></think> 6", "", "6"),
        ("<think><answer>5</answer>", "", None),
        ("<thinking>5</thinking>6", "", "6"),
        ("<|begin_of_thought|>5<|end_of_thought|>\n<|begin_of_solution|>\n6\n<|end_of_solution|>", "", "6"),
        ("<reasoning>\n5\n</reasoning>\n<answer>\n6\n</answer>\n", "", "6"),
        ("[THINK]5[/THINK]6", "", "6"),
        ("◁think▷5◁/think▷6", "", "6"),
        ("<seed:think>5</seed:think>6", "", "6"),
        ("<THINK>5</THINK>6", "", "6"),
        ("<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>6<|return|>", "", "6"),
        ("<|channel|>analysis<|message|>5<|end|>", "", None),
        ("<|channel|>commentary<|message|>5<|end|>", "", None),
        ("<|channel|>final <|constrain|>json<|message|>6<|return|>", "", "6"),
        ("analysis5 it isassistantfinal6", "", "6"),  # the same without special tokens
        ("analysis5 it is", "<|start|>user<|message|>?<|end|><|start|>assistant", None),
        ("analysis of it gives 5", "", "analysis of it gives 5"),
        ("", "", ""),
        ("<think></think>", "", ""),
    ],
)
def test_the_answer(response: str, prompt: str, answer: str | None) -> None:
    assert split_response(response, prompt=prompt).answer == answer


def test_marks_of_ones_own_and_none() -> None:
    assert split_response("5 ### <answer>6</answer>", ("@@", "###")) == ("5 ###", "6")
    assert split_response("@@ 5", ("@@", "###")).answer is None
    assert split_response("<think>5</think>6", ("@@", "###")).answer == "<think>5</think>6"
    assert split_response("<think>5</think><answer>6</answer>", "none").answer == "<think>5</think><answer>6</answer>"


def generated(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "generated": True}


def test_each_turn_has_a_thought_of_its_own() -> None:
    prompt = {"role": "user", "content": THINKING_PROMPT, "generated": False}
    tool = {"role": "tool", "content": "42 </think>", "generated": False}
    messages = [prompt, generated("a</think>call "), tool, generated("<think>b</think>6")]
    assert split_messages(messages) == ("a</think><think>b</think>", "call 6")
    assert split_messages([prompt, generated("a</think>call "), tool, generated("<think>b")]).answer is None
    assert split_messages([prompt, generated("a"), generated("</think>6")]).answer == "6", "one turn in two pieces"
    assert split_messages([prompt]) == ("", "")


def test_the_key_is_checked() -> None:
    assert MathEnvConfig.read({}).thoughts == "auto"
    assert MathEnvConfig.read({"thoughts": ["<t>", "</t>"]}).thoughts == ("<t>", "</t>")
    for wrong in ("on", ["<t>"], ["<t>", " "]):
        with pytest.raises(EnvironmentConfigError, match="env.math.thoughts"):
            MathEnvConfig.read({"thoughts": wrong})
