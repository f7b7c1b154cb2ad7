"""Custom parts of the objective: a recipe names them by import path, docs/extending.md describes them.

An estimator and a reward shaping get a `StepSamples` and return one value per sample. A KL estimator gets log-ratios. A
loss is a class derived from `ClippedPGLossFn`, or a function. What they return is checked: a wrong shape or a value
that is not finite is a CustomCodeError that names the recipe's key and the function. Estimators and shapings get a
copy, which they may change in place.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.base.imports import import_by_path, no_exit, place_of
from grpo_mcore.objective.advantages import AdvantageEstimate, group_stats
from grpo_mcore.objective.combine import CUSTOM, METRIC_REDUCTIONS
from grpo_mcore.objective.kl import SampleKL, custom_kl_estimate
from grpo_mcore.objective.loss import ClippedPGLossFn
from grpo_mcore.objective.reduce import Count
from grpo_mcore.recipe import ClippedPGLossConfig, CustomCode, KLType

LOSS_INPUTS = ("curr_logprobs", "batch", "global_valid_seqs", "global_valid_toks")


class CustomCodeError(ValueError):
    """A recipe names code by import path that does not do what its key asks for."""


@dataclass(frozen=True)
class StepSamples:
    """The N samples of a step as a custom estimator or reward shaping gets them."""

    rewards: Tensor
    """float64 [N]: scaled and, for an estimator, shaped; NaN for a failed sample."""
    group_ids: Tensor
    """int64 [N]: 0, 1, ... in the order of the groups; samples of one prompt have the same."""
    valid: Tensor
    """bool [N]: samples that have a reward."""
    rewards_by_name: Mapping[str, Tensor]
    """float64 [N] by name: the parts of rewards; NaN for samples without this part."""
    prompt_lengths: Tensor
    """int64 [N]: tokens of the prompt."""
    generated_lengths: Tensor
    """int64 [N]: tokens that the policy generated, over all turns."""
    truncated: Tensor
    """bool [N]: samples cut off at a length limit."""
    turns: Tensor
    """int64 [N]: turns that the policy generated."""
    trained: Tensor
    """bool [N]: samples that count in the loss: neither failed, empty nor filtered."""
    turn_rewards: tuple[tuple[float | None, ...], ...] = ()
    """Rewards of each sample's turns, None for turns without one; empty where the environment gives none."""
    kl: SampleKL | None = None
    """KL of the samples to the reference, with loss_fn.use_kl_in_reward."""
    kl_penalty: float = 0.0
    """loss_fn.reference_policy_kl_penalty where the KL is in the reward, else 0."""


def custom_advantages(path: str, samples: StepSamples, options: Mapping[str, Any]) -> AdvantageEstimate:
    """Return what the estimator at `path` makes of the samples: `fn(samples, **options)` returns a tensor [N] or an
    AdvantageEstimate. Failed samples get 0. Raises CustomCodeError."""
    key = f"grpo.adv_estimator.path {path}"
    result = _called(custom_function(path, key), key, copy.deepcopy(samples), **options)
    if not isinstance(result, AdvantageEstimate):
        result = AdvantageEstimate(result, group_stats(samples.rewards, samples.group_ids, samples.valid))
    return replace(result, advantages=torch.where(samples.valid, _values(result.advantages, samples.valid, key), 0.0))


def custom_shaping(path: str, samples: StepSamples, options: Mapping[str, Any]) -> Tensor:
    """Return the rewards [N] that the function at `path` makes of the samples: `fn(samples, **options)`. Failed samples
    keep NaN. Raises CustomCodeError."""
    key = f"grpo.reward_shaping.path {path}"
    values = _values(_called(custom_function(path, key), key, copy.deepcopy(samples), **options), samples.valid, key)
    return torch.where(samples.valid, values, torch.nan)


def _called(code: Callable[..., Any], key: str, *arguments: Any, **options: Any) -> Any:
    """Call a custom function of the driver. Raises CustomCodeError with the place where it fails."""
    try:
        with no_exit("it"):
            return code(*arguments, **options)
    except Exception as error:
        raise CustomCodeError(f"{key} raised {type(error).__name__}: {error}{place_of(error)}") from error


