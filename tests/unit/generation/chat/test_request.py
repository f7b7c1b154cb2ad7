from typing import Any

import pytest

from grpo_mcore.generation.chat.request import ChatRequest, RequestError
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.rollout.trajectory import Sampling

TRAINING = Sampling(100, 1.0, 1.0, None, (2,))
VALIDATION = Sampling(100, 0.0, 1.0, 20, (2,))
CONFIG = ChatConfig("policy", (TRAINING, VALIDATION))


def read(**body: Any) -> ChatRequest:
    return ChatRequest.read({"messages": [{"role": "user", "content": "a"}], **body}, CONFIG)


def test_a_request_samples_as_training_or_validation_does() -> None:
    assert read().sampling(CONFIG) == TRAINING
    assert read(temperature=1.0, top_p=1.0, top_k=-1).sampling(CONFIG) == TRAINING
    assert read(temperature=0).sampling(CONFIG) == VALIDATION
    asked = read(max_tokens=7, stop=["x"], stop_token_ids=[3]).sampling(CONFIG)
    assert (asked.max_new_tokens, asked.stop_strings, asked.stop_token_ids[-1]) == (7, ("x",), 3)
    assert read(max_tokens=7, max_completion_tokens=500).sampling(CONFIG).max_new_tokens == 100


@pytest.mark.parametrize("other", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0, "top_k": 5}])
def test_other_distributions_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"must be those of training or validation, \(1, 1, None\) or \(0, 1, 20\)"):
        read(**other).sampling(CONFIG)


@pytest.mark.parametrize(
    "body",
    [{"n": 2}, {"stream": True}, {"logit_bias": {"3": 1}}, {"presence_penalty": 0.1}, {"min_p": 0.1}]
    + [{"functions": [{"name": "f"}]}, {"chat_template": "x"}, {"documents": [{}]}, {"thinking_token_budget": 4}]
    + [{"top_logprobs": 5}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}],
)
def test_fields_that_would_constrain_the_policy_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(body))}: .* is not served"):
        read(**body)


def test_a_choice_of_tools_that_is_not_served_is_told_the_one_that_is() -> None:
    """It said 'none', by which no call would be read."""
    with pytest.raises(RequestError, match="tool_choice: 'required' is not served, leave it at 'auto'"):
        read(tool_choice="required")


def test_neutral_and_unknown_fields_have_no_effect() -> None:
    read(n=1, stream=False, presence_penalty=0.0, top_logprobs=0, tool_choice="auto", user="me", metadata={"a": "b"})


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"messages": []}, 400, "messages: List should have at least 1 item"),
        ({"messages": "hi"}, 400, "messages: Input should be a valid list"),
        ({"messages": [{}], "max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1"),
        ({"messages": [{}], "model": "gpt"}, 404, "the model 'gpt' is not served here, 'policy' is"),
        ({"messages": [{}], "stop": ""}, 400, "stop.*: String should have at least 1 character"),
        ({"messages": [{}], "stop": [""]}, 400, "stop.*"),
        ({}, 400, "messages: Field required"),
    ],
)
def test_malformed_requests(body: dict[str, Any], status: int, why: str) -> None:
    with pytest.raises(RequestError, match=why) as error:
        ChatRequest.read(body, CONFIG)
    assert error.value.status == status
