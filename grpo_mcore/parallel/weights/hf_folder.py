"""A model's folder in Hugging Face's format: read slice by slice, and written file by file, by one process or by all
ranks of a mesh together."""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from grpo_mcore.families import (
    VALUE_HEAD,
    Box,
    HfTensor,
    ModelShape,
    Param,
    other_trainers_checkpoint,
    params_of,
    with_overrides,
)
from grpo_mcore.parallel.finite import all_finite
from grpo_mcore.rollout.tokenizer_file import NAMED_TEMPLATES, as_written, tokenizer_folder
from grpo_mcore.rollout.turn_end import turn_ends

SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
SHARD_BYTES = 2 << 30
CHUNK_BYTES = 64 << 20
"""Bytes that are read at a time where two stored tensors are compared."""
CARRIED = "model-carried.safetensors"
"""File of an export with the tensors that the policy does not train."""
NOT_COPIED = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ot", ".onnx"),
    *(".index.json", ".md"),
)
"""Endings of files that do not go from the source's folder into an export: other weights, and their description."""

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NO_WEIGHTS = ("consolidated", "adapter_model", "training_args", "optimizer")
"""Beginnings of safetensors files that hold no weights in transformers' form, in a folder without an index."""

ADAPTER = "adapter_config.json"
QUANTIZED_BESIDE = "hf_quant_config.json"
"""ModelOpt's file in the folder of a quantized model, whose config.json may not say that it is quantized."""

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
"""Endings of files with weights that are not read."""

READABLE = ("BF16", "F16", "F32", "F64")
"""Number formats that are read as they are. Others, such as F8_E4M3, have scales in further tensors."""

NEVER_READ = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Parts of names of buffers that old checkpoints hold, and that every implementation computes anew."""

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tiktoken.model", "chat_template.jinja", "chat_template.json"),
    "tekken.json",
)
"""Files that are the tokenizer's: an export has those of the tokenizer that trained, and no others."""

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.((?:gate_up|down)_proj(?:_bias)?)")
"""Names of `HfTensor`s with a stack."""


log = logging.getLogger(__name__)


class WeightsError(ValueError):
    """A Hugging Face checkpoint lacks what the model needs."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file. `dtype`: safetensors' name of it, such as BF16."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that hold a model's weights, as transformers and vLLM choose them: those that the
    index names, or model.safetensors, or all of them in a folder with neither. Others are left over from something
    else (an older export, Mistral's consolidated.safetensors), and a note says so.

    Raises WeightsError if there is none, if a file that the index names is missing, and if a model.safetensors lies
    beside an index that does not name it: transformers would read the one, and vLLM the other.
    """
    files = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    index, single = folder / INDEX, files.get(SINGLE)
    if index.is_file():
        listed = sorted(set(_read_index(index).values()))
        if missing := [name for name in listed if name not in files]:
            raise WeightsError(
                f"{index} names {len(listed)} files, and {len(missing)} of them are missing, such "
                f"as {missing[0]}; copy or download the model again"
            )
        if single is not None and SINGLE not in listed:
            raise WeightsError(
                f"{folder} holds {SINGLE} and an index of {len(listed)} other files; transformers "
                "reads the former, vLLM the latter: delete what does not belong to the model"
            )
        chosen = [files[name] for name in listed]
    elif single is not None:
        chosen = [single]
    else:
        chosen = [path for name, path in files.items() if not name.startswith(NO_WEIGHTS)]
    if not chosen:
        others = sorted(path.name for path in folder.iterdir() if path.name.endswith(OTHER_WEIGHTS))
        read_first = "which is not read: save the model with transformers' save_pretrained first"
        hint = f"; it has {others[0]}, {read_first}" if others else ""
        if (made_by := other_trainers_checkpoint(folder)) is not None:
            hint = f"; {made_by}"
        if (folder / ADAPTER).is_file():
            hint = " of a model; it is an adapter: merge it into its base model first (peft: merge_and_unload)"
        raise WeightsError(f"{folder} contains no .safetensors file{hint}")
    if ignored := [name for name, path in files.items() if path not in chosen]:
        by = "the index does not name them" if index.is_file() else "they are not the model's"
        log.warning("%s: not read, since %s: %s", folder, by, ", ".join(ignored))
    return chosen


