"""Values that are not finite are found, without temporaries."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_mcore.parallel import finite
from grpo_mcore.parallel.finite import _extremes, all_finite, is_finite


class Allocations(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operator creates."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        known = {arg.untyped_storage().data_ptr() for arg in args if torch.is_tensor(arg)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_gradients_are_found_without_temporaries(dtype: torch.dtype) -> None:
    values = (torch.linspace(-1, 1, 1 << 16) * 3e38).to(dtype)  # the sum of their squares would overflow
    with Allocations() as allocations:
        assert is_finite(values)
    assert allocations.largest <= 8
    with Allocations() as allocations:
        assert torch.isfinite(values).all()
    assert allocations.largest >= 1 << 16, "the recorder sees temporaries"
    for wrong in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 12345, -1):
            broken = values.clone()
            broken[place] = wrong
            assert not is_finite(broken)
    assert is_finite(values[:0])


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_value_among_many_tensors_is_found(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "_extremes", lambda tensors, _: _extremes(tensors, kind))
    tensors = [torch.linspace(-1, 1, size).to(dtype) * 3e38 for size in (0, 1, 7, 4096)]
    tensors += [torch.zeros((), dtype=torch.float64), torch.tensor([1, 2])]
    assert all_finite(tensors)
    assert all_finite([])
    for wrong in (torch.nan, torch.inf, -torch.inf):
        for number, tensor in enumerate(tensors[1:4], start=1):
            broken = tensor.clone()
            broken[-1] = wrong
            assert not all_finite([*tensors[:number], broken, *tensors[number + 1 :]])
