"""The weights of one vLLM rank: new slices are collected next to the weights in use, then all are exchanged at once.

vLLM's CPU build computes with packed copies of its linear weights and drops the plain ones. So a shadow of each layer
is packed as soon as its slices are complete, and the exchange only swaps what the layer refers to.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.models.utils import is_pp_missing_parameter
from vllm.platforms import current_platform

from grpo_mcore.base.host_memory import lend
from grpo_mcore.families import Box
from grpo_mcore.layout import WHOLE
from grpo_mcore.refit.engine_side import fp8
from grpo_mcore.refit.engine_side.derived_weights import DerivedWeights
from grpo_mcore.refit.engine_side.exchange import Exchange, Swap, exchange_attributes, exchange_parameters, shadow_of
from grpo_mcore.refit.plan.parts import Part
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.plan.proof import Sums, checksum


@dataclass(eq=False)
class Target:
    """One parameter to fill, in the shape in which vLLM loads it. `used_by`: the modules that use it, with its name
    there; tied embeddings have two."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    expected: int  # elements; vLLM's padding of the vocabulary is not among them
    used_by: list[tuple[nn.Module, str]]
    transient: bool  # vLLM keeps only a packed copy
    tensor: Tensor | None = None
    borrowed: bool = False  # `tensor` is a view of the buffer
    arrived: int = 0
    copies: list[tuple[tuple[int, int, int], Box, torch.dtype]] = field(default_factory=list)  # need a checksum

    @property
    def complete(self) -> bool:
        return self.arrived == self.expected


