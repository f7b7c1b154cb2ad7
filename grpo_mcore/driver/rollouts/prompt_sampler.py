"""Which prompts are worth their tokens: a draw that passes over prompts which are too easy or too hard.

The data come in their order, and each prompt is taken or passed over. A prompt that is passed over costs nothing, and
is offered again in the next pass over the data. The draw depends on the seed and the prompt's uid alone, so that a
resumed run takes the prompts that it would have taken.
"""

from collections.abc import Callable

from grpo_mcore.base.imports import import_by_path, no_exit
from grpo_mcore.data import DatumSpec
from grpo_mcore.recipe import SamplerConfig
from grpo_mcore.rollout.pass_rates import PassRates, PromptRecord
from grpo_mcore.rollout.trajectory import sample_seed

Worth = Callable[..., float]
"""(prompt, record, pass_rates, **options) -> the probability with which a prompt is taken. `record`: a PromptRecord,
None for a prompt that was not tried; `pass_rates`: the PassRates of the run."""


class SamplerError(ValueError):
    """A sampler cannot be loaded, or returned what is no probability."""


class PromptSampler:
    """Takes prompts or passes them over, by their pass rates."""

    def __init__(self, config: SamplerConfig, rates: PassRates, seed: int) -> None:
        """Raises SamplerError where config.path cannot be imported."""
        self._config, self._rates, self._seed = config, rates, seed
        self._custom: Worth | None = None
        if config.path is not None:
            self._custom = import_by_path(config.path, "data.sampler.path", SamplerError)

    def worth(self, prompt: DatumSpec) -> float:
        """Return the probability with which a prompt is taken."""
        record = self._rates.record(prompt)
        if self._custom is None:
            return self._of_pool(prompt, record)
        with no_exit(f"data.sampler.path {self._config.path}"):
            worth = self._custom(prompt, record, self._rates, **self._config.options)
        if not isinstance(worth, float | int) or not 0.0 <= worth <= 1.0:
            raise SamplerError(f"data.sampler.path {self._config.path}: returned {worth!r}; a probability is needed")
        return worth

    def takes(self, prompt: DatumSpec) -> bool:
        """Return whether a prompt is taken."""
        return sample_seed(self._seed, 0, prompt["uid"], 0) / 2**63 < self.worth(prompt)

    def metrics(self) -> dict[str, float]:
        """Return the number of prompts by pool: `prompts/at_most_THRESHOLD`, by the pass rate of their last groups."""
        thresholds = self._config.thresholds
        counts = dict.fromkeys(thresholds, 0)
        for record in self._rates.prompts.values():
            counts[thresholds[pool_of(record.rate, thresholds)]] += 1
        return {f"prompts/at_most_{threshold:g}": float(count) for threshold, count in counts.items()}

    def _of_pool(self, prompt: DatumSpec, record: PromptRecord | None) -> float:
        config = self._config
        if record is not None and config.drop_solved_after and record.solved_in_a_row >= config.drop_solved_after:
            return 0.0
        rate = record.rate if record is not None else None
        if rate is None and config.column is not None:
            rate = self._rates.of_column(prompt, config.column)
        if rate is None:
            return 1.0
        return config.weights[pool_of(rate, config.thresholds)] / max(config.weights)


def pool_of(rate: float, thresholds: list[float]) -> int:
    """Return the number of the first threshold that a pass rate does not exceed."""
    return next(number for number, threshold in enumerate(thresholds) if rate <= threshold)
