"""`fits`: the one place that says what is wrong with a layout. The checks of a recipe and of a run, `plan`, `launch`
and the policy all ask it, so a layout that one of them refuses is refused by all, in the same words.

Layouts on which Megatron-Core or vLLM would fail an assertion or compute wrong results are refused, with the key to
change.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from grpo_mcore.families import ModelShape, engine_sizes, tensor_parallel_sizes
from grpo_mcore.layout.engine import EngineLayout
from grpo_mcore.layout.findings import Finding, Key, LayoutError
from grpo_mcore.layout.policy import PolicyLayout


@dataclass(frozen=True)
class DevicePool:
    """Devices of the policy or of the engines. `per_node`: accelerators of each node (on CPU: processes)."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class EngineDevices:
    """`count` engines of one layout on the devices of `pool`. `counted`: each rank takes one device. On CPU, engines
    that share the policy's devices take none."""

    layout: EngineLayout
    count: int
    pool: DevicePool
    counted: bool


def fits(
    policy: PolicyLayout, ranks: int, shape: ModelShape | None = None, engines: EngineDevices | None = None
) -> list[Finding]:
    """Return all that is wrong with a policy's layout on `ranks` ranks and with the engines' layout; [] if nothing is.
    `shape` is the model's, None while it is not known. `engines` is None if there are none or they are not known."""
    findings = list(_ranks(policy, ranks))
    if engines is not None:
        findings += _devices(engines)
    if shape is not None:
        findings += _policy_model(policy, shape)
    if shape is not None and engines is not None:
        findings += _engine_model(engines.layout, shape)
    return list(dict.fromkeys(findings))


def _ranks(policy: PolicyLayout, ranks: int) -> Iterator[Finding]:
    """The sizes must fit the ranks and each other."""
    tensor, pipeline = policy.tensor, policy.pipeline
    copy = tensor * pipeline * policy.context
    if ranks % copy or not ranks:
        yield Finding(
            (Key.TENSOR, Key.PIPELINE, Key.CONTEXT, "cluster.gpus_per_node", "cluster.num_nodes"),
            f"one copy of the model needs TP {tensor} x PP {pipeline} x CP {policy.context} = {copy} ranks, and "
            f"{ranks} is not a multiple of that; there are cluster.num_nodes x gpus_per_node ranks, less those that "
            "engines or teachers have to themselves",
        )
    elif ranks // pipeline % (policy.expert * policy.expert_tensor):
        yield Finding(
            (Key.EXPERT, Key.EXPERT_TENSOR),
            f"EP {policy.expert} x ETP {policy.expert_tensor} = {policy.expert * policy.expert_tensor} does not divide "
            f"the {ranks // pipeline} ranks of a pipeline stage ({ranks} ranks / PP {pipeline})",
        )
    if policy.sequence_parallel and tensor == 1:
        yield Finding((Key.SEQUENCE, Key.TENSOR), "sequence parallelism needs tensor_model_parallel_size above 1")
    for key, layers in ((Key.FIRST, policy.first_layers), (Key.LAST, policy.last_layers)):
        if layers is not None and pipeline == 1:
            yield Finding((key, Key.PIPELINE), "an uneven split needs pipeline_model_parallel_size above 1")
    if policy.virtual > 1 and pipeline == 1:
        message = f"{policy.virtual} model chunks per stage need pipeline_model_parallel_size above 1"
        yield Finding((Key.VIRTUAL, Key.PIPELINE), message)
    if policy.expert * policy.expert_tensor > 1:
        yield from _split_tokens(policy)


def _split_tokens(policy: PolicyLayout) -> Iterator[Finding]:
    """Each rank must send its own tokens to the experts."""
    if policy.tensor > 1 and not policy.sequence_parallel:
        yield Finding(
            (Key.SEQUENCE, Key.TENSOR),
            "experts under tensor parallelism need sequence_parallel: true; without it every tensor-parallel rank "
            "sends all tokens to the experts",
        )


