"""Low-rank adapters (LoRA, arXiv 2106.09685): which weights get one, and how its two parts are split over the ranks.

A weight W [outputs, inputs] acts as W + scale * up @ down, with down [rank, inputs] and up [outputs, rank]. The parts
are declared as parameters, so that building, checkpoints and planning split and count them by the same rules.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, Protocol

from grpo_mcore.families.spec import VALUE_HEAD, FamilyError, HfTensor, ModelShape, Param, Split, Stage

AT = "policy.megatron_cfg.peft."

WITHOUT_EXPERTS = "exclude_modules: ['*.local_experts.*']"

ABSORBED = ".linear_kv_up_proj.weight"
"""End of the name of the weight of latent attention that vLLM multiplies into queries and outputs."""

DOWN, UP = ".weight.down", ".weight.up"
"""Ends of the names of an adapter's tensors, after the layer's name in Hugging Face's format."""

ENGINE_ADAPTER = 1
"""Number by which an engine's requests name the policy's adapters."""


@dataclass(frozen=True)
class AdapterShape:
    """The adapters of a model. `targets`: names of linear layers ("linear_qkv"), or patterns of their full names
    ("*.layers.0.*"); empty means all. `excluded`: linear layers without an adapter, in the same form."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class Adapter:
    """The adapter of the parameter `weight`."""

    weight: Param
    down: Param
    up: Param


class PeftSettings(Protocol):
    """The keys of policy.megatron_cfg.peft that are read here."""

    enabled: bool
    dim: int
    alpha: float
    target_modules: list[str]
    exclude_modules: list[str]
    refit: Literal["merged", "adapters"]


class FreezingSettings(Protocol):
    """The keys of policy.megatron_cfg that are read here."""

    freeze_moe_router: bool
    freeze_attention: bool


def adapter_shape(peft: PeftSettings) -> AdapterShape | None:
    """Return the adapters that policy.megatron_cfg.peft describes; None if it is disabled."""
    if not peft.enabled:
        return None
    return AdapterShape(peft.dim, peft.alpha, tuple(peft.target_modules), tuple(peft.exclude_modules))


def adapters_of(params: Iterable[Param], shape: AdapterShape) -> dict[Param, Adapter]:
    """Return the adapters of `params`, keyed by the weights that they belong to."""
    return {param: _adapter(param, shape.rank) for param in params if is_adapted(param, shape)}


def adapter_params(params: Iterable[Param], shape: AdapterShape) -> list[Param]:
    """Return the parts of the adapters of `params`, as a refit sends them when it sends nothing else."""
    return [part for adapter in adapters_of(params, shape).values() for part in (adapter.down, adapter.up)]


def is_adapted(param: Param, shape: AdapterShape) -> bool:
    """Return whether the parameter is the weight of a linear layer that gets an adapter."""
    if not _is_linear(param):
        return False
    name = layer_name(param)
    targeted = not shape.targets or any(_matches(name, pattern) for pattern in shape.targets)
    return targeted and not any(_matches(name, pattern) for pattern in shape.excluded)


def frozen_parts(settings: FreezingSettings) -> tuple[str, ...]:
    """Return parts of Megatron-Core's names of the parameters that a recipe freezes."""
    router = (".router.weight", ".router.bias") if settings.freeze_moe_router else ()
    return (*router, *((".self_attention.",) if settings.freeze_attention else ()))


def is_trained(param: Param, shape: AdapterShape | None, *, frozen: Collection[str] = ()) -> bool:
    """Return whether training changes the parameter: adapters freeze all others but a value head; without adapters
    `frozen` has parts of the names of those that are frozen."""
    if param.buffer:
        return False
    if shape is not None:
        return param.hf[0].name == VALUE_HEAD or is_adapted(param, shape)
    return not any(part in param.megatron for part in frozen)


