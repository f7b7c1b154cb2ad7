"""vLLM's tokenizer of the mode "hf", loaded as the policy's is."""

import logging
from typing import Any

from vllm.tokenizers.hf import CachedHfTokenizer, get_cached_tokenizer
from vllm.tokenizers.registry import TokenizerRegistry

from grpo_mcore.rollout.tokenizer_file import as_written


class EngineTokenizer(CachedHfTokenizer):
    """Loads tokenizers as vLLM does, and then makes them read and write text as their own files say. vLLM copies a
    tokenizer for its threads after it is loaded: what is changed later does not reach the copies."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        loaded = super().from_pretrained(*args, **kwargs)
        written = as_written(loaded)
        return loaded if written is loaded else get_cached_tokenizer(written)


def register_tokenizer() -> None:
    """Let vLLM load the tokenizers of this process by EngineTokenizer from now on."""
    if TokenizerRegistry.load_tokenizer_cls("hf") is not EngineTokenizer:
        registry_log = logging.getLogger("vllm.tokenizers.registry")
        level = registry_log.level
        registry_log.setLevel(logging.ERROR)  # it warns that the mode has a class already
        TokenizerRegistry.register("hf", __name__, EngineTokenizer.__name__)
        registry_log.setLevel(level)
