"""A small tokenizer of the kind that Llama 2, Mistral and TinyLlama have."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def sentence_piece(template: str, kind: str) -> Any:
    """Return a tokenizer of letters, in which two spaces are one token. `kind`: `prepend` as the published files of
    Llama 2 and Mistral have it, else the Metaspace of newer ones."""
    letters = ["<unk>", "<s>", "</s>", "▁▁", "▁t", "▁", "\n", *map(chr, range(33, 127))]
    merges = [("▁", "▁"), ("▁", "t")]
    core = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, merges, unk_token="<unk>"))
    if kind == "prepend":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", bos_token="<s>", unk_token="<unk>")
    made.chat_template = template
    return made
