"""Environments that tests name by import path."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_mcore.environments.interfaces import EnvironmentInterface, EnvironmentReturn


class Faulty(EnvironmentInterface):
    """Score like the math environment, except for two questions: the first sample of `config["infinite"]` gets an
    infinite reward, as after a division by zero; no sample of `config["down"]` gets a reward."""

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        question = message_log_batch[0][0]["content"]
        said = [messages[-1]["content"] for messages in message_log_batch]
        rewards: list[float | None] = [
            float(text.strip() == meta["ground_truth"]) for text, meta in zip(said, metadata, strict=True)
        ]
        if self.config["infinite"] in question:
            rewards[0] = float("inf")
        if self.config["down"] in question:
            rewards = [None] * len(said)
        count, reason = len(said), "the server is down"
        return EnvironmentReturn(
            [{}] * count, list(metadata), [None] * count, rewards, [True] * count, list(said), [reason] * count
        )


class Talkative(EnvironmentInterface):
    """Reward every character with `config["each"]`."""

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        rewards: list[float | None] = [self.config["each"] * len(log[-1]["content"]) for log in message_log_batch]
        count = len(rewards)
        return EnvironmentReturn(
            [{}] * count, list(metadata), [None] * count, rewards, [True] * count, [None] * count, ["talkative"] * count
        )


class Dialogue(EnvironmentInterface):
    """Answer each turn until the third one, rewarded at random by what was said. If the file `config["interrupt"]`
    exists, the first call about a second turn for a question that it holds removes it, and interrupts the run."""

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        turns = [sum(message["generated"] for message in messages) for messages in message_log_batch]
        asked = "".join(messages[0]["content"] for messages in message_log_batch)
        interrupt = Path(self.config["interrupt"])
        if 2 in turns and interrupt.exists() and interrupt.read_text() in asked:
            interrupt.unlink()
            raise KeyboardInterrupt
        count = len(turns)
        said = [str(messages[-1]["content"]) for messages in message_log_batch]
        rewards: list[float | None] = [float(len(text) % 2) for text in said]
        return EnvironmentReturn(
            [{"role": "user", "content": "1"}] * count, list(metadata), [None] * count, rewards,
            [turn == 3 for turn in turns], said, ["dialogue"] * count,
        )  # fmt: skip
