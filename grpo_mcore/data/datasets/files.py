"""Rows of the user's own files as conversations: one function per layout."""

import math
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from grpo_mcore.base.text import as_written
from grpo_mcore.data.datasets.choices import choices_of
from grpo_mcore.data.datasets.contexts import context_field, context_of
from grpo_mcore.data.datasets.mapped import Row, unusable
from grpo_mcore.data.datasets.messages import as_messages, assistant, is_chat_as_text, user
from grpo_mcore.data.datasets.source import missing, required
from grpo_mcore.data.interfaces import RESERVED_KEYS, DataError
from grpo_mcore.rollout.datum import field_of
from grpo_mcore.rollout.images import given_image, inline_image, is_image, with_images
from grpo_mcore.rollout.messages import (
    Item,
    ItemReader,
    Message,
    MessageError,
    UnknownItem,
    content_text,
    kind_of,
    read_content,
    read_list,
    read_messages,
    read_tools,
    with_instructions,
)

QUESTIONS = (
    *("instruction", "input", "question", "problem", "prompt", "query", "question_stem", "Question", "Problem"),
    *("goal", "ctx"),
)
"""Fields under which published data have their questions: the first that a row has is meant."""
ANSWERS = (
    *("output", "reward_model.ground_truth", "answer", "final_answer", "expected_answer", "label", "target"),
    *("solution", "response", "completion", "verification_info.ground_truth", "answerKey", "correct_answer", "correct"),
    *("answer_idx", "correct_option", "cop", "answers.text", "answers", "Answer", "Correct Answer"),
    "extra_info.answer",
)
"""Fields under which published data have their answers: the first that a row has is meant."""
SYSTEMS = ("system", "system_prompt")
"""Fields under which published data have their system prompts: the first that a row has is meant."""

_CHATS = ("messages", "conversations", "conversation")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_MEDIA_FILE = re.compile(
    r"^(?:data:|iVBORw0KGgo|/9j/|UklGR)|\.(?:png|jpe?g|gif|webp|bmp|mp4|avi|mov|webm|wav|mp3|flac)$", re.IGNORECASE
)
"""A name of such a file, a data URL, or the begin of a PNG, JPEG or WebP file in base64."""
_MEDIA_MARK = re.compile("<(?:image|video|audio)>")


def settings_for(row: Row) -> dict[str, str]:
    """Return the keys of a dataset's entry that read a row with such fields, as far as they differ from the defaults;
    {} if its layout is not known."""
    if isinstance(row.get("responses_create_params"), dict):
        return {"dataset_name": "NemoGymDataset"}
    question = next((key for key in QUESTIONS if row.get(key)), None)
    if question is not None and isinstance(row[question], dict):
        question = next((f"{question}.{part}" for part in ("stem", "text") if part in row[question]), question)
    if _is_ranked(row) or _rejects_its_answer(row):
        return {"dataset_name": "BinaryPreferenceDataset"}
    if {"chosen", "rejected"} <= set(row):
        question = question or next((key for key in _CHATS if _is_chat(row.get(key))), None)
        if question is None and not _is_chat(_hh_messages(row["chosen"])):
            return {}
        key = {} if question in (None, "prompt") else {"prompt_key": str(question)}
        return {"dataset_name": "BinaryPreferenceDataset", **key}
    if chat := next((key for key in _CHATS if _is_chat(row.get(key))), None):
        return {"dataset_name": "openai_format", **({} if chat == "messages" else {"chat_key": chat})}
    if question is None:
        return {}
    answer = None if "ground_truth" in row else next((key for key in ANSWERS if _answers(row, key)), None)
    keys = ({} if question == "input" else {"input_key": question}) | (
        {} if answer in (None, "output") else {"output_key": str(answer)}
    )
    if context := context_field(row):
        keys["context_key"] = context
    return {"dataset_name": "ResponseDataset", **keys}


def _answers(row: Row, key: str) -> bool:
    """Return whether a field may be the answer: KTO's `label` only says whether the completion is a good one."""
    value = field_of(row, key)
    return value is not None and not (key == "label" and isinstance(value, bool) and "completion" in row)


