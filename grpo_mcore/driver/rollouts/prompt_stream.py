"""The prompts of all epochs, one after another, with a state for checkpoints."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from grpo_mcore.data import DataError, MultipleDataloaderWrapper
from grpo_mcore.data.loader import as_read_now, fingerprint
from grpo_mcore.driver.rollouts.prompt_sampler import PromptSampler
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.pass_rates import PassRates


def check_same_data(state: Mapping[str, Any], dataloader: Any) -> None:
    """Raise DataError if a run with this state (`PromptStream.state_dict`) read other rows."""
    saved, now = state.get("data"), fingerprint(dataloader)
    if saved is not None and saved != now:
        raise DataError(
            f"cannot continue with this data: its rows are not those of the checkpoint (digest {now}, at the "
            f"checkpoint {saved}); restore them, or start a new run"
        )


class PromptStream:
    """Takes batches from a stateful data loader and hands out any number of prompts.

    A prompt that was taken is remembered until `mark_done`: a checkpoint holds it among those that come next. So a
    resumed run neither loses a prompt that was under way nor repeats one that was done.

    A sampler may pass prompts over: they come again in the next epoch.

    From the second epoch on a uid gets the suffix `@2`, `@3`, ...: it names one prompt of the run, not one row of the
    data.
    """

    def __init__(
        self,
        dataloader: Any,
        max_epochs: int,
        state: Mapping[str, Any] | None = None,
        *,
        columns: Sequence[str] = (),
        sampler: Callable[[PassRates], PromptSampler] | None = None,
    ) -> None:
        """`state`: what `state_dict` returned in the run that this one resumes. `columns`: those by which pass rates
        are kept. `sampler`: makes what passes prompts over, None: all are taken."""
        self.dataloader, self.max_epochs = dataloader, max_epochs
        self.epoch = 0
        self.rates = PassRates(columns, None if state is None else state.get("pass_rates"))
        self._sampler = None if sampler is None else sampler(self.rates)
        self._passed_over: list[str] = []  # not yet in the ledger
        self._passed_over_in_step = 0 if state is None else state.get("passed_over", 0)
        self._worthless = 0  # prompts in a row that no draw would have taken
        self._waiting: deque[DatumSpec] = deque()
        self._taken: dict[str, DatumSpec] = {}
        self._batches: Iterator[list[DatumSpec]] | None = None
        if state is not None:
            check_same_data(state, dataloader)
            self.epoch = state["epoch"]
            self._waiting.extend(as_read_now(prompt, dataloader) for prompt in state["waiting"])
            self.dataloader.load_state_dict(state["dataloader"])
        if isinstance(dataloader, MultipleDataloaderWrapper):
            dataloader.pass_rates = self.rates

    def take(self, count: int) -> list[DatumSpec]:
        """Return the next `count` prompts; fewer only when the last epoch has ended, or no prompt is worth taking."""
        while len(self._waiting) < count and self.epoch < self.max_epochs and not self._all_worthless():
            if self._batches is None:
                self._batches = iter(self.dataloader)
            batch = next(self._batches, None)
            if batch is None:
                self.epoch += 1
                self._batches = None
                continue
            suffix = f"@{self.epoch + 1}" if self.epoch else ""
            prompts = [cast(DatumSpec, {**datum, "uid": datum["uid"] + suffix}) for datum in batch]
            self._waiting.extend(prompt for prompt in prompts if self._takes(prompt))
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        self._taken |= {datum["uid"]: datum for datum in taken}
        return taken

    def _takes(self, prompt: DatumSpec) -> bool:
        if self._sampler is None or self._sampler.takes(prompt):
            self._worthless = 0
            return True
        self._worthless = 0 if self._sampler.worth(prompt) else self._worthless + 1
        self._passed_over.append(prompt["uid"])
        self._passed_over_in_step += 1
        return False

    def _all_worthless(self) -> bool:
        """Return whether two passes over the data would take nothing."""
        return self._worthless > 2 * len(self.rates.prompts) > 0

    def passed_over(self) -> list[str]:
        """Return the prompts that were passed over since the last call."""
        uids, self._passed_over = self._passed_over, []
        return uids

    def step_metrics(self) -> dict[str, float]:
        """Return pass rates by column, the prompts in the sampler's pools, and how many it has passed over since the
        last call, also before a resume."""
        if self._sampler is None:
            return self.rates.metrics()
        passed_over, self._passed_over_in_step = float(self._passed_over_in_step), 0
        return self.rates.metrics() | self._sampler.metrics() | {"prompts/passed_over": passed_over}

    def mark_done(self, uids: Iterable[str]) -> None:
        """Forget prompts that were trained on, filtered, or failed. Raises KeyError for one that is not under way."""
        for uid in uids:
            del self._taken[uid]

    def put_back(self, uids: Sequence[str]) -> None:
        """Return prompts that were taken and not used: they come next, in this order. Raises KeyError for one that is
        not under way."""
        self._waiting.extendleft([self._taken.pop(uid) for uid in reversed(uids)])

    def record_step(self, step: int, metrics: dict[str, float]) -> None:
        """Tell a data loader of several datasets what the last step came to; it may choose the next batch by it."""
        if isinstance(self.dataloader, MultipleDataloaderWrapper):
            self.dataloader.set_records({"step": step, **metrics})

    def state_dict(self) -> dict[str, Any]:
        waiting = [*self._taken.values(), *self._waiting]
        return {
            "epoch": self.epoch,
            "waiting": waiting,
            "dataloader": self.dataloader.state_dict(),
            "data": fingerprint(self.dataloader),
            "pass_rates": self.rates.state_dict(),
            "passed_over": self._passed_over_in_step,
        }
