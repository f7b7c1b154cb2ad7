"""A small byte-level tokenizer, as those of Qwen, Llama 3 and DeepSeek are."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "print('hi !', x ) .\n\n  y = 中文 é\t2"


def make_byte_level(folder: Path, tokenizer_class: str = "PreTrainedTokenizerFast") -> PreTrainedTokenizerFast:
    """Save it with a `tokenizer_class` in its settings, and with the clean-up of Llama 3's. Return it as it is."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<eos>"]
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator(["print hello world"] * 3, trainer)
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=template)
    saved.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    more = {"tokenizer_class": tokenizer_class, "clean_up_tokenization_spaces": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return saved
