"""A sequence classifier as the reward: its logit on the whole conversation, whatever it is batched with."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from grpo_mcore.environments import create_env
from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.environments.reward_model.reward_model import RewardModelConfig, RewardModelEnvironment
from grpo_mcore.environments.reward_model.reward_model_worker import Classifier
from grpo_mcore.environments.verifier_pool import Result
from grpo_mcore.tools.demo.arithmetic import make_tokenizer

pytestmark = pytest.mark.slow  # processes that load models

PROMPT = [{"role": "system", "content": "+"}, {"role": "user", "content": "37+45="}]
ANSWERS = ["82", "082", "1", "=" * 20, "", "82" * 7]


def make_model(folder: Path, outputs: int) -> Path:
    make_tokenizer(folder)
    torch.manual_seed(outputs)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen3Config(**sizes, num_key_value_heads=2, head_dim=16, vocab_size=32, num_labels=outputs, pad_token_id=0)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("reward"), 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("two"), 2)


def section(folder: Path) -> dict[str, Any]:
    return {"model_name": str(folder), "batch_size": 4, "max_length": 40}


class Here:
    """Runs the workers' function in this process, which has torch already."""

    def __init__(self, folder: Path) -> None:
        self.score = Classifier(str(folder), None, False, None, 40, "cpu", "float32")

    def run(self, jobs: Sequence[Any]) -> list[Result]:
        return [Result(self.score(*job), None, 0.0) for job in jobs]


@pytest.fixture(scope="module")
def env(folder: Path) -> RewardModelEnvironment:
    env = object.__new__(RewardModelEnvironment)
    env.config = RewardModelConfig(**section(folder))
    env._pool = Here(folder)  # type: ignore[assignment]
    return env


@torch.no_grad()
def logit(folder: Path, text: str, label: int = 0) -> float:
    """Return the model's logit for one text, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    return model(input_ids=ids).logits[0, label].item()


def conversations(*answers: str) -> list[list[dict[str, str]]]:
    return [[*PROMPT, {"role": "assistant", "content": answer}] for answer in answers]


def test_rewards_are_the_models_logits(env: RewardModelEnvironment, folder: Path) -> None:
    """Conversations are as the chat template writes them, with the end of the answer; batches have other lengths."""
    result = env.step([[{"role": "assistant", "content": answer}] for answer in ANSWERS], [{"messages": PROMPT}] * 6)
    expected = [logit(folder, f"<bos><system>+<user>37+45=<assistant>{answer}<eos>") for answer in ANSWERS]
    assert result.rewards == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 4) for value in expected}) == 6
    assert result.reasons[0] == f"reward model: {result.rewards[0]:.4g}"
    assert result.terminateds == [True] * 6


@pytest.mark.slow
def test_its_workers_give_the_same(env: RewardModelEnvironment, folder: Path) -> None:
    logs = [[{"role": "assistant", "content": answer}] for answer in ANSWERS]
    of_workers = create_env("reward_model", section(folder))
    assert isinstance(of_workers, RewardModelEnvironment)
    found = of_workers.step(logs, [{"messages": PROMPT}] * 6)
    of_workers.shutdown()
    assert found.rewards == pytest.approx(env.step(logs, [{"messages": PROMPT}] * 6).rewards, abs=1e-6)


def test_a_conversation_that_is_too_long_has_no_reward(env: RewardModelEnvironment) -> None:
    logs = [[{"role": "assistant", "content": answer}] for answer in ("82", "1" * 40)]
    result = env.step(logs, [{"messages": PROMPT}] * 2)
    assert result.rewards[0] is not None and result.rewards[1] is None
    assert result.reasons[1] == "52 tokens are more than env.reward_model.max_length, 40"


def test_the_prompt_is_needed(env: RewardModelEnvironment) -> None:
    with pytest.raises(ValueError, match="'messages' in extra_env_info.*processor: chat_data_processor"):
        env.step([[{"role": "assistant", "content": "82"}]], [{"ground_truth": "82"}])


def classifier(folder: Path, label: int | None = None, sigmoid: bool = False, template: str | None = None) -> Any:
    return Classifier(str(folder), label, sigmoid, template, 100, "cpu", "float32")


def test_one_of_several_outputs_and_its_sigmoid(two: Path) -> None:
    text = "<bos><system>+<user>37+45=<assistant>82<eos>"
    for label in (0, 1):
        expected = torch.tensor(logit(two, text, label))
        assert classifier(two, label)(conversations("82")) == pytest.approx([expected.item()], abs=1e-6)
        assert classifier(two, label, True)(conversations("82")) == pytest.approx([expected.sigmoid().item()], abs=1e-6)


def test_texts_in_parts_are_joined_as_everywhere(folder: Path) -> None:
    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    model = classifier(folder, template="{prompt}?{response}.")
    conversation = [{"role": "user", "content": parts("4", "1")}, {"role": "assistant", "content": parts("8", "2")}]
    plain = [{"role": "user", "content": "4\n1"}, {"role": "assistant", "content": "8\n2"}]
    assert model.tokens(conversation) == model.tokens(plain)


def test_a_text_of_ones_own(folder: Path) -> None:
    [score] = classifier(folder, template="{prompt}?{response}.")(conversations("82"))
    assert score == pytest.approx(logit(folder, "+\n\n37+45=?82."), abs=1e-6)


@pytest.mark.parametrize(
    ("label", "message"),
    [(None, "it has 2 outputs; set env.reward_model.label to one of 0 to 1"), (2, "label is 2, and it has 2 outputs")],
)
def test_a_label_that_does_not_fit(two: Path, label: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classifier(two, label)


def test_a_system_prompt_goes_into_the_question_where_the_template_knows_none(folder: Path, tmp_path: Path) -> None:
    """As Gemma 2's, of Skywork's reward models."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer.chat_template = refuses + "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    [score] = classifier(tmp_path)(conversations("82"))
    assert score == pytest.approx(logit(tmp_path, "<user>+\n\n37+45=<assistant>82"), abs=1e-6)


