"""The functions that test_policy_state.py runs on the ranks."""

import resource
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from grpo_mcore.base import host_memory
from grpo_mcore.base.processes import free_port
from grpo_mcore.objective import ClippedPGLossConfig, ClippedPGLossFn
from grpo_mcore.parallel.finite import NonFiniteState
from grpo_mcore.parallel.memory import on_device, on_host, storage_key
from grpo_mcore.parallel.mesh import Address, prepare_megatron
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.parallel.policy import NonFiniteLoss, Policy
from grpo_mcore.parallel.weights import checkpoint
from grpo_mcore.parallel.weights.checkpoint import MASTER, SaveError
from grpo_mcore.recipe import PolicyConfig
from grpo_mcore.tools.parity.rank import LayoutCase, micro_batches, owned_slices, policy_config
from tests.distributed.policy_cases import COUNTS, few_rows
from tests.fused_adam import install_fused_adam

Settings = Mapping[str, Any]
PLAIN: Settings = {}
ADAM = {"lr": 1e-2, "min_lr": 1e-3, "adam_eps": 1e-3, "weight_decay": 0.01}
ON_HOST: Settings = {"optimizer_cpu_offload": True}
MOMENTS = ("exp_avg", "exp_avg_sq")
SCHEDULE = {"lr_decay_style": "cosine", "lr_decay_iters": 10, "lr_warmup_iters": 2, "lr_warmup_init": 1e-3}


def adam_policy(
    address: Address,
    model: str,
    case: LayoutCase,
    *,
    reference: bool = False,
    precision: str = "float32",
    in_parts: bool = False,
    variant: Settings = PLAIN,
) -> Policy:
    """Build a policy with `adam_config`."""
    config = adam_config(model, case, precision, in_parts, variant)
    return build(config, address, reference=reference)


def build(
    config: PolicyConfig, address: Address, *, reference: bool = False, platform: Platform | None = None
) -> Policy:
    """Build a policy, with a stand-in for TransformerEngine's Adam if the optimizer needs it and there is none."""
    platform = platform or Platform.detect()
    if config.megatron_cfg.optimizer.use_precision_aware_optimizer and not platform.transformer_engine:
        prepare_megatron(Platform("cpu"))
        install_fused_adam()
    return Policy(config, address, seed=1, timeout_s=60, reference=reference, platform=platform)


def adam_config(
    model: str, case: LayoutCase, precision: str = "float32", in_parts: bool = False, variant: Settings = PLAIN
) -> PolicyConfig:
    """Return a policy section whose learning rate changes every step, so that a lost schedule is noticed. `variant`:
    more settings of the optimizer, with which gradients are bfloat16 too."""
    config = policy_config(model, case, precision=precision)
    megatron = config.megatron_cfg
    megatron.distributed_data_parallel_config.grad_reduce_in_fp32 = not variant
    megatron.optimizer = megatron.optimizer.model_copy(update=ADAM | dict(variant))
    megatron.dist_ckpt_optim_fully_reshardable = not in_parts
    megatron.scheduler = megatron.scheduler.model_copy(update=SCHEDULE)
    return config


def step(policy: Policy) -> tuple[float, float]:
    """Train one step and return (gradient norm, this rank's share of the loss)."""
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0), prev_equals_curr=True)
    report = policy.train_step(few_rows(policy), loss_fn, **COUNTS)
    policy.advance_schedule()
    reports = policy.layout.is_reporting_rank(torch.distributed.get_rank())
    return report.grad_norm, report.metrics["loss"] if reports else 0.0


def train_with_experts(
    address: Address, model: str, case: LayoutCase, folder: str, grouped: bool, load: bool
) -> list[tuple[float, float]]:
    """Train in bfloat16, or continue from `folder`, with experts as grouped products or one at a time."""
    config = policy_config(model, case, precision="bfloat16")
    platform = Platform("cpu", grouped_products=grouped)
    policy = Policy(config, address, seed=1, timeout_s=60, reference=False, platform=platform)
    # Imported after join_mesh has installed the CPU layer.
    from megatron.core.transformer.moe.experts import SequentialMLP

    from grpo_mcore.parallel.layers.experts import GroupedExperts

    experts = [module for chunk in policy.chunks for module in chunk.modules() if isinstance(module, SequentialMLP)]
    assert experts and all(isinstance(module, GroupedExperts) == grouped for module in experts)
    if load:
        policy.load(folder)
        return [step(policy) for _ in range(2)]
    first = [step(policy) for _ in range(2)]
    policy.save(folder)
    return [*first, *(step(policy) for _ in range(2))]


