"""A model folder is trusted with its tokenizer and chat template, and with no code."""

from __future__ import annotations

import base64
import json
import socketserver
import string
import threading
from pathlib import Path

import huggingface_hub
import pytest
from jinja2.exceptions import SecurityError

from grpo_mcore.data import DataError, check_token_ids, load_tokenizer, say_other_ends
from grpo_mcore.tools.demo.arithmetic import make_tokenizer
from tests.unit.data.byte_level import TEXT, make_byte_level
from tests.unit.data.sentence_piece import sentence_piece


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tokenizer(folder)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n")
    settings = folder / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | own))
    with pytest.raises(DataError, match="names own.Own, custom code that is not run; delete auto_map"):
        load_tokenizer(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "places", [["tokenization_kimi.TikTokenTokenizer", None], "tokenization_kimi.TikTokenTokenizer"]
)
def test_rules_that_only_a_program_has_are_refused(tmp_path: Path, places: object) -> None:
    """As Moonlight's: transformers knows its model type, and read it by the rules of Llama 3."""
    words = [bytes([byte]) for byte in range(256)]
    lines = [f"{base64.b64encode(word).decode()} {number}\n" for number, word in enumerate(words)]
    (tmp_path / "tiktoken.model").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    own = {"auto_map": {"AutoTokenizer": places}, "tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]"}
    tokens = {"256": {"content": "[EOS]", "special": True}}
    settings = own | {"added_tokens_decoder": tokens, "chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match=r"rules of tokenization_kimi.TikTokenTokenizer, custom code .* tokenizer.json"):
        load_tokenizer(str(tmp_path))


def test_a_token_without_an_embedding_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """It had been trained on as zeros where the vocabulary is split, and ended the run with IndexError elsewhere."""
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    size = max(tokenizer.get_vocab().values()) + 1
    check_token_ids(tokenizer, "mine", size, "m")
    with pytest.raises(DataError, match=rf"largest token of 'mine' is .* with number {size - 1}, but the model 'm' has "
                       rf"{size - 4} tokens .* 0 to {size - 5}; 4 tokens have no embedding"):  # fmt: skip
        check_token_ids(tokenizer, "mine", size - 4, "m")
    tokenizer.add_tokens(["<image_soft_token>"])  # as Gemma 3's tokenizer has, beyond its text model's vocabulary
    check_token_ids(tokenizer, "mine", size, "m")
    tokenizer.add_tokens(["<thought>"])
    with pytest.raises(DataError, match=rf"'<thought>' with number {size + 1}, .* 1 tokens have no embedding"):
        check_token_ids(tokenizer, "mine", size, "m")


def test_a_chat_template_reaches_nothing_outside_of_it(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}])


def test_other_ends_of_the_model_are_said(tmp_path: Path, package_log: pytest.LogCaptureFixture) -> None:
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = {"eos_token_id": [eos, 9], "pad_token_id": pad}
    (tmp_path / "config.json").write_text(json.dumps(config))
    say_other_ends(tokenizer, tmp_path)
    assert not package_log.messages
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 9}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "pad_token_id": 9}))
    say_other_ends(tokenizer, tmp_path)
    ends, padding = package_log.messages
    assert f"eos_token_id of {tmp_path / 'config.json'} is 9, that of the tokenizer {eos} ('<eos>')" in ends
    assert f"pad_token_id of {tmp_path / 'generation_config.json'} is 9, that of the tokenizer {pad}" in padding


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["version https://git-lfs.github.com/spec/v1", "{}", "[]", ""])
def test_files_that_are_no_tokenizer_are_refused_by_name(tmp_path: Path, file: str, content: str) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match=f"the tokenizer '{tmp_path}'"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(("content", "why"), [("{", "is no JSON"), ("[1]", "must hold an object, got list")])
def test_settings_of_generation_that_are_no_object_are_refused(tmp_path: Path, content: str, why: str) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(DataError, match=f"generation_config.json {why}"):
        say_other_ends(load_tokenizer(str(tmp_path)), tmp_path)