@pytest.mark.parametrize("padding", [None, 3])
def test_batches_of_a_model_with_a_config_inside_its_config(tmp_path: Path, padding: int | None) -> None:
    """Gemma 3 and Qwen 3.5: transformers takes the padding token of the text's config."""
    make_tokenizer(tmp_path)
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    text |= {"num_key_value_heads": 1, "vocab_size": 32}
    seen = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=seen | {"image_size": 28, "patch_size": 14}, num_labels=1)
    config.text_config.pad_token_id, config.image_token_id = padding, 30
    Gemma3ForSequenceClassification(config).save_pretrained(tmp_path)
    model = classifier(tmp_path)
    alone = [model([conversation])[0] for conversation in conversations("82", "1", "8" * 9)]
    assert model(conversations("82", "1", "8" * 9)) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(("head", "others"), [("value_head.weight", "value_head.weight, which"), ("score.weight", "")])
def test_a_model_without_its_head(folder: Path, tmp_path: Path, head: str, others: str) -> None:
    """transformers fills a head that the files lack with random numbers: so it would with OpenRLHF's value_head, with
    ArmoRM's regression_layer, and with a language model."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    score = weights.pop("score.weight")
    save_file(weights | ({head: score} if others else {}), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"no score.weight, which would be random numbers.*{others}.*only sequence"):
        classifier(tmp_path)


class Pool:
    """A pool that fails on every batch that contains one of these answers."""

    def __init__(self, *poison: str) -> None:
        self.poison, self.sizes = poison, []  # type: ignore[var-annotated]

    def run(self, jobs: Sequence[Any]) -> list[Result]:
        self.sizes += [len(batch) for (batch,) in jobs]
        return [self._one([conversation[-1]["content"] for conversation in batch]) for (batch,) in jobs]

    def _one(self, answers: list[str]) -> Result:
        if set(answers) & set(self.poison):
            return Result(None, "timed out after 1 s", 1.0)
        return Result([float(answer) for answer in answers], None, 0.5)


def test_a_batch_that_fails_costs_one_sample() -> None:
    env = object.__new__(RewardModelEnvironment)
    env.config = RewardModelConfig(model_name="x", batch_size=3)
    env._pool = pool = Pool("4")  # type: ignore[assignment]
    scored = env._score(conversations(*map(str, range(8))))
    assert [result.value for result in scored] == [0, 1, 2, 3, None, 5, 6, 7]
    assert scored[4].failure == "timed out after 1 s"
    assert pool.sizes == [3, 3, 2, 1, 1, 1]


@pytest.mark.every_state  # as any function that does not load: test_verifier_pool.py
def test_a_model_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentConfigError, match="reward model '.*nowhere' does not load: "):
        create_env("reward_model", {"model_name": str(tmp_path / "nowhere")})


def test_resources() -> None:
    section = {"model_name": "x", "num_workers": 3, "threads_per_worker": 2}
    assert RewardModelEnvironment.resources(section) == {"cpus": 6.0, "gpus": 0.0}
    assert RewardModelEnvironment.resources(section | {"device": "cuda"})["gpus"] == 1.0
    with pytest.raises(EnvironmentConfigError, match="env.reward_model.model_name: Field required"):
        RewardModelEnvironment.resources({})


def test_marks_in_the_prompt_are_text_and_its_calls_are_shown(folder: Path) -> None:
    """A template is filled in one pass."""
    classifier = Here(folder).score
    classifier.text_template = "{prompt}={response}"
    call = {"type": "function", "function": {"name": "1", "arguments": {"1": 2}}}
    classifier.tokenizer = Mock(return_value={"input_ids": [1]}, bos_token_id=None)
    prompt = [{"role": "user", "content": "{response}+"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    classifier.tokens([*prompt, {"role": "assistant", "content": "{prompt}"}])
    classifier.tokenizer.assert_called_once_with('{response}+\n\n{"name": "1", "arguments": {"1": 2}}={prompt}')


def test_the_first_token_of_a_text_comes_from_its_template_or_from_the_tokenizer(folder: Path) -> None:
    classifier = Here(folder).score
    tokenizer = classifier.tokenizer
    first = tokenizer.bos_token = "+"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.bos_token_id)]
    )
    for classifier.text_template in ("{prompt}={response}", first + "{prompt}={response}"):
        ids = classifier.tokens([{"role": "user", "content": "3"}, {"role": "assistant", "content": "5"}])
        assert ids == tokenizer.convert_tokens_to_ids(["+", "3", "=", "5"])


@pytest.mark.parametrize("reward", [None, -3.0])
def test_reasoning_that_is_not_closed_has_no_answer(env: RewardModelEnvironment, reward: float | None) -> None:
    before, env.config = env.config, env.config.model_copy(update={"unfinished_reward": reward})
    responses = ["82", "<think>37+", "<think>1</think>82"]
    logs = [[{"role": "assistant", "content": text}] for text in responses]
    done = env.step(logs, [{"messages": PROMPT}] * 3)
    env.config = before
    first, unfinished, last = done.rewards
    assert first == last is not None and unfinished == reward
    assert done.reasons is not None and "not closed" in str(done.reasons[1])
