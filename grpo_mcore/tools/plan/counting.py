"""Counts what traced operators would do on a GPU: memory that is live, kernels, host synchronisations, bytes sent.

`Counter` lies above torch's FakeTensorMode, which computes shapes instead of values. Small integers are an exception:
lengths and positions decide shapes, so tensors without floating-point inputs are computed for real. So is a router's
map of tokens to experts, which gives every expert equally many.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

_SYNCHRONISE = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
"""Operators whose result the host must wait for on a GPU."""

_NO_KERNEL = {
    "detach", "alias", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    "_unsafe_view", "_reshape_alias", "set_", "resize_", "_local_scalar_dense",
}  # fmt: skip


@dataclass
class PhaseCounts:
    """The counts of one phase. `peak` is the bytes of all live tensors, with those that were live when the phase
    began."""

    name: str
    peak: int = 0
    launches: int = 0
    syncs: collections.Counter[str] = field(default_factory=collections.Counter)  # by place in the code
    sent: collections.Counter[str] = field(default_factory=collections.Counter)  # bytes by collective


class Counter(TorchDispatchMode):
    """Enter it inside a FakeTensorMode with `allow_non_fake_inputs`."""

    def __init__(self) -> None:
        super().__init__()
        self.message: list[int] = []
        """Shape of the tensors that pipeline stages send each other; a receiving rank is told it first."""
        self.live = 0
        self.phases: list[PhaseCounts] = []
        self._storages: dict[int, Any] = {}
        self._on_host: dict[int, Any] = {}
        self._functions = _Functions(self)

    def __enter__(self) -> Counter:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def begin(self, name: str) -> None:
        """Begin a phase; what follows is counted for it."""
        sizes = {key: (ref, ref().nbytes()) for key, (ref, _) in self._storages.items()}
        self._storages, self.live = sizes, sum(nbytes for _, nbytes in sizes.values())  # some were resized
        self.phases.append(PhaseCounts(name, peak=self.live))

    def on_host(self, tensors: Sequence[Tensor]) -> None:
        """Take these tensors out of the count: on a GPU they are in host memory."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._free(storage._cdata)
            self._on_host[storage._cdata] = weakref.ref(storage, partial(self._forget, storage._cdata))

    def seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, so wrapped that it is counted like any other where a backward pass calls it again."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._functions if self._functions.away else contextlib.nullcontext():
                return function(*args, **kwargs)

        return call

    def _is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._on_host

    def _forget(self, key: int, _: Any) -> None:
        del self._on_host[key]

    def synchronised(self) -> None:
        """Count a wait of the host, under the place in the code that caused it."""
        if self.phases:
            self.phases[-1].syncs[_place()] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # no operator: asks where a tensor is
            return args[0].fake_device
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if self.phases:
            self._count(func, tensors)
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs, fake)
        if tensors and not fake:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0]  # to host memory, which keeps its values
        if func is aten.copy_.default and self.phases and self._is_on_host(args[0]) and args[0].dtype != args[1].dtype:
            # It takes the other dtype on the device first.
            self.phases[-1].peak = max(self.phases[-1].peak, self.live + args[0].nbytes)
        if func is aten._local_scalar_dense.default:
            return 1.0 if tensors[0].is_floating_point() else 1
        if func is aten.scatter.value and not tensors[0].is_floating_point():
            return _balanced_map(tensors[0].size(0), tensors[0].size(1), tensors[1].size(1))
        if func is aten.masked_select.default and not isinstance(args[1], FakeTensor):
            with unset_fake_temporarily():
                count = int(args[1].sum())
            result = args[0].new_empty(count)
        else:
            result = func(*args, **kwargs)
        if not tensors and isinstance(result, Tensor) and not result.is_floating_point():
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                self._track(leaf)
        return result

    def _count(self, func: Any, tensors: Sequence[Tensor]) -> None:
        phase, name = self.phases[-1], func.overloadpacket.__name__
        if func in _SYNCHRONISE or (func is aten.index.Tensor and any(t.dtype is torch.bool for t in tensors[1:])):
            self.synchronised()
        if func.namespace == "c10d":
            phase.sent[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if not func.is_view and name not in _NO_KERNEL:
            phase.launches += 1

    def _collective(self, func: Any, args: Any, kwargs: Any, fake: bool) -> Any:
        """Run a collective of the fake process group, as if every rank held what this one holds."""
        if fake:
            try:
                return func(*args, **kwargs)
            except UnsupportedOperatorException:  # of those without a rule for fake tensors only the handle is used
                with unset_fake_temporarily():
                    args, kwargs = tree_map(lambda x: torch.empty(0) if isinstance(x, Tensor) else x, (args, kwargs))
                    return func(*args, **kwargs)
        with unset_fake_temporarily():
            done = func(*args, **kwargs)
            match func._schema.name:
                case "c10d::_allgather_base_":
                    args[0].copy_(args[1].flatten().repeat(args[0].numel() // args[1].numel()).view_as(args[0]))
                case "c10d::allgather_":
                    for outputs, value in zip(*args[:2], strict=True):
                        for output in outputs:
                            output.copy_(value)
                case "c10d::alltoall_base_":
                    args[0].copy_(args[1])
                case "c10d::recv_":
                    args[0][0].copy_(torch.tensor(self.message))
            return done

    def _track(self, tensor: FakeTensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._storages or key in self._on_host:
            return
        self._storages[key] = weakref.ref(storage, lambda _: self._free(key)), nbytes
        self.live += nbytes
        if self.phases:
            self.phases[-1].peak = max(self.phases[-1].peak, self.live)

    def _free(self, key: int) -> None:
        _, nbytes = self._storages.pop(key, (None, 0))
        self.live -= nbytes


class _Functions(TorchFunctionMode):
    """Counts the ways to read values that are no operators, `tolist` and `torch.tensor` of scalars, and takes the fused
    RMS norm, which torch takes on a GPU only."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter
        self.away = False  # torch takes a mode away while it handles a function, such as a whole backward pass

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.backward:
            self.away = True
            try:
                return func(*args, **kwargs)
            finally:
                self.away = False
        if func is Tensor.tolist:
            self._counter.synchronised()
        if getattr(func, "__name__", "") == "tensor" and isinstance(args[0], list):
            scalars = [value for value in tree_leaves(args[0]) if isinstance(value, FakeTensor)]
            for _ in scalars:
                self._counter.synchronised()
            if scalars:
                return torch.stack(scalars)
        if func is torch.nn.functional.rms_norm:
            return _FusedRMSNorm.apply(args[0], kwargs["weight"])
        return func(*args, **kwargs)


def _balanced_map(tokens: int, experts: int, active: int) -> Tensor:
    """Return a router's map of tokens to experts that gives every expert equally many."""
    with unset_fake_temporarily():
        chosen = (torch.arange(tokens)[:, None] * active + torch.arange(active)) % experts
        return torch.zeros(tokens, experts, dtype=torch.int32).scatter_(1, chosen, 1)


class _FusedRMSNorm(torch.autograd.Function):
    """Launches and keeps as much as torch's fused RMS norm on a GPU; the values are meaningless."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return gradients[0] * x, torch.zeros_like(weight)


def _place() -> str:
    """Return the innermost function of this package or of Megatron-Core that is running, as "file:function"."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("grpo_mcore.", "megatron.")) and name != __name__:
            return f"{name.rpartition('.')[2]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
