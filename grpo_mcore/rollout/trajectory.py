"""Requests to an engine, its trajectories, and their scores.

Tokens stay tokens: a turn carries the ids that were prompted or sampled; nothing decoded is tokenised again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grpo_mcore.batching.prefix_trees import prefix_sketch

FinishReason = Literal["stop", "length", "abort"]
INVALID_TOOL_CALL, MALFORMED_THINKING = FLAGS = ("invalid_tool_call", "malformed_thinking")
"""What may be wrong with the form of a generated turn: its tokens may have an advantage of their own."""
FINISH_REASONS: tuple[str, ...] = ("stop", "length", "abort")


@dataclass(frozen=True)
class ImageSpan:
    """The tokens of an image in a turn, or in a sample. `offset`: of its first token. `digest`: `image_digest` of its
    content, whose bytes travel beside the group. `grid`: times, rows and columns of its patches."""

    offset: int
    length: int
    digest: str
    grid: tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Turn:
    """One message of a conversation, as tokens.

    `token_ids`: int64 [n]. `logprobs`: float32 [n] of the sampled tokens, None where they were not generated.
    `loss_mask`: True where the policy generated the tokens. `text`: the turn as text, for people and environments;
    training does without it. `flag`: one of FLAGS, "" where nothing is wrong. `images`: where the tokens of images
    stand, in order: they are never looked for by their id, which a policy may sample. Two turns are equal when all
    agree, tensors bit by bit.
    """

    role: str
    token_ids: Tensor
    logprobs: Tensor | None = None
    loss_mask: bool = False
    text: str = ""
    flag: str = ""
    images: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        if self.token_ids.dtype != torch.int64 or self.token_ids.dim() != 1:
            raise ValueError(
                f"Turn({self.role!r}).token_ids must be int64 [n], "
                f"got {self.token_ids.dtype} {list(self.token_ids.shape)}"
            )
        if self.logprobs is not None and (
            self.logprobs.dtype != torch.float32 or self.logprobs.shape != self.token_ids.shape
        ):
            raise ValueError(
                f"Turn({self.role!r}).logprobs must be float32 {list(self.token_ids.shape)} like the tokens, "
                f"got {self.logprobs.dtype} {list(self.logprobs.shape)}"
            )
        end = 0
        for image in self.images:
            if image.offset < end or image.length < 1 or image.offset + image.length > len(self):
                raise ValueError(
                    f"Turn({self.role!r}).images: {image} is out of order or beyond the {len(self)} tokens"
                )
            end = image.offset + image.length

    def __len__(self) -> int:
        return self.token_ids.numel()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Turn):
            return NotImplemented
        if (self.role, self.loss_mask, self.text, self.flag) != (other.role, other.loss_mask, other.text, other.flag):
            return False
        if self.images != other.images:
            return False
        if not torch.equal(self.token_ids, other.token_ids):
            return False
        if self.logprobs is None or other.logprobs is None:
            return self.logprobs is other.logprobs
        return torch.equal(self.logprobs, other.logprobs)

    def __hash__(self) -> int:
        return hash((self.role, self.loss_mask, self.text, len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes: torch takes 20 times as long to pickle a short tensor, and a step has thousands.
        logprobs = None if self.logprobs is None else self.logprobs.numpy().tobytes()
        ids = self.token_ids.numpy().tobytes()
        return turn_of_bytes, (self.role, ids, logprobs, self.loss_mask, self.text, self.flag, self.images)


def turn_of_bytes(
    role: str,
    token_ids: bytes,
    logprobs: bytes | None,
    loss_mask: bool,
    text: str,
    flag: str = "",
    images: tuple[ImageSpan, ...] = (),
) -> Turn:
    """Return a turn from its tensors' bytes: int64 and float32."""
    ids = torch.from_numpy(np.frombuffer(token_ids, np.int64).copy())
    scores = None if logprobs is None else torch.from_numpy(np.frombuffer(logprobs, np.float32).copy())
    return Turn(role, ids, scores, loss_mask, text, flag, images)