def train_save_train(
    address: Address,
    model: str,
    case: LayoutCase,
    folder: str,
    in_parts: bool = False,
    precision: str = "float32",
    variant: Settings = PLAIN,
) -> list[tuple[float, float]]:
    policy = adam_policy(address, model, case, in_parts=in_parts, precision=precision, variant=variant)
    for _ in range(2):
        step(policy)
    policy.start_save(folder)
    later = [step(policy) for _ in range(2)]  # while the checkpoint is written
    policy.is_saved(wait=True)
    return later


def train_save_train_in_pieces(
    address: Address, model: str, case: LayoutCase, folder: str, most: int
) -> tuple[list[tuple[float, float]], int]:
    """Train and save as `train_save_train`, gathering `most` elements at a time: (its steps, the most elements that one
    gathering of the save took)."""
    taken, whole, listed = [0], torch.distributed.all_gather_into_tensor, torch.distributed.all_gather

    def gather_whole(out: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        taken.append(out.numel())
        return whole(out, *args, **kwargs)

    def gather_listed(out: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        taken.append(sum(part.numel() for part in out if part.dtype == torch.float32))
        return listed(out, *args, **kwargs)

    policy = adam_policy(address, model, case)
    for _ in range(2):
        step(policy)
    with (
        mock.patch.object(torch.distributed, "all_gather_into_tensor", gather_whole),
        mock.patch.object(torch.distributed, "all_gather", gather_listed),
        mock.patch.object(checkpoint, "GATHERED", most),
    ):
        policy.save(folder)
    return [step(policy) for _ in range(2)], max(taken)


def save_failing_on_rank_1(address: Address, model: str, case: LayoutCase, folder: str) -> str:
    """Train on during a save that fails, then save again. Return the failure's message."""
    policy = adam_policy(address, model, case)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if address.rank == 1:  # its weights alone are larger
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    policy.start_save(f"{folder}/torn")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    step(policy)
    try:
        policy.is_saved(wait=True)
    except SaveError as error:
        policy.save(f"{folder}/whole")
        return str(error)
    return "no error"


def load_train(
    address: Address, model: str, case: LayoutCase, folder: str, precision: str = "float32", variant: Settings = PLAIN
) -> list[tuple[float, float]]:
    policy = adam_policy(address, model, case, precision=precision, variant=variant)
    policy.load(folder)
    return [step(policy) for _ in range(2)]


def export(address: Address, model: str, case: LayoutCase, folder: str) -> None:
    policy = adam_policy(address, model, case)
    policy.weights.export_hf(folder, model, shard_bytes=100_000)


def reference_after_training(address: Address, model: str, case: LayoutCase) -> Any:
    policy = adam_policy(address, model, case, reference=True)
    batches = micro_batches(policy)
    first = torch.cat(policy.logprobs(batches), 1)
    step(policy)
    reference = torch.cat(policy.reference_logprobs(batches), 1)
    return first, reference, torch.cat(policy.logprobs(batches), 1)


def bfloat16_logprobs(address: Address, model: str, case: LayoutCase) -> dict[int, torch.Tensor]:
    policy = Policy(policy_config(model, case, precision="bfloat16"), address, seed=1, timeout_s=60, reference=False)
    batches = micro_batches(policy)
    return {
        int(name): part
        for batch, row in zip(batches, policy.logprobs(batches), strict=True)
        for name, part in zip(batch.names, batch.split(row), strict=True)
    }


def train_offload_train(
    address: Address, model: str, case: LayoutCase, precision: str, offload: bool, variant: Settings = PLAIN
) -> tuple[list[tuple[float, float]], bool, bool]:
    """Train, offload and onload twice, as on a GPU but with CPU tensors: (steps, optimizer moved to pinned memory that
    is used again, views kept)."""
    policy = adam_policy(address, model, case, precision=precision, variant=variant)
    steps, moved, views = [step(policy)], True, _views_of_weights(policy)
    pinned: list[torch.Tensor] = []
    host_memory.pin, host_memory.unpin = pinned.append, pinned.remove  # torch for CPUs cannot lock pages
    for _ in range(2 if offload else 0):
        before = _moments(policy)
        policy.platform = Platform("gpu")
        policy.offload()
        room = set(map(storage_key, pinned))
        moved &= not before & _moments(policy) and len(room) == 1 and _moments(policy) == room
        policy.onload()
        moved &= _moments(policy).isdisjoint(room)
        steps.append(step(policy))
    steps += [step(policy) for _ in range(3 - len(steps))]
    return steps, moved, views == _views_of_weights(policy)


def save_offloaded_load_train(
    address: Address, model: str, case: LayoutCase, folder: str
) -> tuple[tuple[float, float], tuple[float, float], bool]:
    """Save while the optimizer is offloaded, and offload again during the save: (the step after the save, the same
    step after loading, what was saved lay in ordinary memory)."""
    policy = adam_policy(address, model, case)
    pinned: list[torch.Tensor] = []
    host_memory.pin, host_memory.unpin = pinned.append, pinned.remove
    policy.platform = Platform("gpu")
    step(policy)
    policy.offload()
    policy.start_save(folder)
    ordinary = len(pinned) == 1 and storage_key(pinned[0]) not in _moments(policy)
    policy.onload()
    after = step(policy)
    policy.offload()
    policy.is_saved(wait=True)
    policy.shutdown()
    resumed = adam_policy(replace(address, master_port=free_port()), model, case)
    resumed.load(folder)
    return after, step(resumed), ordinary


def caches_emptied(address: Address, model: str, level: int, colocated: bool) -> int:
    """Return how often an offload on a GPU gives cached memory back."""
    config = adam_config(model, LayoutCase("TP1"))
    config.megatron_cfg.empty_unused_memory_level = level
    config.generation.colocated.enabled = colocated
    policy = build(config, address)
    host_memory.pin = host_memory.unpin = lambda flat: None
    policy.platform = Platform("gpu")
    with mock.patch.object(torch.cuda, "empty_cache") as emptied:
        policy.offload()
    return emptied.call_count


def _moments(policy: Policy) -> set[int]:
    states = [state for adam in on_device(policy.optimizer) for state in adam.state.values()]
    return {storage_key(state[name]) for state in states for name in ("exp_avg", "exp_avg_sq")}


def _views_of_weights(policy: Policy) -> list[bool]:
    """For each tensor that the optimizer updates, whether it is a view of a weight."""
    weights = {storage_key(weight) for chunk in policy.chunks for weight in chunk.parameters()}
    groups = [group for part in policy.optimizer.chained_optimizers for group in part.optimizer.param_groups]
    return [storage_key(updated) in weights for group in groups for updated in group["params"]]


def train_on_a_broken_sample(address: Address, model: str, case: LayoutCase) -> tuple[str, bool]:
    policy = adam_policy(address, model, case)
    before = owned_slices(policy)
    batches = micro_batches(policy)
    for batch in batches:
        for i, name in enumerate(batch.names):
            if name == "4":
                batch.columns["advantages"][0, batch.segments == i] = torch.nan
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0), prev_equals_curr=True)
    try:
        policy.train_step(batches, loss_fn, global_valid_seqs=8, global_valid_toks=90)
    except NonFiniteLoss as error:
        after = owned_slices(policy)
        same = all(torch.equal(a, b) for (*_, a), (*_, b) in zip(before, after, strict=True))
        return str(error), same
    return "no error", False


