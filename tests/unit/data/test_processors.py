"""Processors: the tokens that the model sees, the environment's metadata, and the trained tokens."""

from __future__ import annotations

import pytest
import torch

from grpo_mcore.data import AllTaskProcessedDataset, DataError, TaskDataSpec
from grpo_mcore.data.interfaces import RowError
from grpo_mcore.data.processors import (
    chat_data_processor,
    find_processor,
    math_data_processor,
    math_hf_data_processor,
    sft_processor,
)
from grpo_mcore.data.tokenizer import template_text

ROW = {
    "messages": [{"role": "user", "content": "37+45="}, {"role": "assistant", "content": "082"}],
    "task_name": "sums",
    "uid": "sums:7",
    "level": 2,
}


def text_of(datum, tokenizer) -> list[str]:
    return [tokenizer.decode(message["token_ids"]) for message in datum["message_log"]]


def test_a_prompt_ends_with_the_generation_prompt(tokenizer):
    datum = math_hf_data_processor(ROW, TaskDataSpec("sums"), tokenizer, 10, 5)
    [message] = datum["message_log"]
    assert text_of(datum, tokenizer) == ["<bos><user>37+45=<assistant>"] == [message["content"]]
    assert message["role"] == "user" and message["token_ids"].dtype == torch.int64
    assert datum["length"] == 9 == len(message["token_ids"])
    assert datum["extra_env_info"] == {"ground_truth": "082", "level": 2, "messages": ROW["messages"][:1]}
    assert (datum["idx"], datum["task_name"], datum["uid"]) == (5, "sums", "sums:7")
    assert datum["loss_multiplier"] == 1.0


def test_a_ground_truth_wins_over_the_answer(tokenizer):
    datum = math_hf_data_processor({**ROW, "ground_truth": "82"}, TaskDataSpec(), tokenizer, None, 0)
    assert datum["extra_env_info"]["ground_truth"] == "82"
    datum = math_hf_data_processor({**ROW, "ground_truth": None}, TaskDataSpec(), tokenizer, None, 0)
    assert datum["extra_env_info"]["ground_truth"] == "082"


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_text_in_the_templates_form_is_refused(tokenizer, role):
    """It would get the template twice, without a word."""
    messages = [{"role": "system", "content": "add"}, *ROW["messages"]]
    templated = [{**one, "content": "<user>37"} if one["role"] == role else one for one in messages]
    for processor in (sft_processor, *([] if role == "assistant" else [math_hf_data_processor])):
        processor({**ROW, "messages": messages[1:]}, TaskDataSpec(), tokenizer, None, 0)
        with pytest.raises(RowError, match=f"the {role}'s text has <user>, which the chat template writes"):
            processor({**ROW, "messages": templated}, TaskDataSpec(), tokenizer, None, 0)


def test_answers_that_the_data_marks_as_context_are_not_trained_on(tokenizer):
    def talk(**marks):
        first = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", **marks}]
        messages = [*first, {"role": "user", "content": "3"}, {"role": "assistant", "content": "4", "weight": 1}]
        log = sft_processor({"messages": messages}, TaskDataSpec(), tokenizer, None, 0)["message_log"]
        return [turn["content"][0] for turn in log if turn["token_loss_mask"].any()]

    assert talk() == talk(weight=1) == talk(loss=True) == ["2", "4"]
    assert talk(weight=0) == talk(loss=False) == talk(train=False) == ["4"]
    assert talk(loss_mask=0) == talk(step_loss_mask=0) == ["4"]
    with pytest.raises(RowError, match="an answer has weight 0.5; only 0 and 1 are supported"):
        talk(weight=0.5)
    for marks, why in (
        ({"weight": 0}, "all its answers are marked as context"),
        (
            {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]},
            "only whole answers can be left out",
        ),
        ({"content": " "}, "message 1.* is blank"),
    ):
        messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", **marks}]
        with pytest.raises(RowError, match=why):
            sft_processor({"messages": messages}, TaskDataSpec(), tokenizer, None, 0)