@dataclass(frozen=True)
class Trajectory:
    """A sample with all its turns, prompt included.

    `weight_versions`: spans (weight version, first token, last token + 1), in order, counted over all tokens.
    `truncated`: the length limit ended it before the policy did. `stop_token`: the token that ended the last
    turn, as its last one; None where a stop string or a limit did. `branches`: tokens of each branch, where an agent
    rewrote its history: its turns then stand side by side, each branch with all its tokens, and what one branch has
    generated is not marked as generated in the others. Empty: one. `routed_experts`: int16 [length - 1, layers, experts
    of a token], the experts to which the engine sent each token but the last, -1 in layers without; None where they
    were not recorded. `turn_numbers`: number of each generated turn, in the order in which they were generated, where
    branches took turns; empty: as they stand.
    """

    uid: str
    generation_index: int
    turns: tuple[Turn, ...]
    weight_versions: tuple[tuple[int, int, int], ...]
    finish_reason: FinishReason
    truncated: bool
    stop_token: int | None = None
    branches: tuple[int, ...] = ()
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)
    turn_numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.routed_experts is not None and len(self.routed_experts) != self.length - 1:
            raise ValueError(f"{self.name}: experts of {len(self.routed_experts)} of the {self.length} tokens")
        if self.branches and (min(self.branches) < 1 or sum(self.branches) != self.length):
            raise ValueError(f"{self.name}: branches of {self.branches} tokens, {self.length} in all")
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"{self.name}: finish_reason {self.finish_reason!r} not in {FINISH_REASONS}")
        end = 0
        for version, first, last in self.weight_versions:
            if not end <= first <= last <= self.length:
                raise ValueError(
                    f"{self.name}: weight version span {(version, first, last)} is out of order or beyond "
                    f"the {self.length} tokens"
                )
            end = last

    @property
    def name(self) -> str:
        """Name of the sample in messages: `uid#generation_index`."""
        return f"{self.uid}#{self.generation_index}"

    def with_prompt(self, token_ids: Tensor) -> Trajectory:
        """Return the trajectory after another prompt, int64 [n], of weights that nobody asks for. Raises ValueError
        for one with branches, each of which repeats the prompt in its own way, and for images in its prompt."""
        if self.branches:
            raise ValueError(f"{self.name} has branches, which keep their prompts")
        first = next((i for i, turn in enumerate(self.turns) if turn.loss_mask), len(self.turns))
        if any(turn.images for turn in self.turns[:first]):
            raise ValueError(f"{self.name} has images in its prompt, which another prompt would not show")
        turns = (Turn("user", token_ids), *self.turns[first:])
        return replace(self, turns=turns, weight_versions=(), routed_experts=None)

    def part(self, first: int, end: int) -> Trajectory:
        """Return branches `first` to `end` - 1 by themselves."""
        start, stop = sum(self.branches[:first]), sum(self.branches[:end])
        starts = list(accumulate(map(len, self.turns), initial=0))
        chosen = [i for i, turn in enumerate(self.turns) if start <= starts[i] < stop and len(turn)]
        generated = [i for i, turn in enumerate(self.turns) if turn.loss_mask]
        numbers = dict(zip(generated, self.turn_numbers or range(len(generated)), strict=True))
        spans = [(version, max(a, start) - start, min(b, stop) - start) for version, a, b in self.weight_versions]
        return replace(
            self,
            turns=tuple(self.turns[i] for i in chosen),
            weight_versions=tuple(span for span in spans if span[1] < span[2]),
            branches=self.branches[first:end] if end - first > 1 else (),
            routed_experts=None if self.routed_experts is None else self.routed_experts[start : stop - 1],
            turn_numbers=tuple(numbers[i] for i in chosen if i in numbers),
        )

    @property
    def length(self) -> int:
        """Number of tokens of all turns."""
        return sum(len(turn) for turn in self.turns)

    @property
    def sequences(self) -> tuple[int, ...]:
        """Tokens of each sequence that the policy reads by itself: of the branches, or of the only one."""
        return self.branches or (self.length,)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first generated turn; of all turns if nothing was generated."""
        count = 0
        for turn in self.turns:
            if turn.loss_mask:
                break
            count += len(turn)
        return count

    @property
    def generated_length(self) -> int:
        """Number of tokens that the policy generated, over all turns."""
        return sum(len(turn) for turn in self.turns if turn.loss_mask)

    @property
    def weight_version(self) -> int:
        """The oldest weight version that generated any of its tokens."""
        if not self.weight_versions:
            raise ValueError(f"{self.name} has no weight version: no engine generated it")
        return min(version for version, _, _ in self.weight_versions)

    @property
    def generated_text(self) -> str:
        """The text of the generated turns, in order."""
        return "".join(turn.text for turn in self.turns if turn.loss_mask)

    def token_ids(self) -> Tensor:
        """int64 [length]."""
        parts = [turn.token_ids for turn in self.turns]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def images(self) -> tuple[ImageSpan, ...]:
        """The images of all turns, with offsets from the sample's start."""
        return _spans_of(self.turns)

    def images_by_sequence(self) -> list[list[ImageSpan]]:
        """The images of each of `sequences`, with offsets from its start."""
        found, start = [], 0
        for length in self.sequences:
            inside = [image for image in self.images() if start <= image.offset < start + length]
            found.append([replace(image, offset=image.offset - start) for image in inside])
            start += length
        return found

    def content_ids(self) -> Tensor:
        """int64 [length]: token ids, and for the tokens of images negative numbers that tell their content. Samples
        begin alike where these are equal."""
        return content_ids(self.turns)

    def logprobs(self) -> Tensor:
        """float32 [length]: of the generated tokens; 0 where a token was not generated."""
        parts = [
            turn.logprobs if turn.logprobs is not None else torch.zeros(len(turn), dtype=torch.float32)
            for turn in self.turns
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32)

    def token_versions(self, default: int) -> Tensor:
        """int64 [length]: the weight version that generated (or, of a prompt, read) each token; `default` outside all
        spans."""
        versions = torch.full((self.length,), default, dtype=torch.int64)
        for version, first, last in self.weight_versions:
            versions[first:last] = version
        return versions

    def flags(self) -> Tensor:
        """int64 [length]: 1 + the place in FLAGS of the turn's flag, 0 where it has none."""
        parts = [torch.full((len(turn),), 1 + FLAGS.index(turn.flag) if turn.flag else 0) for turn in self.turns]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def turn_of_tokens(self) -> Tensor:
        """int64 [length]: number of the generated turn of each token, 0 for tokens that were not generated."""
        numbers = iter(self.turn_numbers or range(len(self.turns)))
        parts = [torch.full((len(turn),), next(numbers) if turn.loss_mask else 0) for turn in self.turns]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def loss_mask(self) -> Tensor:
        """bool [length]: True where the policy generated the token."""
        parts = [torch.full((len(turn),), turn.loss_mask, dtype=torch.bool) for turn in self.turns]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.bool)


