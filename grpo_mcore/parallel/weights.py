"""Loading and exporting one policy rank's weights, slice by slice, from the family's declaration of its parameters.

No rank ever holds the whole model: loading reads only this rank's slices of the safetensors files, exporting writes
them in place into files that all ranks share.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from grpo_mcore.families import Box, HfTensor, ModelShape, Param, Split, Stage, params_of, pieces
from grpo_mcore.parallel.layout import Coordinates, Layout

SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class WeightsError(ValueError):
    """A Hugging Face checkpoint lacks what the model needs."""


class ShardedWeights:
    """This rank's parameters, each with the Hugging Face slices that it holds."""

    def __init__(self, chunks: Sequence[torch.nn.Module], shape: ModelShape, layout: Layout, here: Coordinates) -> None:
        """`chunks`: this rank's model chunks, one unless the pipeline is interleaved."""
        self.shape, self.layout, self.here = shape, layout, here
        self.local: list[tuple[Param, Tensor]] = []
        self.names: list[str] = []  # names of the parameters in `local`, as the refit plan uses them
        self.additions: dict[str, Callable[[], Tensor]] = {}  # by parameter name: what its adapter adds to its values
        for index, chunk in enumerate(chunks):
            named, buffers = dict(chunk.named_parameters()), dict(chunk.named_buffers())
            for param in params_of(shape):
                name = self._local_name(param, chunk)
                tensor = (buffers if param.buffer else named).pop(name, None)
                if name is not None and tensor is not None:
                    self.local.append((param, tensor))
                    self.names.append(f"{index}:{name}" if len(chunks) > 1 else name)
            assert not named, f"parameters that the {shape.family} family does not declare: {sorted(named)}"
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
        at = param.layer - (layers[0].layer_number - 1) if layers else -1
        expert = None
        if param.expert is not None:
            index, count = param.expert
            on_rank = count // self.layout.expert
            if index // on_rank != self.here.expert:
                return None
            expert = index % on_rank
        return param.megatron.format(layer=at, expert=expert) if 0 <= at < len(layers) else None

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

    def slices(self, *, owned_only: bool) -> Iterator[tuple[str, Box, Tensor]]:
        """Yield (Hugging Face name, box in that tensor, values); the values are a view unless there is an adapter.

        `owned_only`, for export: yield every slice on exactly one rank of the whole mesh, that is on data-parallel and
        context-parallel rank 0, for replicated tensors on tensor-parallel rank 0, and no copies of tied embeddings.
        """
        merged = self.parameters()
        for name, (param, _) in zip(self.names, self.local, strict=True):
            if owned_only and not self._owns(param):
                continue
            values = merged[name]
            for piece in pieces(param, self.shape, *self.split(param)):
                yield piece.hf, piece.hf_box, values[_index(piece.local_box)]

    def parameters(self) -> Mapping[str, Tensor]:
        """Return this rank's tensors by Megatron-Core's name, prefixed by the model chunk if there are several.

        A refit reads from these. A parameter is merged with its adapter when it is looked up.
        """
        tensors = {name: tensor.detach() for name, (_, tensor) in zip(self.names, self.local, strict=True)}
        return Merged(tensors, self.additions) if self.additions else tensors

    @torch.no_grad()
    def load_hf(self, folder: str | Path) -> None:
        """Read this rank's slices of the safetensors files in `folder`. Raises WeightsError if one is missing."""
        reader = _SafetensorsFolder(Path(folder))
        for _, tensor in self.local:
            tensor.zero_()  # vocabulary padding stays zero
        for name, box, view in self.slices(owned_only=False):
            view.copy_(reader.read(name, box))

    def export_hf(self, folder: str | Path, source: str | Path, *, shard_bytes: int = 4 << 30) -> None:
        """Write a folder that transformers and vLLM can load. Collective; all ranks need to see its file system.

        `source`: the folder that the model came from; its config, tokenizer and generation settings are copied.
        """
        folder, rank = Path(folder), torch.distributed.get_rank()
        dtype = self.local[0][1].dtype
        files = plan_files(hf_tensors(self.shape), dtype.itemsize, shard_bytes)
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for path in Path(source).iterdir():
                if path.is_file() and not path.name.endswith((".safetensors", ".bin", ".index.json")):
                    shutil.copy(path, folder / path.name)
            for name, tensors in files.items():
                _create_file(folder / name, tensors, dtype)
            if len(files) > 1:
                where = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
                (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
        torch.distributed.barrier()
        targets: dict[str, Tensor] = {}
        for name, tensors in files.items():
            targets |= _map_file(folder / name, tensors, dtype)
        for hf_name, box, view in self.slices(owned_only=True):
            targets[hf_name][_index(box)].copy_(view)
        del targets
        torch.distributed.barrier()


class Merged(Mapping[str, Tensor]):
    """Tensors by name, some with an addition. Each look-up computes the sum anew; nothing is kept."""

    def __init__(self, tensors: Mapping[str, Tensor], additions: Mapping[str, Callable[[], Tensor]]) -> None:
        self._tensors, self._additions = tensors, additions

    def __getitem__(self, name: str) -> Tensor:
        tensor, addition = self._tensors[name], self._additions.get(name)
        return tensor if addition is None else (tensor.float() + addition()).to(tensor.dtype)

    def __contains__(self, name: object) -> bool:  # Mapping's default would compute the sum
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def hf_tensors(shape: ModelShape) -> list[HfTensor]:
    """Return every tensor of the Hugging Face checkpoint once, in the order of the forward pass."""
    return [tensor for param in params_of(shape) if not param.copy for tensor in param.hf]


def plan_files(tensors: list[HfTensor], itemsize: int, shard_bytes: int) -> dict[str, list[HfTensor]]:
    """Assign tensors, in order, to safetensors files of at most `shard_bytes`, unless one tensor is larger."""
    groups: list[list[HfTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if size and size + tensor.numel * itemsize > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.numel * itemsize
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


class _SafetensorsFolder:
    """Reads boxes of tensors from whichever file of the folder holds them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise WeightsError(f"policy.model_name: {folder} contains no .safetensors file")
        self.files = [safe_open(path, framework="pt") for path in paths]
        self.where = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118

    def read(self, name: str, box: Box) -> Tensor:
        if name not in self.where:
            raise WeightsError(f"{self.folder} lacks the tensor {name}; it has {len(self.where)} others")
        tensor = self.where[name].get_slice(name)
        shape = tensor.get_shape()
        if len(shape) != len(box) or any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
            raise WeightsError(f"{self.folder}: {name} has shape {shape}, which contradicts config.json")
        return tensor[_index(box)]


def _dtype_of(tensor: HfTensor, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if tensor.float32 else dtype


def _header(tensors: list[HfTensor], dtype: torch.dtype) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the safetensors header, padded to 8 bytes, and the byte range of each tensor after it."""
    ranges, at = {}, 0
    for tensor in tensors:
        ranges[tensor.name] = (at, at + tensor.numel * _dtype_of(tensor, dtype).itemsize)
        at = ranges[tensor.name][1]
    entries = {
        t.name: {
            "dtype": SAFETENSORS_NAMES[_dtype_of(t, dtype)],
            "shape": t.shape,
            "data_offsets": ranges[t.name],
        }
        for t in tensors
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, ranges


def _create_file(path: Path, tensors: list[HfTensor], dtype: torch.dtype) -> None:
    header, ranges = _header(tensors, dtype)
    with open(path, "wb") as file:
        file.write(header)
        os.ftruncate(file.fileno(), len(header) + max(stop for _, stop in ranges.values()))


def _map_file(path: Path, tensors: list[HfTensor], dtype: torch.dtype) -> dict[str, Tensor]:
    header, ranges = _header(tensors, dtype)
    flat = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)[len(header) :]
    return {t.name: flat[slice(*ranges[t.name])].view(_dtype_of(t, dtype)).view(t.shape) for t in tensors}


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
