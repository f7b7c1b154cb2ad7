"""The LoRA adapters of one vLLM rank: new ones are collected next to those in use, then all are exchanged at once.

vLLM applies them beside the model's own weights, which stay as they were loaded. It has one adapter, under one number,
and every request names it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights

from grpo_mcore.families import DOWN, ENGINE_ADAPTER, UP, Box
from grpo_mcore.layout import WHOLE
from grpo_mcore.refit.plan.parts import Part
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.plan.proof import Sums, checksum


class EngineAdapters:
    """The adapters of an engine rank, in use and staged. Each refit calls `expect`, `receive` for each copy, `exchange`
    and `put_to_use`. A second `exchange` undoes the first."""

    in_place = False
    absent: frozenset[str] = frozenset()  # an engine of several pipeline stages serves no adapters
    fallbacks: tuple[str, ...] = ()  # nothing is left to vLLM's own loading

    def __init__(self, manager: Any, device: torch.device, dtype: torch.dtype) -> None:
        """`manager`: vLLM's LoRAModelManager. `dtype`: the engine's."""
        self._manager, self._device, self._dtype = manager, device, dtype
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
        layers = {part for module in self._manager.modules for part in self._parts(module)}
        if unknown := sorted(name for name in shapes if name.removesuffix(UP).removesuffix(DOWN) not in layers):
            raise RefitError(
                f"vLLM applies no adapter to {', '.join(unknown)}; leave these layers out with "
                "policy.megatron_cfg.peft.exclude_modules, or set policy.megatron_cfg.peft.refit to merged"
            )
        self._staged = {
            name: torch.empty(shape, dtype=self._dtype, device=self._device) for name, shape in shapes.items()
        }
        self._expected = {name: math.prod(shape) for name, shape in shapes.items()}
        self.sums = {}

    def _parts(self, module: str) -> list[str]:
        """Return the layers that vLLM's module computes together, such as query, key and value."""
        return self._manager.packed_modules.get(module, [module])

    def receive(
        self, key: tuple[int, int, int], name: str, box: Box, values: Tensor, summed: torch.dtype | None
    ) -> None:
        """Take the slice `box` of an adapter's tensor. `summed`: dtype of the checksum; None: no checksum."""
        name = name.removeprefix(WHOLE)
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
        for module in self._manager.modules:
            parts = self._parts(module)
            if (down := self._in_use.get(parts[0] + DOWN)) is not None:  # all parts share it
                rank = len(down)
                layers |= {part: LoRALayerWeights(part, rank, rank, down, self._in_use[part + UP]) for part in parts}
        self._manager.add_adapter(LoRAModel(ENGINE_ADAPTER, rank, layers))
        self._manager.activate_adapter(ENGINE_ADAPTER)