FIRST_CONTENT = -(2**63)
"""The least number of `content_ids`."""


def content_number(digest: str) -> int:
    """Return the number below 0 that tells the first token of an image; its further tokens count down from it."""
    return -1 - (int.from_bytes(blake2b(digest.encode(), digest_size=8).digest(), "little") >> 2)


def content_ids(turns: Sequence[Turn]) -> Tensor:
    """Return `Trajectory.content_ids` of turns."""
    ids = torch.cat([turn.token_ids for turn in turns]) if turns else torch.empty(0, dtype=torch.int64)
    for image in _spans_of(turns):
        ids[image.offset : image.offset + image.length] = content_number(image.digest) - torch.arange(image.length)
    return ids


def with_spans(turn: Turn, known: Mapping[int, ImageSpan], token: int) -> Turn:
    """Return a turn of content ids with the ids of tokens, and the spans of its images. `known`: images by
    `content_number`; `token`: their id. Raises KeyError for an image that is not known."""
    ids, spans, offset = turn.token_ids.clone(), list[ImageSpan](), 0
    while (below := (ids[offset:] < 0).nonzero()).numel():
        offset += int(below[0])
        spans.append(span := replace(known[int(ids[offset])], offset=offset))
        ids[offset : (offset := offset + span.length)] = token
    return replace(turn, token_ids=ids, images=tuple(spans)) if spans else turn