def question_and_answer(
    row: Row,
    *,
    question: str,
    answer: str,
    needs_answer: bool = True,
    choices: str | None = None,
    context: str | None = None,
    system: str | None = None,
) -> Row:
    """Convert a question (text or a conversation) and its answer (text or messages). The row's other fields are kept; a
    field `ground_truth` may replace the answer. Another list or an object is the ground truth and no message."""
    if bad := _bad_answer(row, *(["label"] if "completion" in row and answer != "label" else [])):
        return bad
    media, images = _images(row)
    messages = _question(row, question, context, system)
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        raise DataError(
            f"{question!r} ends with an answer of the assistant, so it is no question; a whole conversation is read "
            f"with dataset_name: openai_format, chat_key: {question}"
        )
    extra = _other_fields(row, question, answer, media) | _tools(row, "tools")
    truth = field_of(row, answer)
    text = content_text(messages[-1]["content"])
    if options := choices_of(row, choices, question, text, truth):
        if (labels := options.shown_in(text)) is not None:
            truth = options.as_shown(truth, labels) or truth
        else:
            messages[-1] = _with_text(messages[-1], options.under)
            truth = options.letter(truth) or truth
        if (other := extra.get("ground_truth")) is not None:
            extra["ground_truth"] = (options.as_shown(other, labels) if labels else options.letter(other)) or other
    if isinstance(truth, float) and not math.isfinite(truth):
        raise DataError(f"{answer!r} is {truth}, which is no answer")
    if _is_chat(truth) or is_chat_as_text(truth):  # TRL's `completion`
        messages += as_messages(truth, answer)
    elif isinstance(truth, list | dict):
        extra.setdefault("ground_truth", truth)
    elif truth is not None:
        messages.append(assistant(as_written(truth)))
    elif row.get("ground_truth") is None and needs_answer:
        if answer in row or "output_key" in settings_for(row):
            _layout_field(row, answer)
        raise DataError(
            f"{missing(row, answer)}. output_key names the field of the answer; for rewards that need none: "
            "processor: chat_data_processor"
        )
    return {**extra, "messages": placed(messages, images, media)}


def _bad_answer(row: Row, *marks: str) -> Row | None:
    """Return the row that stands for one whose answer is marked as a bad one, as data for KTO have them; else None."""
    mark = next((key for key in ("kto_tag", *marks) if row.get(key) is False), None)
    return None if mark is None else unusable(f"{mark!r} is false, which marks its answer as a bad one (KTO)")


def _is_index(truth: Any) -> bool:
    return isinstance(truth, int | float) and not isinstance(truth, bool)


def _question(row: Row, key: str, context: str | None = None, system: str | None = None) -> list[Message]:
    """Return a question as messages, with the other fields of its row that belong to it: Alpaca's `input` below its
    instruction, the text that it is about above it, earlier turns, and the system prompt."""
    messages = as_messages(_hh_messages(_layout_field(row, key)), key)
    if len(messages) > 1 and messages[-1] == assistant(""):  # "...\n\nAssistant:" in the form of HH-RLHF
        messages.pop()
    text = content_text(messages[-1]["content"])
    above = "" if context is None else context_of(row, context)
    below = _text_field(row, "input") if key == "instruction" else None
    around = [None if above in text else above, below]
    if any(around) and (text or all(around) or _has_image(messages[-1])):
        messages[-1] = _with_text(
            messages[-1], lambda text: "\n\n".join(part for part in (around[0], text, around[1]) if part)
        )
    if len(messages) == 1:
        messages = [*_history(row), *messages]
    return _with_system(messages, row, system)


def _has_image(message: Message) -> bool:
    return isinstance(message["content"], list) and any(map(is_image, message["content"]))


def _with_text(message: Message, write: Callable[[str], str]) -> Message:
    """Return a message with what `write` makes of its text; one with images keeps its parts, and gets the rest around
    them."""
    if not _has_image(message):
        return {**message, "content": write(content_text(message["content"]))}
    before, _, after = write("\0").partition("\0")
    parts = [{"type": "text", "text": before}, *message["content"], {"type": "text", "text": after}]
    return {**message, "content": [part for part in parts if part.get("text") != ""]}


def _text_field(row: Row, key: str) -> str | None:
    """Return the text of a field that the model is shown, None where it is null or blank. A number is shown as it is
    written. Raises DataError for a value of another type."""
    value = field_of(row, key)
    if value is None or isinstance(value, str):
        return value if value and value.strip() else None
    if not _is_index(value):
        raise DataError(f"{key!r} must be text, got {kind_of(value)}")
    return as_written(value)


