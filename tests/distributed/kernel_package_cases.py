"""The functions that test_kernel_package.py runs on ranks with and without TransformerEngine's stand-in."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_mcore.parallel.mesh import Address, leave_mesh
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.parallel.weights.checkpoint import BackgroundSave, load_checkpoint, make_moments
from grpo_mcore.recipe import PolicyConfig
from tests.distributed.policy_state_cases import step


@dataclass(frozen=True)
class OnCpu(Platform):
    """A GPU's layers, settings and optimizer, with tensors on the CPU."""

    backend = "gloo"
    pins_memory = False

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")


def platform() -> Platform:
    """Return the platform of this process: the stand-in is importable or not."""
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        return Platform("cpu")
    return OnCpu("gpu", transformer_engine=True, grouped_products=True)


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
    settings = {"distributed_data_parallel_config": {"grad_reduce_in_fp32": False}}
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