@pytest.mark.parametrize("processor", [sft_processor, math_hf_data_processor])
@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": "37<eos>"}, "the user's text has <eos>, "),
        ({"role": "critic", "content": "37"}, "the role 'critic' is neither one of system, user, assistant, tool nor"),
    ],
)
def test_an_end_of_text_and_a_role_that_no_template_knows_are_refused(tokenizer, processor, message, said):
    with pytest.raises(RowError, match=said):
        processor({**ROW, "messages": [message, *ROW["messages"]]}, TaskDataSpec(), tokenizer, None, 0)


@pytest.mark.parametrize(("limit", "multiplier"), [(10, 1.0), (9, 0.0), (3, 0.0), (None, 1.0)])
def test_a_prompt_that_is_too_long_is_marked_and_not_truncated(tokenizer, limit, multiplier):
    datum = math_hf_data_processor(ROW, TaskDataSpec(), tokenizer, limit, 0)
    assert datum["loss_multiplier"] == multiplier
    assert datum["length"] == 9 == len(datum["message_log"][0]["token_ids"])


def test_a_task_of_a_gym_stays_unchanged(tokenizer):
    task = {"responses_create_params": {"input": "1+1="}, "expected_answer": 0}
    row = {"messages": ROW["messages"][:1], "agent_task": task, "uid": "t:1", "task_name": "t"}
    datum = find_processor("nemo_gym")(row, TaskDataSpec("t"), tokenizer, 9, 3)
    assert datum["extra_env_info"] == {"agent_task": task, "ground_truth": 0}
    assert (datum["length"], datum["loss_multiplier"], datum["uid"]) == (9, 0.0, "t:1")
    unknown = find_processor("nemo_gym")(row | {"messages": []}, TaskDataSpec("t"), tokenizer, 9, 3)
    assert (unknown["message_log"], unknown["length"], unknown["loss_multiplier"]) == ([], 0, 1.0)


def test_math_rows(tokenizer):
    row = {"problem": "1+1=", "expected_answer": 2, "source": "x"}
    datum = math_data_processor(row, TaskDataSpec("math"), tokenizer, 64, 4)
    assert text_of(datum, tokenizer) == ["<bos><user>1+1=<assistant>"]
    assert datum["extra_env_info"]["ground_truth"] == 2
    assert (datum["task_name"], datum["uid"]) == ("math", "math:4")
    in_chat_format = math_data_processor(ROW, TaskDataSpec(), tokenizer, 64, 0)
    assert in_chat_format["extra_env_info"]["ground_truth"] == "082"


def test_an_environment_without_a_truth_gets_the_prompt(tokenizer):
    row = {"messages": [{"role": "user", "content": "37+45="}], "tests": [{"input": "", "output": "82"}]}
    datum = chat_data_processor(row, TaskDataSpec("code"), tokenizer, 64, 3)
    assert datum["extra_env_info"] == row and datum["uid"] == "code:3"
    assert text_of(datum, tokenizer) == ["<bos><user>37+45=<assistant>"]
    info = chat_data_processor(ROW, TaskDataSpec(), tokenizer, 64, 0)["extra_env_info"]
    assert info == {"messages": ROW["messages"][:1], "ground_truth": "082", "level": 2}
    assert find_processor("chat_data_processor") is chat_data_processor


