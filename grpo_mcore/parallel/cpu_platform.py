"""Lets Megatron-Core run without a GPU: the only place where anything of it, or of torch for its sake, is replaced.

`install()` must run before `megatron` is first imported. Where torch sees a GPU it does nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._device

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")
_installed = False


def fill_in_transformer_engine() -> None:
    """Puts right what Megatron-Core takes for granted of TransformerEngine where it is missing, on a GPU too."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as latent_attention

    if not isinstance(latent_attention.TELinear, type):
        latent_attention.HAVE_TE = False  # a stand-in of its wrapper makes it True
    # The router looks up a name that is then not defined.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def install() -> None:
    """Replaces the CUDA calls that Megatron-Core 0.16 makes without asking. Idempotent; inert with a GPU."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    # `with torch.device(...)` knows the factories by identity, from its first use on: let it see the originals.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:  # device="cuda" is written out in schedules, clip_grads and the grad buffers
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # moves of optimizer and data tensors
    torch.Tensor.type = _type_as_on_cuda(torch.Tensor.type)  # the optimizers compare type() with torch.cuda names
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU  # is only ever used as device=
    cuda.set_device = lambda device: None  # set by schedules before a backward pass
    cuda.synchronize = lambda device=None: None  # nothing runs asynchronously
    cuda.empty_cache = lambda: None  # there is no cache
    cuda.is_current_stream_capturing = lambda: False  # no CUDA graphs
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()  # one generator serves both names
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.random.default_generator.manual_seed(seed)
    cuda.Stream = cuda.Event = _Nothing  # constructed by the data-parallel wrapper
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda device=None: _Nothing()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None  # profiling marks of the schedules
    with _nothing_is_compiled():
        import megatron.core.tensor_parallel.random as megatron_random
        import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    # The sizes of an all-to-all are turned into numbers only where they come from a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_numbers
    # Set here, because vLLM in the same process puts a stream without events in the place of torch's.
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _Nothing()

    # These two go around torch.cuda to the C functions.
    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


@contextlib.contextmanager
def _nothing_is_compiled() -> Iterator[None]:
    """Megatron-Core marks its fused kernels for torch.compile as it is imported. They are for GPUs, and the compiler's
    own import would be a third of the start of every rank."""
    original = torch.compile
    torch.compile = lambda function=None, **options: function or (lambda kernel: kernel)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original


class _Nothing:
    """Stands for a CUDA stream or event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self  # record_event gives an event


def _as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return on_cpu


def _type_as_on_cuda(original: Any) -> Any:
    def type_as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    return type_as_on_cuda
