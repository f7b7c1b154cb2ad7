"""Processors, which make a row a DatumSpec: they apply the chat template and tokenise the text, once.

A processor is `fn(datum_dict, task_data_spec, tokenizer, max_seq_length, idx) -> DatumSpec`, given by name or import
path. None of them truncates: a prompt that does not fit gets loss_multiplier 0, and the dataset excludes and counts it.
"""

import inspect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from grpo_mcore.base.imports import import_by_path
from grpo_mcore.data.answers import Chat, trained_spans
from grpo_mcore.data.interfaces import (
    RESERVED_KEYS,
    DataError,
    RowError,
    TaskDataProcessFnCallable,
    TaskDataSpec,
    uid_text,
)
from grpo_mcore.data.turn_tokens import marks_of_a_question
from grpo_mcore.recipe import CustomCode, MasterConfig
from grpo_mcore.rollout.chat_form import chat_form
from grpo_mcore.rollout.datum import DatumSpec, Message
from grpo_mcore.rollout.images import IMAGE_MARK, given_image, images_of, is_image, take_images
from grpo_mcore.rollout.messages import (
    REASONING_FIELDS,
    MessageError,
    content_text,
    join_texts,
    read_messages,
    read_tools,
    refuse_unknown_roles,
)
from grpo_mcore.rollout.text_tokens import tokens_behind

DEFAULT_PROCESSOR = "math_hf_data_processor"
_PROBLEM = "@@problem@@"
_IMAGE_COLUMNS = ("image", "images", "image_path", "image_url", "img")
SLIDING_PUZZLE = "examples.sliding_puzzle.dataset:sliding_puzzle_processor"


@dataclass(frozen=True)
class TaskRow:
    """A row and the other arguments of its processor. `limit` is the maximum number of its tokens; None: any number."""

    fields: dict[str, Any]
    spec: TaskDataSpec
    tokenizer: Any
    limit: int | None
    idx: int

    @property
    def task_name(self) -> str:
        return self.fields.get("task_name", self.spec.task_name)

    @property
    def uid(self) -> str:
        return uid_text(self.fields.get("uid"), f"{self.task_name}:{self.idx}")

    def datum(self, log: list[Message], length: int, *, fits: bool, info: dict[str, Any] | None = None) -> DatumSpec:
        """Return the row as a datum. `info` holds the values for its environment."""
        return DatumSpec(
            message_log=log,
            length=length,
            extra_env_info=info or {},
            loss_multiplier=1.0 if fits else 0.0,
            idx=self.idx,
            task_name=self.task_name,
            uid=self.uid,
        )


def _processor(process: Callable[[TaskRow], DatumSpec]) -> TaskDataProcessFnCallable:
    """Return the processor that calls a function of the row. The row's messages and tools are brought into one form
    first, wherever its dataset has them from."""

    def processor(
        datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int | None, idx: int
    ) -> DatumSpec:
        if hasattr(tokenizer, "image_processor"):  # the processor of a vision model, as NeMo RL's scripts give it
            tokenizer = tokenizer.tokenizer
            if task_data_spec.images is None:
                task_data_spec.images = images_of(tokenizer.name_or_path)
        row = TaskRow(datum_dict, task_data_spec, tokenizer, max_seq_length, idx)
        fields = dict(datum_dict)
        if fields.get("messages"):
            fields["messages"] = _read(row, "messages")
        if fields.get("tools"):
            fields["tools"] = _read(row, "tools", read_tools)
        if chosen := fields.get("chat_template_kwargs"):
            fields["chat_template_kwargs"] = _read_variables(row.uid, chosen)
        return process(replace(row, fields=fields))

    for name in ("__name__", "__qualname__", "__doc__"):
        setattr(processor, name, getattr(process, name))
    return processor


def _read(row: TaskRow, key: str, read: Callable[[Any, str], list[Any]] | None = None) -> list[Any]:
    """Return the messages, or tools, of a row in their normal form, each text in one piece."""
    try:
        return join_texts((read or _read_chat)(row.fields[key], key), chat_form(row.tokenizer).joint)
    except MessageError as error:
        raise RowError(row.uid, str(error)) from error