def check_adapters(
    params: Iterable[Param],
    model: ModelShape,
    shape: AdapterShape,
    tensor: int,
    expert_tensor: int,
    *,
    refitted: bool = False,
) -> None:
    """Raise FamilyError if a name matches no linear layer of this model, if no layer gets an adapter, or if an expert
    gets one although it is split over other ranks than the layers around it, or if adapters that are refitted by
    themselves (`refitted`) belong to experts in a way that vLLM does not take."""
    linear = [param for param in params if _is_linear(param)]
    kinds = ", ".join(sorted({_kind(layer_name(param)) for param in linear}))
    for key, patterns in (("target_modules", shape.targets), ("exclude_modules", shape.excluded)):
        for pattern in patterns:
            if not any(_matches(layer_name(param), pattern) for param in linear):
                frozen = "; the tower of a vision model is frozen" if model.vision else ""
                raise FamilyError(
                    f"{AT}{key}: {pattern!r} is no linear layer of this {model.family} model, which has {kinds}{frozen}"
                )
    adapted = [param for param in linear if is_adapted(param, shape)]
    if not adapted:
        raise FamilyError(f"{AT}exclude_modules leaves no layer with an adapter; this {model.family} model has {kinds}")
    if refitted:
        _check_engines_take(linear, adapted, model)
    if expert_tensor not in (1, tensor) and any(param.expert for param in adapted):
        raise FamilyError(
            f"{AT}target_modules: experts with adapters need an expert_tensor_parallel_size of 1 or of "
            f"tensor_model_parallel_size {tensor}, not {expert_tensor}; or {WITHOUT_EXPERTS}"
        )


def _check_engines_take(linear: list[Param], adapted: list[Param], model: ModelShape) -> None:
    """Raise FamilyError if vLLM does not apply the adapters of some of the `adapted` among all `linear` layers."""
    has, experts = set(adapted), [param for param in linear if param.expert]
    if any(param.megatron.endswith(ABSORBED) for param in adapted):
        name = _kind(ABSORBED.removesuffix(".weight"))
        raise FamilyError(
            f"{AT}refit: vLLM ignores adapters of {name}, which it keeps in another form; use merged, or "
            f"exclude_modules: [{name}]"
        )
    if model.family == "gpt_oss" and has & set(experts):
        raise FamilyError(
            f"{AT}refit: adapters of gpt_oss's experts go to engines merged only; use that, or {WITHOUT_EXPERTS}"
        )
    layers = {param.layer for param in has & set(experts)}
    partly = [param for param in experts if param.layer in layers and param not in has]
    if partly:
        raise FamilyError(
            f"{AT}refit: vLLM takes adapters of linear_fc1 and linear_fc2 of all experts of a layer, or none; "
            f"{layer_name(partly[0])} has none; use merged, or {WITHOUT_EXPERTS}"
        )


def layer_name(param: Param) -> str:
    """Return the full name of the weight's layer, with layer and expert indices of the whole model."""
    expert = None if param.expert is None else param.expert[0]
    return param.megatron.format(layer=param.layer, expert=expert).removesuffix(".weight")


def _is_linear(param: Param) -> bool:
    """Return whether the parameter is a weight that can have an adapter: a matrix of a layer, but not a router's."""
    matrix = len(param.hf[0].shape) == 2 and param.megatron.endswith(".weight") and not param.buffer
    return matrix and param.stage is Stage.LAYER and not param.megatron.endswith("router.weight")


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _matches(name: str, pattern: str) -> bool:
    return pattern == _kind(name) or fnmatchcase(name, pattern)


def _adapter(weight: Param, rank: int) -> Adapter:
    """Declare an adapter. `up` is split like a weight that is split by rows, `down` like one split by columns; the
    other part is whole."""
    columns = weight.split is Split.COLUMNS
    first, inputs = weight.hf[0], weight.hf[0].shape[1]
    name = weight.megatron.removesuffix(".weight")
    down = replace(
        weight,
        megatron=f"{name}.down",
        hf=(HfTensor(first.name.removesuffix(".weight") + DOWN, (rank, inputs)),),
        split=Split.COLUMNS if columns else Split.REPLICATED,
        engine=None,
    )
    up = replace(
        weight,
        megatron=f"{name}.up",
        hf=tuple(HfTensor(tensor.name.removesuffix(".weight") + UP, (tensor.shape[0], rank)) for tensor in weight.hf),
        split=Split.REPLICATED if columns else weight.split,
        engine=None,
    )
    return Adapter(weight, down, up)
