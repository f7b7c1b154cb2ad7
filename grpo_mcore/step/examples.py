"""Examples of the data as the policy's ranks and the files of samples take them: as trajectories and groups."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType

from grpo_mcore.batching.prefix_trees import Prefixes, prefix_hashes
from grpo_mcore.rollout.datum import DatumSpec, Message
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Score, Trajectory, TrajectoryRef, Turn
from grpo_mcore.rollout.workers import Ref

NO_SCORE = Score(None, None, "", 0.0)
"""The score of an example, which no environment rewards."""


def filled_up(batch: Sequence[DatumSpec], ranks: int) -> tuple[list[DatumSpec], list[float]]:
    """Return the examples and their weights, with copies of weight 0 if they are fewer than the data-parallel ranks, as
    the last batch of a validation may be."""
    copies = max(0, ranks - len(batch))
    return [*batch, *[batch[0]] * copies], [1.0] * len(batch) + [0.0] * copies


def as_trajectory(uid: str, log: Sequence[Message], index: int = 0) -> Trajectory:
    """Return an example as a trajectory whose trained tokens count as generated. `index`: 0 for the chosen answer of a
    pair, 1 for the rejected one."""
    turns = tuple(turn for message in log for turn in _turns(message))
    return Trajectory(uid, index, turns, (), "stop", truncated=False)


def _turns(message: Message) -> Iterator[Turn]:
    """Yield the message in runs of tokens that are trained on, and tokens that are not."""
    tokens, mask = message["token_ids"], message["token_loss_mask"].tolist()  # a list: most messages are short
    start = 0
    for trained, run in groupby(mask, bool):
        stop = start + sum(1 for _ in run)
        images = [image for image in message.get("images", ()) if start <= image.offset < stop]
        moved = tuple(replace(image, offset=image.offset - start) for image in images)
        yield Turn(message["role"], tokens[start:stop], loss_mask=trained, images=moved)
        start = stop


def prefixes_of(trajectories: Sequence[Trajectory]) -> list[Prefixes]:
    """Return the hashes by which examples that begin alike are found."""
    return [prefix_hashes(trajectory.content_ids().tolist()) for trajectory in trajectories]


def as_group(
    datum: DatumSpec,
    trajectories: Sequence[Trajectory],
    refs: Sequence[Ref],
    version: int,
    images: Mapping[str, Ref] = MappingProxyType({}),
) -> Group:
    """Return an example, or both answers of a pair, as a group without rewards. `version`: version of the weights that
    train on it. `images`: references to the files of its images, by digest."""
    samples = tuple(
        TrajectoryRef(
            uid=datum["uid"],
            generation_index=trajectory.generation_index,
            length=trajectory.length,
            prompt_length=trajectory.prompt_length,
            generated_length=trajectory.generated_length,
            weight_version=version,
            truncated=False,
            finish_reason="stop",
            ref=ref,
            images=dict(images),
        )
        for trajectory, ref in zip(trajectories, refs, strict=True)
    )
    return Group(datum, samples, (NO_SCORE,) * len(samples))