class EngineWeights:
    """Collects new weights: `receive` for each copy of a bucket, `mark_done` after the bucket; finally `exchange` puts
    all to use, and a second `exchange` undoes that. Needs memory for a second copy of the weights, except with
    `in_place`: then each layer is exchanged as soon as it is complete, which cannot be undone."""

    def __init__(
        self,
        model: nn.Module,
        part: Part,
        device: torch.device,
        dtype: torch.dtype,
        *,
        in_place: bool,
        spare: dict[str, Tensor] | None = None,
        version: int = 0,
        kept: tuple[str, ...] = (),
    ) -> None:
        """`dtype`: the engine's. `spare`: `old_memory` of the last refit, to take the new weights into. `version`: the
        weight version; one quantised layer of each is compared with a reference, in turns. `kept`: first parts of the
        names of parameters that stay as they were loaded. Raises RefitError if another parameter stays unfilled or
        cannot take slices."""
        self._model, self._device, self._dtype, self.in_place = model, device, dtype, in_place
        self._kept = kept
        self.wholes: dict[str, Tensor] = {}  # tensors for vLLM's own loading
        self._whole_shapes = part.whole_shapes()
        self.fallbacks = tuple(self._whole_shapes)
        self.unplanned: list[str] = []  # parameters that only vLLM's own loading can fill
        self.absent: set[str] = set()  # what other pipeline stages have
        self.sums: Sums = {}
        self._exchanges: list[Exchange] = []
        self._waiting: list[Sequence[Target]] = []  # complete layers whose scales need other ranks
        self._spare = spare or {}
        self._derived = DerivedWeights(model, dtype)
        self._has_head = any(type(module) is ParallelLMHead for module in model.modules())
        self._targets = self._find_targets(part)
        self._layers = self._find_layers()
        quantized = [path for path, module in model.named_modules() if fp8.format_of(module)]
        self._compared = quantized[version % len(quantized)] if quantized else None
        self.quantized: dict[str, int] = {}  # digest of each quantised layer
        self._paths = {id(module): path for path, module in model.named_modules()}

    @property
    def parameters(self) -> int:
        return len(self._targets)

    def _find_targets(self, part: Part) -> dict[str, Target]:
        filled: dict[str, int] = {}
        for load in part.all_loads():
            if not load.param.startswith(WHOLE):
                filled[load.param] = filled.get(load.param, 0) + _volume(load.box)
        used_by: dict[int, list[tuple[nn.Module, str]]] = {}
        by_name: dict[str, nn.Parameter] = {}
        for path, module in self._model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                by_name[f"{path}.{name}" if path else name] = parameter
                used_by.setdefault(id(parameter), []).append((module, name))
        self.absent = {name for name in filled if name not in by_name and is_pp_missing_parameter(name, self._model)}
        for name in self.absent:
            del filled[name]
        if unknown := sorted(set(filled) - set(by_name)):
            raise RefitError(f"the engine has no parameters {', '.join(unknown)}, which the refit plan fills")
        planned = {id(by_name[name]) for name in filled}
        first_names = {id(parameter): name for name, parameter in reversed(by_name.items())}  # one of a tied pair
        self.unplanned = [
            name
            for name, weight in by_name.items()
            if id(weight) not in planned | self._derived.parameters
            and first_names[id(weight)] == name
            and not (self._kept and name.startswith(self._kept))
            and _elements(used_by, weight)
        ]
        if self.unplanned and not self.fallbacks:
            raise RefitError(f"the refit plan leaves parameters of the engine unfilled: {', '.join(self.unplanned)}")
        targets = {}
        for name, count in filled.items():
            places = used_by[id(by_name[name])]
            target = _target(name, by_name[name], places)
            target.transient = target.transient and self._device.type == "cpu" and not current_platform.is_zen_cpu()
            if count != target.expected:
                raise RefitError(
                    f"the refit plan leaves parameters of the engine unfilled: {name} gets {count:,} of its "
                    f"{target.expected:,} elements"
                )
            for module, _ in places:
                _check_method(name, module)
            targets[name] = target
        return targets

    def _find_layers(self) -> dict[str, list[Target]]:
        """Return, for each target's name, all targets of its module: a bias is packed with its weight."""
        by_module: dict[int, list[Target]] = {}
        for target in self._targets.values():
            by_module.setdefault(id(target.used_by[0][0]), []).append(target)
        self._layers_of = set(by_module)
        return {target.name: by_module[id(target.used_by[0][0])] for target in self._targets.values()}

    @torch.no_grad()
    def receive(
        self, key: tuple[int, int, int], name: str, box: Box, values: Tensor, summed: torch.dtype | None
    ) -> None:
        """Take the slice `box` of the parameter `name`, or of a whole tensor. `values`: a view of the buffer.
        `summed`: dtype of the checksum; None: no checksum."""
        if name.startswith(WHOLE):
            self._receive_whole(name.removeprefix(WHOLE), box, values)
            return
        target = self._targets[name]
        whole = all(span == (0, size) for span, size in zip(box, target.shape, strict=True))
        if whole and target.transient and values.dtype == target.dtype and values.is_contiguous():
            target.tensor, target.borrowed = values.view(target.shape), True
        else:
            if target.tensor is None:
                target.tensor = self._memory_for(target)
            target.tensor[_index(box)].copy_(values.view([stop - start for start, stop in box]))
        target.arrived += _volume(box)
        if summed is not None:
            target.copies.append((key, box, summed))
        layer = self._layers[name]
        if all(other.complete for other in layer):
            self._finish(layer)

    def _memory_for(self, target: Target) -> Tensor:
        tensor = self._spare.pop(target.name, None)
        if tensor is None or (tensor.shape, tensor.dtype) != (target.shape, target.dtype):
            tensor = torch.empty(target.shape, dtype=target.dtype, device=self._device)
        return tensor if tensor.numel() == target.expected else tensor.zero_()  # with vLLM's padding

    def _receive_whole(self, name: str, box: Box, values: Tensor) -> None:
        if name not in self.wholes:
            self.wholes[name] = torch.empty(self._whole_shapes[name], dtype=values.dtype, device=self._device)
        self.wholes[name][_index(box)] = values

    def mark_done(self) -> None:
        """Copy whatever still views the buffer, which will be overwritten."""
        for target in self._targets.values():
            if target.borrowed and target.tensor is not None:
                target.tensor, target.borrowed = target.tensor.clone(), False

    def tied(self) -> dict[str, list[nn.Module]]:
        """Return, for each parameter of several modules, those after the first that compute with a packed copy."""
        users: dict[int, tuple[str, list[nn.Module]]] = {}
        for path, module in self._model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in users:
                    users[id(parameter)][1].append(module)
                else:
                    users[id(parameter)] = (f"{path}.{name}", [])
        return {
            name: [
                module for module in modules if isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)
            ]
            for name, modules in users.values()
            if modules
        }

    def missing(self) -> list[str]:
        return [target.name for target in self._targets.values() if not target.complete]

    def _finish(self, layer: Sequence[Target]) -> None:
        """Compute the checksums of a complete module, and prepare its exchange as soon as that is possible."""
        for target in layer:
            assert target.tensor is not None
            for key, box, dtype in target.copies:
                self.sums[key] = checksum(target.tensor[_index(box)], dtype)
            module, name = target.used_by[0]
            if name == "w2_bias" and vars(module)["moe_config"].tp_rank:  # as vLLM loads it: each rank adds its own
                target.tensor, target.borrowed = torch.zeros_like(target.tensor), False
        if any(fp8.spans_ranks(*target.used_by[0]) for target in layer):
            self._waiting.append(layer)
        else:
            self._make_ready(layer)

    def _make_waiting_ready(self) -> None:
        """Quantise, at the commit, what needs the largest values of other ranks: until then they may generate, and
        complete their layers in an order of their own."""
        for layer in sorted(self._waiting, key=lambda layer: layer[0].name):
            self._make_ready(layer)
        self._waiting = []

    @torch.no_grad()
    def _make_ready(self, layer: Sequence[Target]) -> None:
        """Prepare the exchange of a complete module."""
        prepared: dict[int, nn.Module] = {}
        for target in layer:
            assert target.tensor is not None
            for module, name in self._to_prepare(target):
                shadow = prepared.setdefault(id(module), shadow_of(module))
                shadow._parameters[name] = nn.Parameter(target.tensor, requires_grad=False)
        modules = {id(module): module for target in layer for module, _ in self._to_prepare(target)}
        by_key: dict[int, Exchange] = {}
        for module in modules.values():
            shadow = prepared[id(module)]
            weight = shadow._parameters.get("weight")
            plain = None if weight is None else weight.data
            exchanges = [*self._prepare(module, shadow), *self._derived.follow(module, shadow, plain)]
            for exchange in exchanges:
                by_key.setdefault(exchange.key, exchange)  # a tied parameter is exchanged once
        for target in layer:
            target.tensor, target.borrowed = None, False
        for exchange in by_key.values():
            if self.in_place:
                exchange.run()
            else:
                self._exchanges.append(exchange)

    def _to_prepare(self, target: Target) -> list[tuple[nn.Module, str]]:
        """Return the users of a target whose modules must be prepared for it. A module that is prepared for its own
        parameters only refers to this one (experts to the bias of their router)."""
        first, *others = target.used_by
        return [first, *(user for user in others if id(user[0]) not in self._layers_of)]

    def _prepare(self, module: nn.Module, shadow: nn.Module) -> Iterable[Exchange]:
        """Let vLLM process `shadow`, and yield the exchanges that make `module` equal to it."""
        method = getattr(module, "quant_method", None)
        # vLLM looks embeddings up in the plain weight; a head of its own has the packed one.
        lookup = type(module) is VocabParallelEmbedding and self._has_head
        plain = lookup or computes_with_plain_weight(module)
        on_cpu, kind = self._device.type == "cpu", fp8.format_of(module)
        if isinstance(method, QuantizeMethodBase) and (kind or (on_cpu and not plain)):
            ours = copy.copy(method)
            shadow.__dict__["quant_method"] = ours
            if isinstance(ours, UnquantizedFusedMoEMethod):
                ours.moe_kernel = None  # vLLM packs experts only when it makes their kernel
            if kind is None:
                ours.process_weights_after_loading(shadow)
            else:
                self._quantize(module, shadow, kind)
            if on_cpu:  # on a GPU kernels and graphs keep the scales that they have, which get new contents below
                yield from exchange_attributes(module, shadow)
                yield from exchange_attributes(method, ours)
        yield from exchange_parameters(module, shadow)

    def _quantize(self, module: nn.Module, shadow: nn.Module, kind: fp8.Format) -> None:
        """Let vLLM quantise the new weights of `shadow`, which also has the old scales of `module`."""
        path = self._paths[id(module)]
        plain: dict[str, Tensor] = {}
        for name, loaded in get_layerwise_info(module).restore_metadata[0].items():
            if loaded.dtype == self._dtype and (new := shadow.get_parameter(name)) is not module.get_parameter(name):
                plain[name] = fp8.padded(module, name, new.data, loaded)
                shadow._parameters[name] = nn.Parameter(plain[name], requires_grad=False)
        shadow.__dict__.pop(fp8.DONE, None)
        shadow.quant_method.process_weights_after_loading(shadow)
        if path == self._compared:
            fp8.check_against_reference(path, shadow, plain, kind, get_tp_group().device_group)
        for name, parameter in module.named_parameters(recurse=False):
            ours = shadow.get_parameter(name)
            if (ours.shape, ours.dtype, ours.stride()) != (parameter.shape, parameter.dtype, parameter.stride()):
                raise RefitError(
                    f"{path}.{name}: vLLM's {kind} quantisation made {ours.dtype} {tuple(ours.shape)} of the new "
                    f"weights, and {parameter.dtype} {tuple(parameter.shape)} when the engine was loaded"
                )
        self.quantized[path] = fp8.digest(shadow)

    def exchange(self) -> None:
        """Swap new for old weights, or old for new. An error leaves everything as it was."""
        self._make_waiting_ready()
        done: list[Exchange] = []
        try:
            for exchange in self._exchanges:
                exchange.run()
                done.append(exchange)
        except BaseException:
            for exchange in reversed(done):
                exchange.run()
            raise
        self.refresh()

    def refresh(self) -> None:
        """Update, after all exchanges, what vLLM's kernels have copied from parameters."""
        self._make_waiting_ready()
        self._derived.refresh()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def old_memory(self) -> dict[str, Tensor]:
        """Return, after the exchange, the memory of the old weights by parameter, where nothing else lives in it. The
        machine may take it, but to write there again takes half the time of writing to fresh memory."""
        swaps = {exchange.key: exchange.value for exchange in self._exchanges if isinstance(exchange, Swap)}
        memory: dict[int, tuple[str, Tensor]] = {}  # by address
        for target in self._targets.values():
            module, name = target.used_by[0]
            old = swaps.get(id(module._parameters[name]))
            if old is not None and old.is_contiguous() and old.untyped_storage().nbytes() == old.nbytes and lend(old):
                memory[old.data_ptr()] = target.name, old
        return dict(memory.values())


