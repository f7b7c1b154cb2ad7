"""The worker process of a reward model: it loads a sequence classifier and scores batches of conversations."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from grpo_mcore.rollout.chat_form import chat_form
from grpo_mcore.rollout.messages import content_text
from grpo_mcore.rollout.tokenizer_file import load_hf_tokenizer

Conversation = Sequence[dict[str, Any]]


def _as_text(message: dict[str, Any]) -> str:
    """Return a message's content and its tool calls."""
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, [content_text(message.get("content")), *calls]))


class Classifier:
    """Scores conversations. Those of one call go through the model together. The arguments are keys of the section
    `env.reward_model`. Raises ValueError if they do not fit the model."""

    def __init__(
        self,
        model_name: str,
        label: int | None,
        sigmoid: bool,
        text_template: str | None,
        max_length: int,
        device: str,
        dtype: str,
    ) -> None:
        from transformers import AutoModelForSequenceClassification

        self.tokenizer = load_hf_tokenizer(model_name)
        if text_template is None and self.tokenizer.chat_template is None:
            raise ValueError("its tokenizer has no chat template; set env.reward_model.text_template")
        weights, loaded = AutoModelForSequenceClassification.from_pretrained(
            model_name, dtype=getattr(torch, dtype), output_loading_info=True
        )
        if missing := sorted(loaded["missing_keys"]):
            left = ", ".join(sorted(loaded["unexpected_keys"])[:3])
            raise ValueError(
                f"its files have no {', '.join(missing[:3])}, which would be random numbers"
                + (f"; they have {left}, which {type(weights).__name__} does not know" if left else "")
                + ": only sequence classifiers of transformers are served, no language models and no other heads"
            )
        self.model = weights.to(device).eval()
        outputs = self.model.config.num_labels
        if label is None and outputs != 1:
            raise ValueError(f"it has {outputs} outputs; set env.reward_model.label to one of 0 to {outputs - 1}")
        if label is not None and label >= outputs:
            raise ValueError(f"env.reward_model.label is {label}, and it has {outputs} outputs")
        self.label, self.sigmoid = label or 0, sigmoid
        self.text_template, self.max_length = text_template, max_length

    def __call__(self, conversations: Sequence[Conversation]) -> list[float | str]:
        """Return for each conversation its score, or the reason why it has none."""
        ids = [self.tokens(conversation) for conversation in conversations]
        scores: list[float | str] = [
            f"{len(tokens)} tokens are more than env.reward_model.max_length, {self.max_length}" for tokens in ids
        ]
        fitting = [index for index, tokens in enumerate(ids) if len(tokens) <= self.max_length]
        if fitting:
            values = self.forward([ids[index] for index in fitting])
            for index, value in zip(fitting, values, strict=True):
                scores[index] = value if math.isfinite(value) else f"the reward model gives {value}"
        return scores

    def tokens(self, conversation: Conversation) -> list[int]:
        if self.text_template is None:
            shown = chat_form(self.tokenizer).messages(conversation)  # Gemma 2 knows no system prompt
            text = self.tokenizer.apply_chat_template(shown, tokenize=False)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        prompt = "\n\n".join(map(_as_text, conversation[:-1]))
        parts = {"{prompt}": prompt, "{response}": content_text(conversation[-1]["content"])}
        text = re.sub("{prompt}|{response}", lambda mark: parts[mark[0]], self.text_template)  # in one pass
        tokens, first = list(self.tokenizer(text)["input_ids"]), self.tokenizer.bos_token_id
        return tokens[1:] if tokens[:2] == [first, first] else tokens  # the template has it, and so the tokenizer

    @torch.inference_mode()
    def forward(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        padding = self.padding_for(sequences)
        longest = max(map(len, sequences))
        ids = torch.tensor([[*tokens, *[padding] * (longest - len(tokens))] for tokens in sequences])
        mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in sequences])
        device = self.model.device
        logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits[:, self.label].float()
        return (logits.sigmoid() if self.sigmoid else logits).tolist()

    def padding_for(self, sequences: Sequence[Sequence[int]]) -> int:
        """Return a token that is in none of the sequences. A decoder reads its score at the last token that is not
        padding; if the padding token also ends the text, that would be the wrong place."""
        present = {token for tokens in sequences for token in tokens}
        padding = self.tokenizer.pad_token_id
        if padding is None or padding in present:
            padding = next(token for token in range(10**9) if token not in present)
        self.model.config.get_text_config().pad_token_id = padding  # where transformers looks for it
        return padding
