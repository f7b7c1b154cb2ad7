"""Finished groups that wait for their step, in a checkpoint: a resumed run trains on them, and generates only the other
prompts that were in flight again.

Each group is a file of its own, written and read one by one, so that the driver never holds the tokens of more than one
group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from grpo_mcore.base import tensor_files
from grpo_mcore.base.file_digests import Digest
from grpo_mcore.cluster import Cluster
from grpo_mcore.data import DatumSpec
from grpo_mcore.driver.checkpoints.checkpoints import SavedPosition
from grpo_mcore.driver.record.run_record import RunRecord
from grpo_mcore.refit.refit import RefitReport
from grpo_mcore.rollout import schedule as s
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Score, Trajectory, TrajectoryRef, Turn, turn_of_bytes
from grpo_mcore.step.step_groups import StepGroups

FOLDER = "groups"

TYPES = (TrajectoryRef, Trajectory, Turn, turn_of_bytes, Score)
"""Classes, and the function that makes turns, in the files of groups."""


def write_groups(folder: Path, groups: Iterable[Group], cluster: Cluster) -> dict[str, Digest]:
    """Write groups with their trajectories to `folder`/groups. Return the files' digests, by path in `folder`."""
    digests = {}
    for number, group in enumerate(groups):
        (folder / FOLDER).mkdir(exist_ok=True)
        samples = [
            (replace(sample, ref=None), None if sample.ref is None else cluster.store.fetch(sample.ref))
            for sample in group.samples
        ]  # an agent that failed has left no trajectory
        contents = {"uid": group.uid, "samples": samples, "scores": group.scores}
        name = f"{FOLDER}/{number:05d}.pt"
        digests[name] = tensor_files.save(contents, folder / name, TYPES)
    return digests


def read_groups(
    folder: Path, prompts: Sequence[DatumSpec], cluster: Cluster, wanted: Mapping[str, int], sizes: range
) -> dict[str, Group]:
    """Return groups that `write_groups` has written, by uid: those with a uid in `wanted` and a number of samples in
    `sizes`. `prompts`: of the groups."""
    by_uid = {prompt["uid"]: prompt for prompt in prompts}
    groups = {}
    for path in sorted((folder / FOLDER).glob("*.pt")):
        saved = tensor_files.load(path, TYPES)
        if saved["uid"] in wanted and len(saved["samples"]) in sizes:
            samples = tuple(
                sample if trajectory is None else replace(sample, ref=cluster.store.put(trajectory))
                for sample, trajectory in saved["samples"]
            )
            groups[saved["uid"]] = Group(by_uid[saved["uid"]], samples, saved["scores"])
    return groups


def young_enough(in_flight: Mapping[str, int], limits: s.ScheduleConfig, version: int) -> dict[str, int]:
    """Return the part of `in_flight` (uid -> weight version, in the order of dispatch) that will be young enough for
    its step, when `version` trains next. The recipe's limit may have changed since they were generated."""
    return {
        uid: generated
        for position, (uid, generated) in enumerate(in_flight.items())
        if version + position // limits.num_prompts - generated <= limits.max_trajectory_age
    }


def resume_in_flight(
    position: SavedPosition,
    record: RunRecord,
    groups: StepGroups,
    cluster: Cluster,
    refit: Callable[[], RefitReport | None],
    dispatch: Callable[[Sequence[DatumSpec]], None],
    *,
    sizes: range,
    goes_on: bool = False,
) -> None:
    """Restore the finished groups of a checkpoint that are young enough for their step and have as many samples as
    `sizes` allows, and `dispatch` the other prompts that were in flight, in their order: the recipe may have changed.
    Does nothing if the run is over already. `goes_on`: the run was not stopped here, so the prompts are under way with
    the weights that they had."""
    schedule = record.schedule
    if not position.in_flight or isinstance(schedule.next(), s.Finish):
        return
    if not goes_on:
        record.refitted(refit())
    version = schedule.policy_version
    batch = record.prompts.take(len(position.in_flight))  # the stream hands these out first, in their order
    young = position.in_flight if goes_on else young_enough(position.in_flight, schedule.config, version)
    restored = read_groups(position.folder, batch, cluster, young, sizes)
    dispatch([prompt for prompt in batch if prompt["uid"] not in restored])
    for group in restored.values():
        groups.add(group)
    begun = young if goes_on else {uid: young[uid] for uid in restored}
    versions = [begun.get(prompt["uid"], version) for prompt in batch]
    record.resumed(batch, versions, list(restored.values()))