def _read_variables(uid: str, chosen: Any) -> dict[str, Any]:
    """Return a row's values for the chat template, an object or JSON text of one."""
    try:
        variables = json.loads(chosen) if isinstance(chosen, str) else chosen
    except ValueError as error:
        raise RowError(uid, f"chat_template_kwargs is not JSON: {error}") from error
    if not isinstance(variables, dict):
        raise RowError(uid, f"chat_template_kwargs must be an object, got {chosen!r:.40}")
    return variables


def _read_chat(value: Any, name: str) -> list[Any]:
    return read_messages(value, name, given_image)


@_processor
def math_hf_data_processor(row: TaskRow) -> DatumSpec:
    """Process a row in chat format: the prompt is everything before a last assistant message. The truth is
    `ground_truth`, or else that message."""
    return _prompt_datum(row, *_split_answer(row))


@_processor
def vlm_hf_data_processor(row: TaskRow) -> DatumSpec:
    """Process a row in chat format whose questions may have images, like math_hf_data_processor. A truth is not needed:
    rewards such as `format` do without one."""
    return _prompt_datum(row, *_split_answer(row), chat=True, images=True)


@_processor
def math_data_processor(row: TaskRow) -> DatumSpec:
    """Process a row with `problem` and `expected_answer`, or one in chat format like math_hf_data_processor."""
    if "problem" not in row.fields:
        return _prompt_datum(row, *_split_answer(row))
    prompt = [{"role": "user", "content": str(row.fields["problem"])}]
    return _prompt_datum(row, prompt, row.fields.get("expected_answer"))


@_processor
def chat_data_processor(row: TaskRow) -> DatumSpec:
    """Process a row in chat format for an environment that needs no truth, such as a reward model, rules or code. It
    gets the prompt's `messages`, and a truth where there is one."""
    return _prompt_datum(row, *_split_answer(row), chat=True)


@_processor
def nemo_gym_data_processor(row: TaskRow) -> DatumSpec:
    """Process a task of NemoGymDataset. The Gym gets the task unchanged; it is tokenised here only to measure it."""
    task = row.fields["agent_task"]
    if row.spec.hint_key is not None:
        raise DataError("hint_key: an agent of a NeMo Gym writes the prompts of its samples; remove the key")
    spec = TaskDataSpec(row.spec.task_name, images=row.spec.images)  # without prompt files, which the Gym does not use
    row = replace(row, spec=spec, fields={key: value for key, value in row.fields.items() if key != "agent_task"})
    if messages := row.fields["messages"]:
        if spec.images is None and take_images(messages)[1]:
            raise RowError(row.uid, "its question has an image; set policy.is_vlm")
        datum = _prompt_datum(row, messages, None, chat=True, images=True)
        datum.pop("images", None)  # the agent sends those of its task to the policy's endpoint
    else:
        datum = row.datum([], 0, fits=True)
    truth = task.get("expected_answer")
    datum["extra_env_info"] = {"agent_task": task} | ({} if truth is None else {"ground_truth": truth})
    return datum


@_processor
def sft_processor(row: TaskRow) -> DatumSpec:
    """Process a whole conversation for SFT: the assistant's messages are trained on (`train_on`: all or the
    last), including their end tokens.

    An answer begins where a generation would begin, after the template's generation prompt, and is tokenised
    separately, so that the prompt has exactly the tokens that it has in a rollout.
    """
    messages = _with_task_prompts(row.fields["messages"], row.spec)
    log, pictures = _answered_log(row, messages)
    length = sum(len(turn["token_ids"]) for turn in log)
    datum = row.datum(log, length, fits=row.limit is None or length <= row.limit)
    if pictures:
        datum["images"] = pictures
    if row.spec.hint_key is not None:
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        hinted_log, _ = _answered_log(row, [*_hinted(row, messages[:first]), *messages[first:]])
        if [turn["content"] for turn in hinted_log[1:]] != [turn["content"] for turn in log[1:]]:
            raise RowError(row.uid, "the chat template writes its answers differently after the hint")
        datum["teacher_prompt"] = hinted_log[0]["token_ids"]
    return datum