def _read_index(path: Path) -> dict[str, str]:
    """Return tensor name -> file name. Raises WeightsError."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is no index: {type(error).__name__}: {error}") from error


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model's folder by name, from the headers of its files. Raises WeightsError for a file
    that is cut off or no safetensors file, for a tensor in two files, and for one that is not where the index says."""
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        for name, tensor in _read_header(path).items():
            if name in tensors:
                raise WeightsError(
                    f"{folder}: {name} is in {tensors[name].file.name} and in {path.name}; delete "
                    "the file that does not belong to the model"
                )
            tensors[name] = tensor
    if (index := folder / INDEX).is_file():
        for name, file in _read_index(index).items():
            if name not in tensors or tensors[name].file.name != file:
                raise WeightsError(f"{index} says that {name} is in {file}, but it is not there")
    return tensors


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file. Raises WeightsError."""
    try:
        size = path.stat().st_size  # of a cache, it may be a link to a file that is gone
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError(f"its header has {length:,} bytes, the file {size:,}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size < end:
            raise ValueError(f"it has {size:,} bytes, its header says {end:,}: it is cut off")
        return {name: StoredTensor(path, tuple(entry["shape"]), str(entry["dtype"])) for name, entry in header.items()}
    except PermissionError as error:
        raise WeightsError(f"{path} cannot be read by this user: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise WeightsError(f"{path} is no whole safetensors file: {error}; copy or download it again") from error


def check_weights(folder: Path, shape: ModelShape, *, required: bool = True) -> None:
    """Check the weights of a model's folder as a whole against what its family declares, without reading a value.

    Raises WeightsError for a tensor that is missing, has another shape than config.json gives it, or a number format
    that needs a conversion, and for tied embeddings with another output layer. A warning names tensors that nobody
    reads. A folder with a config alone passes where its weights are not `required`: they can be planned before they
    are there.
    """
    weights = (".safetensors", INDEX, *OTHER_WEIGHTS)
    if not required and not any(path.name.endswith(weights) for path in folder.iterdir()):
        return
    if (folder / QUANTIZED_BESIDE).is_file():
        raise WeightsError(
            f"{folder} holds {QUANTIZED_BESIDE}, by which vLLM takes it for a quantized model: give "
            "the model in bfloat16, or delete that file if the weights are not quantized"
        )
    tensors = stored_tensors(folder)
    if (folder / ADAPTER).is_file() and any(folder.glob("adapter_model.*")):
        raise WeightsError(
            f"{folder} holds a model and an adapter: transformers would add the adapter to it, and "
            "engines and policy would not. Merge them (peft: merge_and_unload), or take the adapter's files out"
        )
    read, missing = set[str](), list[str]()
    for param in params_of(shape):
        for tensor in param.hf:
            name, expected = _place_of(tensor, param, tensors)
            if name not in tensors and name == VALUE_HEAD:  # a language model's: a critic's head starts at 0
                read |= {other for other in tensors if other.endswith("lm_head.weight")}
                continue
            if name not in tensors:
                missing += [tensor.name] if tensor.name not in missing else []
                continue
            read.add(name)
            stored = tensors[name]
            if stored.shape == (0,):
                raise WeightsError(
                    f"{stored.file}: {name} is empty, as DeepSpeed's ZeRO-3 saves a model whose "
                    "parts were not gathered; make a whole one by zero_to_fp32.py in the checkpoint's folder"
                )
            if stored.shape != expected:
                raise WeightsError(
                    f"{stored.file}: {name} has shape {list(stored.shape)}, config.json "
                    f"(with hf_config_overrides) says {list(expected)}"
                )
            if stored.dtype not in READABLE:
                raise WeightsError(
                    f"{stored.file}: {name} is of type {stored.dtype}; only {', '.join(READABLE)} "
                    "can be read: convert the model to bfloat16 first"
                )
    if missing:
        raise WeightsError(
            f"{folder} lacks {len(missing)} tensors, such as {missing[0]}; it has {len(tensors)} "
            f"others, such as {next(iter(tensors), '')}. {_why_missing(missing, tensors)}"
        )
    if shape.tied_embeddings:
        words = next(param.hf[0].name for param in params_of(shape) if param.copy)
        read |= _check_tied(folder, words, tensors)
    unread = [
        name for name in tensors if name not in read and not any(part in name for part in (*shape.carried, *NEVER_READ))
    ]
    if unread:
        more = f", ... ({len(unread)} in all)" if len(unread) > 3 else ""
        log.warning("%s: nobody reads %s%s", folder, ", ".join(unread[:3]), more)


def _why_missing(missing: Sequence[str], tensors: Mapping[str, StoredTensor]) -> str:
    """Return what may have happened to a folder that lacks tensors of the model."""
    if any(".lora_A." in name or ".base_layer." in name for name in tensors):
        return "Adapters are not merged into it: merge them first (peft: merge_and_unload)"
    longer = next((name for name in tensors if name.endswith(f".{missing[0]}")), None)
    if longer is not None:
        return (
            f"The names begin with {longer.removesuffix(missing[0])}, as a wrapper of the model has left them: save "
            "the model inside it, or rename the tensors"
        )
    if any(missing[0] == f"model.{name}" for name in tensors):
        return "It was saved without its output layer (AutoModel): save the AutoModelForCausalLM"
    if list(missing) == ["lm_head.weight"]:
        return (
            "If its embeddings are tied, config.json must say so: set tie_word_embeddings: true there, or in "
            "hf_config_overrides"
        )
    if "lm_head.weight" in tensors and all(name.endswith("embed_tokens.weight") for name in missing):
        return "Its tied embeddings were saved under the other name: rename lm_head.weight in the file"
    return "Is config.json that of another model?"


def _check_tied(folder: Path, words: str, tensors: Mapping[str, StoredTensor]) -> set[str]:
    """Raise WeightsError if a model with tied embeddings has another output layer in its files, as one has whose
    output layer was trained by itself (PEFT's `modules_to_save`): transformers uses it, and the policy would not.
    Return the names of the output layer."""
    heads = {name for name in tensors if name.endswith("lm_head.weight")}
    reader = SafetensorsFolder(folder) if heads else None
    for name in heads:
        assert reader is not None
        head, embedding = (reader.where[key].get_slice(key) for key in (name, words))
        rows = tensors[name].shape[0]
        step = max(1, CHUNK_BYTES // (4 * tensors[name].shape[1]))
        if tensors[name].shape != tensors[words].shape or any(
            not torch.equal(head[start : start + step], embedding[start : start + step])
            for start in range(0, rows, step)
        ):
            raise WeightsError(
                f"config.json of {folder} says tie_word_embeddings, but {name} differs from {words}: set "
                "tie_word_embeddings: false there, or in hf_config_overrides, to use it, or delete it from the files"
            )
    return heads


def _place_of(tensor: HfTensor, param: Param, tensors: Mapping[str, StoredTensor]) -> tuple[str, tuple[int, ...]]:
    """Return the name and the whole shape that a tensor has in the folder, which may stack all experts'."""
    if tensor.name in tensors:
        return tensor.name, tensor.shape
    if tensor.stack is not None:
        return tensor.stored.name, tensor.stored.shape
    if (stacked := _in_stack(tensor.name)) is not None and param.expert is not None:
        rows = tensor.shape[0] * (1 if stacked[0].endswith("down_proj") else 2)
        return stacked[0], (param.expert[1], rows, *tensor.shape[1:])
    return tensor.name, tensor.shape


class SafetensorsFolder:
    """Reads boxes of tensors from whichever file of the folder holds them."""

    def __init__(self, folder: Path) -> None:
        """Raises WeightsError, as `stored_tensors` does."""
        self.folder = folder
        files: dict[Path, Any] = {}
        self.where: dict[str, Any] = {}
        self.stored = stored_tensors(folder)
        for name, tensor in self.stored.items():
            if tensor.file not in files:
                files[tensor.file] = safe_open(tensor.file, framework="pt")
            self.where[name] = files[tensor.file]

    def read(self, name: str, box: Box) -> Tensor:
        if name not in self.where and (stacked := _in_stack(name)) is not None and stacked[0] in self.where:
            return self._read_stacked(*stacked, box)
        if name not in self.where and (match := EXPERT.fullmatch(name)) and f"{match[1]}.{match[3]}" in self.where:
            expert, stack = int(match[2]), self.where[f"{match[1]}.{match[3]}"].get_slice(f"{match[1]}.{match[3]}")
            return _transposed(stack[(slice(expert, expert + 1), *reversed(index_of(box)))][0])
        if name not in self.where:
            raise WeightsError(f"{self.folder} lacks the tensor {name}; it has {len(self.where)} others")
        tensor = self.where[name].get_slice(name)
        shape = tensor.get_shape()
        if len(shape) != len(box) or any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
            raise WeightsError(f"{self.folder}: {name} has shape {shape}, which contradicts config.json")
        return tensor[index_of(box)]

    def _read_stacked(self, name: str, expert: int, part: int, box: Box) -> Tensor:
        """Read a box of one expert from a tensor that holds all; `part`: 1 is the second half of its rows."""
        tensor = self.where[name].get_slice(name)
        offset = part * tensor.get_shape()[1] // 2
        rows, columns = index_of(box)
        return tensor[expert : expert + 1, rows.start + offset : rows.stop + offset, columns][0]


def _in_stack(name: str) -> tuple[str, int, int] | None:
    """Return where a checkpoint that stacks its experts has this tensor: (name, expert, half of the rows)."""
    match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if match is None:
        return None
    stack = "down_proj" if match[3] == "down" else "gate_up_proj"
    return f"{match[1]}.{stack}", int(match[2]), int(match[3] == "up")


@dataclass(frozen=True)
class Formats:
    """The number formats of an export's tensors: `dtype`, but for those that are always float32 and those that training
    did not change, of which `reader` has the values and `untouched` the formats, by name in the export."""

    dtype: torch.dtype
    untouched: Mapping[str, torch.dtype] = field(default_factory=dict)
    reader: SafetensorsFolder | None = None

    @classmethod
    def of(cls, dtype: torch.dtype, source: Path, shape: ModelShape, is_trained: Callable[[Param], bool]) -> Self:
        """Return the formats of an export of a model that training started from. If `source` holds no weights, what
        training did not change is written as the policy holds it. Raises WeightsError where there is no `source`."""
        if not source.is_dir():
            raise WeightsError(
                f"the folder {source} is gone, whose config and tokenizer are needed: put it back, "
                "or give a copy of it to `grpo-mcore export CHECKPOINT --model FOLDER`"
            )
        if not any(path.name.endswith(".safetensors") for path in source.iterdir()):
            return cls(dtype)
        reader, by_name = SafetensorsFolder(source), {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
        found: dict[str, set[torch.dtype | None]] = {}
        for param in params_of(shape):
            for tensor in param.hf:
                stored = reader.stored.get(_place_of(tensor, param, reader.stored)[0])  # None: a head that began at 0
                kept = None if is_trained(param) or stored is None else by_name[stored.dtype]
                found.setdefault(tensor.stored.name, set()).add(kept)
        untouched = {name: formats.pop() for name, formats in found.items() if len(formats) == 1}
        return cls(dtype, {name: kept for name, kept in untouched.items() if kept is not None}, reader)

    def __getitem__(self, tensor: HfTensor) -> torch.dtype:
        always = torch.float32 if tensor.float32 else self.dtype
        return self.untouched.get(tensor.name, always)

    def nbytes(self, tensor: HfTensor) -> int:
        return tensor.numel * self[tensor].itemsize


class HfFolderWriter:
    """Writes a model's weights into `folder`, with the other files of `source`.

    `files`: the parameters of each safetensors file, in the order of the forward pass. One process calls `create`,
    then every process writes its slices. `formats`: a dtype stands for a model of which every tensor was trained.
    """

    def __init__(
        self, folder: Path, shape: ModelShape, formats: torch.dtype | Formats, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder, self.formats = folder, Formats(formats) if isinstance(formats, torch.dtype) else formats
        self.files, self._carried = plan_files(shape, self.formats, shard_bytes), shape.carried
        self._vocab_size, self._head = shape.vocab_size, shape.head

    def create(
        self,
        source: Path,
        tokenizer: str | Path | None = None,
        overrides: Mapping[str, Any] = MappingProxyType({}),
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Write everything but the weights: config, generation settings and tokenizer, and files of the right size.

        `tokenizer`: name or folder of the tokenizer that trained, if not that of `source`; `chat_template`: its
        template, as text or a file, if not its own; `template_kwargs`: values of its variables in training, which
        become their defaults. `overrides`: policy.hf_config_overrides, which become part of the config. Raises OSError
        if the disk is full.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in source.iterdir():
            is_written = path.name.endswith(NOT_COPIED) or path.name in TOKENIZER_FILES or path.name == ADAPTER
            if path.is_file() and not is_written:
                shutil.copyfile(path, self.folder / path.name)  # without its mode: some are changed afterwards
        _write_config(self.folder / "config.json", self.formats.dtype, overrides)
        if self._head == "value":
            _write_classifier(self.folder / "config.json")
        of_model = tokenizer is None or Path(tokenizer) == source
        trained = copy_tokenizer(self.folder, source, tokenizer, chat_template, template_kwargs)
        if trained is not None:
            _write_tokens(self.folder, trained, of_model, self._vocab_size, classifies=self._head == "value")
        for name, params in self.files.items():
            _create_file(self.folder / name, tensors_of(params), self.formats)
        carried = self._carry(source)
        if len(self.files) > 1 or self._carried:
            tensors = {name: tensors_of(params) for name, params in self.files.items()}
            where = {tensor.name: name for name, of_file in tensors.items() for tensor in of_file}
            size = sum(self.formats.nbytes(tensor) for of_file in tensors.values() for tensor in of_file)
            size += sum(tensor.nbytes for tensor in carried.values())
            where |= dict.fromkeys(carried, CARRIED)
            index = {"metadata": {"total_size": size}, "weight_map": where}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    def _carry(self, source: Path) -> dict[str, Tensor]:
        """Copy the tensors of `source` that the policy does not train, as they are, and return them by name."""
        if not self._carried:
            return {}
        if not any(path.name.endswith(".safetensors") for path in source.iterdir()):
            log.warning(
                "%s holds no weights: the export lacks those that the policy does not train (%s)",
                source,
                ", ".join(self._carried),
            )
            return {}
        reader = SafetensorsFolder(source)
        carried = {
            name: file.get_tensor(name)
            for name, file in reader.where.items()
            if any(part in name for part in self._carried)
        }
        if carried:
            save_file(carried, self.folder / CARRIED, metadata={"format": "pt"})
        return carried

    def write(self, name: str, slices: Iterable[tuple[str, Box, Tensor]]) -> None:
        """Write slices of tensors of file `name` in place, with the source's values where training changed nothing."""
        targets, stored = _map_file(self.folder / name, tensors_of(self.files[name]), self.formats), dict[str, str]()
        for tensor in (tensor for param in self.files[name] for tensor in param.hf):
            stored[tensor.name] = tensor.stored.name
            if tensor.stack is not None:
                targets[tensor.name] = _transposed(targets[tensor.stored.name][tensor.stack[0]])
        for hf_name, box, values in slices:
            if self.formats.reader is not None and stored[hf_name] in self.formats.untouched:
                values = self.formats.reader.read(hf_name, box)
            if not all_finite([values]):
                raise WeightsError(f"{hf_name} holds NaN or infinite values: such a model is not exported")
            targets[hf_name][index_of(box)].copy_(values)


def put_in_place(partial: Path, folder: Path) -> None:
    """Make the complete folder `partial` appear as `folder`, in place of an older one."""
    doomed = folder.with_name(f"tmp_old_{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    if folder.exists():
        os.replace(folder, doomed)
    os.replace(partial, folder)
    shutil.rmtree(doomed, ignore_errors=True)


def plan_files(shape: ModelShape, formats: Formats, shard_bytes: int) -> dict[str, list[Param]]:
    """Assign the model's parameters, in order, to files of at most `shard_bytes`, unless one parameter, or a layer's
    stacks of experts, are larger. The tensors of one parameter are in one file."""
    groups: list[list[Param]] = [[]]
    size = 0
    for param in params_of(shape):
        if param.copy:
            continue
        more = sum(formats.nbytes(tensor) for tensor in param.hf)
        within = bool(groups[-1] and groups[-1][-1].hf[0].stack and param.hf[0].stack)  # one file has a layer's stacks
        if size and size + more > shard_bytes and not within:
            groups.append([])
            size = 0
        groups[-1].append(param)
        size += more
    if len(groups) == 1 and not shape.carried:  # transformers looks for no other file if there is one of this name
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def tensors_of(params: Sequence[Param]) -> list[HfTensor]:
    """Return the tensors of the file that these parameters make up, in order."""
    return list(dict.fromkeys(tensor.stored for param in params for tensor in param.hf))


def _transposed(tensor: Tensor) -> Tensor:
    """Return a view with the dimensions in reverse order."""
    return tensor.permute(*reversed(range(tensor.dim())))


def index_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _write_config(path: Path, dtype: torch.dtype, overrides: Mapping[str, Any]) -> None:
    """Make config.json name the number format of the weights, so that transformers keeps it by default, have the
    overridden values that the weights were trained with, and name no program that is not in the folder."""
    config = with_overrides(json.loads(path.read_text(encoding="utf-8")), overrides)
    parts = [config, *(part for part in [config.get("text_config")] if isinstance(part, dict))]
    for part in parts:
        keys = [key for key in ("dtype", "torch_dtype") if key in part]
        part |= dict.fromkeys(keys or (["dtype"] if part is config else []), str(dtype).removeprefix("torch."))
    modules = [str(name).partition(".")[0] for name in (config.get("auto_map") or {}).values() if "--" not in str(name)]
    if any(not path.with_name(f"{module}.py").is_file() for module in modules):
        del config["auto_map"]  # whoever trusts the model's own code would look for it here
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def classifier_name(config: Mapping[str, Any]) -> str:
    """Return transformers' class of sequence classifiers for a model's config.json. Raises WeightsError if the model's
    family has none there."""
    import transformers

    name = str((config.get("architectures") or [""])[0])
    wanted = re.sub("For(CausalLM|ConditionalGeneration|TokenClassification)$", "ForSequenceClassification", name)
    if not wanted.endswith("ForSequenceClassification") or not hasattr(transformers, wanted):
        raise WeightsError(
            f"transformers has no sequence classifier for {name or 'a model without architectures'}, and a model with "
            "a head of one output is exported as one: its critic can be trained, but not exported, and no reward model"
        )
    return wanted


def _write_classifier(path: Path) -> None:
    """Make config.json describe a sequence classifier with one label. As a token classifier it loads too."""
    config = json.loads(path.read_text(encoding="utf-8"))
    changed = {"architectures": [classifier_name(config)], "id2label": {"0": "value"}, "label2id": {"value": 0}}
    config.pop("auto_map", None)
    path.write_text(json.dumps(config | changed, indent=2) + "\n", encoding="utf-8")


def _write_tokens(folder: Path, tokenizer: Any, own: bool, vocab_size: int, *, classifies: bool = False) -> None:
    """Let config and generation settings name the tokens that end the answers of the tokenizer that trained, and its
    padding token if the model has that. `own`: the tokenizer is the model's. A classifier gets no padding token by
    which the template ends a conversation: transformers reads the score at the last token that is no padding."""
    settings_path = folder / "generation_config.json"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = (
        json.loads(settings_path.read_text(encoding="utf-8"))
        if settings_path.is_file()
        else {"_from_model_config": True}
    )
    inner = config.get("text_config", {}) if "eos_token_id" not in config else config
    known = [*_as_list(settings.get("eos_token_id")), *_as_list(inner.get("eos_token_id"))] if own else []
    ends = list(dict.fromkeys([end for end in (*turn_ends(tokenizer).stop_ids, *known) if end is not None]))
    changed: dict[str, Any] = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id < vocab_size:  # transformers refuses others
        changed["pad_token_id"] = tokenizer.pad_token_id
    last = tokenizer(turn_ends(tokenizer).behind, add_special_tokens=False)["input_ids"][-1:]
    if classifies and last == [changed.get("pad_token_id", inner.get("pad_token_id"))]:
        changed["pad_token_id"] = None
    for target in (settings, *([config["text_config"]] if "text_config" in config else []), config):
        target.update(changed)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    settings_path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(
    folder: Path,
    source: Path,
    name: str | Path | None,
    chat_template: str | None,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Copy the files of the tokenizer that trained into `folder`, with the template that trained, and return it; None
    if the model has none. `name` and the others: as in `HfFolderWriter.create`.

    They are not saved anew: what transformers 5 saves, transformers 4 and what is built on it refuse to load. Where
    transformers 5, and so vLLM, reads them otherwise than the policy did (tokenizer_file.py), they name another class.
    Raises WeightsError for a tokenizer or a template that is not here.
    """
    from transformers import AutoTokenizer

    is_of_model = name is None or Path(name) == source
    if is_of_model and not any((source / file).is_file() for file in TOKENIZER_FILES):
        return None  # a model without a tokenizer, as tests have
    try:
        home = source if name is None else tokenizer_folder(name)
        loaded = AutoTokenizer.from_pretrained(home, trust_remote_code=False)
        tokenizer = as_written(loaded)
    except (OSError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        raise WeightsError(f"policy.tokenizer.name: {name or source} is no tokenizer here: {cause}") from error
    files = {*TOKENIZER_FILES, *tokenizer.vocab_files_names.values()}
    for path in home.iterdir():
        if path.name in files and path.is_file():
            shutil.copyfile(path, folder / path.name)
        elif path.name == NAMED_TEMPLATES and chat_template is None:
            (folder / path.name).mkdir()
            for template in path.iterdir():
                shutil.copyfile(template, folder / path.name / template.name)
    settings = folder / "tokenizer_config.json"
    if tokenizer is not loaded and settings.is_file():
        changed = json.loads(settings.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if chat_template is not None:
        try:
            is_text = "{" in chat_template
            tokenizer.chat_template = chat_template if is_text else Path(chat_template).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise WeightsError(
                f"policy.tokenizer.chat_template: {chat_template}: {error.strerror}; export in the folder in which the "
                "run was started, or put the template there"
            ) from error
    if isinstance(tokenizer.chat_template, str):
        defaults = "".join(
            f"{{%- set {key} = {key} | default({json.dumps(value, ensure_ascii=False)}) %}}"
            for key, value in template_kwargs.items()
            if value is not None and key.isidentifier() and re.search(rf"\b{key}\b", tokenizer.chat_template)
        )
        tokenizer.chat_template = defaults + tokenizer.chat_template
        if defaults or chat_template is not None:
            _write_template(folder, tokenizer.chat_template)
    return tokenizer


def _write_template(folder: Path, template: str) -> None:
    """Make `template` the only one of the tokenizer in `folder`."""
    (folder / "chat_template.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "chat_template" in settings:
        settings["chat_template"] = template
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else list(ids) if isinstance(ids, list) else [ids]


def _header(tensors: list[HfTensor], formats: Formats) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the safetensors header, padded to 8 bytes, and the byte range of each tensor after it. Those with the
    longest elements come first, so that all are aligned."""
    ranges, offset = {}, 0
    for tensor in sorted(tensors, key=lambda tensor: -formats[tensor].itemsize):
        ranges[tensor.name] = (offset, offset + formats.nbytes(tensor))
        offset = ranges[tensor.name][1]
    entries = {
        t.name: {"dtype": SAFETENSORS_NAMES[formats[t]], "shape": t.shape, "data_offsets": ranges[t.name]}
        for t in tensors
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, ranges


def _create_file(path: Path, tensors: list[HfTensor], formats: Formats) -> None:
    header, ranges = _header(tensors, formats)
    with open(path, "wb") as file:
        # The blocks are reserved: writing to a mapped file on a full disk would kill the process.
        os.posix_fallocate(file.fileno(), 0, len(header) + max(stop for _, stop in ranges.values()))
        file.write(header)


def _map_file(path: Path, tensors: list[HfTensor], formats: Formats) -> dict[str, Tensor]:
    header, ranges = _header(tensors, formats)
    flat = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)[len(header) :]
    return {t.name: flat[slice(*ranges[t.name])].view(formats[t]).view(t.shape) for t in tensors}
