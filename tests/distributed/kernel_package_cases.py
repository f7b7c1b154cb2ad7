"""The functions that test_kernel_package.py runs on ranks with and without TransformerEngine's stand-in."""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from grpo_mcore.parallel.memory import on_device
from grpo_mcore.parallel.mesh import Address, leave_mesh, prepare_megatron
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.parallel.weights.checkpoint import BackgroundSave, load_checkpoint, make_moments
from grpo_mcore.recipe import PolicyConfig
from grpo_mcore.tools.parity import rank
from grpo_mcore.tools.parity.rank import LayoutCase, ParityWorkload
from tests.distributed.policy_state_cases import policy_with_settings, step, step_against_adamw


@dataclass(frozen=True)
class OnCpu(Platform):
    """A GPU's layers, settings and optimizer, with tensors on the CPU."""

    backend = "gloo"
    pins_memory = False

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")


def platform() -> Platform:
    """Return the platform of this process: the stand-in, which computes from now on, is importable or not."""
    try:
        from transformer_engine.pytorch import kernels
    except ImportError:
        return Platform("cpu")
    kernels.compute()
    return OnCpu("gpu", transformer_engine=True, grouped_products=True)


def logprobs_and_gradients(
    address: Address,
    model: str,
    case: LayoutCase,
    packed: bool,
    work: ParityWorkload,
    overrides: Mapping[str, Any],
    fault: str | None = None,
) -> dict[str, Any]:
    """Return the same as `tools.parity.rank.logprobs_and_gradients`, on this process's platform; with a fault of
    FAULTS."""
    here = platform()
    prepare_megatron(here)
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        return rank.logprobs_and_gradients(address, model, case, packed, work, overrides, here)


def _with_settings(change: Callable[[Any], None]) -> Any:
    """Change Megatron-Core's settings of each model."""
    from grpo_mcore.parallel import model

    original = model.transformer_config

    def changed(*args: Any) -> Any:
        config = original(*args)
        change(config)
        return config

    return mock.patch.object(model, "transformer_config", changed)


def _with_attention(change: Callable[[Any, dict[str, Any]], None]) -> Any:
    """Change an attention layer, and what it is called with, before it computes."""
    from transformer_engine.pytorch import DotProductAttention

    original = DotProductAttention.forward

    def changed(self: Any, *args: Any, **how: Any) -> Any:
        kept = vars(self) | {"_parameters": dict(self._parameters)}
        change(self, how)
        try:
            return original(self, *args, **how)
        finally:
            vars(self).update(kept)

    return mock.patch.object(DotProductAttention, "forward", changed)


def _as_one_sequence(_layer: Any, how: dict[str, Any]) -> None:
    ends = how["cu_seqlens_q"][[0, -1]]
    how |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends} | dict.fromkeys(
        ("max_seqlen_q", "max_seqlen_kv"), int(ends[1])
    )


FAULTS: Mapping[str, Callable[[], Any]] = {
    "YaRN's factor dropped": lambda: _with_settings(lambda config: setattr(config, "apply_rope_fusion", True)),
    "windows of one more key": lambda: _with_settings(
        lambda config: setattr(config, "window_size", (config.window_size[0] + 1, 0))
    ),
    "sinks ignored": lambda: _with_attention(lambda layer, _: layer._parameters.update(softmax_offset=None)),
    "scale applied twice": lambda: _with_attention(
        lambda layer, _: setattr(layer, "softmax_scale", layer.softmax_scale**2)
    ),
    "other sequences and padding seen": lambda: _with_attention(_as_one_sequence),
}
"""Faults of the kind that raise nothing: a kernel that gets, or takes, another argument than the model needs."""


def steps_against_adamw(address: Address, model: str, precision: str, settings: dict[str, Any]) -> list[float]:
    """Train two steps. Return the largest difference of a weight from AdamW's formula in each."""
    here = platform()
    policy = policy_with_settings(address, model, LayoutCase("TP1"), precision, settings, here)
    assert here.transformer_engine and "FusedAdam" in str(on_device(policy.optimizer))
    fused = [getattr(module, "fuse_wgrad_accumulation", None) for module in policy.chunks[0].modules()]
    assert fused.count(True) == 4 * policy.shape.num_layers and False not in fused
    return [step_against_adamw(policy, settings) for _ in range(2)]


