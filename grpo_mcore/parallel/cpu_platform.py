"""Lets Megatron-Core run without a GPU: the only file that patches Megatron-Core, or torch on its behalf.

`mesh.prepare_megatron` calls it before `megatron` is first imported, for a rank whose tensors are on the CPU, also on a
machine that has a GPU.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._device

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")
_KERNELS = ("transformer_engine", "apex", "amp_C")
"""Packages from which Megatron-Core takes kernels wherever it can import them."""
_installed = False


@functools.cache
def hide_kernels() -> None:
    """Let imports of kernels for GPUs fail as if they were not installed. Megatron-Core decides by import what computes
    norms, updates and clips gradients, also for tensors on a CPU; here the rank's platform decides."""
    for name in _KERNELS:
        sys.modules[name] = None  # type: ignore[assignment]


def fill_in_transformer_engine() -> None:
    """Correct what Megatron-Core assumes of TransformerEngine when it is missing, on CPU and on GPU."""
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as latent_attention
    import megatron.core.utils as utils

    if not isinstance(latent_attention.TELinear, type):
        latent_attention.HAVE_TE = False  # Megatron-Core's stand-in for the class sets it to True
    if utils.get_te_version() is None:  # compared with the version that a setting of the optimizer needs
        utils._te_version = utils.PkgVersion("0")
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:  # it rounds the norms of bfloat16 gradients
        clip_grads.l2_norm_impl = _l2_norm
    # The router looks up this name, which is undefined without TransformerEngine.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _l2_norm(chunk: int, noop: Any, lists: Any, *_: Any) -> tuple[torch.Tensor, None]:
    """Return the norm of all gradients together, in float32, as TransformerEngine's kernel does."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensors in lists for tensor in tensors]
    return torch.stack(norms).norm()[None], None


def installed() -> bool:
    """Return whether this process belongs to the CPU: `install` cannot be undone."""
    return _installed


def install() -> None:
    """Replace the CUDA calls that Megatron-Core 0.16 makes unconditionally. Idempotent."""
    global _installed
    cuda: Any = torch.cuda
    # Each time, because vLLM, imported later into the same process, puts streams without events here.
    cuda.Stream = cuda.Event = _NoStream  # constructed by the data-parallel wrapper and the optimizer on the host
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda device=None: _NoStream()
    if _installed:
        return
    _installed = True
    # `with torch.device(...)` remembers the factories by identity at its first use: show it the originals.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:  # schedules, clip_grads and the gradient buffers hard-code device="cuda"
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # called on optimizer and data tensors
    torch.Tensor.type = _type_as_on_cuda(torch.Tensor.type)  # the optimizers compare type() with torch.cuda names
    cuda.current_device = lambda: _CPU  # used only as device=
    cuda.set_device = lambda device: None  # called by schedules before a backward pass
    cuda.synchronize = lambda device=None: None  # CPU work is synchronous
    cuda.empty_cache = lambda: None  # there is no cache
    cuda.is_current_stream_capturing = lambda: False  # no CUDA graphs
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()  # CPU has one generator
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.random.default_generator.manual_seed(seed)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None  # profiling marks of the schedules
    with _compile_disabled():
        import megatron.core.tensor_parallel.mappings as mappings
        import megatron.core.tensor_parallel.random as megatron_random
        import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    # Megatron-Core converts the sizes of an all-to-all to numpy only if they come from a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_numpy
    # Set here, because vLLM in the same process replaces torch's stream by one without events.
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _NoStream()

    # Ranks that share experts across data-parallel ranks have different numbers of tokens, which Gloo does not take.
    mappings._gather_along_first_dim = _gather_evenly(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_evenly(mappings._reduce_scatter_along_first_dim)

    # An optimizer on the host asks each tensor whether it is on a GPU.
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = _split_as_on_cuda(
        HybridDeviceOptimizer._get_sub_optimizer_param_groups
    )

    # These two bypass torch.cuda and call the C functions.
    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


@contextlib.contextmanager
def _compile_disabled() -> Iterator[None]:
    """Make torch.compile return its argument while Megatron-Core is imported.

    Megatron-Core marks its fused GPU kernels for compilation, and importing the compiler would take a third of each
    rank's start-up time.
    """
    original = torch.compile
    torch.compile = lambda function=None, **options: function or (lambda kernel: kernel)
    try:
        yield
    finally:
        torch.compile = original


class _NoStream:
    """Stand-in for a CUDA stream or event; every method returns the object itself.

    vLLM's CPU worker uses it too where both are in one process: a stream that is idle, on the CPU, can be entered."""

    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def query(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather_evenly(gather: Any) -> Any:
    """Let a gathering of parts [sizes[rank], ...] pad them to the largest, for Gloo."""

    def gather_evenly(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any) -> torch.Tensor:
        if output_split_sizes is None or len(set(output_split_sizes)) == 1:
            return gather(input_, group, output_split_sizes, *args)
        parts = gather(_padded(input_, max(output_split_sizes)), group, None, *args).chunk(len(output_split_sizes))
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    return gather_evenly


def _reduce_scatter_evenly(scatter: Any) -> Any:
    """Let a sum whose parts [sizes[rank], ...] go to different ranks pad them to the largest, for Gloo."""

    def scatter_evenly(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any) -> torch.Tensor:
        if input_split_sizes is None or len(set(input_split_sizes)) == 1:
            return scatter(input_, group, input_split_sizes, *args)
        parts = [_padded(part, max(input_split_sizes)) for part in input_.split(list(input_split_sizes))]
        return scatter(torch.cat(parts), group, None, *args)[: input_split_sizes[group.rank()]]

    return scatter_evenly


def _padded(part: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])


def _split_as_on_cuda(split: Any) -> Any:
    """Let the division of weights between device and host take those for on the device that it has not moved.

    Of each weight it asks `is_cuda`, moves it if it belongs to the host, and asks again.
    """
    moved: list[torch.Tensor] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor)
        return tensor

    def is_cuda(tensor: torch.Tensor) -> bool:
        on_host = bool(moved)
        moved.clear()
        return not on_host

    def split_as_on_cuda(self: Any, fraction: float) -> Any:
        pretence = {"is_cuda": property(is_cuda), "cpu": move, "pin_memory": lambda tensor: tensor}
        for name, value in pretence.items():
            setattr(torch.Tensor, name, value)
        try:
            return split(self, fraction)
        finally:
            for name in pretence:
                delattr(torch.Tensor, name)

    return split_as_on_cuda


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
        # Under a TorchFunctionMode `original` looks this function up again.
        return original(self).replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.", 1)

    return type_as_on_cuda
