"""A policy checkpoint as a Hugging Face folder, made by one process on the CPU, whatever layout wrote the checkpoint.

The network is built without memory for its weights. It only says where each parameter lies in the checkpoint; the
values are read for one safetensors file at a time, so memory holds at most the weights of the largest file, twice.
"""

import contextlib
import json
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from grpo_mcore.base import processes
from grpo_mcore.families import (
    AdapterShape,
    ModelShape,
    Param,
    adapter_shape,
    frozen_parts,
    is_trained,
    pieces,
    read_hf_config,
    shape_of,
)
from grpo_mcore.layout import Coordinates, PolicyLayout
from grpo_mcore.parallel.finite import all_finite
from grpo_mcore.parallel.mesh import Address, join_mesh, leave_mesh
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.parallel.weights.hf_folder import SHARD_BYTES, Formats, HfFolderWriter, copy_tokenizer, index_of
from grpo_mcore.recipe import MegatronConfig, PolicyConfig

ONE_RANK = PolicyLayout(1, 1, 1)
JOIN_TIMEOUT_S = 60.0
SIZES = (
    *("family", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("ffn_hidden_size", "vocab_size", "tied_embeddings"),
)
"""Fields of a model's shape that a checkpoint and the config.json of its model have in common."""
PEFT_PREFIX = "base_model.model."
MODULE_ROOTS = {"backbone.": "model.", "language_model.model.": "model.language_model."}
"""Beginnings of tensors' names in checkpoints of Nemotron-H and Gemma 3, and those of their modules in transformers,
which PEFT looks for. vLLM takes either."""
FUSED_IN_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Layers of which PEFT believes, in a model with experts, that they are the experts': transformers has these as stacks.
So it would leave out the adapters of dense layers and of shared experts, unless it is given their parameters."""


class ExportError(ValueError):
    """A checkpoint cannot be written in the format asked for."""


def export_merged(
    checkpoint: Path,
    config: PolicyConfig,
    source: Path,
    target: Path,
    *,
    tokenizer: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights of `checkpoint`, merged with their adapters, as a folder that transformers and vLLM load.

    `checkpoint`: the policy's part of a checkpoint. `config`: the policy section of its recipe. `source`: the folder of
    the model that the run started from, for the config and the tokenizer; `tokenizer`: name or folder of the tokenizer,
    if it is another one; its template is that of `config`. Raises ExportError if a tensor is missing or unreadable.
    """
    with one_rank():
        reader = CheckpointReader(checkpoint, config, _shape(source, config))
        trained = partial(is_trained, shape=reader.adapters, frozen=frozen_parts(config.megatron_cfg))
        formats = Formats.of(reader.dtype, source, reader.shape, trained)
        writer = HfFolderWriter(target, reader.shape, formats, shard_bytes)
        template, values = config.tokenizer.chat_template, config.tokenizer.chat_template_kwargs or {}
        writer.create(source, tokenizer, config.hf_config_overrides, template, values)
        for name, params in writer.files.items():
            writer.write(name, reader.slices(set(params)))


def export_adapter(
    checkpoint: Path, config: PolicyConfig, source: Path, base: str, target: Path, *, tokenizer: str | None = None
) -> None:
    """Write the adapters of `checkpoint` into the folder `target`, in the format of PEFT, with the tokenizer and the
    template that trained.

    `base`: the name of the model that the adapters belong to; the others as in `export_merged`. Raises ExportError if
    there are none, if a head was trained beside them, if one belongs to an expert of a family for which PEFT has no
    place for it, if one is not finite, or if a tensor is missing.
    """
    from safetensors.torch import save_file

    if config.head == "value":
        raise ExportError("the head of one output was trained beside the adapters: export the whole, without --adapter")
    with one_rank():
        reader = CheckpointReader(checkpoint, config, _shape(source, config))
        tensors = reader.peft_tensors()
    assert reader.adapters is not None
    if broken := [name for name, tensor in tensors.items() if not all_finite([tensor])]:
        raise ExportError(f"{broken[0]} holds NaN or infinite values: such adapters are not exported")
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    modules = {name.removeprefix(PEFT_PREFIX).partition(".lora_")[0] for name in tensors}
    of_experts = {name for name in modules if ".experts." in name}
    as_parameters = {name for name in modules - of_experts if reader.shape.experts and name.endswith(FUSED_IN_EXPERTS)}
    kinds = {name.rpartition(".")[2] for name in of_experts}  # by which PEFT knows them before it stacks them
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": reader.adapters.rank,
        "lora_alpha": reader.adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [*sorted(kinds), *sorted(modules - of_experts - as_parameters)],
        **({"target_parameters": [f"{name}.weight" for name in sorted(as_parameters)]} if as_parameters else {}),
        "inference_mode": True,
    }
    template, values = config.tokenizer.chat_template, config.tokenizer.chat_template_kwargs or {}
    copy_tokenizer(target, source, tokenizer, template, values)
    (target / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _shape(source: Path, config: PolicyConfig) -> ModelShape:
    return shape_of(read_hf_config(source, config.hf_config_overrides), config.head)


def _stacked_by_peft(shape: ModelShape) -> bool:
    """Return whether PEFT makes adapters of stacks of those of single experts: not for GPT-OSS, Nemotron-H, Qwen3.5 and
    Qwen3-VL."""
    of_qwen3_5 = shape.delta is not None and not shape.delta.inputs_by_head
    return shape.family not in ("gpt_oss", "nemotron_h") and not (of_qwen3_5 or shape.stacked_experts)


def module_name(name: str, shape: ModelShape) -> str:
    """Return the name that transformers has for a module whose weights have this name in a checkpoint."""
    if shape.vision is not None and shape.root == "model":  # Qwen2.5-VL
        return re.sub(r"^model\.", "model.language_model.", name)
    root = next((root for root in MODULE_ROOTS if name.startswith(root)), "")
    return MODULE_ROOTS.get(root, "") + name.removeprefix(root)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Be the only rank of a mesh on the CPU; Megatron-Core needs one to build a network and to read a checkpoint."""
    address = Address(0, 1, 0, "127.0.0.1", processes.free_port())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron-Core and torch, on which no reader can act
        join_mesh(ONE_RANK, address, seed=0, timeout_s=JOIN_TIMEOUT_S, platform=Platform("cpu"))
        try:
            yield
        finally:
            leave_mesh()


class CheckpointReader:
    """Reads the parameters of a policy checkpoint, a few at a time. Needs a mesh of one rank."""

    def __init__(self, folder: Path, config: PolicyConfig, shape: ModelShape) -> None:
        """Raises ExportError if `folder` is no checkpoint of this model, or lacks a tensor."""
        from grpo_mcore.parallel.model import build_model
        from grpo_mcore.parallel.weights.adapters import attach_adapters
        from grpo_mcore.parallel.weights.weights import ShardedWeights

        if not (folder / "metadata.json").is_file():
            raise ExportError(f"{folder} is not a policy checkpoint: metadata.json is missing")
        self.folder, self.shape = folder, shape
        self.dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.precision]
        self.adapters: AdapterShape | None = adapter_shape(config.megatron_cfg.peft)
        # Only these settings decide which parameters there are; the others may not suit a single rank.
        peft = config.megatron_cfg.peft
        with torch.device("meta"):
            networks = build_model(shape, ONE_RANK, MegatronConfig(peft=peft), self.dtype, Platform("cpu"))
        self._check_sizes()
        self.weights = ShardedWeights(networks, shape, ONE_RANK, Coordinates(0, 0, 0))
        if self.adapters is not None:
            attach_adapters(networks, self.weights, self.adapters, peft.lora_A_init_method, seed=0)
        self._additions = {}  # name of a weight -> (its adapter, the names of its parts)
        for index, addition in enumerate(networks[0].adapters.all if self.adapters is not None else ()):
            by_param = dict(zip((param for param, _ in self.weights.local), self.weights.names, strict=True))
            name = by_param[addition.adapter.weight]
            self._additions[name] = (addition.adapter, f"adapters.all.{index}.down", f"adapters.all.{index}.up")
        self._entries: dict[str, Any] = networks[0].sharded_state_dict()
        self._saved = SavedTensors(folder)
        self._check()

    def slices(self, params: Collection[Param]) -> Iterator[tuple[str, Any, Tensor]]:
        """Yield (Hugging Face tensor, box in it, values) of these parameters, merged with their adapters."""
        from grpo_mcore.parallel.weights.weights import Merged

        names = [
            name for name, (param, _) in zip(self.weights.names, self.weights.local, strict=True) if param in params
        ]
        parts = [part for name in names if name in self._additions for part in self._additions[name][1:]]
        values = self.read([*names, *parts])
        scale = self.adapters.scale if self.adapters is not None else 0.0

        def product(down: str, up: str) -> Tensor:
            return scale * (values[up].float() @ values[down].float())

        additions = {name: partial(product, *names) for name, (_, *names) in self._additions.items() if name in values}
        yield from self.weights.slices(owned_only=True, among=params, values=Merged(values, additions))

    def peft_tensors(self) -> dict[str, Tensor]:
        """Return the adapters by PEFT's names. Where our adapter spans several of the model's layers (query, key and
        value; gate and up), each gets a copy of `down` and its rows of `up`."""
        if self.adapters is None:
            raise ExportError("the checkpoint has no adapters (policy.megatron_cfg.peft); leave --adapter out")
        experts = [adapter for adapter, *_ in self._additions.values() if adapter.weight.expert is not None]
        if experts and not _stacked_by_peft(self.shape):
            raise ExportError(
                f"{len(experts)} adapters belong to experts, which transformers keeps as stacks, and PEFT cannot adapt "
                f"those of a {self.shape.family} model one by one; leave --adapter out to export the merged model"
            )
        values = self.read([part for _, *parts in self._additions.values() for part in parts])
        tensors = {}
        for adapter, down, up in self._additions.values():
            for piece in pieces(adapter.up, self.shape, 0, 1):
                layer = PEFT_PREFIX + module_name(piece.hf.removesuffix(".weight.up"), self.shape)
                if f"{layer}.lora_B.weight" not in tensors:
                    tensor = next(tensor for tensor in adapter.up.hf if tensor.name == piece.hf)
                    tensors[f"{layer}.lora_A.weight"] = values[down].clone()
                    tensors[f"{layer}.lora_B.weight"] = values[up].new_empty(tensor.shape)
                tensors[f"{layer}.lora_B.weight"][index_of(piece.hf_box)] = values[up][index_of(piece.local_box)]
        return tensors

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return these entries of the checkpoint, whole."""
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace

        built = {name: _built(self._entries[name]) for name in names}
        values = self._saved.read([part for structure in built.values() for part in _parts(structure)])
        tensors = {}
        for name, structure in built.items():
            loaded = dict_list_map_outplace(lambda part: values[part.key, part.global_offset], structure)
            merge = getattr(self._entries[name], "merge_fn", None)  # of an entry that is saved in several parts
            tensors[name] = loaded if merge is None else merge(loaded)
        return tensors

    def _check_sizes(self) -> None:
        """Raise ExportError if the checkpoint is of a model of other sizes: parts of its tensors would be read."""
        from megatron.core import dist_checkpointing

        try:
            saved = dist_checkpointing.load_common_state_dict(str(self.folder))["shape"]
        except Exception as error:  # as of a damaged .metadata
            raise ExportError(f"{self.folder}/common.pt cannot be read: {type(error).__name__}: {error}") from error
        described = {name: getattr(self.shape, name) for name in SIZES}
        for name, value in described.items():
            if saved.get(name, value) != value:
                raise ExportError(
                    f"{self.folder} holds a model of {name} {saved[name]}, and its config.json says {value}; give the "
                    "folder of the model that the run started from with --model"
                )

    def _check(self) -> None:
        """Raise ExportError if the checkpoint lacks a tensor that this model has."""
        hf_names = {
            name: ", ".join(tensor.name for tensor in param.hf)
            for name, (param, _) in zip(self.weights.names, self.weights.local, strict=True)
        }
        for adapter, down, up in self._additions.values():
            hf_names |= {part: f"the adapter of {adapter.weight.hf[0].name}" for part in (down, up)}
        saved, lacking = self._saved.tensors, dict[str, str]()
        for name, meaning in hf_names.items():
            if name not in self._entries:
                raise ExportError(f"Megatron-Core saves no {name}, which holds {meaning}")
            lacking |= {part.key: meaning for part in _parts(_built(self._entries[name])) if part.key not in saved}
        if lacking:
            key, meaning = next(iter(lacking.items()))
            more = f", and {len(lacking) - 1} others" if len(lacking) > 1 else ""
            raise ExportError(f"{self.folder} lacks the tensor {key} ({meaning}){more}; it has {len(saved)} others")


class SavedTensors:
    """The tensors of a checkpoint by name, of which any box can be read, whichever ranks wrote its parts.

    Megatron-Core's own loading wants every shard of a tensor at once, and all layers of a kind are one tensor there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, FileSystemReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:  # it unpickles, so a damaged file can raise anything
            raise ExportError(f"{folder}/.metadata cannot be read: {type(error).__name__}: {error}") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        stored = metadata.state_dict_metadata.items()
        self.tensors = {name: tensor for name, tensor in stored if isinstance(tensor, TensorStorageMetadata)}

    def read(self, parts: Iterable[Any]) -> dict[tuple[str, tuple[int, ...]], Tensor]:
        """Return the values of Megatron-Core's ShardedTensors by (name, offset). Raises ExportError."""
        values, chunks = dict[tuple[str, tuple[int, ...]], Tensor](), defaultdict[str, list[ChunkStorageMetadata]](list)
        for part in parts:
            values[part.key, part.global_offset] = torch.empty(part.local_shape, dtype=part.dtype)
            size = (*[1] * part.prepend_axis_num, *part.local_shape)  # the number of the layer or expert comes first
            chunks[part.key].append(ChunkStorageMetadata(torch.Size(part.global_offset), torch.Size(size)))
        items = [
            item
            for key, count in chunks.items()
            for item in create_read_items_for_chunk_list(key, self.tensors[key], count)
        ]
        covered = Counter[tuple[str, tuple[int, ...]]]()
        for item in items:
            covered[_key(item.dest_index)] += math.prod(item.lengths)
        for key, tensor in values.items():
            if covered[key] != tensor.numel():
                raise ExportError(f"{self.folder}: {key[0]} at {list(key[1])} is not complete in the checkpoint")
        try:
            self._reader.read_data(LoadPlan(items), _Into(values))
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            names = ", ".join(list(chunks)[:3])
            raise ExportError(f"{self.folder}: {names}, ... cannot be read: {error}") from error
        return values


class _Into(DefaultLoadPlanner):
    """Gives torch's reader the tensors to read into."""

    def __init__(self, values: Mapping[tuple[str, tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self._values = values

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor = self._values[_key(index)]
        assert index.offset is not None
        return tensor.view(*[1] * (len(index.offset) - tensor.dim()), *tensor.shape)


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    assert index.offset is not None
    return index.fqn, tuple(index.offset)


def _built(entry: Any) -> Any:
    """Return the ShardedTensor of an entry, or those that it is saved as, in dicts and lists."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    return entry.build() if isinstance(entry, ShardedTensorFactory) else entry


def _parts(structure: Any) -> Iterator[Any]:
    """Yield every ShardedTensor of `_built`."""
    if isinstance(structure, dict | list):
        for inner in structure.values() if isinstance(structure, dict) else structure:
            yield from _parts(inner)
    else:
        yield structure