def break_the_state(address: Address, model: str, case: LayoutCase, folder: str) -> dict[str, str]:
    """Break a weight and a moment on rank 1 alone, and the learning rate, and return what this rank says of each."""
    policy = adam_policy(address, model, case)
    step(policy)
    policy.save(folder)
    said = {}

    def attempt(name: str, act: Callable[[], object]) -> None:
        try:
            act()
            said[name] = "no error"
        except (NonFiniteState, NonFiniteLoss) as error:
            said[name] = f"{type(error).__name__}: {error}"

    mine = address.rank == 1
    weights = {name: weight for chunk in policy.chunks for name, weight in chunk.module.named_parameters()}
    weight = weights["decoder.layers.0.mlp.linear_fc2.weight"]
    with torch.no_grad():
        before = weight.clone()
        if mine:
            weight[0, 0] = torch.nan
        attempt("save a weight", lambda: policy.start_save(f"{folder}-weight"))
        attempt("train a weight", lambda: step(policy))
        weight.copy_(before)
    attempt("mended", lambda: policy.save(f"{folder}-mended"))
    moments = [state["exp_avg_sq"] for adam in on_device(policy.optimizer) for state in adam.state.values()]
    if mine:
        moments[0].view(-1)[0] = torch.inf
    attempt("save a moment", lambda: policy.start_save(f"{folder}-moment"))
    attempt("train a moment", lambda: step(policy))
    policy.load(folder)
    for group in policy.optimizer.param_groups:
        group["lr"] = 1e30
    attempt("a learning rate", lambda: (step(policy), step(policy)))
    policy.load(folder)
    attempt("loaded again", lambda: step(policy))
    said["written"] = ", ".join(sorted(path.name for path in Path(folder).parent.iterdir()))
    return said


