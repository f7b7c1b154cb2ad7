"""Go on where a checkpoint left off: its finished groups are trained on, its other prompts are generated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_mcore.algorithms.checkpointing.checkpoints import SavedPosition
from grpo_mcore.algorithms.checkpointing.group_store import in_time, read_groups
from grpo_mcore.algorithms.lifecycle.run_record import RunRecord
from grpo_mcore.algorithms.training_step.step_groups import StepGroups
from grpo_mcore.cluster import Cluster
from grpo_mcore.data import DatumSpec
from grpo_mcore.refit import RefitReport
from grpo_mcore.rollout import schedule as s


def resume_in_flight(
    position: SavedPosition,
    record: RunRecord,
    groups: StepGroups,
    cluster: Cluster,
    refit: Callable[[], RefitReport],
    dispatch: Callable[[Sequence[DatumSpec]], None],
) -> None:
    """Restore the finished groups of a checkpoint that are young enough for their step, and `dispatch` the other
    prompts that were in flight, in their order. Does nothing where the run is over already."""
    schedule = record.schedule
    if not position.in_flight or isinstance(schedule.next(), s.Finish):
        return
    record.refitted(refit())
    version = schedule.policy_version
    batch = record.prompts.take(len(position.in_flight))  # the stream hands these out first, in their order
    young = in_time(position.in_flight, schedule.config, version)
    restored = read_groups(position.folder, batch, cluster, young)
    dispatch([prompt for prompt in batch if prompt["uid"] not in restored])
    for group in restored.values():
        groups.add(group)
    versions = [young[prompt["uid"]] if prompt["uid"] in restored else version for prompt in batch]
    record.resumed(batch, versions, list(restored.values()))