def test_prompt_files_wrap_the_question_and_add_a_system_prompt(tokenizer, tmp_path):
    (tmp_path / "prompt.txt").write_text("= {} =")
    (tmp_path / "system.txt").write_text("+")
    spec = TaskDataSpec("t", str(tmp_path / "prompt.txt"), str(tmp_path / "system.txt"))
    datum = math_hf_data_processor(ROW, spec, tokenizer, 64, 0)
    assert text_of(datum, tokenizer) == ["<bos><system>+<user>= 37+45= =<assistant>"]
    own_system = {**ROW, "messages": [{"role": "system", "content": "-"}, *ROW["messages"]]}
    datum = math_hf_data_processor(own_system, spec, tokenizer, 64, 0)
    assert text_of(datum, tokenizer) == ["<bos><system>-<user>= 37+45= =<assistant>"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no place", r"prompt_file .*prompt\.txt: no \{\} in it where the problem would go"),
        (r"{} in \boxed{}", r"write one \{\} where the problem goes and double all other braces"),
        ("{question}", r"double all other braces.*KeyError"),
        ("{} {", r"double all other braces.*ValueError"),
    ],
)
def test_a_bad_prompt_file_is_an_error_at_once(tmp_path, text, message):
    (tmp_path / "prompt.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        TaskDataSpec("t", str(tmp_path / "prompt.txt"))
    (tmp_path / "prompt.txt").write_text(r"{} in \boxed{{}}")
    assert TaskDataSpec("t", str(tmp_path / "prompt.txt")).format_problem("1") == r"1 in \boxed{}"


def test_prompt_files_that_windows_wrote(tmp_path):
    """The mark of their encoding had become part of every prompt, and UTF-16 ended in a traceback."""
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeff= {} =".encode())
    assert TaskDataSpec("t", str(file)).format_problem("1") == "= 1 ="
    file.write_text("= {} =", encoding="utf-16")
    with pytest.raises(DataError, match=r"prompt_file .*prompt\.txt: not UTF-8 text \(invalid start byte, byte 0\)"):
        TaskDataSpec("t", str(file))
    with pytest.raises(DataError, match=r"chat_template .*prompt\.txt: not UTF-8 text"):
        template_text(str(file))


def test_sft_trains_on_the_answers_and_on_their_ends_only(tokenizer):
    messages = [
        {"role": "system", "content": "+"},
        *ROW["messages"],
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "002"},
        {"role": "user", "content": "and?"},
    ]
    datum = sft_processor({**ROW, "messages": messages}, TaskDataSpec("sums"), tokenizer, 64, 0)
    assert text_of(datum, tokenizer) == [
        "<bos><system>+<user>37+45=<assistant>",
        "082<eos>",
        "<user>1+1=<assistant>",
        "002<eos>",
    ]
    assert [message["role"] for message in datum["message_log"]] == ["user", "assistant"] * 2
    for message in datum["message_log"]:
        trained = message["role"] == "assistant"
        assert message["token_loss_mask"].tolist() == [int(trained)] * len(message["token_ids"])
    whole = tokenizer.apply_chat_template(messages[:-1], tokenize=False)
    assert "".join(text_of(datum, tokenizer)) == whole
    assert datum["length"] == len(tokenizer(whole, add_special_tokens=False)["input_ids"])


def test_sft_and_rollouts_see_the_same_prompt_tokens(tokenizer):
    sft = sft_processor(ROW, TaskDataSpec(), tokenizer, 64, 0)
    rollout = math_hf_data_processor(ROW, TaskDataSpec(), tokenizer, 64, 0)
    assert torch.equal(sft["message_log"][0]["token_ids"], rollout["message_log"][0]["token_ids"])


@pytest.mark.parametrize(("limit", "multiplier"), [(13, 1.0), (12, 0.0)])
def test_sft_uses_the_whole_length(tokenizer, limit, multiplier):
    datum = sft_processor(ROW, TaskDataSpec(), tokenizer, limit, 0)
    assert (datum["length"], datum["loss_multiplier"]) == (13, multiplier)


@pytest.mark.parametrize("processor", [math_hf_data_processor, sft_processor])
def test_a_row_without_an_answer_is_named(tokenizer, processor):
    row = {**ROW, "messages": ROW["messages"][:1]}
    with pytest.raises(DataError, match="^sums:7: (neither an answer|it has no assistant message)"):
        processor(row, TaskDataSpec(), tokenizer, 64, 0)


def test_a_template_that_raises_names_the_row(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('only users') }}")
    with pytest.raises(DataError, match="sums:7: the chat template rejects it: TemplateError: only users"):
        math_hf_data_processor(ROW, TaskDataSpec(), tokenizer, 64, 0)


def own_processor(datum_dict, task_data_spec, tokenizer, max_seq_length, idx):
    return math_hf_data_processor(datum_dict, task_data_spec, tokenizer, max_seq_length, idx)


