"""Low-rank adapters (LoRA) on the policy's linear layers: each frozen weight acts as W + scale * up @ down.

Only the adapters are trained. An export writes the merged weights or the adapters, and a refit sends either.
"""

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.parallel_state import get_expert_tensor_parallel_group
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear

from grpo_mcore.families import AdapterShape, FamilyError, Param, Split, adapters_of, params_of, pieces
from grpo_mcore.families.adapters import Adapter, layer_name
from grpo_mcore.layout import Coordinates, PolicyLayout
from grpo_mcore.parallel.layers.sharded_parts import sharded_in_parts
from grpo_mcore.parallel.weights.weights import ShardedWeights


def attach_adapters(chunks: Sequence[Any], weights: ShardedWeights, shape: AdapterShape, init: str, seed: int) -> None:
    """Freeze this rank's chunks and add adapters to their linear layers; `up` is zero, so nothing changes yet.

    `init`: how `down` is drawn, see `initial_down`. The same seed gives the same values on every layout.
    Raises FamilyError if a pipeline stage would have nothing to train.
    """
    adapters = adapters_of(params_of(weights.shape), shape)
    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.adapters = Adapters(weights.layout, weights.here)
        if chunk.post_process and weights.shape.head == "value":  # it begins at 0, which would stop every gradient
            chunk.output_layer.requires_grad_(True)
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_start_gradient)
    for name, (param, tensor) in zip(weights.names, weights.local, strict=True):
        if param not in adapters:
            continue
        index, _, inner = name.rpartition(":")
        chunk = chunks[int(index or 0)]
        addition = LowRank(adapters[param], tensor, weights, shape, init, seed, chunk.config.sequence_parallel)
        chunk.adapters.add(addition, chunk.get_submodule(inner.removesuffix(".weight")))
        weights.additions[name] = addition.product
        weights.adapters |= {name.removesuffix(".weight") + end: part for end, part in addition.parts().items()}
    if not all(len(chunk.adapters.all) for chunk in chunks):
        raise FamilyError(
            "policy.megatron_cfg.peft: no layer of a pipeline stage has an adapter, which leaves it nothing to train; "
            "name other target_modules, or use fewer stages"
        )


def _start_gradient(_module: Any, _arguments: Any, embeddings: Tensor) -> Tensor:
    """Make the frozen embedding's output require a gradient: recomputed layers get none unless their input does."""
    return embeddings.requires_grad_() if torch.is_grad_enabled() else embeddings


def kept_features(rate: float, inputs: int, seed: int) -> Tensor:
    """Draw which input features an adapter keeps, float32 [inputs]: 0, or 1 / (1 - rate)."""
    kept = torch.rand(inputs, generator=torch.Generator().manual_seed(seed)) >= rate
    return kept / (1 - rate)


def initial_down(init: str, rank: int, inputs: int, seed: int) -> Tensor:
    """Draw an adapter's `down` [rank, inputs], float32. xavier: normal, variance 2 / (rank + inputs); kaiming: uniform,
    variance 1 / (3 inputs); normal: normal, standard deviation 0.2."""
    generator, down = torch.Generator().manual_seed(seed), torch.empty(rank, inputs)
    match init:
        case "xavier":
            return torch.nn.init.xavier_normal_(down, generator=generator)
        case "kaiming":
            return torch.nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
        case _:
            return down.normal_(0.0, 0.2, generator=generator)


