"""Chat templates that do not come to an end, or want more memory than there is."""

from __future__ import annotations

import threading
import time

import pytest

from grpo_mcore.data import DataError, bounded, load_tokenizer
from grpo_mcore.data.bounded import TemplateTime, in_memory, in_time
from grpo_mcore.tools.demo.arithmetic import make_tokenizer


def test_a_template_that_wants_all_memory_is_refused_at_once(tmp_path):
    make_tokenizer(tmp_path)
    with pytest.raises(
        DataError, match="the chat template of .* cannot be used: it takes more than 2 GiB; set another"
    ):
        load_tokenizer(str(tmp_path), "{{ 'a' * 10**10 }}")


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


def test_a_template_without_an_end_is_stopped(tmp_path, monkeypatch):
    make_tokenizer(tmp_path)
    monkeypatch.setattr(bounded, "RENDER_S", 0.5)
    endless = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(DataError, match="cannot be used: the chat template is not done after 0.5 s"):
        load_tokenizer(str(tmp_path), endless + "{% endfor %}")


def test_bounds_end_with_their_block():
    with in_time(0.2), in_memory(1 << 30):
        pass
    time.sleep(0.3)
    assert len(bytearray(1 << 31)) == 1 << 31
    with pytest.raises(TemplateTime), in_time(0.05):
        time.sleep(30)


def test_other_threads_render_without_a_limit_of_time():
    done = []

    def render() -> None:
        with in_time(0.01):
            time.sleep(0.1)
            done.append(True)

    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    assert done == [True]