@_processor
def preference_processor(row: TaskRow) -> DatumSpec:
    """Process a prompt with a chosen and a rejected answer for DPO. The assistant's messages of the answers are trained
    on (`train_on`: all or the last), including their end tokens, and nothing of the prompt. Both answers must fit."""
    prompt = _with_task_prompts(row.fields["messages"], row.spec)
    if take_images(prompt)[1]:
        raise RowError(row.uid, "pairs of answers to questions with images (DPO) are not supported")
    logs = [
        _answered_log(row, [*prompt, *_read(row, answer)], len(prompt), f" ({answer})")[0]
        for answer in ("chosen", "rejected")
    ]
    return _datum_of_logs(row, logs)


@_processor
def reward_model_processor(row: TaskRow) -> DatumSpec:
    """Process a conversation with a `score`, or a prompt with a chosen and a rejected answer and maybe a `margin`, for
    a reward model. It reads what `env.reward_model` shows it: the whole conversation as the chat template writes it,
    without tools. The token after its end, whose value is the score, is a copy of the last one."""
    prompt, pairs = _with_task_prompts(row.fields["messages"], row.spec), "rejected" in row.fields
    answers = [_read(row, name) for name in ("chosen", "rejected")] if pairs else [[]]
    label = "margin" if pairs else "score"
    value: Any = row.fields.get(label)
    value = 0.0 if pairs and value in (None, "") else value
    try:
        score = math.nan if isinstance(value, bool) else float(value)  # that of a CSV file is text
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise RowError(row.uid, f"its {label!r} must be a finite number, got {value!r:.40}")
    datum = _datum_of_logs(row, [_scored_log(row, [*prompt, *answer]) for answer in answers])
    datum["score"] = score
    return datum


def _datum_of_logs(row: TaskRow, logs: Sequence[list[Message]]) -> DatumSpec:
    """Return a conversation, or the chosen and the rejected one of a pair, as a datum. A pair of equal ones, which says
    nothing, is excluded."""
    tokens = [[token for turn in log for token in turn["token_ids"].tolist()] for log in logs]
    same = len(logs) == 2 and tokens[0] == tokens[1]
    fits = not same and (row.limit is None or max(map(len, tokens)) <= row.limit)
    info = {"unusable": "chosen and rejected are the same"} if same else None
    datum = row.datum(logs[0], sum(map(len, tokens)), fits=fits, info=info)
    if len(logs) == 2:
        datum["rejected_log"] = logs[1]
    return datum


def _scored_log(row: TaskRow, messages: list[dict[str, Any]]) -> list[Message]:
    """Return a whole conversation, of which nothing is trained on, and the token at which its score is read."""
    import torch

    messages, images = _taken(row.uid, messages)
    if images:
        raise RowError(row.uid, "reward models of conversations with images are not supported")
    if messages[-1]["role"] != "assistant":
        raise RowError(row.uid, "its last message is not the assistant's, so there is no answer to score")
    _refuse_templated(messages, row.tokenizer, row.uid)
    left_out = ("tools", "chat_template_kwargs")
    bare = replace(row, fields={key: value for key, value in row.fields.items() if key not in left_out})
    text = _shown(bare, chat_form(row.tokenizer).messages(messages), row.uid, add_generation_prompt=False)
    (whole,), _ = _tokenise(bare, [("user", text)], [])
    end = Message(role="assistant", content="", token_ids=whole["token_ids"][-1:].clone())
    for turn in (whole, end):
        turn["token_loss_mask"] = torch.full_like(turn["token_ids"], turn is end)
    return [whole, end]


