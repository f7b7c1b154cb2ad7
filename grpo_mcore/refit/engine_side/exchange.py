"""Exchanges of values that a vLLM model computes with: one run brings in the new values, a second the old ones."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_STRUCTURE = {"_parameters", "_buffers", "_modules", "quant_method"}
_MISSING = object()


class Exchange(ABC):
    key: Any  # identifies what is exchanged

    @abstractmethod
    def run(self) -> None: ...


class _Attribute(Exchange):
    def __init__(self, owner: dict[str, Any], name: str, value: Any) -> None:
        self.key = (id(owner), name)
        self._owner, self._name, self._value = owner, name, value

    def run(self) -> None:
        old = self._owner.get(self._name, _MISSING)
        if self._value is _MISSING:
            del self._owner[self._name]
        else:
            self._owner[self._name] = self._value
        self._value = old


class Swap(Exchange):
    """Replaces the memory of a parameter: on CPU nothing else refers to it. `value`: the new one, then the old one."""

    def __init__(self, live: Tensor, value: Tensor) -> None:
        self.key = id(live)
        self._live, self.value = live, value

    def run(self) -> None:
        old = self._live.data
        self._live.data = self.value
        self.value = old


class _Copy(Exchange):
    """Exchanges the contents: CUDA graphs read the memory that they were captured with."""

    def __init__(self, live: Tensor, value: Tensor) -> None:
        self.key = id(live)
        self._live, self._value = live, value

    def run(self) -> None:
        old = self._live.data.clone()
        self._live.data.copy_(self._value)
        self._value.copy_(old)


def shadow_of(module: nn.Module) -> nn.Module:
    """Return a module of the same class and settings whose parameters and attributes can be set independently."""
    shadow = object.__new__(type(module))
    shadow.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        shadow.__dict__[name] = dict(module.__dict__[name])
    return shadow


def exchange_tensor(live: Tensor, value: Tensor) -> Exchange:
    """Return the exchange of `live`'s contents with `value`."""
    return Swap(live, value) if live.device.type == "cpu" else _Copy(live, value)


def exchange_parameters(live: nn.Module, shadow: nn.Module) -> Iterator[Exchange]:
    """Yield an exchange for every parameter in which `shadow` differs from `live`."""
    for name, parameter in shadow._parameters.items():
        ours = live._parameters.get(name)
        if parameter is not None and ours is not None and parameter is not ours:
            yield exchange_tensor(ours, parameter.data)


def exchange_attributes(live: Any, shadow: Any) -> Iterator[Exchange]:
    """Yield an exchange for every attribute in which `shadow` differs from `live`, except modules and parameters."""
    for name, value in shadow.__dict__.items():
        if name not in _STRUCTURE and live.__dict__.get(name, _MISSING) is not value:
            yield _Attribute(live.__dict__, name, value)
