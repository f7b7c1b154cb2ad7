"""Reads a recipe of NeMo RL that names its DTensor policy as one of the Megatron-Core policy.

`policy.dtensor_cfg` (`policy.automodel_cfg` in newer recipes), `policy.optimizer` and `policy.scheduler` become
`policy.megatron_cfg`. Sizes, recomputation, offload, LoRA, optimizer and learning rate keep their meaning; what only
tunes the DTensor policy is dropped. `policy.dtensor_as_megatron: false` forbids it.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import product

from grpo_mcore.recipe.errors import COMMAND_LINE, Problem, in_yaml, nearest_hint
from grpo_mcore.recipe.schema.megatron import OptimizerConfig
from grpo_mcore.recipe.yaml_tree import Node

SECTIONS = ("dtensor_cfg", "automodel_cfg")
POLICIES = ("policy", "teacher", "value")
"""Sections that hold a policy."""
MEGATRON = "policy.megatron_cfg"
READ_AS = f"read as {MEGATRON}"
"""Start of the line that says so."""
SAME = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "activation_checkpointing": "activation_checkpointing",
    "env_vars": "env_vars",
    "cpu_offload": "optimizer.optimizer_cpu_offload",
    "lora_cfg.enabled": "peft.enabled",
    "lora_cfg.dim": "peft.dim",
    "lora_cfg.alpha": "peft.alpha",
    "lora_cfg.dropout": "peft.dropout",
    "lora_cfg.target_modules": "peft.target_modules",
    "lora_cfg.exclude_modules": "peft.exclude_modules",
    "lora_cfg.lora_A_init": "peft.lora_A_init_method",
}
"""Keys of the DTensor policy's section, and the keys of `policy.megatron_cfg` that mean the same."""
OPTIMIZER = {"lr": "optimizer.lr", "weight_decay": "optimizer.weight_decay", "eps": "optimizer.adam_eps"}
"""The same for `policy.optimizer.kwargs`; `betas` are two keys."""
_TUNING = {
    *("enabled", "_v2", "custom_parallel_plan", "defer_fsdp_grad_sync", "moe_parallelizer", "automodel_kwargs"),
    *("clear_cache_every_n_steps", "dp_replicate_size", "data_parallel_size", "checkpoint", "model_save_format"),
    *("save_consolidated", "single_rank_consolidation", "consolidation_timeout_minutes", "lora_cfg"),
}
"""Keys of the section that change speed, memory or the form of files of the DTensor policy alone."""
_LORA_TUNING = {"match_all_linear", "use_triton", "dropout_position", "lora_dtype", "use_memory_efficient_lora"}
_OPTIMIZER_TUNING = {
    *("foreach", "fused", "capturable", "differentiable", "bias_correction", "adam_w_mode", "set_grad_none"),
    *("master_weights", "master_weight_dtype", "store_param_remainders", "exp_avg_dtype", "exp_avg_sq_dtype"),
}
_ADAMW = ("AdamW", "FusedAdam")
_FROZEN: dict[str, tuple[bool | None, str]] = {
    "freeze_vision_tower": (True, "the tower of a vision model is always frozen; set true"),
    "freeze_language_model": (False, "the text part is what is trained; set false"),
    "freeze_audio_tower": (None, ""),  # no model here has one
}
"""Keys of freeze_config, what their value must be (None: any), and why."""
_LAYERS = {
    "linear_qkv": r"[qkv]_proj|qkv_proj",
    "linear_proj": r"o_proj",
    "linear_fc1": r"gate_proj|up_proj|gate_up_proj",
    "linear_fc2": r"down_proj",
}
"""Names of linear layers in Hugging Face's models, by the name of the layer that holds them here."""


def aliases(policy: str = "policy") -> Iterator[tuple[str, str]]:
    """Yield (key of the DTensor policy, key here) for all keys that keep their value. `policy`: its section."""
    for section in SECTIONS:
        yield from ((f"{policy}.{section}.{theirs}", f"{policy}.megatron_cfg.{ours}") for theirs, ours in SAME.items())
    rates = OPTIMIZER.items()
    yield from ((f"{policy}.optimizer.kwargs.{theirs}", f"{policy}.megatron_cfg.{ours}") for theirs, ours in rates)