def _spans_of(turns: Sequence[Turn]) -> tuple[ImageSpan, ...]:
    starts = accumulate(map(len, turns), initial=0)
    return tuple(
        replace(image, offset=start + image.offset)
        for start, turn in zip(starts, turns, strict=False)
        for image in turn.images
    )


@dataclass(frozen=True)
class TrajectoryRef:
    """A trajectory as the driver holds it: plain numbers, and `ref`, its place in the object store. Its size does not
    depend on the trajectory's length.

    `images`: places in the object store of the images' bytes, as they were given, by digest: one for all samples with
    the image.
    `turns`: those that the policy generated. `truncated`: also where the context had no room for a next turn.
    `branches`: those of the trajectory.
    `prompt_sketch`: `prefix_sketch` of its prompt, by which samples that begin alike are found.
    """

    uid: str
    generation_index: int
    length: int
    prompt_length: int
    generated_length: int
    weight_version: int
    truncated: bool
    finish_reason: FinishReason
    ref: Any
    turns: int = 1
    stop_token: int | None = None
    branches: tuple[int, ...] = ()
    prompt_sketch: str = field(default="", compare=False, repr=False)
    images: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors in the object store: token ids (int64), log-probs of generated tokens (float32)."""
        return 8 * self.length + 4 * self.generated_length

    @property
    def environment_tokens(self) -> int:
        """Number of tokens between the generated turns: the environment's messages in the chat template, and what
        branches repeat."""
        return self.length - self.prompt_length - self.generated_length

    @classmethod
    def of(cls, trajectory: Trajectory, ref: Any, images: Mapping[str, Any] = MappingProxyType({})) -> TrajectoryRef:
        prompt = trajectory.content_ids()[: min(trajectory.prompt_length, trajectory.sequences[0])]
        return cls(
            uid=trajectory.uid,
            generation_index=trajectory.generation_index,
            length=trajectory.length,
            prompt_length=trajectory.prompt_length,
            generated_length=trajectory.generated_length,
            weight_version=trajectory.weight_version,
            truncated=trajectory.truncated,
            finish_reason=trajectory.finish_reason,
            ref=ref,
            turns=sum(turn.loss_mask for turn in trajectory.turns),
            stop_token=trajectory.stop_token,
            branches=trajectory.branches,
            prompt_sketch=prefix_sketch(prompt.tolist()),
            images=dict(images),
        )


@dataclass(frozen=True)
class GenerationRequest:
    """One turn of one sample to generate: what comes before it, and the seed of its random draws.

    `continues`: the trajectory so far, in whose context `prompt` is what was said since; None for a first turn.
    The driver sends a reference to it in the object store, which the engine's worker resolves. `images`: likewise the
    files of the images in all turns, by digest.
    """

    uid: str
    generation_index: int
    prompt: tuple[Turn, ...]
    seed: int
    stop_strings: tuple[str, ...] = ()
    continues: Any = None
    images: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns before the one to generate."""
        return self.prompt if self.continues is None else (*self.continues.turns, *self.prompt)

    def token_ids(self) -> Tensor:
        """int64 [prompt length]: all turns joined."""
        return torch.cat([turn.token_ids for turn in self.turns])

    def image_spans(self) -> tuple[ImageSpan, ...]:
        """The images of all turns, with offsets from the start."""
        return _spans_of(self.turns)