def computes_with_plain_weight(module: nn.Module) -> bool:
    """Return whether vLLM's CPU build found no packed form for this layer's weight (bfloat16 without AVX-512): the
    function that it computes with holds nothing. To try again takes most of a millisecond a layer."""
    function = vars(module).get("cpu_linear")
    return function is not None and not (
        getattr(function, "__closure__", None) or getattr(function, "__defaults__", None)
    )


def _target(name: str, parameter: nn.Parameter, used_by: list[tuple[nn.Module, str]]) -> Target:
    module, attribute = used_by[0]
    recorded = get_layerwise_info(module).restore_metadata[0].get(attribute)
    loaded = parameter if recorded is None else recorded
    transient = parameter.numel() == 0 and isinstance(getattr(module, "quant_method", None), UnquantizedLinearMethod)
    shape = fp8.filled_shape(module, attribute, loaded)
    return Target(name, shape, loaded.dtype, _loaded_elements(module, attribute, loaded), used_by, transient)


def _loaded_elements(module: nn.Module, attribute: str, loaded: Tensor) -> int:
    if isinstance(module, VocabParallelEmbedding):
        return module.num_org_embeddings_per_partition * math.prod(loaded.shape[1:])
    return math.prod(fp8.filled_shape(module, attribute, loaded))


def _elements(used_by: dict[int, list[tuple[nn.Module, str]]], parameter: nn.Parameter) -> int:
    """Return the number of elements of a parameter that a checkpoint would fill."""
    module, attribute = used_by[id(parameter)][0]
    recorded = get_layerwise_info(module).restore_metadata[0].get(attribute)
    if recorded is None and fp8.format_of(module):
        return 0  # a scale
    return _loaded_elements(module, attribute, parameter if recorded is None else recorded)


def _check_method(name: str, module: nn.Module) -> None:
    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return
    if isinstance(method, UnquantizedFusedMoEMethod):
        backend = method.unquantized_backend
        if backend not in (UnquantizedMoeBackend.CPU, UnquantizedMoeBackend.TRITON):
            raise RefitError(
                f"{name}: slices cannot be put into experts of vLLM's {backend.value} kernel, which keeps them in an "
                "order of its own; set policy.generation.vllm_kwargs.moe_backend to triton"
            )
    elif not isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)) and not fp8.format_of(module):
        raise RefitError(
            f"{name}: slices cannot be put into a layer of {type(method).__name__}; use "
            "policy.generation.vllm_cfg.precision: bfloat16 or fp8"
        )


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
