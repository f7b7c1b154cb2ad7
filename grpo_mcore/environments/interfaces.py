"""The interface of an environment: it reads conversations and returns observations, rewards and whether they end."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import Any, ClassVar, NamedTuple

from grpo_mcore.base.imports import no_exit
from grpo_mcore.base.text import not_unicode, replaced
from grpo_mcore.environments.config import EnvConfig
from grpo_mcore.environments.errors import EnvironmentConfigError
from grpo_mcore.rollout.images import given_image
from grpo_mcore.rollout.messages import read_content, result_content
from grpo_mcore.rollout.trajectory import Outcome, Trajectory, fingerprint


class EnvironmentReturn(NamedTuple):
    """The results of one step. Every list has one entry per conversation. An optional field may be None instead of a
    list, which means None for every conversation.

    `observations`: the environment's next message, {"role", "content"}; the role `tool` is kept if the chat template
    has it, any other becomes `user`. `metadata`: what the next step gets; None: unchanged. `next_stop_strings`: strings
    that end the next turn; None: unchanged. `terminateds`: whether the conversation is over. `rewards`: reward of this
    turn alone (the rewards of a conversation's turns are added up); None: the environment failed, and the sample is
    excluded and counted, never scored 0. `answers`: the extracted answer. `reasons`: why it got that reward. `seconds`:
    how long scoring took. `rewards_by_name`: the components of a reward that has several. `tracebacks`: text for the
    run's console, such as the first traceback of a function that raises. `failures`: "COMPONENT: KIND" for each attempt
    to score it that failed, such as "judge: HTTP 503", also if a later attempt succeeded. `turn_rewards`: score
    of the state after this turn, for grpo.turn_credit, or a list with one entry for each of the policy's turns so far,
    None for those that are not scored. `state_keys`: the state in which the policy took this turn, as text; turns with
    equal keys are compared by gigpo. None: all tokens before the turn.
    """

    observations: list[dict[str, Any]]
    metadata: list[dict[str, Any] | None] | None
    next_stop_strings: list[list[str] | None] | None
    rewards: list[float | None]
    terminateds: list[bool]
    answers: list[str | None] | None = None
    reasons: list[str] | None = None
    seconds: list[float] | None = None
    rewards_by_name: list[dict[str, float]] | None = None
    tracebacks: Sequence[str | None] | None = None
    failures: Sequence[Sequence[str]] | None = None
    turn_rewards: Sequence[Sequence[float | None] | float | None] | None = None
    state_keys: Sequence[str | None] | None = None


def single_turn_return(
    metadata: Sequence[dict[str, Any]],
    rewards: Sequence[float | None],
    reasons: Sequence[str],
    seconds: Sequence[float],
    *,
    answers: Sequence[str | None] | None = None,
    rewards_by_name: list[dict[str, float]] | None = None,
    tracebacks: Sequence[str | None] | None = None,
    failures: Sequence[Sequence[str]] | None = None,
) -> EnvironmentReturn:
    """Return the results of a step that ends every conversation. The observation is the reason."""
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": f"Environment: {reason}"} for reason in reasons],
        metadata=list(metadata),
        next_stop_strings=[None] * len(rewards),
        rewards=list(rewards),
        terminateds=[True] * len(rewards),
        answers=[None] * len(rewards) if answers is None else list(answers),
        reasons=list(reasons),
        seconds=list(seconds),
        rewards_by_name=rewards_by_name,
        tracebacks=tracebacks,
        failures=failures,
    )


class EnvironmentBase:
    """The base of all environments, built from a recipe's section `env.<name>`. Several threads may use an instance."""

    needs: ClassVar[dict[str, float]] = {"cpus": 1.0, "gpus": 0.0}
    """Processors and accelerators that one instance needs."""
    concurrent_calls: ClassVar[int] = 1
    """Maximum concurrent calls of one instance that is a cluster worker; each has a thread."""
    config_class: ClassVar[type[EnvConfig] | None] = None
    """The type of `config`. None: a dict with any keys."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config: Any = self.read_config(config or {})

    @classmethod
    def sample_timeout_s(cls, config: Mapping[str, Any]) -> float | None:
        """Return the maximum seconds for one sample of an environment that runs agents, as a NeMo Gym does. None: the
        environment scores turns that our engines generate."""
        return None

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Any:
        """Return a recipe's section in the form of `config`. Raises EnvironmentConfigError that names the key."""
        return dict(config) if cls.config_class is None else cls.config_class.read(config)

    @classmethod
    def resources(cls, config: Mapping[str, Any]) -> dict[str, float]:
        """Return what an instance with this section needs of the cluster: {"cpus", "gpus"}. Raises
        EnvironmentConfigError if the section is wrong, before anything is started."""
        cls.read_config(config)
        return dict(cls.needs)

    @classmethod
    def call_limits(cls, config: Mapping[str, Any]) -> tuple[int, int]:
        """Return the maximum concurrent calls of an instance with this section, and the maximum samples of a call."""
        return cls.concurrent_calls, 32

    @classmethod
    def completed(cls, config: Mapping[str, Any], tokenizer: Any) -> Mapping[str, Any]:
        """Return the section with the values that depend on the policy's tokenizer filled in."""
        return config

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        """Raise EnvironmentConfigError if an instance with this section could not be built. Quick: called before
        anything is started."""
        cls.read_config(config)

    @classmethod
    def check_row(cls, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Raise EnvironmentConfigError if answers to a prompt with the fields `info`, its `extra_env_info`, could
        not be scored. Called as `check` is, with the first row of a dataset."""

    @classmethod
    def check_truths(cls, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Return for each prompt, given by its `extra_env_info`, why no answer to it could be right, such as a ground
        truth that its own verifier does not accept; None if there is no such reason."""
        return [None] * len(rows)

    @classmethod
    def remote(cls, config: Mapping[str, Any] | None = None) -> RemoteEnvironment:
        """Return this environment as an actor of the run's cluster, for `task_to_env`."""
        return RemoteEnvironment(cls, config or {})

    @property
    def solved_at(self) -> float | None:
        """Lowest reward of a sample that counts as solved: the key `solved_at` of the section. None: not set."""
        config = getattr(self, "config", None)  # a class that does not call our constructor has none
        return config.solved_at if isinstance(config, EnvConfig) else (config or {}).get("solved_at")

    def shutdown(self) -> None:
        """Free what the environment holds. It is not used afterwards."""


class RemoteEnvironment:
    """An environment that runs as an actor of the run's cluster. It is started when a loop first uses it; a wrong
    configuration is an EnvironmentConfigError at once."""

    def __init__(self, cls: type[EnvironmentBase], config: Mapping[str, Any]) -> None:
        cls.check(config)
        if cls.sample_timeout_s(config) is not None:
            raise EnvironmentConfigError(
                f"{cls.__name__} runs agents that generate whole samples: name it in the recipe's section env"
            )
        self.cls, self.config = cls, dict(config)
        self.workers: dict[int, Any] = {}
        """The worker on each cluster that it was started on, by the cluster's id."""


class EnvironmentInterface(EnvironmentBase, ABC):
    """Scores the samples that the engines generate, turn by turn."""

    @abstractmethod
    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn | Awaitable[EnvironmentReturn]:
        """Return the environment's answer to each conversation. `message_log_batch[i]`: the messages {"role",
        "content"} so far; `metadata[i]`: a mapping of its own, the prompt's `extra_env_info` or what the last step
        returned for it. It may be async: all calls in a process have one event loop."""

    def advance(self, metadata: Sequence[dict[str, Any]], *trajectories: Trajectory) -> list[Outcome]:
        """Call `step` on these trajectories and return the outcomes of their last turns, in order. Trajectories are
        separate arguments so that the cluster resolves object references in their place."""
        if len(metadata) != len(trajectories):
            raise ValueError(f"advance: {len(metadata)} metadata for {len(trajectories)} trajectories")
        start = time.perf_counter()
        copies = [dict(info) for info in metadata]  # the samples of a prompt may share one mapping
        name = f"{type(self).__name__}.step"
        with no_exit(name):
            result = self.step([conversation(trajectory) for trajectory in trajectories], copies)
        if inspect.isawaitable(result):
            result = asyncio.run_coroutine_threadsafe(_awaited(result, name), _event_loop()).result()
        seconds = (time.perf_counter() - start) / max(len(trajectories), 1)
        rows = _rows(result, len(trajectories))
        return [self._outcome(row, it, seconds) for row, it in zip(rows, trajectories, strict=True)]

    def _outcome(self, row: Mapping[str, Any], trajectory: Trajectory, seconds: float) -> Outcome:
        """Return the outcome of one conversation. `row`: its entry of each field of an EnvironmentReturn; a field of
        the wrong type costs the sample its reward. `seconds`: used if the EnvironmentReturn has none."""
        try:
            content, role = _observation(row["observations"])
            name = type(self).__name__
            none = f"{name} returned None as the reward: it could not score the turn (0.0: a turn without one)"
            return Outcome(
                reward=None if row["rewards"] is None else _finite("rewards", row["rewards"]),
                answer=_answer(row["answers"]),
                reason=replaced(_text("reasons", row["reasons"]) or "") or (none if row["rewards"] is None else ""),
                seconds=seconds if row["seconds"] is None else _finite("seconds", row["seconds"]),
                rewards_by_name=_parts(row["rewards_by_name"]),
                terminated=_flag("terminateds", row["terminateds"]),
                solved_at=self.solved_at,
                observation=content,
                role=role,
                stop_strings=_stop_strings(row["next_stop_strings"]),
                metadata=_mapping("metadata", row["metadata"]),
                traceback=_text("tracebacks", row["tracebacks"]),
                failures=_texts("failures", row["failures"]),
                turn_rewards=turn_rewards(row["turn_rewards"], sum(turn.loss_mask for turn in trajectory.turns)),
                turn_states=(_state(row["state_keys"], trajectory),),
            )
        except (TypeError, ValueError, ArithmeticError) as error:
            return Outcome(None, None, f"{type(self).__name__} returned {error}", seconds, terminated=True)

    def global_post_process_and_metrics(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return metrics over a whole batch of samples. `batch` has the columns `rewards` and `uid`."""
        return {}


_loop_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's environments, which runs in a thread. There is only one, because clients
    that an environment opens are bound to it."""
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="environments", daemon=True).start()
        return _loop


async def _awaited(result: Awaitable[EnvironmentReturn], name: str) -> EnvironmentReturn:
    with no_exit(name):
        return await result


_REQUIRED_FIELDS = ("observations", "rewards", "terminateds")
OPTIONAL_FIELDS = tuple(name for name in EnvironmentReturn._fields if name not in _REQUIRED_FIELDS)


def _rows(result: EnvironmentReturn, count: int) -> list[dict[str, Any]]:
    """Return, for each of `count` conversations, its entry of every field. Raises ValueError for a field that is not a
    list of `count` entries: nobody knows which entry belongs to which conversation then."""
    columns: dict[str, list[Any]] = {}
    if not hasattr(result, "rewards"):
        raise TypeError(f"step returned {type(result).__name__}; an EnvironmentReturn is needed")
    for field in EnvironmentReturn._fields:
        values: Any = getattr(result, field, None)
        if values is None and field in OPTIONAL_FIELDS:
            values = [None] * count
        if hasattr(values, "tolist"):  # an array or a tensor
            values = values.tolist()
        if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
            raise ValueError(f"step returned {field} of type {type(values).__name__}; a list is needed")
        columns[field] = list(islice(values, count + 1))  # an iterator may have no end
        if len(columns[field]) != count:
            entries = f"more than {count}" if len(columns[field]) > count else len(columns[field])
            raise ValueError(f"step returned {entries} {field} for {count} conversations")
    return [{field: values[index] for field, values in columns.items()} for index in range(count)]


def _finite(field: str, value: Any) -> float:
    """Return a finite number as a float. It may be of numpy, or a tensor with one element."""
    if isinstance(value, str | bytes | list) or not math.isfinite(value):
        raise ValueError(f"{field} with {value!r:.80}, which is not a finite number")
    return float(value)


def _text(field: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{field} with {value!r:.80}, which is not text but {type(value).__name__}")


def _texts(field: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError(f"{field} with {value!r:.80}; a list of strings is needed")
    return tuple(replaced(_text(field, entry) or "") for entry in value or ())


def _answer(value: Any) -> str | None:
    """Return an answer as text; a number is one."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    text = _text("answers", value)
    return None if text is None else replaced(text)


def _flag(field: str, value: Any) -> bool:
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, bool | int) and value not in (0.0, 1.0):  # torch.ones_like(rewards), as in NeMo RL
        raise TypeError(f"{field} with {value!r:.80}, which is neither true nor false")
    return bool(value)


def _mapping(field: str, value: Any) -> dict[str, Any] | None:
    if value is None or isinstance(value, dict):
        return value
    raise TypeError(f"{field} with {value!r:.80}, which is not a mapping but {type(value).__name__}")


def _parts(value: Any) -> dict[str, float]:
    parts = _mapping("rewards_by_name", value) or {}
    return {str(name): _finite(f"rewards_by_name[{name!r}]", part) for name, part in parts.items()}


def turn_rewards(value: Any, turns: int) -> tuple[float | None, ...]:
    """Return the score after each of the policy's turns. `value`: a list of them, or that after the last one. Raises
    TypeError or ValueError for a list of another length, and for what is not a finite number."""
    if value is None:
        return ()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        value = [*[None] * (turns - 1), value]
    if len(value) != turns:
        raise ValueError(f"turn_rewards with {len(value)} entries for the {turns} turns of the policy")
    return tuple(None if entry is None else _finite(f"turn_rewards[{i}]", entry) for i, entry in enumerate(value))


def _state(value: Any, trajectory: Trajectory) -> str:
    """Return a key of constant size for the state in which the last turn was taken: of the environment's own key, or of
    the tokens before the turn. The first turn of all samples of a prompt is taken in the same state."""
    if (key := _text("state_keys", value)) is not None:
        return fingerprint(list(key.encode("utf-8", "surrogatepass")))
    if sum(turn.loss_mask for turn in trajectory.turns) < 2:
        return ""
    return fingerprint(trajectory.content_ids()[: trajectory.length - len(trajectory.turns[-1])].tolist())


def _stop_strings(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not all(isinstance(string, str) and string for string in value):
        raise TypeError(f"next_stop_strings with {value!r:.80}; a list of non-empty strings is needed")
    return tuple(value)


def _observation(value: Any) -> tuple[str | list[Any] | None, str]:
    """Return the text of an observation, or its parts where it has images, and its role."""
    message = _mapping("observations", value) or {}
    content, role = result_content(message.get("content")), message.get("role", "user")
    if isinstance(content, list):
        content = read_content(content, "observations[].content", read_image=given_image).value
    texts = [part.get("text", "") for part in content] if isinstance(content, list) else [content]
    text = "".join(_text("observations[].content", part) or "" for part in texts)
    if not isinstance(role, str) or not role:
        raise TypeError(f"observations[].role with {role!r:.80}, which is no role")
    if problem := not_unicode(text):
        raise ValueError(f"an observation that is no Unicode: {problem}")
    return content, role


def conversation(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return a trajectory as messages {"role", "content", "generated", "tokens"}. `generated`: whether the policy wrote
    the message; those that it wrote have their `token_ids` too. `tokens`: number of tokens. The last message has the
    sample's `finish_reason`."""
    messages: list[dict[str, Any]] = [
        {"role": turn.role, "content": turn.text, "generated": turn.loss_mask, "tokens": len(turn)}
        for turn in trajectory.turns
    ]
    for message, turn in zip(messages, trajectory.turns, strict=True):
        if turn.loss_mask:
            message["token_ids"] = turn.token_ids.tolist()
    if messages:
        messages[-1]["finish_reason"] = trajectory.finish_reason
    return messages


def response_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the policy's text: all messages marked as generated, or all of the assistant's if none is marked."""
    marked = [message for message in messages if message.get("generated")]
    chosen = marked or [message for message in messages if message["role"] == "assistant"]
    return "".join(message["content"] for message in chosen)