@dataclass(frozen=True)
class AgentRequest:
    """A sample for which an agent takes all turns. `task`: as its dataset has it, None where that has none for agents.
    `task_index`, `generation_index`: what identifies the sample in a Gym."""

    uid: str
    generation_index: int
    task: Any
    task_index: int
    seed: int


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. `max_new_tokens` is per turn; `top_k` None: no limit. `scores_prompt`: what counts is the
    log-probs of the prompt's tokens, of a teacher. `first_is_greedy`: the first sample of a group takes the likeliest
    token at each position."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    scores_prompt: bool = False
    first_is_greedy: bool = False


@dataclass(frozen=True)
class Score:
    """Judgement of an environment on one trajectory.

    `reward` None: the environment failed; the sample is excluded and counted, never scored 0. `answer`: the part of the
    response that was taken for the answer, None where there was none. `reason`: why, in words. `seconds`: duration of
    the scoring. `terminated`: the environment ended the conversation; False where a limit did. `solved_at`: reward from
    which on the sample is solved; None: the environment names none. `failures`: one string for each failed attempt to
    score it, whether or not a later one succeeded: "COMPONENT: KIND". `turn_rewards`: score of the state after
    each generated turn, None where there is none; empty: the environment gives none. `turn_states`: key of the state in
    which each generated turn was taken; equal keys are equal states. `step_rewards`: the part of the reward that each
    generated turn got; empty for agents, whose reward is of the whole.
    """

    reward: float | None
    answer: str | None
    reason: str
    seconds: float
    rewards_by_name: dict[str, float] = field(default_factory=dict)
    terminated: bool = True
    solved_at: float | None = None
    failures: tuple[str, ...] = ()
    turn_rewards: tuple[float | None, ...] = ()
    turn_states: tuple[str, ...] = ()
    step_rewards: tuple[float, ...] = ()

    @property
    def solved(self) -> bool | None:
        """Whether the reward reaches `solved_at`; without one, whether it is 1 and not 0. None for a reward that is
        neither (a graded one), and without a reward."""
        if self.reward is None or (self.solved_at is None and self.reward not in (0, 1)):
            return None
        return self.reward >= (1 if self.solved_at is None else self.solved_at)


def accuracy(scores: Iterable[Score]) -> float | None:
    """Return the share of samples that are solved, among those with a reward. None where a reward is graded, or where
    there is none."""
    solved = [score.solved for score in scores if score.reward is not None]
    return sum(map(bool, solved)) / len(solved) if solved and None not in solved else None


def mean_parts(scores: Iterable[Score]) -> dict[str, float]:
    """Return the mean of each named reward as `reward/NAME`, over the samples that have it."""
    values: dict[str, list[float]] = {}
    for score in scores:
        if score.reward is not None:
            for name, value in score.rewards_by_name.items():
                values.setdefault(f"reward/{name}", []).append(value)
    return {name: sum(values[name]) / len(values[name]) for name in sorted(values)}


@dataclass(frozen=True)
class Outcome(Score):
    """Judgement of an environment on one turn, with its next message. Of `turn_states` it has this turn's.

    `observation`: its next message, None where it has nothing to say, parts where it has images; `role`: role of the
    observation's message. `metadata`: metadata of the next call; None: the same again. `stop_strings`: strings that end
    the next turn; None: the same again. `traceback`: text for the run's console.
    """

    observation: str | list[Any] | None = None
    role: str = "user"
    stop_strings: tuple[str, ...] | None = None
    metadata: dict[str, Any] | None = None
    traceback: str | None = None


def sample_seed(seed: int, step: int, uid: str, generation_index: int, turn: int = 0) -> int:
    """Return the seed of one turn of a sample, in 0 .. 2^63 - 1: a hash of (grpo.seed, step, prompt uid, generation
    index) and, after the first, of the turn."""
    text = f"{seed}/{step}/{uid}/{generation_index}" + (f"/{turn}" if turn else "")
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def fingerprint(token_ids: Sequence[int]) -> str:
    """Return a hash of a sequence of tokens."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()