def _history(row: Row) -> list[Message]:
    """Return the earlier turns of a row under `history`: messages, or pairs of a question and its answer as
    LLaMA-Factory and ms-swift have them."""
    turns = field_of(row, "history")
    if _is_chat(turns):
        return read_messages(turns, "history")
    if not isinstance(turns, list) or not any(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        return []  # another field of that name
    for number, turn in enumerate(turns):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise DataError(
                f"turn {number} of 'history' must be a question and its answer, both text, got {turn!r:.100}"
            )
    return [message for question, answer in turns for message in (user(question), assistant(answer))]


def _with_system(messages: list[Message], row: Row, key: str | None, default: str | None = None) -> list[Message]:
    """Return the messages with the row's system prompt in front, unless they have one: of the field `key`, else of one
    of SYSTEMS, else `default`. Raises DataError for two that differ."""
    key = key or next((name for name in SYSTEMS if row.get(name)), SYSTEMS[0])
    content = read_content(field_of(row, key), repr(key)).value
    text = content_text(content).strip()
    if messages[0]["role"] == "system":
        if text not in content_text(messages[0]["content"]):
            raise DataError(f"{key!r} is another system prompt than that of the conversation: leave one of them out")
        return messages
    if not text:
        content = default or ""
    return [{"role": "system", "content": content}, *messages] if content else messages


def _images(row: Row) -> tuple[str, list[Any]]:
    """Return the field of a row's images and the images in it, "" and none where there are none. Refuse a row with a
    video or sound in a field: without it the question would be another one."""
    found = "", list[Any]()
    for name in _MEDIA:
        value = row.get(name)
        if isinstance(value, str):  # another text may be the name of a container's image
            is_media = bool(_MEDIA_FILE.search(value) or value and _MEDIA_MARK.search(str(row)))
        else:
            is_media = bool(value) and not isinstance(value, int | float)
        if is_media and not name.startswith("image"):
            raise DataError(f"{name!r} has a video or sound, and only text and images are supported")
        if is_media and found[1]:
            raise DataError(f"{found[0]!r} and {name!r} both have images; leave one of them out")
        if is_media:
            found = name, value if isinstance(value, list) else [value]
    return found


def placed(messages: list[Message], images: Sequence[Any], name: str) -> list[Message]:
    """Return messages with the images of a row's field `name` in their places."""
    if not images:
        return messages
    try:
        return with_images(messages, [given_image(image) for image in images], name)
    except (ValueError, OSError) as error:
        raise DataError(str(error)) from error


def _layout_field(row: Row, key: str) -> Any:
    """Return the field that makes a row one of this layout. Raises DataError without it, and says how the row's own
    layout is read, if that is known."""
    if field_of(row, key) is not None:
        return field_of(row, key)
    error = missing(row, key)
    if key in row or not (keys := settings_for(row)):
        raise error
    how = ", ".join(f"{name}: {value}" for name, value in keys.items())
    pairs = "; pairs of answers are for `grpo-mcore dpo` and `rm`" if {"chosen", "rejected"} <= set(row) else ""
    raise DataError(f"{error}. Read it with {how}{pairs}")


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], dict)
        and bool({"role", "from"} & set(value[0]))
    )


def openai_row(
    row: Row, *, chat: str, tools: str = "tools", system_key: str | None = None, system_prompt: str | None = None
) -> Row:
    """Convert a whole conversation and the tools that it may call."""
    value = _layout_field(row, chat)
    if isinstance(value, str) and not value.lstrip().startswith("["):
        raise DataError(f"{chat!r} must be a list of messages, got text")
    other = row.get("messages")
    if chat != "messages" and other and not _is_chat(other) and not is_chat_as_text(other):
        raise DataError(f"{chat!r} is the conversation; rename the field 'messages', which is {kind_of(other)}")
    media, images = _images(row)
    messages = read_messages(read_list(value, chat, "messages"), chat, given_image)
    if messages[-1]["role"] == "assistant" and (bad := _bad_answer(row, "label")):
        return bad
    messages = placed(_with_system(messages, row, system_key, system_prompt), images, media)
    return {**_other_fields(row, chat, tools, media), "messages": messages, **(_tools(row, tools) or _older_tools(row))}


def _older_tools(row: Row) -> Row:
    """Return the tools of a row in OpenAI's older form, `functions`, which goes with messages' `function_call`."""
    value = row.get("functions")
    is_tools = isinstance(value, list) and all(isinstance(tool, dict) and "name" in tool for tool in value)
    return _tools(row, "functions") if is_tools else {}