def later_wins(base: Node, top: Node, pairs: Iterable[tuple[str, str]]) -> Node:
    """Return the lower of two layers of a recipe without contradictions to the upper one: where the upper one sets one
    key of a pair, the other key has its value here too. `pairs`: keys of NeMo RL, and the keys here that mean the
    same."""
    pairs = list(pairs)
    for policy in POLICIES:
        if not names_a_policy(policy, base, top):
            pairs += aliases(policy)
    for pair in pairs:
        for upper, lower in (pair, pair[::-1]):
            node, other = top.find(upper), base.find(lower)
            if node is not None and other is not None and top.find(lower) is None and not _both_typed(node, other):
                base = _with(base, lower.split("."), node)
    for policy, section in product(POLICIES, SECTIONS):  # the one that the upper layer switches on is the only one
        switches = (f"{policy}.{section}.enabled", f"{policy}.megatron_cfg.enabled")
        for upper, lower in (switches, switches[::-1]):
            node, other = top.find(upper), base.find(lower)
            if node is None or other is None or top.find(lower) is not None or _both_typed(node, other):
                continue
            if node.value is True and other.value is True:
                base = _with(base, lower.split("."), other.having(None if lower == switches[1] else False))
    return base


def _both_typed(node: Node, other: Node) -> bool:
    """Return whether both values are from one layer: the command line."""
    return node.source == other.source == COMMAND_LINE


def _with(tree: Node, parts: list[str], node: Node) -> Node:
    """Return the tree with another node at a path that it has."""
    name, *rest = parts
    return tree.having(tree.value | {name: _with(tree.value[name], rest, node) if rest else node})


def names_a_policy(policy: str, *trees: Node) -> bool:
    """Return whether one of the trees switches the DTensor policy of a section on or off."""
    return any(tree.find(f"{policy}.{section}.enabled") is not None for tree in trees for section in SECTIONS)


def dtensor_as_megatron(tree: Node, problems: list[Problem], notes: list[Problem]) -> Node:
    """Return the tree with the DTensor policy's keys as those of the Megatron-Core policy. A tree that switches that
    policy off, or forbids this, stays as it is."""
    policy, allowed = tree.find("policy"), tree.find("policy.dtensor_as_megatron")
    if policy is None or not policy.is_mapping or (allowed is not None and allowed.value is False):
        return tree
    sections = [policy.value[name] for name in SECTIONS if name in policy.value]
    if any(section.value is not None and not section.is_mapping for section in sections):
        return tree  # refused as a key of NeMo RL
    section = {name: node for part in sections for name, node in part.children()}
    used = {name: policy.value[name] for name in ("optimizer", "scheduler") if name in policy.value}
    enabled = section.get("enabled")
    if (enabled is not None and enabled.value is not True) or not (section or used):
        return tree
    megatron = policy.value.get("megatron_cfg") or Node({}, policy.source, MEGATRON)
    if not megatron.is_mapping:
        return tree
    is_ours = megatron.find("enabled")
    others = {name: node for name, node in policy.value.items() if name not in (*SECTIONS, *used)}
    if enabled is not None and is_ours is not None and is_ours.value is True:
        problems.append(enabled.problem(f"contradicts {is_ours.problem('true')}; set one of them to false"))
        return tree.having({**tree.value, "policy": policy.having(others)})
    alone = is_ours is not None and is_ours.value is False  # the section of a policy that is not used
    megatron = _Megatron(_on_command_line(megatron) if alone else megatron, enabled is not None, problems)
    _use_section(section, megatron, problems)
    if (optimizer := used.get("optimizer")) is not None:
        _use_optimizer(optimizer, megatron, problems)
    scheduler = used.get("scheduler", Node(None, policy.source, "policy.scheduler"))
    if scheduler.value is not None or alone or (enabled is not None and "scheduler" in used):
        _use_scheduler(scheduler, megatron, problems)
    if (size := megatron.value("tensor_model_parallel_size")) in (None, 1) and "sequence_parallel" in megatron.set:
        megatron.leave_out("sequence_parallel")  # it has no effect on one rank, and is refused here
    others["megatron_cfg"] = megatron.tree.having(
        megatron.tree.value | ({"enabled": Node(True, enabled.source, enabled.key)} if enabled is not None else {})
    )
    if enabled is not None:
        sizes = f"TP {size or 1}, CP {megatron.value('context_parallel_size') or 1}"
        message = f"{READ_AS} ({sizes}); policy.dtensor_as_megatron: false forbids it"
        notes.append(enabled.problem(message))
    else:
        notes += [node.problem(f"used as {MEGATRON}.{key}") for key, node in megatron.set.items()]
    return tree.having({**tree.value, "policy": policy.having(others)})


