"""The LoRA adapters of one vLLM rank: new ones are collected next to those in use, then all are exchanged at once.

vLLM applies them beside the model's own weights, which stay as they were loaded. It has one adapter, under one number,
and every request names it.
"""

import math
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers import FusedMoE3DWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights

from grpo_mcore.families import DOWN, ENGINE_ADAPTER, UP, Box
from grpo_mcore.layout import WHOLE
from grpo_mcore.refit.plan.parts import Part
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.plan.proof import Sums, checksum

SIDES = (("gate_proj", "up_proj", "gate_up_proj"), ("down_proj",))
"""Layers of an expert in Hugging Face's format: those that vLLM computes together, in its order. A family has gate and
up apart or as one."""


class EngineAdapters:
    """The adapters of an engine rank, in use and staged. Each refit calls `expect`, `receive` for each copy, `exchange`
    and `put_to_use`. A second `exchange` undoes the first."""

    in_place = False
    absent: frozenset[str] = frozenset()  # an engine of several pipeline stages serves no adapters
    fallbacks: tuple[str, ...] = ()  # nothing is left to vLLM's own loading

    def __init__(self, manager: Any, device: torch.device, dtype: torch.dtype) -> None:
        """`manager`: vLLM's LoRAModelManager. `dtype`: the engine's."""
        self._manager, self._device, self._dtype = manager, device, dtype
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        self._mapper = mapper and mapper.get_rename_mapper()
        self._names: dict[str, str] = {}  # of the plan's tensors, with vLLM's name of the layer
        self._pairs: dict[str, tuple[str, str]] = {}  # `down` and `up` of each of vLLM's layers
        self._in_use: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}
        self._expected: dict[str, int] = {}  # elements that have not arrived, by tensor
        self.sums: Sums = {}

    @property
    def parameters(self) -> int:
        return len(self._staged)

    def expect(self, part: Part) -> None:
        """Start to collect what the plan brings. Raises RefitError if vLLM has no adapters for all of it."""
        shapes = part.whole_shapes()
        if weights := sorted({load.param for load in part.all_loads() if not load.param.startswith(WHOLE)}):
            raise RefitError(f"the engine serves adapters, and the refit plan brings the weights {', '.join(weights)}")
        names = dict(zip(shapes, self._mapper.apply_list(list(shapes)) if self._mapper else shapes, strict=True))
        pairs = self._pairs_among(set(names.values()))
        taken = {name for pair in pairs.values() for name in pair}
        if unknown := sorted(name for name, ours in names.items() if ours not in taken):
            raise RefitError(
                f"vLLM applies no adapter to {', '.join(unknown)}; leave these layers out with "
                "policy.megatron_cfg.peft.exclude_modules, or set policy.megatron_cfg.peft.refit to merged"
            )
        self._names, self._pairs = names, pairs
        self._staged = {
            names[name]: torch.empty(shape, dtype=self._dtype, device=self._device) for name, shape in shapes.items()
        }
        self._expected = {names[name]: math.prod(shape) for name, shape in shapes.items()}
        self.sums = {}

    def _pairs_among(self, names: set[str]) -> dict[str, tuple[str, str]]:
        """Return the names of the two tensors of each of vLLM's layers that has both."""
        pairs = {}
        for module in self._manager.modules:
            first: dict[str, str] = {}  # query, key and value, and gate and up, share the first one's `down`
            for layer in self._parts(module):
                shared = first.setdefault(layer.rpartition(".")[0], layer)
                down = (layer if layer + DOWN in names else shared) + DOWN
                if down in names and layer + UP in names:
                    pairs[layer] = down, layer + UP
        return pairs

    def _parts(self, module: str) -> list[str]:
        """Return the layers that vLLM's module computes together, such as query, key and value, or all experts."""
        wrapper = self._manager.modules[module]
        if isinstance(wrapper, FusedMoE3DWithLoRA):
            parts = [part for side in SIDES for part in side]
            return [f"{module}.{expert}.{part}" for expert in range(wrapper.global_num_experts) for part in parts]
        return self._manager.packed_modules.get(module, [module])

    def receive(
        self, key: tuple[int, int, int], name: str, box: Box, values: Tensor, summed: torch.dtype | None
    ) -> None:
        """Take the slice `box` of an adapter's tensor. `summed`: dtype of the checksum; None: no checksum."""
        name = self._names[name.removeprefix(WHOLE)]
        target = self._staged[name][tuple(slice(*span) for span in box)]
        target.copy_(values)
        self._expected[name] -= target.numel()
        if summed is not None:
            self.sums[key] = checksum(target, summed)

    def mark_done(self) -> None:
        """Nothing views the buffer."""

    def missing(self) -> list[str]:
        return [name for name, count in self._expected.items() if count]

    def exchange(self) -> None:
        """Swap new for old adapters, or old for new."""
        self._in_use, self._staged = self._staged, self._in_use

    def put_to_use(self) -> None:
        """Register the adapters with vLLM, which forgets them whenever a weight update ends."""
        self._manager.remove_adapter(ENGINE_ADAPTER)
        if not self._in_use:
            return
        layers: dict[str, LoRALayerWeights] = {}
        for layer, (down, up) in self._pairs.items():
            rank = len(self._in_use[down])
            layers[layer] = LoRALayerWeights(layer, rank, rank, self._in_use[down], self._in_use[up])
        for module, wrapper in self._manager.modules.items():
            if isinstance(wrapper, FusedMoE3DWithLoRA) and not layers.keys().isdisjoint(parts := self._parts(module)):
                for part in parts:
                    layers.pop(part, None)
                layers[module] = self._stacked(module, wrapper, rank)
        self._manager.add_adapter(LoRAModel(ENGINE_ADAPTER, rank, layers))
        self._manager.activate_adapter(ENGINE_ADAPTER)

    def _stacked(self, module: str, wrapper: FusedMoE3DWithLoRA, rank: int) -> LoRALayerWeights:
        """Return the adapters of this rank's experts as vLLM keeps them where a checkpoint has experts as stacks:
        down [experts, rank, inputs] and up [experts, outputs, rank] of gate and up together, and of the last layer."""
        first = wrapper.ep_rank * wrapper.local_num_experts
        downs, ups = [], []
        for side in SIDES:
            pairs = [
                [self._pairs[name] for part in side if (name := f"{module}.{expert}.{part}") in self._pairs]
                for expert in range(first, first + wrapper.local_num_experts)
            ]
            downs.append(torch.stack([self._in_use[pair[0][0]] for pair in pairs]))
            ups.append(torch.stack([torch.cat([self._in_use[up] for _, up in pair]) for pair in pairs]))
        return LoRALayerWeights(module, rank, rank, downs, ups)
