"""Templates of chats as published models have them, and a tokenizer with one."""

from typing import Any

WORDS = [
    "<eos>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|start|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
]
GEMMA = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GLM = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n<think></think>\n{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)
GPT_OSS_TOOLS = (
    "{% set ns = namespace(call=none) %}{% for m in messages %}{% if m.role == 'assistant' and 'tool_calls' in m %}"
    "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% set later = namespace(final=false) %}{% for o in messages[loop.index:] %}{% if o.role == 'assistant' and "
    "'tool_calls' not in o %}{% set later.final = true %}{% endif %}{% endfor %}"
    "{% if (m.content or m.thinking) and not later.final %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
    "{% set c = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json"
    "<|message|>{{ c.arguments|tojson }}<|call|>{% set ns.call = c.name %}"
    "{% elif m.role == 'assistant' %}{% if loop.last and not add_generation_prompt %}{% if 'thinking' in m %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% set ns.call = none %}{% endif %}"
    "{% elif m.role == 'tool' %}{% if ns.call is none %}{{ raise_exception('no call before') }}{% endif %}"
    "<|start|>functions.{{ ns.call }} to=assistant<|channel|>commentary<|message|>{{ m.content|tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Gemma 4 writes a result only beside the call that it answers.
GEMMA4_TOOLS = (
    "{% for m in messages %}{% if m.role != 'tool' %}<|{{ m.role }}|>{% for c in m.tool_calls or [] %}"
    "call:{{ c.function.name }}{{ c.function.arguments|tojson }}{% endfor %}"
    "{% if m.tool_calls %}<|observation|>{% for o in messages[loop.index:] if o.role == 'tool' %}"
    "{{ o.tool_call_id }}={{ o.content }}<|end|>{% endfor %}{% endif %}"
    "{{ m.content }}{% if not m.tool_calls or m.content %}<end_of_turn>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|assistant|>{% endif %}"
)


def tokenizer_of(template: str, eos: str = "<eos>") -> Any:
    """Return a tokenizer of letters, in which WORDS are tokens as published ones are: added, and not in a list of
    special tokens."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(code): code - 32 for code in range(32, 127)} | {"\n": 95, "?": 31}
    base = Tokenizer(models.WordLevel(letters, unk_token="?"))
    base.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    base.add_tokens([AddedToken(word, special=True, normalized=False) for word in WORDS])
    return PreTrainedTokenizerFast(tokenizer_object=base, eos_token=eos, chat_template=template)