class _Megatron:
    """`policy.megatron_cfg` while it gets the values of the DTensor policy. `replaces`: these take the place of values
    of files; otherwise two values of one key are a problem, unless they are equal."""

    def __init__(self, tree: Node, replaces: bool, problems: list[Problem]) -> None:
        self.tree, self.set = tree.copy(), dict[str, Node]()
        self._replaces, self._problems = replaces, problems

    def value(self, key: str) -> object:
        node = self.tree.find(key)
        return None if node is None else node.plain()

    def leave_out(self, key: str) -> None:
        section, _, name = key.rpartition(".")
        if (parent := self.tree.find(section)) is not None and parent.is_mapping:
            parent.value.pop(name, None)

    def put(self, key: str, node: Node, *, replaces: bool = False) -> None:
        """Set a key, unless the command line has set it and `node` comes from a file."""
        present = self.tree.find(key)
        if present is not None and present.value is not None and present.plain() != node.plain():
            if present.source == COMMAND_LINE and node.source != COMMAND_LINE:
                return
            if not (replaces or self._replaces) or present.source == node.source == COMMAND_LINE:
                message = f"contradicts {present.key} = {in_yaml(present.plain())} ({present.source})"
                self._problems.append(node.problem(message))
                return
        *sections, name = key.split(".")
        parent = self.tree
        for part in sections:
            inner = parent.value.get(part)
            if inner is None or not inner.is_mapping:
                inner = parent.value[part] = Node({}, node.source, f"{MEGATRON}.{part}")
            parent = inner
        parent.value[name] = self.set[key] = node


def _on_command_line(node: Node) -> Node:
    """Return a mapping with the values that the command line sets alone."""
    kept = {}
    for name, child in node.children():
        if child.is_mapping and (inner := _on_command_line(child)).value:
            kept[name] = inner
        elif not child.is_mapping and child.source == COMMAND_LINE and name != "enabled":
            kept[name] = child
    return node.having(kept)


def _use_section(section: dict[str, Node], megatron: _Megatron, problems: list[Problem]) -> None:
    """Use the keys of the DTensor policy's section."""
    for name, node in section.items():
        if name in SAME and node.value not in (None, {}):
            if name != "cpu_offload" or node.value is not False:
                megatron.put(SAME[name], node)
        elif name not in SAME and name not in _TUNING:
            hint = nearest_hint(name, [*SAME, *_TUNING])
            problems.append(node.problem(f"unknown key of the DTensor policy{hint}"))
    frozen = Node(section, "", "").find("automodel_kwargs.freeze_config")
    for name, node in frozen.children() if frozen is not None else ():
        needed, reason = _FROZEN.get(name, (False, "freezing of other parameters is not supported; remove the key"))
        if needed is not None and bool(node.value) is not needed:
            problems.append(node.problem(reason))
    lora = section.get("lora_cfg")
    if lora is None or not lora.is_mapping:
        if lora is not None and lora.value is not None:
            problems.append(lora.problem(f"expected a mapping of keys, got {in_yaml(lora.plain())}"))
        return
    everything = lora.value.get("match_all_linear")
    for name, node in lora.value.items():
        key = SAME.get(f"lora_cfg.{name}")
        if key is None and name not in _LORA_TUNING and node.value not in (None, False):
            known = [known.partition(".")[2] for known in SAME if known.startswith("lora_cfg.")]
            problems.append(node.problem(f"not supported{nearest_hint(name, [*known, *_LORA_TUNING])}"))
        elif key is None or node.value is None:
            continue
        elif name == "lora_A_init":
            megatron.put(key, node.having("kaiming" if node.value == "uniform" else node.value))
        elif name.endswith("_modules") and node.is_list:
            overridden = name == "target_modules" and everything is not None and everything.value is True
            modules = [] if overridden else node.value
            megatron.put(key, node.having([item.having(_layer(item.value)) for item in modules]))
        else:
            megatron.put(key, node)


def _layer(name: object) -> object:
    """Return the name or pattern of a linear layer here for one of Hugging Face's models."""
    for ours, theirs in _LAYERS.items():
        name = re.sub(rf"(?<![A-Za-z_])(?:{theirs})(?![A-Za-z_])", ours, name) if isinstance(name, str) else name
    return name