def break_a_moment_on_the_host(address: Address, model: str, folder: str) -> dict[str, str]:
    """Break a moment of an optimizer on the host in two ways, and return what the next update and save say of each."""
    policy = adam_policy(address, model, LayoutCase("TP1"), precision="bfloat16", variant=ON_HOST)
    step(policy)
    policy.save(folder)
    said = {}
    for kind, value in (("exp_avg", torch.nan), ("exp_avg_sq", torch.inf)):
        moments = [state[kind] for adam in on_host(policy.optimizer) for state in adam.state.values()]
        moments[0].view(-1)[0] = value
        for act, call in (("update", lambda: step(policy)), ("save", lambda: policy.start_save(f"{folder}-broken"))):
            try:
                call()
                said[f"{act}, {kind}"] = "no error"
            except NonFiniteState as error:
                said[f"{act}, {kind}"] = str(error)
        policy.load(folder)
    return said


def train_with_a_frozen_router(address: Address, model: str, case: LayoutCase) -> tuple[bool, bool]:
    """Train one step and return whether the routers' weights changed, and whether others did."""
    config = policy_config(model, case)
    config.megatron_cfg.freeze_moe_router = True
    policy = Policy(config, address, seed=1, timeout_s=60, reference=False)
    before = owned_slices(policy)
    step(policy)
    moved = {True: False, False: False}
    for (name, _, was), (_, _, now) in zip(before, owned_slices(policy), strict=True):
        moved[name.endswith("mlp.gate.weight")] |= not torch.equal(was, now)
    return moved[True], moved[False]


def step_with_other_settings(address: Address, model: str, folder: str, changed: dict[str, float]) -> float:
    """Load a checkpoint with other settings of the optimizer, and see `step_against_adamw`."""
    policy = policy_with_settings(address, model, LayoutCase("TP1"), "float32", changed)
    assert policy.load(folder)
    return step_against_adamw(policy, changed)


def save_without_the_optimizer(
    address: Address, model: str, case: LayoutCase, folder: str, settings: dict[str, float]
) -> list[tuple[str, Any, torch.Tensor]]:
    """Train two steps in bfloat16, save, and return the weights."""
    policy = policy_with_settings(address, model, case, "bfloat16", settings)
    step(policy), step(policy)
    policy.start_save(folder, optimizer=False)
    policy.is_saved(wait=True)
    return owned_slices(policy)


def resume_without_the_optimizer(
    address: Address, model: str, case: LayoutCase, folder: str, settings: dict[str, float]
) -> tuple[list[tuple[str, Any, torch.Tensor]], bool, float]:
    """Load what was saved: (the weights, whether Adam's float32 weights equal them, see `step_against_adamw`)."""
    policy = policy_with_settings(address, model, case, "bfloat16", settings)
    assert not policy.load(folder)
    assert policy.scheduler.num_steps == 2
    weights = owned_slices(policy)
    updated = [weight for weight, _ in _float32_weights(policy).values()]
    equal = all(weight.dtype == torch.float32 and torch.equal(weight, weight.bfloat16().float()) for weight in updated)
    return weights, equal, step_against_adamw(policy, settings)