def _answered_log(
    row: TaskRow, messages: list[dict[str, Any]], first: int = 0, which: str = ""
) -> tuple[list[Message], dict[str, bytes]]:
    """Return a conversation up to its last answer, as tokens with their loss masks, and its images by digest. The
    assistant's messages from index `first` on are answers, each tokenised separately; all else is context. `which`
    names one of the row's conversations in errors. The task's `train_on` says whether all answers are trained on, or
    the last.

    An answer begins where a generation would begin. With `all`, earlier answers are trained on as the template shows
    them once later turns follow: Qwen3 and DeepSeek leave out their reasoning then.
    """
    tokenizer, uid = row.tokenizer, row.uid + which
    messages, images = _taken(uid, messages)
    _refuse_templated(messages, tokenizer, uid)
    form = chat_form(tokenizer)
    prompt = form.messages(messages[:first])
    messages = [*prompt, *form.messages(messages[first:])]
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= len(prompt)]
    if not assistant:
        raise RowError(uid, "it has no assistant message, so there is nothing to train on")
    answers = [i for i in assistant if _is_trained(messages[i], uid)]
    if not answers:
        raise RowError(uid, f"all its answers are marked as context ({', '.join(_MARKS_OF_CONTEXT)})")
    if blank := [i for i in answers if not (str(messages[i].get("content") or "").strip() or _says(messages[i]))]:
        raise RowError(uid, f"message {blank[0]}, an answer that is trained on, is blank")

    def render(shown: Chat, add_generation_prompt: bool) -> str:
        return _shown(row, shown, uid, add_generation_prompt=add_generation_prompt)

    answers = answers[-1:] if row.spec.train_on == "last" else answers
    try:
        whole, spans = trained_spans(render, messages, answers, tokenizer)
    except RowError:
        raise
    except DataError as error:
        raise RowError(uid, str(error)) from error
    turns: list[tuple[str, str]] = []
    done = 0
    for start, stop in spans:
        turns += [("user", whole[done:start]), ("assistant", whole[start:stop])]
        done = stop
    import torch  # heavy, and not needed where rows are only checked

    shown = sum(is_image(part) for message in messages[: answers[-1]] for part in _parts(message))
    log, pictures = _tokenise(row, turns, images[:shown])
    for turn in log:
        turn["token_loss_mask"] = torch.full_like(turn["token_ids"], turn["role"] == "assistant")
    return log, pictures


_MARKS_OF_CONTEXT = ("weight", "loss", "train", "loss_mask", "step_loss_mask")
"""Fields by which published data leave an answer out of the loss: OpenAI has weight 0, ms-swift loss, axolotl train,
verl loss_mask, slime step_loss_mask."""


def _is_trained(message: dict[str, Any], uid: str) -> bool:
    if message.get("train_detail"):  # axolotl's, for parts of an answer
        raise RowError(uid, "an answer has train_detail; only whole answers can be left out of the loss")
    for key in _MARKS_OF_CONTEXT:
        if (mark := message.get(key)) not in (None, 0, 1):  # true and false among them
            raise RowError(uid, f"an answer has {key} {mark!r:.40}; only 0 and 1 are supported")
        if mark == 0 and mark is not None:
            return False
    return True


def _says(message: dict[str, Any]) -> bool:
    """Return whether a message without a text says something nevertheless."""
    return any(message.get(key) for key in ("tool_calls", *REASONING_FIELDS))


PROCESSORS: dict[str, TaskDataProcessFnCallable] = {
    "default": math_hf_data_processor,
    "math_hf_data_processor": math_hf_data_processor,
    "math_data_processor": math_data_processor,
    "vlm_hf_data_processor": vlm_hf_data_processor,
    "chat_data_processor": chat_data_processor,
    "nemo_gym_data_processor": nemo_gym_data_processor,
    "nemo_gym": nemo_gym_data_processor,
    "sft_processor": sft_processor,
    "preference_processor": preference_processor,
    "reward_model_processor": reward_model_processor,
}


def longest_prompt(config: MasterConfig) -> int:
    """Return the maximum number of tokens of a prompt in a GRPO run."""
    limits = (config.data.max_input_seq_length, config.policy.generation.vllm_cfg.max_model_len)
    return min(limit for limit in (*limits, config.policy.max_total_sequence_length) if limit is not None)


def find_processor(choice: str | CustomCode) -> TaskDataProcessFnCallable:
    """Return a processor by name or import path ("package.module:function" or "package.module.function"), or a custom
    one with its options."""
    name, options = (choice.path, choice.options) if isinstance(choice, CustomCode) else (choice, {})
    name = SLIDING_PUZZLE if name == "sliding_puzzle_processor" else name
    if name in PROCESSORS:
        return PROCESSORS[name]
    if not {".", ":"} & set(name):
        raise DataError(f"unknown processor {name!r}: known are {sorted(PROCESSORS)}, or an import path")
    processor = import_by_path(name, "processor", DataError)
    try:
        inspect.signature(processor).bind({}, None, None, None, 0, **options)
    except TypeError as error:
        raise DataError(
            f"the processor {name!r} cannot be called as fn(datum_dict, task_data_spec, tokenizer, max_seq_length, "
            f"idx{''.join(f', {option}=' for option in options)}): {error}"
        ) from error
    return partial(processor, **options) if options else processor


