"""Tokenizers that read and write text as their own files say.

transformers 5 builds some classes anew, whatever rules tokenizer.json has: with `tokenizer_class: LlamaTokenizerFast`,
as DeepSeek's models have it (R1-Distill-Llama, R1-0528-Qwen3-8B, deepseek-math), a byte-level tokenizer gets the rules
of Llama 2. Then "hello world" has the tokens of "helloworld", and answers are shown as "helloĠworld"
(huggingface/transformers#45488). Files of Llama 2's own kind (TinyLlama) put a space behind each special token, as the
model was trained; the new class does not.
"""

import json
import logging
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer with further templates."""

_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", f"{NAMED_TEMPLATES}/*")
_RULES = ("normalizer", "pre_tokenizer", "decoder")
_PROBE = "Hello  world's 12345 tests:\n\n\tx = 3.14; I'LL don't é 中文 🙂\r\n 1,000"


def tokenizer_folder(name: str | Path) -> Path:
    """Return the folder with a tokenizer's files: the one of this name, or a snapshot of the hub's. Raises OSError for
    a name that is neither, at once: transformers would ask a hub that does not answer again and again, for 100 s."""
    if (folder := Path(name)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    fetch = partial(snapshot_download, str(name), allow_patterns=list(_FILES), ignore_patterns=["*/*.json"])
    try:
        return Path(fetch())
    except Exception as error:  # of the hub, of the net, or of a name that is none
        with suppress(Exception):
            return Path(fetch(local_files_only=True))
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise OSError(
            f"it is not a folder here, and could not be fetched from the Hugging Face hub: {reason}"
        ) from None


def load_hf_tokenizer(name: str | Path) -> Any:
    """Load a tokenizer by name or folder. No code of its folder is run. Raises what transformers raises, and ValueError
    where there are no files of a tokenizer: transformers then makes one of the model's type, which has special tokens
    alone and reads every text as nothing; and where only a program of its folder has the rules that text is read by
    (Kimi-K2, Moonlight): transformers then takes other rules, if it knows the model's type."""
    from transformers import AutoTokenizer

    folder = tokenizer_folder(name)
    program = _program_of(folder)
    if program is not None and _file_of(folder) is None:
        raise ValueError(
            f"text is read by the rules of {program}, custom code that is not run; make a tokenizer.json by them "
            "(transformers' TikTokenConverter with the program's pattern), and delete auto_map from "
            "tokenizer_config.json"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # else it would ask in a terminal
    except ValueError as error:
        if program is None:
            raise
        raise ValueError(
            f"it names {program}, custom code that is not run; delete auto_map from tokenizer_config.json, so that "
            "tokenizer.json is read"
        ) from error
    if len(tokenizer) == len(tokenizer.added_tokens_encoder):
        raise ValueError(
            "it has no tokenizer.json, nor another file of a tokenizer; copy those of the model it was made of, or "
            "set policy.tokenizer.name"
        )
    return as_written(tokenizer)


def as_written(tokenizer: Any) -> Any:
    """Return a tokenizer that transformers has loaded, or, if that reads text otherwise than the tokenizer.json of the
    same folder, the one that the file describes. It decodes what the policy wrote as it is: with
    `clean_up_tokenization_spaces`, as Llama 3's folders have it, 'hi !' in a program became 'hi!'."""
    if not _is_as_its_file_says(tokenizer):
        from transformers import PreTrainedTokenizerFast

        name, before = tokenizer.name_or_path, type(tokenizer).__name__
        logger.info("%s: text is read by the rules of tokenizer.json, not by those of %s", name, before)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(name)
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _is_as_its_file_says(tokenizer: Any) -> bool:
    from tokenizers import Tokenizer

    loaded = getattr(tokenizer, "backend_tokenizer", None)
    try:
        path = _file_of(tokenizer_folder(tokenizer.name_or_path))
    except OSError:  # made in memory
        path = None
    if loaded is None or path is None:
        return True
    written = json.loads(path.read_text(encoding="utf-8"))
    if all(_rule(loaded, part) == written.get(part) for part in _RULES):
        return True
    from_file, end = Tokenizer.from_file(str(path)), tokenizer.eos_token
    has_end = end is not None and from_file.token_to_id(end) == tokenizer.eos_token_id
    text = f"{_PROBE}{end}{_PROBE}{end} {_PROBE}" if has_end else _PROBE
    ids = from_file.encode(text, add_special_tokens=False).ids
    return bool(
        loaded.encode(text, add_special_tokens=False).ids == ids and loaded.decode(ids) == from_file.decode(ids)
    )


def _rule(backend: Any, part: str) -> Any:
    rule = getattr(backend, part)
    return None if rule is None else json.loads(rule.__getstate__())


def _program_of(folder: Path) -> str | None:
    """Return the class of the tokenizer's own code (tokenization_kimi.TikTokenTokenizer), None if it has none."""
    path = _file_of(folder, "tokenizer_config.json")
    settings = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    places = settings.get("auto_map") if isinstance(settings, dict) else None
    if isinstance(places, dict):
        places = places.get("AutoTokenizer")
    return next((class_name for class_name in places if class_name), None) if isinstance(places, list) else places


def _file_of(folder: Path, file: str = "tokenizer.json") -> Path | None:
    return path if (path := folder / file).is_file() else None