def policy_with_settings(
    address: Address,
    model: str,
    case: LayoutCase,
    precision: str,
    settings: dict[str, Any],
    platform: Platform | None = None,
) -> Policy:
    """Build a policy with these settings of the optimizer, which stay the same in every step."""
    config = policy_config(model, case, precision=precision)
    megatron = config.megatron_cfg
    megatron.optimizer = megatron.optimizer.model_copy(update=ADAM | settings)
    megatron.scheduler = megatron.scheduler.model_copy(
        update={
            "lr_warmup_iters": 0,
            "lr_warmup_init": settings["lr"],
            "start_weight_decay": settings["weight_decay"],
            "end_weight_decay": settings["weight_decay"],
        }
    )
    return build(config, address, platform=platform)


def step_against_adamw(policy: Policy, settings: dict[str, float]) -> float:
    """Train one step and return the largest difference between the weights and AdamW's formula (Loshchilov & Hutter
    2019, Algorithm 2) with these settings, in float64. Without a state, the moments before the step are 0."""
    rate, beta1, beta2, eps = (settings[key] for key in ("lr", "adam_beta1", "adam_beta2", "adam_eps"))
    adams = (*on_device(policy.optimizer), *on_host(policy.optimizer))
    counts = _by_param(adams, "step")
    before = {}
    for param, (weight, state) in _float32_weights(policy).items():
        moments = (state.get(name, torch.zeros_like(weight)).double() for name in MOMENTS)
        before[param] = (weight.double(), *moments, float(state.get("step", counts[param])) + 1)
    step(policy)
    decays = _by_param(adams, "weight_decay")
    assert set(decays.values()) <= {0.0, settings["weight_decay"]}
    after, difference = _float32_weights(policy), 0.0
    for param, (weight, mean, square, count) in before.items():
        weight_now, state = after[param]
        mean_now = state["exp_avg"].double()
        gradient = (mean_now - beta1 * mean) / (1 - beta1)
        expected_square = beta2 * square + (1 - beta2) * gradient**2
        unbiased = mean_now / (1 - beta1**count), expected_square / (1 - beta2**count)
        decay = rate * decays[param] * weight
        expected = weight - decay - rate * unbiased[0] / (unbiased[1].sqrt() + eps)
        difference = max(difference, float((weight_now.double() - expected).abs().max()))
    return difference


def _by_param(adams: Iterable[Any], setting: str) -> dict[torch.Tensor, Any]:
    groups = [group for adam in adams for group in adam.param_groups]
    return {param: group.get(setting, 0) for group in groups for param in group["params"]}


def _float32_weights(policy: Policy) -> dict[torch.Tensor, tuple[torch.Tensor, Mapping[str, torch.Tensor]]]:
    """Return, for each tensor that Adam updates, on the device or on the host, the float32 weight and its state."""
    found = {}
    for adam in (*on_device(policy.optimizer), *on_host(policy.optimizer)):
        for param in (param for group in adam.param_groups for param in group["params"]):
            state = adam.state.get(param, {})
            found[param] = state.get(MASTER, param.float()), state
    return found


def steps_with_late_sends(address: Address, model: str, case: LayoutCase, delay: float) -> list[tuple[float, float]]:
    """Train two steps. What the second stage sends is read from its tensor `delay` seconds later, as Gloo may do."""
    policy = adam_policy(address, model, case)
    from megatron.core.pipeline_parallel import p2p_communication

    post_messages = p2p_communication._p2p_ops
    send, world = torch.distributed.isend, torch.distributed.group.WORLD
    with ThreadPoolExecutor(1) as sender:

        class Late:
            def __init__(self, tensor: torch.Tensor, dst: int) -> None:
                self.sent = sender.submit(lambda: (time.sleep(delay), send(tensor, dst, group=world))[1])

            def wait(self) -> None:
                self.sent.result().wait()

        def late_send(tensor: torch.Tensor, dst: int, group: Any) -> Any:
            return Late(tensor, dst) if group is world and delay else send(tensor, dst, group=group)

        def post(**messages: Any) -> Any:
            with mock.patch.object(torch.distributed, "isend", late_send):
                return post_messages(**messages)

        with mock.patch.object(p2p_communication, "_p2p_ops", post):
            return [step(policy) for _ in range(2)]


def build_after_a_failure(address: Address, broken: str, model: str) -> tuple[str, float]:
    """Fail to build a policy, and build another one in the same process."""
    said = "no error"
    try:
        adam_policy(address, broken, LayoutCase("TP1"))
    except ValueError as error:
        said = str(error)
    policy = adam_policy(replace(address, master_port=free_port()), model, LayoutCase("TP1"))
    return said, step(policy)[0]
