"""A fake device that counts copies to the host, for machines without a GPU.

Its tensors say `meta`, which torch lets any machine have, and hold their values in a CPU tensor besides. So code that
reads a value, by whichever way, has to ask for it, and code that mixes the two places by mistake is found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("meta")
# Operators whose result has a size that depends on data: a GPU stops for them too.
DATA_DEPENDENT = ("nonzero", "masked_select", "_unique", "bincount", "repeat_interleave", "equal")


class OnDevice(Tensor):
    """A tensor on the device. `held`: its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        found = Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=DEVICE, requires_grad=False
        )
        found.held = held
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of CountHostCopies")


class CountHostCopies(TorchDispatchMode):
    """Runs operations on the device, and counts those at which device and host wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        inputs = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        here = [t for t in inputs if isinstance(t, OnDevice)]
        made_here = "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]) == DEVICE
        copies = "_to_copy" in name or name == "copy_"
        if made_here:
            kwargs["device"] = torch.device("cpu")
        if here or made_here:
            # torch.tensor(values, device=...) copies too, and on `meta` gives a tensor without values.
            strangers = [t for t in inputs if not isinstance(t, OnDevice) and (t.dim() > 0 or t.device == DEVICE)]
            assert copies or not strangers, f"{name}: a tensor with values of the host among those of the device"
        to_host = bool(here) and (
            name == "_local_scalar_dense"
            or name.startswith(DATA_DEPENDENT)
            or (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]))
            or (copies and not made_here and (kwargs.get("device") is not None or not isinstance(args[0], OnDevice)))
        )
        from_host = copies and made_here and not here
        if to_host or from_host:
            self.copies.append(name)
        out = func(
            *tree_map_only(OnDevice, lambda t: t.held, args), **tree_map_only(OnDevice, lambda t: t.held, kwargs)
        )
        if (here or made_here) and not (copies and to_host):
            return tree_map_only(Tensor, OnDevice, out)
        return out


def on_device(value: Any) -> Any:
    """Return a batch with its tensors on the device."""
    return tree_map_only(Tensor, lambda t: OnDevice(t.detach()), value)