def _prompt_datum(
    row: TaskRow, prompt: list[dict[str, Any]], answer: Any, *, chat: bool = False, images: bool = False
) -> DatumSpec:
    """Return the prompt as one message of tokens. The environment gets the row's columns, the prompt's `messages` and
    the truth: `ground_truth`, else `answer`, which may be missing with `chat`. `images`: the prompt may have some."""
    truth = answer if row.fields.get("ground_truth") is None else row.fields["ground_truth"]
    if truth is None and not chat:
        raise RowError(row.uid, f"neither an answer ({row.spec.output_key!r}) nor a 'ground_truth' to check against")
    if isinstance(truth, float) and not math.isfinite(truth):
        raise RowError(row.uid, f"its 'ground_truth' is {truth}, which is no answer")
    if isinstance(truth, str) and not truth.strip() and not chat:
        raise RowError(row.uid, "its answer is blank; for rewards that need none: processor: chat_data_processor")
    messages = _with_task_prompts(prompt, row.spec)
    if not images and any(is_image(part) for message in messages for part in _parts(message)):
        raise RowError(row.uid, "its question has an image; set processor: vlm_hf_data_processor (data.default)")
    message, pictures = _as_prompt(row, messages)
    length = len(message["token_ids"])
    extra = {key: value for key, value in row.fields.items() if key not in RESERVED_KEYS}
    extra |= {} if truth is None else {"ground_truth": truth}
    extra["messages"], _ = _taken(row.uid, messages)
    datum = row.datum([message], length, fits=row.limit is None or length < row.limit, info=extra)
    if pictures:
        datum["images"] = pictures
    if row.spec.hint_key is not None:
        datum["teacher_prompt"] = _as_prompt(row, _hinted(row, messages))[0]["token_ids"]
    return datum


def _as_prompt(row: TaskRow, messages: list[dict[str, Any]]) -> tuple[Message, dict[str, bytes]]:
    """Return messages in the form that the chat template takes, as one message of the tokens that it writes, and their
    images by digest."""
    messages, images = _taken(row.uid, messages)
    _refuse_templated(messages, row.tokenizer, row.uid)
    shown = chat_form(row.tokenizer).messages(messages)
    text = _shown(row, shown, row.uid, add_generation_prompt=True)
    (prompt,), pictures = _tokenise(row, [("user", text)], images)
    return prompt, pictures


def _taken(uid: str, messages: Chat) -> tuple[list[dict[str, Any]], list[bytes]]:
    try:
        return take_images(messages)
    except ValueError as error:
        raise RowError(uid, str(error)) from error


def _parts(message: dict[str, Any]) -> list[Any]:
    return message["content"] if isinstance(message.get("content"), list) else []