def grouped_products(address: Address, sizes: list[int], accumulates: bool) -> list[float]:
    """Return the largest error of a product of groups of rows, of the rows' gradient, and of the weights'."""
    prepare_megatron(platform())
    from grpo_mcore.parallel.layers.experts import FusedGroupedLinear

    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=generator)
    rows, weights = draw(sum(sizes), 16), [torch.nn.Parameter(draw(24, 16)) for _ in sizes]
    for weight in weights:
        weight.main_grad = torch.ones_like(weight)
    out = FusedGroupedLinear.apply(rows.requires_grad_(), sizes, accumulates, *weights)
    above = draw(out.shape)
    out.backward(above)
    expected = [part @ weight.T for part, weight in zip(rows.split(sizes), weights, strict=True)]
    of_rows = [part @ weight for part, weight in zip(above.split(sizes), weights, strict=True)]
    of_weights = [part.T @ x for part, x in zip(above.split(sizes), rows.split(sizes), strict=True)]
    found = [weight.main_grad - 1 if accumulates else weight.grad for weight in weights]
    assert all(getattr(weight, "grad_added_to_main_grad", False) == accumulates for weight in weights)
    pairs = ((out, torch.cat(expected)), (rows.grad, torch.cat(of_rows)), (torch.stack(found), torch.stack(of_weights)))
    return [float((left - right).abs().sum()) for left, right in pairs]


def save(address: Address, folder: str, models: Mapping[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    """Save a policy of each model in `folder` before its first step, with other weights than the model's and moments.
    Return what each holds."""
    held = {}
    for name, policy in _policies(address, _plain(models)):
        torch.manual_seed(len(name))
        with torch.no_grad():
            for parameter in policy.chunks[0].parameters():
                parameter.add_(torch.randn_like(parameter))
        make_moments(policy.optimizer)
        for part in policy.optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment].uniform_()
        policy.optimizer.reload_model_params()
        writer = BackgroundSave()
        writer.start(policy, Path(folder, name), optimizer=True)
        assert writer.done(wait=True)
        held[name] = _held(policy)
    return held


def load(address: Address, folder: str, models: Mapping[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    """Load each model's checkpoint from `folder`. Return what the policies then hold."""
    held = {}
    for name, policy in _policies(address, _plain(models)):
        assert load_checkpoint(policy, Path(folder, name)), "it holds the optimizer"
        held[name] = _held(policy)
    return held


def layers(address: Address, models: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the modules of which each model's layers are made: "transformer_engine" or Megatron-Core's and ours."""
    return {
        name: {base.__module__ for module in policy.chunks[0].modules() for base in type(module).__mro__}
        for name, policy in _policies(address, _plain(models))
    }


def train_save_train(address: Address, folder: str, policies: Mapping[str, PolicyConfig]) -> dict[str, Any]:
    """Train each policy for a step, save it, and train it further. Return the second step's numbers by name."""
    numbers = {}
    for name, policy in _policies(address, policies):
        step(policy)
        policy.save(Path(folder, name))
        numbers[name] = step(policy)
    return numbers


def pass_on(address: Address, folder: str, policies: Mapping[str, PolicyConfig]) -> None:
    """Load each policy, and save it again as NAME-again."""
    for name, policy in _policies(address, policies):
        policy.load(Path(folder, name))
        policy.save(Path(folder, f"{name}-again"))


def load_train(address: Address, folder: str, policies: Mapping[str, PolicyConfig]) -> dict[str, Any]:
    """Resume each policy from NAME-again, and train it. Return the step's numbers by name."""
    numbers = {}
    for name, policy in _policies(address, policies):
        policy.load(Path(folder, f"{name}-again"))
        numbers[name] = step(policy)
    return numbers


def _plain(models: Mapping[str, Path]) -> dict[str, PolicyConfig]:
    settings = {
        "distributed_data_parallel_config": {"grad_reduce_in_fp32": False},
        "optimizer": {"min_lr": 0.0},
        "scheduler": {"lr_warmup_init": 0.0},
    }
    return {
        name: PolicyConfig.model_validate(
            {"model_name": str(folder), "precision": "bfloat16", "megatron_cfg": settings}
        )
        for name, folder in models.items()
    }


def _policies(address: Address, policies: Mapping[str, PolicyConfig]) -> Iterator[tuple[str, Policy]]:
    for name, config in policies.items():
        yield name, Policy(config, address, seed=1, timeout_s=60, reference=False, platform=platform())
        leave_mesh()
        gc.freeze()  # what is left are modules: leaving the next mesh need not scan them


def _held(policy: Policy) -> dict[str, torch.Tensor]:
    """Return weights and moments by the name of the parameter."""
    network: Any = policy.chunks[0].module
    held = {name: parameter.detach().float() for name, parameter in network.named_parameters()}
    names = {parameter: name for name, parameter in network.named_parameters()}
    for part in policy.optimizer.chained_optimizers:
        for parameter, (group, index) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][index]
            held[f"{names[parameter]}: weight"] = main.detach().float()
            for moment in ("exp_avg", "exp_avg_sq"):
                held[f"{names[parameter]}: {moment}"] = part.optimizer.state[main][moment]
    return {name: values.clone() for name, values in held.items()}