def gym_task(row: Row) -> Row:
    """Convert a task of NeMo Gym, which its agent gets unchanged. The messages only measure the prompt; a task may
    leave them to the environment."""
    params = _layout_field(row, "responses_create_params")
    if not isinstance(params, dict):
        raise DataError(f"'responses_create_params' must be an object, got {kind_of(params)}")
    items = params.get("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    try:
        messages = ItemReader().read(msgspec.convert(items or [], list[Item]))
        messages = with_instructions(messages, params.get("instructions"))
        messages = read_messages(messages, "input", inline_image) if messages else []
        tools = read_tools(params.get("tools"), "tools")
    except (MessageError, UnknownItem, msgspec.ValidationError) as error:
        raise DataError(f"'responses_create_params': {error}") from error
    return {"messages": messages, "agent_task": row, **({"tools": tools} if tools else {})}


def preference_pair(
    row: Row, *, prompt: str, chosen: str, rejected: str, choices: str | None = None, context: str | None = None
) -> Row:
    """Convert a prompt with a better and a worse answer, each text or messages. Where the answers are whole
    conversations, the prompt is what they have in common at their start. Also a row in NeMo RL's form, a context with
    completions by rank, of which the first rank is the better answer and the last one the worse; and in ms-swift's, a
    conversation with what its last answer must not be."""
    if _images(row)[1]:
        raise DataError("it has an image, and pairs of answers to questions with images (DPO) are not supported")
    if chosen not in row and _is_ranked(row):
        best, *_, worst = sorted(row["completions"], key=lambda completion: completion["rank"])
        if best["rank"] == worst["rank"]:
            raise DataError(f"'completions' has no better and worse answer: all have the rank {best['rank']}")
        others = {key: value for key, value in row.items() if key not in ("context", "completions")}
        row = {**others, prompt: row["context"], chosen: best["completion"], rejected: worst["completion"]}
    elif chosen not in row and _rejects_its_answer(row):
        others = {key: value for key, value in row.items() if key not in ("messages", *_REJECTED)}
        row = {**others, chosen: row["messages"], rejected: _whole_rejected(row)}
    better = as_messages(_hh_messages(required(row, chosen)), chosen, role="assistant")
    worse = as_messages(_hh_messages(required(row, rejected)), rejected, role="assistant")
    if better[0]["role"] != "assistant" or worse[0]["role"] != "assistant":
        both = takewhile(lambda pair: pair[0] == pair[1], zip(better[:-1], worse[:-1], strict=False))
        messages = [message for message, _ in both]
        if not messages:
            raise DataError(f"{chosen!r} and {rejected!r} must be answers, or conversations that begin alike")
        if (own_prompt := field_of(row, prompt)) is not None:
            last = as_messages(_hh_messages(own_prompt), prompt)[-1]
            if content_text(last["content"]).strip() not in [
                content_text(message["content"]).strip() for message in messages
            ]:
                raise DataError(f"{chosen!r} and {rejected!r} begin with another prompt than {prompt!r}")
        better, worse = better[len(messages) :], worse[len(messages) :]
        messages = _with_system(messages, row, None)
    else:
        messages = _question(row, prompt, context)
        text = content_text(messages[-1]["content"])
        if (options := choices_of(row, choices, prompt, text, None)) and not options.shown_in(text):
            messages[-1] = _with_text(messages[-1], options.under)
    return {
        **_other_fields(row, prompt, chosen, rejected),
        **_tools(row, "tools"),
        "messages": messages,
        "chosen": better,
        "rejected": worse,
    }


def _is_ranked(row: Row) -> bool:
    """Return whether a row is one of NeMo RL's PreferenceDataset."""
    completions = row.get("completions")
    return (
        "context" in row
        and isinstance(completions, list)
        and len(completions) > 1
        and all(isinstance(completion, dict) and isinstance(completion.get("rank"), int) for completion in completions)
        and all("completion" in completion for completion in completions)
    )


_REJECTED = ("rejected_messages", "rejected_response")


def _rejects_its_answer(row: Row) -> bool:
    """Return whether a row is one of ms-swift's: `messages`, and the whole worse conversation or its answer alone."""
    return _is_chat(row.get("messages")) and any(row.get(key) for key in _REJECTED)


def _whole_rejected(row: Row) -> Any:
    """Return the worse conversation of a row in ms-swift's form."""
    if whole := row.get("rejected_messages"):
        return whole
    messages, worse = as_messages(row["messages"], "messages"), row["rejected_response"]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return [*messages, *(worse if isinstance(worse, list) else [{"role": "assistant", "content": worse}])]


def _hh_messages(value: Any) -> Any:
    """Return a conversation as messages that is text in the form of HH-RLHF, "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    if not isinstance(value, str) or not value.startswith("\n\nHuman:"):
        return value
    parts = re.split(r"\n\n(Human|Assistant):", value)[1:]
    return [{"role": role.lower(), "content": text.strip()} for role, text in zip(parts[::2], parts[1::2], strict=True)]


def _other_fields(row: Row, *used: str) -> Row:
    return {key: value for key, value in row.items() if key not in (*used, *RESERVED_KEYS)}


def _tools(row: Row, key: str) -> Row:
    """Return {"tools": ...}, or nothing for a row without tools."""
    tools = read_tools(field_of(row, key), key)
    return {"tools": tools} if tools else {}