def test_a_template_may_lie_in_a_file_or_be_one_of_several(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    question = [{"role": "user", "content": "1"}]
    (tmp_path / "chat_template.jinja").write_text("{{ 'of the file ' + messages[0].content }}")
    assert load_tokenizer(str(tmp_path)).apply_chat_template(question, tokenize=False) == "of the file 1"
    (tmp_path / "chat_template.jinja").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "{{ 'default ' + messages[0].content }}"}]
    named.append({"name": "tool_use", "template": "{{ 'tools' }}"})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.apply_chat_template(question, tokenize=False) == "default 1"
    assert tokenizer.apply_chat_template(question, tokenize=False, tools=[{"type": "function"}]) == "tools"


def test_text_is_decoded_as_it_was_written(tmp_path: Path) -> None:
    """Llama 3's folders ask for a clean-up that takes spaces out of programs."""
    from examples.sliding_puzzle.make_model import make_tokenizer as tokenizer_of

    tokenizer_of(tmp_path, string.printable, ())
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"clean_up_tokenization_spaces": True}))
    tokenizer = load_tokenizer(str(tmp_path))
    said = "print('hi !', x ) . y"
    assert tokenizer.decode(tokenizer(said, add_special_tokens=False)["input_ids"]) == said


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "LlamaTokenizer"])
def test_text_is_read_by_the_rules_of_tokenizer_json(tmp_path: Path, kind: str) -> None:
    """DeepSeek's folders name LlamaTokenizerFast, of which transformers 5 makes a tokenizer that drops all spaces."""
    written = make_byte_level(tmp_path, kind)
    tokenizer = load_tokenizer(str(tmp_path))
    ids = written(TEXT, add_special_tokens=False)["input_ids"]
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.get_vocab() == written.get_vocab()  # no further token, for which there is no embedding


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_a_space_behind_a_special_token_is_that_of_tokenizer_json(tmp_path: Path, kind: str) -> None:
    """TinyLlama's answers and turns begin with one. The class of transformers 5 left it out."""
    written = sentence_piece("{{ messages[0].content }}", "prepend")
    written.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": kind}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    text = "two</s>\n<s>ten"
    ids = load_tokenizer(str(tmp_path))(text, add_special_tokens=False)["input_ids"]
    assert ids == written(text, add_special_tokens=False)["input_ids"]


def test_a_template_that_shows_no_question_is_refused_and_one_without_a_header_is_said(tmp_path, package_log):
    make_tokenizer(tmp_path)
    with pytest.raises(DataError, match="does not show a question; set policy.tokenizer.chat_template"):
        load_tokenizer(str(tmp_path), "{{ '' }}")
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    header = "{% if add_generation_prompt %}<assistant>{% endif %}"
    load_tokenizer(str(tmp_path), plain + header, {"add_generation_prompt_": True})
    (key,) = package_log.messages
    assert "chat_template_kwargs.add_generation_prompt_: the chat template does not use it" in key
    assert load_tokenizer(str(tmp_path), f"\ufeff{plain}").chat_template == plain
    assert (
        "has no generation prompt: the policy has to write '<assistant>' before each answer" in package_log.messages[-1]
    )


def test_a_hub_that_does_not_answer_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks it six times in 100 s. What was fetched before is read from its cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    asked = []
    with socketserver.TCPServer(("127.0.0.1", 0), lambda request, *_: asked.append(request)) as hub:  # it hangs up
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_address[1]}")
        answering = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        answering.start()
        try:
            with pytest.raises(DataError, match="not a folder here, and could not be fetched from the Hugging Face"):
                load_tokenizer("someone/model")
            assert len(asked) <= 2
            fetched = tmp_path / "models--someone--model"
            make_tokenizer(fetched / "snapshots" / "abc")
            (fetched / "refs").mkdir()
            (fetched / "refs" / "main").write_text("abc")
            assert len(load_tokenizer("someone/model")) > 1
        finally:
            hub.shutdown()
            answering.join()