def _use_optimizer(optimizer: Node, megatron: _Megatron, problems: list[Problem]) -> None:
    """Use `policy.optimizer`, a class of torch or TransformerEngine and its arguments."""
    if not optimizer.is_mapping:
        if optimizer.value is not None:
            problems.append(optimizer.problem("expected an optimizer of torch, {name, kwargs}"))
        return
    kwargs = optimizer.find("kwargs")
    arguments = dict(kwargs.children()) if kwargs is not None and kwargs.is_mapping else {}
    kind, decay = optimizer.find("name"), arguments.get("weight_decay")
    name = "AdamW" if kind is None else str(kind.value).rpartition(".")[2]
    if kind is not None and name == "Adam" and decay is not None and decay.value:
        problems.append(kind.problem("adds its weight decay to the gradient, which is not supported; AdamW is"))
    elif kind is not None and name not in (*_ADAMW, "Adam"):
        problems.append(kind.problem(f"{in_yaml(kind.plain())} is not supported yet; torch.optim.AdamW is"))
        return
    for other, node in optimizer.children():
        if other not in ("name", "kwargs"):
            problems.append(node.problem("unknown key of an optimizer; it has name and kwargs"))
    for argument, node in arguments.items():
        if argument in OPTIMIZER:
            megatron.put(OPTIMIZER[argument], node)
        elif argument == "betas" and node.is_list and len(node.value) == 2:
            megatron.put("optimizer.adam_beta1", node.value[0], replaces=True)
            megatron.put("optimizer.adam_beta2", node.value[1], replaces=True)
        elif argument not in _OPTIMIZER_TUNING and node.value not in (None, False):
            hint = nearest_hint(argument, [*OPTIMIZER, "betas", *_OPTIMIZER_TUNING])
            problems.append(node.problem(f"not supported{hint}"))


def _use_scheduler(scheduler: Node, megatron: _Megatron, problems: list[Problem]) -> None:
    """Use `policy.scheduler`: a class of torch and its arguments, or a list of such, the last with the milestones at
    which the next one begins. null: the learning rate is constant."""
    entries = scheduler.value if scheduler.is_list else [] if scheduler.value is None else [scheduler]
    names = {id(entry): name for entry in entries if (name := entry.find("name")) is not None}
    for entry in entries:
        if id(entry) not in names and entry.find("milestones") is None:
            problems.append(entry.problem("expected a scheduler of torch, {name, kwargs}, or {milestones}"))
    pieces = [entry for entry in entries if id(entry) in names]
    rate = megatron.value("optimizer.lr")
    rate = rate if isinstance(rate, int | float) else OptimizerConfig().lr
    warmup, kinds = 0, [str(names[id(piece)].value).rpartition(".")[2] for piece in pieces]
    if kinds[:1] == ["LinearLR"] and _number(pieces[0], "start_factor", 1 / 3) < _number(pieces[0], "end_factor", 1):
        first, kinds = pieces.pop(0), kinds[1:]
        warmup = int(_number(first, "total_iters", 5))
        if _number(first, "end_factor", 1) != 1:
            problems.append(first.problem("a warm-up must end at the factor 1"))
        start = float(f"{rate * _number(first, 'start_factor', 1 / 3):.12g}")
        megatron.put("scheduler.lr_warmup_init", first.having(start), replaces=True)
    at = pieces[0] if pieces else scheduler
    megatron.put("scheduler.lr_warmup_iters", at.having(warmup), replaces=True)
    if not kinds or (kinds == ["ConstantLR"] and _number(at, "factor", 1 / 3) == 1):
        megatron.put("scheduler.lr_decay_style", at.having("constant"), replaces=True)
        _put_null(megatron, at)
        return
    if kinds == ["CosineAnnealingLR"]:
        style, steps, end = "cosine", _number(at, "T_max", 0), _number(at, "eta_min", 0)
    elif kinds == ["LinearLR"]:
        style, steps, end = "linear", _number(at, "total_iters", 5), rate * _number(at, "end_factor", 1)
    else:
        message = f"{', '.join(kinds)} after the warm-up: not supported yet; constant, linear and cosine are"
        problems.append(at.problem(message))
        return
    megatron.put("scheduler.lr_decay_style", at.having(style), replaces=True)
    megatron.put("scheduler.lr_decay_iters", at.having(warmup + int(steps)), replaces=True)
    megatron.put("optimizer.min_lr", at.having(float(f"{end:.12g}")), replaces=True)


def _put_null(megatron: _Megatron, node: Node) -> None:
    """Let values that a constant rate does not read follow the others."""
    for key in ("scheduler.lr_decay_iters", "optimizer.min_lr"):
        present = megatron.tree.find(key)
        if present is not None and present.source != COMMAND_LINE:
            megatron.leave_out(key)
    if megatron.tree.find("scheduler.lr_decay_iters") is None:
        megatron.put("scheduler.lr_decay_iters", node.having(None), replaces=True)


def _number(piece: Node, name: str, default: float) -> float:
    node = piece.find(f"kwargs.{name}")
    return node.value if node is not None and isinstance(node.value, int | float) else default
