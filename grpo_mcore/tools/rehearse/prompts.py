"""The prompts of a rehearsal: real objects of the real data loader, with numbers in place of words."""

from typing import Any

import torch

from grpo_mcore.data import TaskData
from grpo_mcore.data.task_datasets import AllTaskProcessedDataset
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.tools.rehearse.world import END

TASK = "rehearsed"
ROWS, VALIDATION_ROWS = 4096, 256
FRAME = len("(u:)(a:")
"""Tokens that the template puts around an environment's message."""


class Tokenizer:
    """One token for each character, and one that ends an answer."""

    eos_token_id = END
    chat_template = "(role:text) for each message, and a $ behind an answer"
    all_special_tokens = ("$",)
    added_tokens_decoder: dict[int, Any] = {}

    def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        texts = (
            f"({message['role'][0]}:{message['content']}{'$' if message['role'] == 'assistant' else ')'}"
            for message in messages
        )
        return "".join(texts) + "(a:" * add_generation_prompt

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [END if character == "$" else 1000 + ord(character) for character in text]}

    def decode(self, tokens: Any) -> str:
        return f"{len(tokens)} modelled tokens"


def modelled_data(config: MasterConfig, prompt_tokens: int, rows: int = ROWS) -> TaskData:
    """Return prompts of `prompt_tokens` tokens each, all of one task, whose environment is the first of the recipe."""
    rows = max(rows, config.grpo.num_prompts_per_step)
    train = _dataset(prompt_tokens, rows)
    validates = bool(config.data.validation) or any(entry.split_validation_size for entry in config.data.train)
    validation = _dataset(prompt_tokens, min(rows, VALIDATION_ROWS)) if validates else None
    env = {TASK: config.data.train[0].env_name}
    return TaskData(train, validation, env, env if validates else {})


def _dataset(prompt_tokens: int, rows: int) -> AllTaskProcessedDataset:
    def prompt(row: dict[str, Any], spec: Any, tokenizer: Any, longest: int | None, index: int) -> Any:
        tokens = torch.full((prompt_tokens,), 100)
        tokens[0] = 1000 + index  # no two prompts begin alike
        message = {"role": "user", "content": str(index), "token_ids": tokens}
        info = {"ground_truth": str(index)}
        return {
            "message_log": [message],
            "length": prompt_tokens,
            "extra_env_info": info,
            "loss_multiplier": 1.0,
            "idx": index,
        }

    return AllTaskProcessedDataset([{"task_name": TASK, "row": row} for row in range(rows)], Tokenizer(), None, prompt)
