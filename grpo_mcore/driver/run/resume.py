"""Go on with the prompts that were in flight when a checkpoint was saved: finished groups train, the others are
generated again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from grpo_mcore.cluster import Cluster
from grpo_mcore.data import DatumSpec
from grpo_mcore.driver.checkpoints.checkpoints import SavedPosition
from grpo_mcore.driver.checkpoints.group_store import read_groups
from grpo_mcore.driver.record.run_record import RunRecord
from grpo_mcore.refit.refit import RefitReport
from grpo_mcore.rollout import schedule as s
from grpo_mcore.step.step_groups import StepGroups


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