def test_processors_by_name_and_import_path(tokenizer):
    assert find_processor("default") is find_processor("math_hf_data_processor") is math_hf_data_processor
    assert find_processor(f"{__name__}:own_processor") is own_processor
    assert find_processor(f"{__name__}.own_processor") is own_processor
    dataset = AllTaskProcessedDataset([ROW], tokenizer, TaskDataSpec("t"), own_processor, max_seq_length=64)
    assert dataset[0]["uid"] == "sums:7"
    with pytest.raises(DataError, match="cannot import the processor"):
        find_processor("tests.unit.data.test_processors:missing")


@pytest.mark.parametrize("processor", [math_hf_data_processor, sft_processor])
def test_the_chat_template_gets_the_tools_of_a_row(tokenizer, monkeypatch, processor):
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "{% for t in tools or [] %}<system>{{ t.function.name }}{% endfor %}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
    )
    row = {**ROW, "tools": [{"type": "function", "function": {"name": "+"}}]}
    datum = processor(row, TaskDataSpec("sums"), tokenizer, 64, 0)
    assert datum["message_log"][0]["content"] == "<system>+<user>37+45=<assistant>"
    assert processor(ROW, TaskDataSpec(), tokenizer, 64, 0)["message_log"][0]["content"] == "<user>37+45=<assistant>"


HINTED = {"messages": ROW["messages"], "uid": "u:3", "why": "9+9"}


def test_a_hint_is_for_the_teacher_alone(tokenizer) -> None:
    """It stands in the last question, once in a prompt for rollouts and once before given answers."""
    plain, spec = TaskDataSpec("t"), TaskDataSpec("t", hint_key="why", hint_prompt="{prompt} ({hint})")
    assert spec.with_hint("{hint}", "{} {prompt}") == "{hint} ({} {prompt})", "each is text"
    for processor in (math_hf_data_processor, sft_processor):
        datum, other = processor(HINTED, spec, tokenizer, 64, 0), processor(HINTED, plain, tokenizer, 64, 0)
        assert text_of(datum, tokenizer) == text_of(other, tokenizer) and "teacher_prompt" not in other
        question = text_of(other, tokenizer)[0]
        told = tokenizer.decode(datum["teacher_prompt"])
        assert told == question.replace(ROW["messages"][0]["content"], f"{ROW['messages'][0]['content']} (9+9)")
        with pytest.raises(RowError, match="the user's text has <user>"):
            processor(HINTED | {"why": "<user>9+9"}, spec, tokenizer, 64, 0)


@pytest.mark.parametrize("row", [{}, {"why": ""}, {"why": 3}])
def test_a_row_without_its_hint_is_named(tokenizer, row) -> None:
    spec = TaskDataSpec("t", hint_key="why")
    for processor in (math_hf_data_processor, sft_processor):
        with pytest.raises(RowError, match="u:3: no text in its column 'why'"):
            processor({"messages": ROW["messages"], "uid": "u:3"} | row, spec, tokenizer, 64, 0)
    with pytest.raises(DataError, match=r"has no \{prompt\} and no \{hint\}"):
        TaskDataSpec("t", hint_key="why", hint_prompt="nothing")


@pytest.mark.parametrize("truth", [float("nan"), float("inf")])
def test_a_ground_truth_that_is_no_number_is_refused(truth, tokenizer):
    row = {"messages": [{"role": "user", "content": "2+2="}], "ground_truth": truth}
    with pytest.raises(RowError, match=f"its 'ground_truth' is {truth}, which is no answer"):
        math_hf_data_processor(row, TaskDataSpec("t"), tokenizer, None, 0)


@pytest.mark.parametrize(
    ("question", "answer", "why"), [(" ", "4", "its question is blank"), ("2+2=", "\n", "its answer is blank")]
)
def test_prompts_with_a_blank_question_or_answer_are_excluded(question, answer, why, tokenizer):
    """They had been sampled, and the math environment refuses to compare with a blank truth."""
    row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], "uid": "u"}
    with pytest.raises(DataError, match=f"u: {why}"):
        math_hf_data_processor(row, TaskDataSpec("t"), tokenizer, None, 0)
    if question.strip():  # a reward model needs no answer
        assert chat_data_processor(row, TaskDataSpec("t"), tokenizer, None, 0)["loss_multiplier"] == 1