def _policy_model(policy: PolicyLayout, shape: ModelShape) -> Iterator[Finding]:
    """The sizes must divide the model's."""
    model, sizes = f"of this {shape.family} model", tensor_parallel_sizes(shape)
    if wrong := _undivided(sizes, policy.tensor) + _shared_heads(shape, policy.tensor):
        allowed = [n for n in range(1, shape.num_heads + 1) if not _undivided(sizes, n) and not _shared_heads(shape, n)]
        message = f"{policy.tensor} does not divide {', '.join(wrong)} {model}; it can be one of {allowed}"
        yield Finding((Key.TENSOR,), message)
    yield from _problems(policy.layers, shape.num_layers)
    experts = shape.experts
    if experts is None:
        for key, size in ((Key.EXPERT, policy.expert), (Key.EXPERT_TENSOR, policy.expert_tensor)):
            if size > 1:
                yield Finding((key,), f"{size}: this {shape.family} model has no experts; set it to 1")
        return
    yield from _problems(policy.experts_per_rank, experts.count)
    if experts.ffn_hidden_size % policy.expert_tensor:
        width = f"the experts' intermediate size {experts.ffn_hidden_size}"
        yield Finding((Key.EXPERT_TENSOR,), f"{policy.expert_tensor} does not divide {width}")
    if shape.biases and policy.expert_tensor > 1:
        yield Finding((Key.EXPERT_TENSOR,), f"{policy.expert_tensor}: the experts of a {shape.family} model stay whole")
    yield from _split_tokens(policy)


def _devices(engines: EngineDevices) -> Iterator[Finding]:
    """Engines must fit their devices: an engine uses a part of one node, or whole nodes."""
    pool, ranks = engines.pool, engines.layout.ranks
    keys = (Key.ENGINE_TENSOR, Key.ENGINE_PIPELINE, "policy.generation.num_engines", "cluster.gpus_per_node")
    if engines.counted and pool.per_node % ranks and ranks % pool.per_node:
        yield Finding(
            keys,
            f"the {ranks} ranks of an engine (TP {engines.layout.tensor} x PP {engines.layout.pipeline}) are neither a "
            f"divisor nor a multiple of the {pool.per_node} devices of a node; an engine uses a part of one node, or "
            "whole nodes",
        )
    elif engines.counted and max(1, engines.count) * ranks > pool.ranks:
        yield Finding(
            keys,
            f"{max(1, engines.count)} engines of {ranks} ranks do not fit {pool.nodes} nodes x {pool.per_node} devices"
            "; lower num_engines or the ranks of an engine",
        )
    elif ranks % engines.layout.nodes:
        yield Finding(keys, f"the {ranks} ranks of an engine do not divide over {engines.layout.nodes} nodes")


def _engine_model(engine: EngineLayout, shape: ModelShape) -> Iterator[Finding]:
    """vLLM must be able to split the model."""
    tensor, experts = engine.tensor, shape.experts
    wrong = _undivided(engine_sizes(shape, engine.expert_parallel), tensor) + _shared_heads(shape, tensor)
    if shape.biases and tensor > 1:
        yield Finding(
            (Key.ENGINE_TENSOR,),
            f"{tensor}: a refit writes the experts of a {shape.family} model, which have biases, into engines of one "
            "rank only; set it to 1, for more engines",
        )
    elif wrong:
        yield Finding((Key.ENGINE_TENSOR,), f"{tensor} does not divide {', '.join(wrong)} of this {shape.family} model")
    if engine.expert_parallel and experts is None:
        yield Finding((Key.ENGINE_EXPERT,), f"{tensor}: this {shape.family} model has no experts; set it to 1")
    elif experts is not None:
        yield from _problems(engine.experts_per_rank, experts.count)


def _problems(divide: Callable[[int], object], count: int) -> tuple[Finding, ...]:
    """Return the findings with which `divide` refuses `count`."""
    try:
        divide(count)
    except LayoutError as error:
        return error.args
    return ()


def _shared_heads(shape: ModelShape, tensor: int) -> list[str]:
    """Return why the key-value heads cannot be distributed: each rank has several, or several ranks share one."""
    heads = shape.num_kv_heads
    if heads % tensor and tensor % heads:
        return [f"num_key_value_heads {heads}"]
    if shape.wide_qk_norm and tensor > heads:
        return [f"num_key_value_heads {heads}, over which their norm is split"]
    return []


def _undivided(sizes: dict[str, int], number: int) -> list[str]:
    """Return the sizes that the number does not divide, each with its name."""
    return [f"{name} {size}" for name, size in sizes.items() if size % number]
