"""Converts the flat layout of `data` to the nested one. Flat: `dataset_name`, `train_data_path`, `val_data_path`,
`input_key`, ... directly under `data`. Nested: `train`, `validation` (a dataset or a list of them) and `default`.

A file uses one layout. If it inherits from a file with the other layout: datasets of a flat file replace the inherited
ones; a nested file is merged into the converted flat one. A dataset from a file replaces an inherited known dataset.

Older Gym recipes of NeMo RL name their files by `train_jsonl_fpath` and `validation_jsonl_fpath`. They are read as the
nested layout."""

from grpo_mcore.recipe.errors import Problem, in_yaml
from grpo_mcore.recipe.schema.data import FILE_DATASETS, DatasetEntry
from grpo_mcore.recipe.yaml_tree import Node

_TRAIN = {"dataset_name": "dataset_name", "train_data_path": "data_path", "train_split": "split"}
_VALIDATION = {"val_data_path": "data_path", "val_split": "split"}
_NAMES_DATASETS = set(_TRAIN) | set(_VALIDATION)
# Keys of a dataset that the flat layout sets for all its datasets at once.
_SHARED = set(DatasetEntry.model_fields) - {"dataset_name", "data_path", "task_name"}
_NEVER_NULL = {
    name
    for name, field in DatasetEntry.model_fields.items()
    if field.default_factory is None and field.default is not None
}
"""Keys of a dataset for which null means their default, as recipes of NeMo RL write it."""
_TRAIN_ONLY = {"split_validation_size", "seed"}
_GYM_FILES = {"train_jsonl_fpath": "train", "validation_jsonl_fpath": "validation"}


def same_layout(base: Node, top: Node) -> tuple[Node, Node]:
    """Return the `data` sections of a file (`top`) and of the file that it inherits from (`base`) in one layout, so
    that they can be merged key by key."""
    base, top = _named_by_entry(base), _named_by_entry(top)
    base_names, top_names = set(base.value), set(top.value)
    if top_names & {"train", "validation", "default"} and base_names & (_NAMES_DATASETS | _SHARED):
        base = _nested(base)
    elif top_names & _NAMES_DATASETS and base_names & {"train", "validation"}:
        if top_names & set(_TRAIN):
            base = _keeping(base, base_names - {"train", "validation"})
        else:  # `top` names validation data only, which replaces the inherited validation data
            validation = _entry(top, _VALIDATION)
            rest = _keeping(top, top_names - set(_VALIDATION))
            base = _keeping(base, base_names - {"validation"})
            top = top.having({**rest.value, "validation": validation})
    for name in ("train", "validation"):
        if name in base.value and name in top.value and _is_another(base.value[name], top.value[name]):
            base = _keeping(base, set(base.value) - {name})
    return base, top


def _named_by_entry(data: Node) -> Node:
    """Return the section with the files of _GYM_FILES as datasets, unless it names these datasets itself."""
    value = {name: node for name, node in data.value.items() if name not in _GYM_FILES}
    for old, name in _GYM_FILES.items():
        if old in data.value and name not in value:
            path = data.value[old]
            kind = Node("NemoGymDataset", path.source, f"data.{name}.dataset_name")
            value[name] = path.having({"data_path": path, "dataset_name": kind})
    return data.having(value)


def _is_another(base: Node, top: Node) -> bool:
    """Return whether `top` names a file and `base` a known dataset. They are then two datasets, and `top` inherits
    nothing."""
    name, path = base.find("dataset_name"), base.find("data_path")
    if name is None or name.value in FILE_DATASETS or top.find("data_path") is None:
        return False
    parts = str(name.value).split(".")
    is_import_path = len(parts) > 1 and all(part.isidentifier() for part in parts)
    return not is_import_path and (path is None or path.value is None)


def nested_layout(tree: Node, problems: list[Problem]) -> Node:
    """Return the tree with `data.train` and `data.validation` as lists of datasets, `data.default` applied to each.
    Idempotent."""
    data = tree.find("data")
    if data is None or not data.is_mapping:
        return tree
    data = _named_by_entry(data)
    flat, nested = set(data.value) & _NAMES_DATASETS, set(data.value) & {"train", "validation"}
    if flat and nested:
        first, second = data.value[min(flat)], data.value[min(nested)]
        message = f"use one layout: {second.key} ({second.source}) belongs to the nested one, this key to the flat one"
        problems.append(first.problem(message))
    data = _nested(data)
    default = data.value.get("default")
    if default is not None and default.value is None:
        data.value["default"] = default.having({})
    for name in ("train", "validation"):
        if name in data.value:
            data.value[name] = _entries(data.value[name], default, name == "train", problems)
    return tree.having({**tree.value, "data": data})


def _nested(data: Node) -> Node:
    """Return the section in the nested layout. Flat keys that all datasets share go to `default`."""
    names = set(data.value)
    value = {name: node for name, node in data.value.items() if name not in _NAMES_DATASETS | _SHARED}
    shared = {name: data.value[name] for name in data.value if name in _SHARED}
    default = data.value.get("default")
    if shared:
        kept = default.value if default is not None and default.is_mapping else {}
        value["default"] = Node({**kept, **shared}, data.source, "data.default")
    if names & set(_TRAIN) and "train" not in names:
        value["train"] = _entry(data, _TRAIN)
    if names & set(_VALIDATION) and "validation" not in names:
        value["validation"] = _entry(data, _VALIDATION, also={"dataset_name": "dataset_name"})
    return data.having(value)


def _entry(data: Node, keys: dict[str, str], also: dict[str, str] | None = None) -> Node:
    """Return the dataset that flat keys describe, or null if all of them are null."""
    nodes = [data.value[flat] for flat in keys if flat in data.value]
    source, key = nodes[0].source, nodes[0].key
    if all(node.value is None for node in nodes):
        return Node(None, source, key)
    fields = {**keys, **(also or {})}
    return Node({new: data.value[flat] for flat, new in fields.items() if flat in data.value}, source, key)


def _entries(node: Node, default: Node | None, train: bool, problems: list[Problem]) -> Node:
    if node.value is None:
        return node.having([])
    entries = []
    for item in node.value if node.is_list else [node]:
        if not item.is_mapping:
            message = f"expected a dataset (a mapping of keys) or a list of them, got {in_yaml(item.plain())}"
            problems.append(item.problem(message))
            continue
        inherited = dict(default.children()) if default is not None and default.is_mapping else {}
        if not train:
            inherited = {name: child for name, child in inherited.items() if name not in _TRAIN_ONLY}
        keys = {**inherited, **item.value}
        kept = {name: child for name, child in keys.items() if child.value is not None or name not in _NEVER_NULL}
        entries.append(item.having(kept))
    return node.having(entries)


def _keeping(data: Node, names: set[str]) -> Node:
    kept = {name: node for name, node in data.value.items() if name in names}
    return data.having(kept)