def _hinted(row: TaskRow, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the row's hint in the last question."""
    hint = row.fields.get(str(row.spec.hint_key))
    if not isinstance(hint, str) or not hint:
        raise RowError(row.uid, f"no text in its column {row.spec.hint_key!r} (hint_key), which the teacher gets")
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None or not isinstance(messages[last]["content"], str):
        raise RowError(row.uid, "no question in text that the hint could go into")
    hinted = {**messages[last], "content": row.spec.with_hint(messages[last]["content"], hint)}
    return [*messages[:last], hinted, *messages[last + 1 :]]


def _split_answer(row: TaskRow) -> tuple[list[dict[str, Any]], str | None]:
    """Return the prompt, and the last message where it is the assistant's. Raises RowError for a blank prompt."""
    prompt, answer = row.fields["messages"], None
    if prompt[-1]["role"] == "assistant":
        prompt, answer = prompt[:-1], prompt[-1]["content"]
    if not any(str(message.get("content") or "").strip() for message in prompt):
        raise RowError(row.uid, "its question is blank")
    return prompt, answer


def _with_task_prompts(messages: list[dict[str, Any]], spec: TaskDataSpec) -> list[dict[str, Any]]:
    """Put the last question into the prompt file's text, and the system prompt first where the row has none."""
    messages = list(messages)
    if spec.prompt is not None:
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is not None:
            content = messages[last]["content"]
            if isinstance(content, list):
                before, _, after = spec.format_problem(_PROBLEM).partition(_PROBLEM)
                texts = [{"type": "text", "text": text} for text in (before, after)]
                content = [part for part in (texts[0], *content, texts[1]) if part.get("text") != ""]
            else:
                content = spec.format_problem(content)
            messages[last] = {**messages[last], "content": content}
    if spec.system_prompt is not None and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": spec.system_prompt})
    return messages


def _refuse_templated(messages: Chat, tokenizer: Any, uid: str) -> None:
    """Text that has the chat template's form already would get it twice, and a token that ends a text would stand in
    its middle, without a word."""
    marks = marks_of_a_question(tokenizer)
    ends = {tokenizer.eos_token, tokenizer.pad_token} - {*marks, getattr(tokenizer, "bos_token", None), None}
    for message in messages:
        text = content_text(message.get("content"))
        if mark := next((mark for mark in marks if mark in text), None):
            raise RowError(
                uid,
                f"the {message['role']}'s text has {mark}, which the chat template writes around messages; give the "
                "text without it, as messages",
            )
        if mark := next((mark for mark in ends if mark in text), None):
            raise RowError(
                uid, f"the {message['role']}'s text has {mark}, by which the tokenizer ends a text; leave it out"
            )


def _shown(row: TaskRow, messages: Chat, uid: str, *, add_generation_prompt: bool) -> str:
    """Return messages as the chat template writes them, with the row's `tools` and its `chat_template_kwargs`."""
    try:
        refuse_unknown_roles(messages, row.tokenizer.chat_template)
    except MessageError as error:
        raise RowError(uid, str(error)) from error
    tools = {"tools": row.fields["tools"]} if row.fields.get("tools") else {}
    variables = row.fields.get("chat_template_kwargs") or {}
    try:
        return row.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **tools, **variables
        )
    except Exception as error:  # a template is code of the model's author and may raise anything
        raise RowError(uid, f"the chat template rejects it: {type(error).__name__}: {error}") from error


def _tokenise(
    row: TaskRow, turns: list[tuple[str, str]], images: Sequence[bytes]
) -> tuple[list[Message], dict[str, bytes]]:
    """Return (role, text) pairs as messages, and their images by digest. The text has all special tokens already; the
    tokenizer adds none."""
    import torch

    before = ["", *(text for _, text in turns)]
    encoded = [tokens_behind(row.tokenizer, earlier, text) for earlier, (_, text) in zip(before, turns, strict=False)]
    log = [Message(role=role, content=text) for role, text in turns]
    pictures = dict[str, bytes]()
    if images or row.spec.images is not None:
        encoded, pictures = _expanded(row, log, encoded, images)
    for message, ids in zip(log, encoded, strict=True):
        message["token_ids"] = torch.tensor(ids, dtype=torch.int64)
    return log, pictures


def _expanded(
    row: TaskRow, log: Sequence[Message], encoded: list[list[int]], images: Sequence[bytes]
) -> tuple[list[list[int]], dict[str, bytes]]:
    """Return the tokens of turns with those of their images, and the images by digest; add their spans to the log."""
    reader = row.spec.images
    if reader is None:
        raise RowError(row.uid, "it has an image; set processor: vlm_hf_data_processor (data.default)")
    if any(IMAGE_MARK in message["content"] for message in log if message["role"] == "user"):
        raise RowError(row.uid, f"its text has {IMAGE_MARK}, and no column `image` or `images` has an image for it")
    if not images and (column := next(filter(row.fields.get, _IMAGE_COLUMNS), None)):
        forms = "an image's bytes, data URL, base64 or path with its ending, as `image` or `images` of a dataset"
        raise RowError(row.uid, f"its column {column!r} is not read as an image; give {forms}, or rename the column")
    try:
        expanded = reader.expand(encoded, images)
    except ValueError as error:
        raise RowError(row.uid, str(error)) from error
    for message, (_, spans) in zip(log, expanded, strict=True):
        if spans:
            message["images"] = spans
    return [ids for ids, _ in expanded], reader.by_digest(images)
