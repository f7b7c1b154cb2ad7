"""How a user's reward function is called: with what it asks for by the names of its parameters.

Nothing here imports torch: it runs in verifier processes.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_mcore.environments.answers import Parts, Thoughts, split_messages, split_response
from grpo_mcore.environments.user_code import where_raised

Info = Mapping[str, Any]

_TRUTH = re.compile("answer|label|gold|target|reference|truth|expected|solution", re.IGNORECASE)
"""Names of a parameter that mean the ground truth, which is `ground_truth` here, however the dataset's column is
called."""
_TEXT = re.compile("completion|predict|response|output|action|prompt|question|problem|text", re.IGNORECASE)
"""Names of a parameter that mean a text, and not all columns of a row."""


@dataclass(frozen=True)
class Sample:
    """One sample, as rules and reward functions see it."""

    response: str
    """Text that the policy wrote, in all turns."""
    info: Info
    """The prompt's fields: the columns of its row, `ground_truth`, and what its environment keeps."""
    prompt: str = ""
    """The prompt as the chat template writes it."""
    turns: Sequence[Mapping[str, Any]] = ()
    """The messages after the prompt, {"role", "content"}, the environment's among them."""
    finish_reason: str | None = None
    """Why the last turn ended: stop, length or abort."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    """Number of tokens that the policy generated, in all turns."""
    completion_ids: Sequence[int] = ()
    """Ids of the tokens that the policy generated, in all turns."""
    notes: list[str] = field(default_factory=list)
    """Values that functions recorded by TRL's `log_extra` and `log_metric`; they are added to the sample's reason."""
    parts: Parts | None = None
    """Reasoning and answer of the response. None: split by the default marks."""

    @classmethod
    def of(
        cls, messages: Sequence[Mapping[str, Any]], info: Info, response: str, thoughts: Thoughts = "auto"
    ) -> Sample:
        """Return the sample of a conversation, in the form of `interfaces.conversation`."""
        start = next((i for i, message in enumerate(messages) if _is_answer(message)), len(messages))
        return cls(
            response=response,
            info=info,
            prompt="".join(str(message["content"]) for message in messages[:start]),
            turns=[{"role": message["role"], "content": message["content"]} for message in messages[start:]],
            finish_reason=messages[-1].get("finish_reason") if messages else None,
            prompt_tokens=sum(message.get("tokens", 0) for message in messages[:start]),
            response_tokens=sum(message.get("tokens", 0) for message in messages if message.get("generated")),
            completion_ids=[token for message in messages for token in message.get("token_ids", ())],
            parts=split_messages(messages, thoughts),
        )

    @property
    def reasoning_and_answer(self) -> Parts:
        return split_response(self.response, prompt=self.prompt) if self.parts is None else self.parts

    @property
    def answer(self) -> str | None:
        """The answer without the reasoning; None if the reasoning is not closed."""
        return self.reasoning_and_answer.answer

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        return list(self.info.get("messages") or [{"role": "user", "content": self.prompt}])

    def named(self) -> dict[str, Any]:
        """Return all that a function may ask for by name. Columns of the row hide `reply`, `thought` and verl's names;
        the names below hide columns."""
        reasoning, answer = self.reasoning_and_answer
        others = {"reply": answer or "", "thought": reasoning, "solution_str": self.response, "extra_info": self.info}
        known = {
            "response": self.response,
            "info": self.info,
            "prompt": self.prompt,
            "messages": self.messages,
            "turns": list(self.turns),
            "finish_reason": self.finish_reason,
            "truncated": self.finish_reason == "length",
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
            "response_token_ids": list(self.completion_ids),
        }
        return {**others, **self.info, **known}


def _is_answer(message: Mapping[str, Any]) -> bool:
    return bool(message.get("generated", message["role"] == "assistant"))


def reward_call(function: Callable[..., Any], *, as_messages: bool = False) -> Callable[[Sample], float | None]:
    """Return `function` as a function of a sample. It may be synchronous or asynchronous, with one of these signatures:

    - fn(response, ground_truth, finish_reason, ...): any names of `Sample.named`, columns of the row among them; with
      **columns it gets all columns;
    - fn(response, info): two parameters, whatever their names; a second with the name of a column gets that column, and
      one with a usual name of a ground truth (answer, label, gold) gets `ground_truth`;
    - fn(prompts, completions, **columns): TRL's, called with lists of one entry. A parameter with such a name that is
      no column of the row is `ground_truth`. `as_messages`: prompts and completions are lists of messages, as in TRL's
      conversational datasets, instead of strings;
    - fn(data_source, solution_str, ground_truth, extra_info): verl's. `extra_info` without such a column: all columns.

    The value may be a number of any library, in a list for TRL's, or verl's dict with `score`; None: the function does
    not apply to this sample.

    The call raises TypeError for a name that a sample does not have, and whatever the function raises.
    """
    arguments, is_trl = reward_arguments(function, as_messages=as_messages)

    def call(sample: Sample) -> float | None:
        positional, keywords = arguments(sample)
        try:
            return number_of(_finished(function(*positional, **keywords)), is_trl)
        except TypeError as error:
            if is_trl and not as_messages and str(error).startswith("string indices must be integers"):
                error.args = (f"{error}; trl_messages: true gives it messages instead of strings",)
            raise

    return call


def reward_arguments(
    function: Callable[..., Any], *, as_messages: bool = False
) -> tuple[Callable[[Sample], tuple[tuple[Any, ...], dict[str, Any]]], bool]:
    """Return what `reward_call` calls the function with, positional and by name, as a function of a sample that raises
    TypeError; and whether its signature is TRL's."""
    parameters = inspect.signature(function).parameters.values()
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    is_trl = any(p.name in ("completions", "completion_ids") for p in by_name)
    two = len(by_position) == 2 and not takes_all and all(p.default is p.empty for p in by_position)

    def arguments(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Each call has values of its own: what a function changes in them is not seen by others, nor by a repetition.
        sample = replace(sample, info=copy.deepcopy(sample.info), turns=copy.deepcopy(sample.turns))
        if is_trl:
            return (), _trl_arguments(sample, by_name, takes_all, as_messages)
        offered = sample.named()
        missing = [p.name for p in by_name if p.default is p.empty and p.name not in offered]
        missing += [p.name for p in by_position if p.kind is p.POSITIONAL_ONLY]
        if missing and two and (values := _by_position(by_position[0].name, by_position[1].name, sample, offered)):
            return values, {}
        if missing:
            raise TypeError(f"it asks for {', '.join(missing)}, but a sample has {_names(offered)}")
        return (), offered if takes_all else {p.name: offered[p.name] for p in by_name if p.name in offered}

    return arguments, is_trl


def _by_position(first: str, second: str, sample: Sample, offered: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return the arguments of a function of two parameters that a sample does not have both of, such as
    fn(response, info), fn(completion, answer) or fn(pred, gold). None if the names mean something else: fn(label,
    response) would compare the response with itself."""
    if first == "args" or (first not in offered and second in ("response", "solution_str", "reply", "thought")):
        return None
    if second not in offered and _TRUTH.search(second):
        truth = sample.info.get("ground_truth")
        return None if truth is None or _TRUTH.search(first) else (offered.get(first, sample.response), truth)
    if second not in offered and _TEXT.search(second):
        return None
    return offered.get(first, sample.response), offered.get(second, sample.info)


def _trl_arguments(
    sample: Sample, parameters: Sequence[inspect.Parameter], takes_all: bool, as_messages: bool
) -> dict[str, Any]:
    prompt: Any = sample.messages if as_messages else sample.prompt
    completion: Any = [{"role": "assistant", "content": sample.response}] if as_messages else sample.response
    if as_messages and len(sample.turns) > 1:
        completion = list(sample.turns)
    offered: dict[str, Any] = {name: [value] for name, value in sample.info.items() if name != "messages"}
    offered |= {"prompts": [prompt], "completions": [completion], "completion_ids": [list(sample.completion_ids)]}
    offered |= {
        "log_extra": lambda column, values: sample.notes.append(f"{column}: {_shown(values)}"),
        "log_metric": lambda name, value: sample.notes.append(f"{name} {value}"),
    }
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in offered]
    truths = [name for name in missing if _TRUTH.search(name)]
    if len(truths) == 1 and sample.info.get("ground_truth") is not None:
        offered[truths[0]] = [sample.info["ground_truth"]]
        missing.remove(truths[0])
    if "trainer_state" in missing:
        raise TypeError(
            "it asks for trainer_state, which an environment does not have: it scores samples of several steps at a "
            "time; give the parameter a default"
        )
    if missing:
        raise TypeError(f"it asks for {', '.join(missing)}, but the columns are {_names(offered)}")
    return offered if takes_all else {p.name: offered[p.name] for p in parameters if p.name in offered}


def _names(offered: Mapping[str, Any]) -> str:
    names = ", ".join(sorted(offered))
    return f"{names}; the dataset's output_key is ground_truth here" if "ground_truth" in offered else names


def _only_one(values: Any) -> Any:
    """Return the only entry of a list, an array or a tensor: the value for the only completion of a call."""
    several = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(several, Sequence) or isinstance(several, str) or len(several) != 1:
        raise TypeError(f"it must return a list with one number for each completion, here one; got {values!r:.80}")
    return several[0]


def number_of(value: Any, is_trl: bool) -> float | None:
    """Return what a function returned as a number; None if it does not apply. Raises TypeError and ValueError.
    `is_trl`: the value is in a list of one. In verl's dict, the `score` is the number."""
    number = _only_one(value) if is_trl else value
    if isinstance(number, Mapping) and "score" in number:
        number = number["score"]
    if isinstance(number, str | bytes | list | tuple | Mapping):
        raise TypeError(f"it returned {number!r:.80}, which is no number, nor a mapping with `score`")
    return None if number is None else float(number)


def _shown(values: Any) -> str:
    is_single = isinstance(values, Sequence) and not isinstance(values, str) and len(values) == 1
    return f"{values[0] if is_single else values!s:.200}"


def _finished(value: Any) -> Any:
    """Return a value. If it is awaitable, wait for it and return its result."""
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def failed_rule(name: str, error: Exception) -> dict[str, Any]:
    """Return the result of rules for a sample on which component `name` raised."""
    text = "".join(traceback.format_exception(error))
    message = f"{type(error).__name__}: {error}"
    return {"failed": name, "error": message, "where": where_raised(error), "traceback": text}
