"""Rewards by a model: a sequence classifier reads the conversation, and its logit is the reward.

The model runs in worker processes, which score in batches. A batch that fails or exceeds its time limit is scored again
one by one, so that only the sample that caused it is lost; that one is excluded and counted.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from grpo_mcore.environments.answers import UNFINISHED, Thoughts, split_messages
from grpo_mcore.environments.config import AnswerConfig
from grpo_mcore.environments.interfaces import EnvironmentInterface, EnvironmentReturn, single_turn_return
from grpo_mcore.environments.verifier_pool import Result, VerifierPool, WorkerSpec

Messages = list[dict[str, Any]]

SHOWN = ("role", "content", "tool_calls", "tool_call_id", "name")
"""Fields of a prompt's message that the reward model reads."""

_MODEL_KEYS = ("model_name", "label", "sigmoid", "text_template", "max_length", "device", "dtype")


class RewardModelConfig(AnswerConfig):
    """The recipe's section `env.reward_model`."""

    section: ClassVar[str] = "env.reward_model"

    model_name: str
    """Folder, or name on the Hugging Face hub, of a sequence classification model and its tokenizer."""
    label: int | None = Field(None, ge=0)
    """Index of the model's output that is the reward. null: the only one."""
    sigmoid: bool = False
    """Whether the reward is the logit's sigmoid, from 0 to 1."""
    text_template: str | None = None
    """The model's input, with {prompt} and {response} in it. null: the model's own chat template."""
    unfinished_reward: float | None = None
    """Reward of a response whose reasoning is not closed, so that it has no answer. null: none, and it is excluded."""
    max_length: int = Field(4096, ge=1)
    """Maximum tokens of a conversation. A longer one gets no reward, because truncated it would be another one."""
    batch_size: int = Field(8, ge=1)
    """Conversations in one forward pass."""
    num_workers: int = Field(1, ge=1)
    """Number of worker processes, each with a model of its own."""
    threads_per_worker: int = Field(1, ge=1)
    """Processor threads of each worker."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the model. cuda: one more GPU than those of the policy, shared by all workers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    timeout_s: float = Field(120.0, gt=0)
    """Seconds of wall-clock time for one batch."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds for a worker to load the model."""


class RewardModelEnvironment(EnvironmentInterface):
    """Single-turn. A conversation is the prompt's `messages` in the metadata, then the policy's answer without its
    reasoning."""

    concurrent_calls = 32
    config_class = RewardModelConfig
    config: RewardModelConfig

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        section = self.config
        self._pool = VerifierPool(
            WorkerSpec(
                what=f"reward model {section.model_name!r}",
                loader="grpo_mcore.environments.reward_model.reward_model_worker:Classifier",
                arguments=tuple(getattr(section, key) for key in _MODEL_KEYS),
                num_workers=section.num_workers,
                timeout_s=section.timeout_s,
                start_s=section.start_timeout_s,
                threads=section.threads_per_worker,
            )
        )

    @classmethod
    def resources(cls, config: Mapping[str, Any]) -> dict[str, float]:
        section = cls.read_config(config)
        cpus = section.num_workers * section.threads_per_worker
        return {"cpus": float(cpus), "gpus": 1.0 if section.device == "cuda" else 0.0}

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        pairs = zip(message_log_batch, metadata, strict=True)
        conversations = [_conversation(messages, entry, self.config.thoughts) for messages, entry in pairs]
        scored = iter(self._score([conversation for conversation in conversations if conversation is not None]))
        unfinished = Result(self.config.unfinished_reward, UNFINISHED, 0.0)
        results = [unfinished if conversation is None else next(scored) for conversation in conversations]
        return single_turn_return(
            metadata,
            rewards=[None if result.failure and result is not unfinished else result.value for result in results],
            reasons=[result.failure or f"reward model: {result.value:.4g}" for result in results],
            seconds=[result.seconds for result in results],
        )

    def shutdown(self) -> None:
        self._pool.close()

    def _score(self, conversations: list[Messages]) -> list[Result]:
        """Return a score or a failure for each conversation."""
        size = self.config.batch_size
        batches = [conversations[first : first + size] for first in range(0, len(conversations), size)]
        results = self._pool.run([(batch,) for batch in batches])
        again = [batch for batch, result in zip(batches, results, strict=True) if result.failure and len(batch) > 1]
        alone = iter(self._pool.run([([conversation],) for batch in again for conversation in batch]))
        scored: list[Result] = []
        for batch, result in zip(batches, results, strict=True):
            if result.failure and len(batch) > 1:
                scored += [_score_of_one(next(alone)) for _ in batch]
            elif result.failure:
                scored.append(result)
            else:
                share = result.seconds / len(batch)
                scored += [_score_of_one(Result([value], None, share)) for value in result.value]
        return scored


def _score_of_one(result: Result) -> Result:
    """Return the result of a batch of one without its list. A string in place of a number is a failure."""
    if result.failure:
        return result
    (value,) = result.value
    return Result(None, value, result.seconds) if isinstance(value, str) else Result(value, None, result.seconds)


def _conversation(
    messages: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any], thoughts: Thoughts
) -> Messages | None:
    """Return the prompt and the answer without its reasoning; None where the reasoning is not closed."""
    prompt = metadata.get("messages")
    if not prompt:
        raise ValueError(
            f"the reward model needs the prompt as 'messages' in extra_env_info, got {sorted(metadata)}; set "
            "processor: chat_data_processor for the dataset under data"
        )
    answer = split_messages(messages, thoughts).answer
    if answer is None:
        return None
    question = [
        {"content": ""} | {key: message[key] for key in SHOWN if message.get(key) is not None} for message in prompt
    ]
    return [*question, {"role": "assistant", "content": answer}]