def _values(result: Any, valid: Tensor, key: str) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != valid.shape:
        shape = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise CustomCodeError(
            f"{key} returned {shape}; expected a tensor of shape {tuple(valid.shape)}: one per sample"
        )
    result = result.detach().cpu().to(torch.float64)
    bad = (valid & ~result.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise CustomCodeError(f"{key} returned values that are not finite, for samples {bad[:8]} which have a reward")
    return result


class CustomLoss:
    """The loss at `path`: an instance of the class there, or the function there. Pickled by its path, so that the
    policy's ranks import it themselves. `options`: keyword arguments of the function, or of the class after those of
    ClippedPGLossFn."""

    def __init__(self, cfg: ClippedPGLossConfig, *, prev_equals_curr: bool = False, max_age: int | None = None) -> None:
        assert cfg.path is not None
        self.cfg, self._how = cfg, {"prev_equals_curr": prev_equals_curr, "max_age": max_age}
        self._key = f"loss_fn.path {cfg.path}"
        code = custom_function(cfg.path, self._key)
        self._fills_prev = prev_equals_curr and not isinstance(code, type)
        self._loss: Callable[..., tuple[Tensor, Mapping[str, Any]]] = (
            code(cfg, **self._how, **cfg.options) if isinstance(code, type) else code
        )
        self._options = {} if isinstance(code, type) else cfg.options
        self.needs_entropy = bool(getattr(self._loss, "needs_entropy", cfg.entropy_coeff is not None))

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_loss, (self.cfg, self._how)

    def __call__(
        self, curr_logprobs: Tensor, batch: Mapping[str, Any], global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return loss and metrics as `ClippedPGLossFn` does. Names of metrics that are not built in get `custom/`."""
        if self._fills_prev and batch.get("prev_logprobs") is None:
            batch = {**batch, "prev_logprobs": curr_logprobs.detach()}
        pair = self._loss(
            curr_logprobs,
            batch,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            **self._options,
        )
        if not isinstance(pair, tuple) or len(pair) != 2 or not _is_scalar(pair[0]) or not isinstance(pair[1], Mapping):
            raise CustomCodeError(
                f"{self._key} must return (loss, metrics): a scalar tensor and a dict, got {pair!r:.200}"
            )
        loss, metrics = pair
        if curr_logprobs.requires_grad and not loss.requires_grad:
            raise CustomCodeError(f"{self._key} returned a loss without a gradient: compute it from curr_logprobs")
        for name, value in metrics.items():
            if not (_is_scalar(value) or isinstance(value, float | int) or name.partition("/age_")[0] in _OF_SEQUENCES):
                shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:100]
                raise CustomCodeError(f"{self._key} returned {shape} as the metric {name!r}; expected a scalar")
        by_name = {name if _is_built_in(name) else CUSTOM + name: value for name, value in metrics.items()}
        return loss.reshape(()), {"loss": loss.detach().to(torch.float64)} | by_name


_OF_SEQUENCES = {name for name, reduction in METRIC_REDUCTIONS.items() if reduction == "values"}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_built_in(name: str) -> bool:
    return name.partition("/age_")[0] in METRIC_REDUCTIONS or name.startswith(CUSTOM)


def _load_loss(cfg: ClippedPGLossConfig, how: Mapping[str, Any]) -> CustomLoss:
    return CustomLoss(cfg, **how)


def build_loss(
    cfg: ClippedPGLossConfig, *, prev_equals_curr: bool = False, max_age: int | None = None
) -> ClippedPGLossFn | CustomLoss:
    """Return the loss of the recipe's section `loss_fn`; the arguments are those of ClippedPGLossFn."""
    kind = ClippedPGLossFn if cfg.path is None else CustomLoss
    return kind(cfg, prev_equals_curr=prev_equals_curr, max_age=max_age)


def custom_function(path: str, key: str) -> Any:
    """Import the function or class at `path`, which the recipe names under `key`. Raises CustomCodeError."""
    code = import_by_path(path, f"code of {key.split()[0]}", CustomCodeError)
    if not callable(code):
        raise CustomCodeError(f"{key} is {type(code).__name__}; expected a function or a class")
    return code


@dataclass(frozen=True)
class CustomPart:
    """One use of custom code: the key that names it, its path, the arguments by position that it gets, its options."""

    key: str
    path: str
    takes: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> Any:
        """Import the code and return it. Raises CustomCodeError if it cannot be called with these arguments."""
        code = custom_function(self.path, f"{self.key} {self.path}")
        if isinstance(code, type) and self.key == "loss_fn.path":
            if not issubclass(code, ClippedPGLossFn):
                raise CustomCodeError(
                    f"{self.key} {self.path}: a loss is a function ({', '.join(LOSS_INPUTS)}) or a class derived from "
                    "grpo_mcore.objective.ClippedPGLossFn"
                )
            options = {"prev_equals_curr": True, "max_age": None, **self.options}
            check_call(code, ("cfg",), options, f"{self.key} {self.path}")
            return code
        check_call(code, self.takes, self.options, f"{self.key} {self.path}")
        return code


def check_call(function: Callable[..., Any], takes: tuple[str, ...], options: Mapping[str, Any], caller: str) -> None:
    """Raise CustomCodeError where `function` cannot be called with these arguments and options."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: it shows when it is called
        return
    try:
        signature.bind(*takes, **options)
    except TypeError as error:
        arguments = ", ".join([*takes, *(f"{name}=" for name in options)])
        option = next((name for name in options if repr(name) in str(error)), None)
        hint = f"; the recipe's options have {option!r}: `grpo-mcore config RECIPE` shows where" if option else ""
        raise CustomCodeError(
            f"{caller} is called with ({arguments}), but it takes {signature}: {error}{hint}"
        ) from error


def check_custom_kl(code: CustomCode) -> None:
    """Try a custom KL estimator on three log-ratios. Raises CustomCodeError."""
    key = f"loss_fn.reference_policy_kl_type {code.path}"
    CustomPart("loss_fn.reference_policy_kl_type", code.path, ("log_ratio",), code.options).check()
    ratios = torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64, requires_grad=True)
    try:
        result = custom_kl_estimate(code.path)(ratios, **code.options)
    except Exception as error:
        raise CustomCodeError(f"{key} raised {type(error).__name__}: {error}") from error
    if not isinstance(result, Tensor) or result.shape != ratios.shape or not result.requires_grad:
        raise CustomCodeError(
            f"{key} must return a tensor of its argument's shape, with a gradient; got {result!r:.100}"
        )


def check_custom_objective(parts: list[CustomPart], kl: KLType) -> None:
    """Check the custom parts of an objective, and its KL estimator if that is custom. Raises CustomCodeError."""
    for part in parts:
        part.check()
    if isinstance(kl, CustomCode):
        check_custom_kl(kl)