class LowRank(torch.nn.Module):
    """The adapter of one linear layer: adds scale * up @ (down @ x), on this tensor-parallel rank's shard."""

    def __init__(
        self,
        adapter: Adapter,
        weight: Tensor,
        weights: ShardedWeights,
        shape: AdapterShape,
        init: str,
        seed: int,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.adapter, self.scale, self.sequence_parallel = adapter, shape.scale, sequence_parallel
        self._seed = f"{seed} {layer_name(adapter.weight)}"
        self._kept: Tensor | None = None  # [inputs on this rank], see `drop`
        rank, inputs = adapter.down.hf[0].shape
        whole = initial_down(init, rank, inputs, zlib.crc32(self._seed.encode()))
        (piece,) = pieces(adapter.down, weights.shape, *weights.split(adapter.down))
        self._box = tuple(slice(*span) for span in piece.hf_box)
        down = whole[self._box]
        self.down = Parameter(down.to(weight.device, weight.dtype))
        self.up = Parameter(weight.new_zeros(weight.size(0), shape.rank))
        self._mark(self.down, adapter.down, weights.here)
        self._mark(self.up, adapter.up, weights.here)
        self._expert_group = None
        if adapter.weight.expert is not None and weights.layout.expert_tensor > 1:
            self._expert_group = get_expert_tensor_parallel_group()

    def _mark(self, part: Parameter, param: Param, coordinates: Coordinates) -> None:
        """Set the attributes by which Megatron-Core reduces the gradient and counts it in the norm."""
        part.tensor_model_parallel = param.split is not Split.REPLICATED
        if param.expert is not None:
            part.allreduce = False
            part.tensor_model_parallel = part.tensor_model_parallel or coordinates.expert_tensor == 0
        elif param.split is Split.REPLICATED:
            # Under sequence parallelism each rank has the gradient of its own tokens only.
            part.sequence_parallel = self.sequence_parallel

    def drop(self, rate: float, step: int) -> None:
        """Leave out the input features that dropout of this rate draws for the step; rate 0: keep all.

        A feature is left out for all tokens of the step, as a column of `down`. So the draw needs no token positions:
        it is the same in every pass of the step (log-probs, training, recomputation) and on every layout.
        """
        self._kept = None
        if rate > 0:
            inputs = self.adapter.down.hf[0].shape[1]
            kept = kept_features(rate, inputs, zlib.crc32(f"{self._seed} {step}".encode()))
            self._kept = kept[self._box[1]].to(self.down.device, self.down.dtype)

    def acting_down(self) -> Tensor:
        """Return `down` without the features that are left out now."""
        return self.down if self._kept is None else self.down * self._kept

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.acting_down(), self.up
        if self._expert_group is not None:
            # The ranks of a split expert have the same tokens, and the dispatcher sums their outputs. So nothing is
            # communicated here but the gradient of the part that is whole on each of them.
            if self.adapter.weight.split is Split.COLUMNS:
                up = copy_to_tensor_model_parallel_region(up, self._expert_group)
            else:
                down = copy_to_tensor_model_parallel_region(down, self._expert_group)
        low = linear(x, down)
        if self.adapter.weight.expert is None:
            low = self._communicate(low)
        return linear(low, up) * self.scale

    def _communicate(self, low: Tensor) -> Tensor:
        """Communicate over tensor-parallel ranks between `down` and `up`, as Megatron-Core does around its own weights.

        Weights split by columns: sum the ranks' partial results. Otherwise: gather all tokens, and sum the gradients.
        """
        match self.adapter.weight.split:
            case Split.REPLICATED:
                return low
            case Split.COLUMNS:
                reduce = reduce_from_tensor_model_parallel_region
                return reduce_scatter_to_sequence_parallel_region(low) if self.sequence_parallel else reduce(low)
            case _:
                copy = copy_to_tensor_model_parallel_region
                return gather_from_sequence_parallel_region(low) if self.sequence_parallel else copy(low)

    def parts(self) -> dict[str, Callable[[], Tensor]]:
        """Return what looks up each part as a refit sends it: the scale is in `up`."""
        return {".down": lambda: self.down.detach(), ".up": lambda: self.up.detach() * self.scale}

    @torch.no_grad()
    def product(self) -> Tensor:
        """Return scale * up @ down for this rank's slice of the weight, float32."""
        return self.scale * (self.up.float() @ self.acting_down().float())


class Adapters(torch.nn.Module):
    """All adapters of one model chunk. Inside `disabled()` the network is the frozen one: the reference policy."""

    def __init__(self, layout: PolicyLayout, coordinates: Coordinates) -> None:
        super().__init__()
        self.layout, self.here = layout, coordinates
        self.all = torch.nn.ModuleList()
        self._enabled = True

    def add(self, addition: LowRank, layer: torch.nn.Module) -> None:
        """Add `addition` to the output of `layer`, which is a tensor or a tuple that starts with one."""
        self.all.append(addition)

        def hook(_layer: Any, arguments: tuple[Tensor, ...], output: Any) -> Any:
            if not self._enabled:
                return output
            more = addition(arguments[0])
            return (output[0] + more, *output[1:]) if isinstance(output, tuple) else output + more

        layer.register_forward_hook(hook)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        self._enabled = False
        try:
            yield
        finally:
            self._enabled = True

    @contextlib.contextmanager
    def dropping(self, rate: float, step: int) -> Iterator[None]:
        """Apply dropout of this rate, with the draw of this step."""
        for addition in self.all:
            addition.drop(rate, step)
        try:
            yield
        finally:
            for addition in self.all:
                addition.drop(0.0, step)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron-Core's sharded tensors, by name and position in the whole model."""
        sharded = {}
        for index, addition in enumerate(self.all):
            for kind, param in (("down", addition.adapter.down), ("up", addition.adapter.up)):
                sharded[f"{prefix}all.{index}.{kind}"] = self._sharded(getattr(addition, kind), param)
        return sharded

    def _sharded(self, part: Tensor, param: Param) -> Any:
        coordinates, layout = self.here, self.layout
        replica = (0, 0, coordinates.data * layout.context + coordinates.context)
        offsets = []
        rank, size = coordinates.tensor, layout.tensor
        if param.expert is not None:
            rank, size = coordinates.expert_tensor, layout.expert_tensor
            replica = (0, rank if param.split is Split.REPLICATED else 0, coordinates.expert_copy)
        elif param.split is Split.REPLICATED:
            replica = (0, coordinates.tensor, replica[2])
        if param.split is not Split.REPLICATED:
            offsets = [(int(param.split is Split.COLUMNS), rank, size)]
        sharded = ShardedTensor.from_rank_offsets(f"adapters.{layer_name(param)}", part, *offsets, replica_id=replica)
        if param.split is Split.PARTS:
            return sharded_in_parts(sharded, [part // layout.tensor for part in param.parts])
        return apply_swiglu_sharded_factory(sharded, ()) if param.split is Split.GATE_UP else sharded
