"""Finished groups that wait for their step, in a checkpoint: a resumed run trains on them, and generates only the other
prompts that were in flight again.

Each group is a file of its own, written and read one by one, so that the driver never holds the tokens of more than one
group.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from grpo_mcore.base import tensor_files
from grpo_mcore.base.files import Digest
from grpo_mcore.cluster import Cluster
from grpo_mcore.data import DatumSpec
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import ImageSpan, Score, Trajectory, TrajectoryRef, Turn, turn_of_bytes

FOLDER = "groups"

TYPES = (TrajectoryRef, Trajectory, Turn, turn_of_bytes, ImageSpan, Score)
"""Classes, and the function that makes turns, in the files of groups."""


def write_groups(folder: Path, groups: Iterable[Group], cluster: Cluster) -> dict[str, Digest]:
    """Write groups with their trajectories to `folder`/groups. Return the files' digests, by path in `folder`."""
    digests = {}
    for number, group in enumerate(groups):
        (folder / FOLDER).mkdir(exist_ok=True)
        samples = [
            (replace(sample, ref=None, images={}), None if sample.ref is None else cluster.store.fetch(sample.ref))
            for sample in group.samples
        ]  # an agent that failed has left no trajectory
        images = {digest: ref for sample in group.samples for digest, ref in sample.images.items()}
        of_images = {digest: cluster.store.fetch(ref) for digest, ref in images.items()}
        contents = {"uid": group.uid, "samples": samples, "scores": group.scores, "images": of_images}
        name = f"{FOLDER}/{number:05d}.pt"
        digests[name] = tensor_files.save(contents, folder / name, TYPES)
    return digests


def read_groups(
    folder: Path, prompts: Sequence[DatumSpec], cluster: Cluster, uids: Mapping[str, int], sizes: range
) -> dict[str, Group]:
    """Return groups that `write_groups` has written, by uid: those with a uid in `uids` and a number of samples in
    `sizes`. `prompts`: the rows of the data from which they were generated."""
    by_uid = {prompt["uid"]: prompt for prompt in prompts}
    groups = {}
    for path in sorted((folder / FOLDER).glob("*.pt")):
        saved = tensor_files.load(path, TYPES)
        if saved["uid"] in uids and len(saved["samples"]) in sizes:
            images = {digest: cluster.store.put(data) for digest, data in saved.get("images", {}).items()}
            samples = tuple(
                replace(sample, ref=None if trajectory is None else cluster.store.put(trajectory), images=images)
                for sample, trajectory in saved["samples"]
            )
            groups[saved["uid"]] = Group(by_uid[saved["uid"]], samples, saved["scores"])
    return groups
