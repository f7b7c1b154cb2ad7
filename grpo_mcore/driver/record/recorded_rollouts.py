"""Groups that come from the files of a recorded run, in its order: no engine generates, no environment scores."""

from collections.abc import Collection, Iterator, Sequence
from typing import NoReturn

from grpo_mcore.base.stopping import StopNow, StopRequest
from grpo_mcore.cluster import Future, ObjectStore, Stream
from grpo_mcore.data import DatumSpec
from grpo_mcore.driver.record.followed_run import FollowedRun
from grpo_mcore.driver.record.recorded_samples import Row, recorded_group
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Sampling


class RecordedRollouts:
    """Takes the place of `Rollouts` in the loop.

    Consumes: the prompts given to `dispatch`, and the record.
    Waits for: nothing.
    """

    def __init__(self, run: FollowedRun, store: ObjectStore, stop: StopRequest) -> None:
        """`stop`: the request through which the run ends where the record ends."""
        self._run, self._store, self._stop = run, store, stop
        self._prompts: dict[str, DatumSpec] = {}  # under way, by uid

    def dispatch(self, prompts: Sequence[DatumSpec], sampling: Sampling, *, generations: int, step: int) -> None:
        self._prompts |= {prompt["uid"]: prompt for prompt in prompts}

    def drop(self, uids: Collection[str]) -> None:
        for uid in uids:
            self._prompts.pop(uid, None)

    def next_group(self) -> Group:
        """Return the group that finished next in the record. Raises StopNow at its end, FollowError where another one
        finished next or its samples are missing."""
        if (following := self._run.next_group(self._prompts)) is None:
            self._end()
        uid, step = following
        return recorded_group(self._prompts.pop(uid), self._run.samples(uid, step), self._store)

    def _end(self) -> NoReturn:
        self._stop.ask(self._run.end, at_once=True)
        raise StopNow

    def most_queued(self) -> int:
        """Return how many of the recorded samples waited for room on the engines that generated them."""
        return self._run.most_queued()

    def awaited(self) -> list[Future | Stream]:
        return []

    def take(self, ready: object) -> None:
        """Never called: nothing is awaited."""


class RecordedValidation(RecordedRollouts):
    """The groups of one validation, in the order of the record."""

    def __init__(self, run: FollowedRun, store: ObjectStore, stop: StopRequest, step: int) -> None:
        """`step`: the step before the validation. Raises FollowError if the samples are missing."""
        super().__init__(run, store, stop)
        self._groups: Iterator[tuple[str, Sequence[Row]]] = iter(run.validation(step).items())

    def next_group(self) -> Group:
        uid, rows = next(self._groups)
        return recorded_group(self._prompts.pop(uid), rows, self._store)
