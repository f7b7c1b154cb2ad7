"""Loading and exporting one policy rank's weights, slice by slice, from the family's declaration of its parameters.

No rank ever holds the whole model: loading reads only this rank's slices of the safetensors files, exporting writes
them in place into files that all ranks share.
"""

import logging
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.families import VALUE_HEAD, Box, ModelShape, Param, Split, Stage, params_of, pieces
from grpo_mcore.layout import Coordinates, PolicyLayout
from grpo_mcore.parallel.finite import all_finite
from grpo_mcore.parallel.weights.hf_folder import (
    SHARD_BYTES,
    Formats,
    HfFolderWriter,
    SafetensorsFolder,
    WeightsError,
    index_of,
    put_in_place,
)

log = logging.getLogger(__name__)

NOTE_S = 5.0
"""Seconds between two messages about weights that are still being read."""


class ShardedWeights:
    """This rank's parameters, each with the Hugging Face slices that it holds."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], shape: ModelShape, layout: PolicyLayout, coordinates: Coordinates
    ) -> None:
        """`chunks`: this rank's model chunks, one unless the pipeline is interleaved."""
        self.shape, self.layout, self.here = shape, layout, coordinates
        self.local: list[tuple[Param, Tensor]] = []
        self.names: list[str] = []  # names of the parameters in `local`, as the refit plan uses them
        self.additions: dict[str, Callable[[], Tensor]] = {}  # by parameter name: what its adapter adds to its values
        self.adapters: dict[str, Callable[[], Tensor]] = {}  # by name: the parts of adapters, the scale in `up`
        for index, chunk in enumerate(chunks):
            weights, buffers = dict(chunk.named_parameters()), dict(chunk.named_buffers())
            for param in params_of(shape):
                name = self._local_name(param, chunk)
                tensor = (buffers if param.buffer else weights).pop(name, None)
                if name is not None and tensor is not None:
                    self.local.append((param, tensor))
                    self.names.append(f"{index}:{name}" if len(chunks) > 1 else name)
            assert not weights, f"parameters that the {shape.family} family does not declare: {sorted(weights)}"
        for param, tensor in self.local:
            # Megatron-Core marks shards only when it initialises them. Without the mark the gradient norm treats them
            # as copies and counts only those of tensor-parallel rank 0.
            tensor.tensor_model_parallel = param.split is not Split.REPLICATED
            if param.expert is not None:
                # Their gradients are reduced over the ranks that hold the same experts. Megatron-Core marks this only
                # under expert parallelism, but ETP may differ from TP without it. No two ranks that the norm sums over
                # hold the same expert.
                tensor.allreduce, tensor.tensor_model_parallel = False, True

    def _local_name(self, param: Param, chunk: torch.nn.Module) -> str | None:
        """Return the parameter's name in this chunk; None if another rank or chunk holds it."""
        if param.stage is not Stage.LAYER:
            return param.megatron
        layers = chunk.decoder.layers
        layer = param.layer - (layers[0].layer_number - 1) if layers else -1
        expert = None
        if param.expert is not None:
            index, count = param.expert
            on_rank = count // self.layout.expert
            if index // on_rank != self.here.expert:
                return None
            expert = index % on_rank
        return param.megatron.format(layer=layer, expert=expert) if 0 <= layer < len(layers) else None

    def split(self, param: Param) -> tuple[int, int]:
        """Return (rank, size) of the dimension that the parameter is split over."""
        if param.expert is not None:
            return self.here.expert_tensor, self.layout.expert_tensor
        return self.here.tensor, self.layout.tensor

    def _owns(self, param: Param) -> bool:
        """Whether this rank, of those with the same values, is the one that exports them."""
        if param.copy:
            return False
        if param.expert is not None:
            return self.here.expert_copy == 0
        return not (self.here.data or self.here.context or (param.split is Split.REPLICATED and self.here.tensor))

    def slices(
        self, *, owned_only: bool, among: Collection[Param] | None = None, values: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Box, Tensor]]:
        """Yield (Hugging Face name, box in that tensor, values); the values are a view unless there is an adapter.

        `owned_only`, for export: yield every slice on exactly one rank of the whole mesh, that is on data-parallel and
        context-parallel rank 0, for replicated tensors on tensor-parallel rank 0, and no copies of tied embeddings.
        `among`: only of these parameters. `values`: tensors by parameter name, in place of `parameters()`.
        """
        values = self.parameters() if values is None else values
        for name, (param, _) in zip(self.names, self.local, strict=True):
            if (among is not None and param not in among) or (owned_only and not self._owns(param)):
                continue
            whole = values[name]
            for piece in pieces(param, self.shape, *self.split(param)):
                yield piece.hf, piece.hf_box, whole[index_of(piece.local_box)]

    def parameters(self) -> Mapping[str, Tensor]:
        """Return this rank's tensors by Megatron-Core's name, prefixed by the model chunk if there are several.

        A refit reads from these. A parameter is merged with its adapter when it is looked up.
        """
        tensors = {name: tensor.detach() for name, (_, tensor) in zip(self.names, self.local, strict=True)}
        return Merged(tensors, self.additions, self.adapters) if self.additions else tensors

    @torch.no_grad()
    def load_hf(self, folder: str | Path) -> None:
        """Read this rank's slices of the safetensors files in `folder`; a value head that it lacks is 0. Raises
        WeightsError if another one is missing or holds values that are not finite."""
        reader = SafetensorsFolder(Path(folder))
        for _, tensor in self.local:
            tensor.zero_()  # vocabulary padding stays zero
        done, whole, reported_at = 0, sum(tensor.nbytes for _, tensor in self.local), time.monotonic()
        for name, box, view in self.slices(owned_only=False):
            if name == VALUE_HEAD and name not in reader.where:
                continue
            view.copy_(reader.read(name, box))
            if not all_finite([view]):
                raise WeightsError(f"{folder}: {name} holds NaN or infinite values")
            done += view.nbytes
            if time.monotonic() - reported_at >= NOTE_S:
                reported_at = time.monotonic()
                log.info("weights: %.1f of %.1f GB", done / 1e9, whole / 1e9)

    def export_hf(
        self,
        folder: str | Path,
        source: str | Path,
        *,
        shard_bytes: int = SHARD_BYTES,
        is_trained: Callable[[Param], bool] = lambda param: True,
        overrides: Mapping[str, Any] = MappingProxyType({}),
        tokenizer: str | None = None,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Write a folder that transformers and vLLM can load. Collective; all ranks need to see its file system.

        `source`: the folder that the model came from; its config, tokenizer and generation settings are copied, and the
        tensors of parameters that were not trained.
        `overrides`: policy.hf_config_overrides. `tokenizer` and the others: as in `HfFolderWriter.create`.
        """
        folder, rank = Path(folder), torch.distributed.get_rank()
        partial = folder.with_name(f"tmp_{folder.name}")
        dtype = next(values.dtype for param, values in self.local if not any(tensor.float32 for tensor in param.hf))
        formats = Formats.of(dtype, Path(source), self.shape, is_trained)
        writer = HfFolderWriter(partial, self.shape, formats, shard_bytes)
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # left by an export that was killed
            writer.create(Path(source), tokenizer, overrides, chat_template, template_kwargs)
        torch.distributed.barrier()
        for name, params in writer.files.items():
            writer.write(name, self.slices(owned_only=True, among=set(params)))
        torch.distributed.barrier()
        if rank == 0:
            put_in_place(partial, folder)
        torch.distributed.barrier()


class Merged(Mapping[str, Tensor]):
    """Tensors by name, some with an addition, and the `parts` that additions are made of, which can be looked up too.
    Each look-up computes anew; nothing is kept."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        additions: Mapping[str, Callable[[], Tensor]],
        parts: Mapping[str, Callable[[], Tensor]] = MappingProxyType({}),
    ) -> None:
        self._tensors, self._additions, self._parts = tensors, additions, parts

    def __getitem__(self, name: str) -> Tensor:
        if name in self._parts:
            return self._parts[name]()
        tensor, addition = self._tensors[name], self._additions.get(name)
        return tensor if addition is None else (tensor.float() + addition()).to(tensor.dtype)

    def __contains__(self, name: object) -> bool:  # Mapping's default would compute the sum
        return name in self._tensors or name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
