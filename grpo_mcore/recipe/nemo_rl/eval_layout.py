"""Converts an evaluation in NeMo RL's form to a recipe: `generation` and `tokenizer` stand at its top, and
`data.dataset_name` names one or several datasets, whose other keys are in `eval.sets`."""

from typing import Any

from grpo_mcore.recipe.errors import Problem, in_yaml
from grpo_mcore.recipe.schema.data import DatasetEntry, dataset_by_name
from grpo_mcore.recipe.yaml_tree import Node

_SAMPLING = ("temperature", "top_p", "top_k")
_ENGINES = ("backend", "max_new_tokens", "stop_token_ids", "stop_strings", "num_engines", "vllm_kwargs",
            "vllm_cfg.precision", "vllm_cfg.tensor_parallel_size", "vllm_cfg.pipeline_parallel_size",
            "vllm_cfg.expert_parallel_size", "vllm_cfg.gpu_memory_utilization", "vllm_cfg.max_model_len",
            "vllm_cfg.enforce_eager")  # fmt: skip
SAME_KEYS = (
    ("generation.model_name", "policy.model_name"),
    *((f"tokenizer.{name}", f"policy.tokenizer.{name}") for name in ("name", "chat_template", "chat_template_kwargs")),
    *((f"generation.{name}", f"policy.generation.val_{name}") for name in _SAMPLING),
    *((f"generation.{name}", f"policy.generation.{name}") for name in _ENGINES),
)
"""Keys of NeMo RL's evaluations, and those here that mean the same: the one that is set later decides."""
# Values by which NeMo RL says "no limit" or "as it is".
_NEUTRAL: dict[str, Any] = {"top_k": -1, "chat_template": "default"}


def eval_layout(tree: Node, problems: list[Problem]) -> Node:
    """Return the tree with `policy` and `data.validation` made of the top-level sections. Idempotent; a tree without
    `eval` stays as it is."""
    if "eval" not in tree.value or not ({"generation", "tokenizer"} & set(tree.value) or _named(tree)):
        return tree
    value = dict(tree.value)
    policy = dict(value["policy"].value) if "policy" in value and value["policy"].is_mapping else {}
    generation = value.pop("generation", None)
    if generation is not None and generation.is_mapping:
        policy = _policy(dict(generation.value), policy)
    if (tokenizer := value.pop("tokenizer", None)) is not None and tokenizer.is_mapping:
        policy["tokenizer"] = _without_neutral(tokenizer)
    value["policy"] = Node(policy, generation.source if generation else tree.source, "policy")
    if _named(tree):
        value["data"] = _data(tree, problems)
    return tree.having(value)


def _named(tree: Node) -> bool:
    data = tree.value.get("data")
    return data is not None and data.is_mapping and "dataset_name" in data.value and "validation" not in data.value


def _policy(generation: dict[str, Node], policy: dict[str, Node]) -> dict[str, Node]:
    """Return the section `policy` with the values of the section `generation`."""
    generation.pop("num_prompts_per_step", None)  # prompts go to the engines as these have room
    if "model_name" in generation:
        policy["model_name"] = generation.pop("model_name")
    for name in _SAMPLING:
        if name in generation:
            generation[f"val_{name}"] = _neutral(name, generation.pop(name))
    vllm = generation.get("vllm_cfg")
    if vllm is not None and vllm.is_mapping:
        if "precision" in vllm.value:
            policy.setdefault("precision", vllm.value["precision"])
        if "max_model_len" in vllm.value:
            policy.setdefault("max_total_sequence_length", vllm.value["max_model_len"])
    inner = policy.get("generation")
    kept = dict(inner.value) if inner is not None and inner.is_mapping else {}
    policy["generation"] = Node({**kept, **generation}, "", "generation")
    return policy


def _data(tree: Node, problems: list[Problem]) -> Node:
    """Return the section `data` with a dataset in `validation` for each name of `dataset_name`."""
    data, sets = _nemo_rl_dataset(tree.value["data"]), tree.find("eval.sets")
    written = data.value["dataset_name"]
    names = written.plain() if written.is_list else str(written.value).split(",")
    of_entry = {key for key in data.value if key in DatasetEntry.model_fields and key != "dataset_name"}
    shared = {key: data.value[key] for key in of_entry if data.value[key].value is not None}
    presets = {_canonical(name): node for name, node in (sets.children() if sets is not None else ())}
    entries = []
    for name in (str(name).strip() for name in names):
        preset = presets.get(_canonical(name))
        if preset is not None and not preset.is_mapping:
            problems.append(preset.problem(f"expected keys of a dataset, got {in_yaml(preset.value)}"))
            continue
        entry = {"dataset_name": written.having(name)}
        entries.append(written.having({**entry, **(dict(preset.value) if preset else {}), **shared}))
    rest = {key: node for key, node in data.value.items() if key not in {*of_entry, "dataset_name"}}
    return data.having({**rest, "validation": written.having(entries)})


def _nemo_rl_dataset(data: Node) -> Node:
    """Return the section `data` with our names for what NeMo RL writes differently: a file as the dataset's name, with
    the keys of its problems and solutions, and MMLU or GPQA with their part in the name."""
    value = dict(data.value)
    language, name = value.pop("language", None), value["dataset_name"]
    for theirs, ours in (("problem_key", "input_key"), ("solution_key", "output_key")):
        if theirs in value:
            value[ours] = value.pop(theirs)
            value.setdefault("data_path", name)
    if "data_path" in value and value["data_path"] is name:
        value["dataset_name"] = name.having("ResponseDataset")
        value.pop("file_format", None)  # the file's name ends with it
    written = str(name.value)
    if language is not None and language.value not in (None, "EN-US"):
        value["subset"] = language
    elif written.startswith("mmlu_") and dataset_by_name(written) is None:
        value["dataset_name"] = name.having("MMLU")
        value["subset"] = name.having(written.removeprefix("mmlu_"))
    elif written == "gpqa_diamond":
        value["dataset_name"] = name.having("GPQA")
    return data.having(value)


def _canonical(name: str) -> str:
    return dataset_by_name(name) or name


def _without_neutral(section: Node) -> Node:
    return section.having({name: _neutral(name, node) for name, node in section.value.items()})


def _neutral(name: str, node: Node) -> Node:
    return node.having(None) if name in _NEUTRAL and node.value == _NEUTRAL[name] else node
