"""Kernels that vLLM's CPU build lacks or does not use, registered as a plug-in of vLLM; nothing happens on GPUs.

- RMS norms: vLLM 0.32 uses plain PyTorch norms and relies on the compiler to fuse them, but our CPU engines run without
  it: six passes over float32 copies for each norm. Not in bfloat16 on processors without AVX-512, where the kernels
  cut instead of rounding.
- Experts without a gate (Nemotron 3): vLLM 0.32 refuses them on CPU. Superfluous once its `CPUUnquantizedExperts`
  supports the activation RELU2_NO_MUL.
- Sigmoid scores with a correction bias and without groups (MiniMax-M2): vLLM 0.32's router for CPU has them in groups
  only. Superfluous once it takes them without.
- Gated DeltaNet mixers (Qwen3.5): vLLM 0.32's CPU kernels take bfloat16 and heads of 64 and 128 only. Superfluous once
  they take float32 and all sizes.
- The files of Qwen's and Gemma 3's vision models import image processors that need torchvision; transformers has the
  same in PIL. Their processors also have one for videos, which has no other form: a class stands for it that refuses
  them. Superfluous once vLLM imports both only where they are used.
- Ranks of one engine that wait for each other's messages sleep instead of asking in a loop.
- Small products get rows of zeros, so that oneDNN meets few numbers of rows: it compiles a kernel for each, which takes
  longer than the product.
- A machine on which vLLM has not run a kind of model looks at its class in a process of its own, which imports vLLM for
  10 s, so as not to touch CUDA. Superfluous once vLLM does so for GPUs alone.

Beside them, `import_vllm_without_compiler`, which comes before any plug-in.
"""

import importlib
import sys
import types
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.base.imports import NOT_INSTALLED, why_not_imported
from grpo_mcore.generation.cpu_experts import plain, register_adapted_experts, sum_of_experts
from grpo_mcore.generation.cpu_quantized import register_quantized_layers

PROVIDER = "vllm_c_cpu"
PRIORITY = {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}  # vLLM's `ir_op_priority`


def import_vllm_without_compiler() -> None:
    """Import vLLM in a process of a CPU engine, where torch compiles nothing. vLLM 0.32 imports the whole compiler to
    change one of its lists, and goes on where it is missing: that is a sixth of an engine's start."""
    torch.compiler.set_stance("force_eager")  # as TORCH_COMPILE_DISABLE, for a process that had imported it before
    unused = "torch._inductor.lowering"
    if unused not in sys.modules:
        sys.modules[unused] = None  # type: ignore[assignment]  # an import of it raises ImportError
        try:
            importlib.import_module("vllm")
        except ImportError:  # another vLLM may need it, or there is none: the engine's own imports say so
            pass
        finally:
            del sys.modules[unused]


def register_cpu_kernels() -> None:
    """Register the kernels with vLLM in this process, once."""
    from vllm import ir
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    _register_norms(rounds_to_bfloat16())
    _allow_experts_without_gate()
    _route_sigmoid_scores_without_groups()
    _replace_gated_delta_net()
    _do_without_torchvision()
    _wait_without_spinning()
    _round_rows()
    _look_at_models_here()
    register_quantized_layers()
    register_adapted_experts()


def rounded_rows(rows: int) -> int:
    """Return the next number with at most four significant binary digits: at most an eighth more rows."""
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def _round_rows(largest: int = 1 << 20) -> None:
    """Let vLLM's products by weights of at most `largest` elements have a rounded number of rows. A row's result does
    not depend on the others. oneDNN takes 1.5 ms to compile a kernel for a new number of rows, and the number of tokens
    of a step is new most of the time."""
    from vllm import _custom_ops as ops

    original = ops.onednn_mm

    def onednn_mm(handler: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.numel() // handler.k
        more = rounded_rows(rows) - rows
        if not more or handler.n * handler.k > largest:
            return original(handler, x, bias)
        padded = torch.nn.functional.pad(x.reshape(rows, handler.k), (0, 0, 0, more))
        return original(handler, padded, bias)[:rows].view(*x.shape[:-1], handler.n)

    ops.onednn_mm = onednn_mm


def _look_at_models_here() -> None:
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def _wait_without_spinning(seconds: float = 0.001) -> None:
    """Let the ranks of an engine and its scheduler wait for each other's messages asleep after `seconds` without one.
    vLLM lets each ask again and again for a second, which takes the processor from the ranks that compute."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    original = SpinCondition.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, seconds)

    SpinCondition.__init__ = __init__


def takes_norm(x: Tensor, weight: Tensor | None, variance_size: int | None, rounds: bool) -> bool:
    """Return whether vLLM's kernel computes this norm correctly. `rounds`: result of `rounds_to_bfloat16`."""
    plain = weight is not None and weight.dtype == x.dtype and variance_size is None
    return plain and (rounds or x.dtype != torch.bfloat16)


def rounds_to_bfloat16() -> bool:
    """Return whether vLLM's kernels round on this processor. Without AVX-512 they cut: norms would be too small by
    0.3 % on average, and the engine another model than the policy."""
    x = torch.tensor([1.0, 3.0] * 16, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, torch.ones_like(x), 0.0)
    return out[1].item() == torch.tensor(3 / 5**0.5).bfloat16().item()


def _register_norms(rounds: bool) -> None:
    from vllm import ir

    def plain(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
        return takes_norm(x, weight, variance_size, rounds)

    def plain_add(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return plain(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()

    @ir.ops.rms_norm.register_impl(PROVIDER, supports_args=plain)
    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out

    @ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=plain_add, inplace=True)
    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual


def _allow_experts_without_gate() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    theirs: Any = CPUUnquantizedExperts
    post_init, supports = FusedMoEConfig.__post_init__, theirs._supports_activation
    pack, apply = theirs.process_weights_after_loading, theirs.apply
    ungated = MoEActivation.RELU2_NO_MUL

    def allow_on_cpu(self: Any) -> None:
        try:
            post_init(self)
        except NotImplementedError:  # its last check, which refuses every activation without a gate on CPU
            if self.activation is not ungated:
                raise

    def keep_unpacked(self: Any, layer: torch.nn.Module) -> None:
        if self.moe_config.activation is not ungated:
            pack(self, layer)

    def compute(self: Any, **options: Any) -> None:
        if options["activation"] is ungated:
            up, down = options["w1"], options["w2"]
            chosen, weights = options["topk_ids"].long(), options["topk_weights"]
            total = sum_of_experts(
                options["hidden_states"], chosen, weights, False, lambda e, _: iter((plain(up[e]), plain(down[e])))
            )
            options["output"].copy_(total)
        else:
            apply(self, **options)

    FusedMoEConfig.__post_init__ = allow_on_cpu
    theirs._supports_no_act_and_mul = staticmethod(lambda: True)
    theirs._supports_activation = staticmethod(lambda activation: activation is ungated or supports(activation))
    theirs.process_weights_after_loading, theirs.apply = keep_unpacked, compute


def _route_sigmoid_scores_without_groups() -> None:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    theirs: Any = CPURouter
    route = theirs._compute_routing

    def compute_routing(self: Any, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if self.scoring_func == "sigmoid" and not self.use_grouped_topk:  # one group of all experts
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        routing: tuple[Tensor, Tensor] = route(self, *arguments, **options)
        return routing

    theirs._compute_routing = compute_routing


def _do_without_torchvision() -> None:
    reason = why_not_imported("torchvision")
    if reason is None:
        return
    if reason != NOT_INSTALLED:  # vLLM and transformers ask for its name only, and then fail to import it
        raise ImportError(f"torchvision is installed but broken ({reason}); remove it: pip uninstall torchvision")
    for model, processor in (("qwen2_vl", "Qwen2VLImageProcessor"), ("gemma3", "Gemma3ImageProcessor")):
        package = f"transformers.models.{model}"
        module: Any = importlib.import_module(f"{package}.image_processing_pil_{model}")
        setattr(module, processor, getattr(module, f"{processor}Pil"))
        sys.modules.setdefault(f"{package}.image_processing_{model}", module)
        setattr(importlib.import_module(package), processor, getattr(module, processor))
    _stand_in_for_videos()


def _stand_in_for_videos() -> None:
    """Let Qwen's processors, which always have one for videos, start with one that knows its settings alone."""
    import transformers
    from transformers.image_processing_base import ImageProcessingMixin
    from transformers.processing_utils import ProcessorMixin

    class NoVideoProcessor(ImageProcessingMixin):
        """The settings by which vLLM sizes a video. Superfluous once transformers reads videos without torchvision."""

        _auto_class = None
        valid_kwargs = type("NoSettings", (), {})
        patch_size, merge_size, temporal_patch_size, fps, min_frames, max_frames = 16, 2, 2, 2, 4, 4
        size = {"shortest_edge": 4096, "longest_edge": 65536}  # noqa: RUF012

        def __init__(self, **options: Any) -> None:
            super().__init__()

        def __call__(self, *videos: Any, **options: Any) -> Any:
            raise ImportError("videos need torchvision, which is not installed")

    NoVideoProcessor.valid_kwargs.__annotations__ = {}
    for parent, names in {
        "transformers": ("BaseVideoProcessor", "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"),
        "transformers.models.qwen2_vl": ("Qwen2VLVideoProcessor",),
        "transformers.models.qwen3_vl": ("Qwen3VLVideoProcessor",),
    }.items():
        for name in names:
            setattr(importlib.import_module(parent), name, NoVideoProcessor)
    for model, name in (("qwen2_vl", "Qwen2VLVideoProcessor"), ("qwen3_vl", "Qwen3VLVideoProcessor")):
        path = f"transformers.models.{model}.video_processing_{model}"
        module: Any = types.ModuleType(path)
        setattr(module, name, NoVideoProcessor)
        module.smart_resize = lambda *, factor, **sizes: (factor, factor)
        sys.modules.setdefault(path, module)
    auto: Any = transformers.AutoVideoProcessor
    auto.from_pretrained = lambda *names, **options: NoVideoProcessor()
    theirs: Any = ProcessorMixin
    check = theirs.check_argument_for_proper_class

    def check_argument(self: Any, name: str, argument: Any) -> Any:
        return NoVideoProcessor if name == "video_processor" else check(self, name, argument)

    theirs.check_argument_for_proper_class = check_argument


def _replace_gated_delta_net() -> None:
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

    # vLLM derives the operator's schema from the annotations, which have to be types.
    def cpu_gdn_attention_core(
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: LayerNameType,
    ) -> None:
        context, name = get_forward_context(), _resolve_layer_name(layer_name)
        layer = context.no_compile_layers[name]
        if context.attn_metadata is None:  # vLLM measures memory
            return
        batch = context.attn_metadata[layer.prefix]
        count = batch.num_decodes + batch.num_prefills
        slots, starts = batch.non_spec_state_indices_tensor[:count], batch.non_spec_query_start_loc[: count + 1]
        known = (
            torch.ones(count, dtype=torch.bool) if batch.has_initial_state is None else batch.has_initial_state[:count]
        )
        windows, states = layer.kv_cache[0], layer.kv_cache[1]
        if not is_conv_state_dim_first():
            windows = windows.transpose(-1, -2)
        window = windows[slots].float().where(known[:, None, None], 0.0)
        state = states[slots].float().where(known[:, None, None, None], 0.0)
        weight = gdn_attention._unpacked_conv_weight(layer).float()
        decay = -layer.A_log.float().exp() * torch.nn.functional.softplus(a.float() + layer.dt_bias.float())
        out = gated_delta_net(mixed_qkv.float(), decay.exp(), b.float().sigmoid(), weight, window, state, starts)
        core_attn_out[: len(out)] = out
        windows[slots], states[slots] = window.to(windows.dtype), state.to(states.dtype)

    gdn_attention.cpu_gdn_attention_core = cpu_gdn_attention_core


def gated_delta_net(
    x: Tensor, decay: Tensor, strength: Tensor, weight: Tensor, window: Tensor, state: Tensor, starts: Tensor
) -> Tensor:
    """Return outputs [T, heads, e] of a Gated DeltaNet mixer (arXiv 2412.06464, eq. 10) for the tokens of several
    sequences, one token of each at a time; change `window` and `state` to those after their last tokens.

    x [T, channels]: queries, keys and values before the convolution with `weight` [channels, kernel]. decay and
    strength [T, heads]. window [n, channels, kernel - 1]: inputs before each sequence. state [n, heads, e, d]. starts
    [n + 1].
    """
    heads, e, d = state.shape[1:]
    keys = (x.size(1) - heads * e) // 2
    out = x.new_zeros(int(starts[-1]), heads, e)
    lengths = starts.diff()
    for step in range(int(lengths.max())):
        running = (lengths > step).nonzero()[:, 0]
        rows = starts[running] + step
        inputs = torch.cat([window[running], x[rows, :, None]], -1)
        window[running] = inputs[..., 1:]
        convolved = torch.nn.functional.silu((inputs * weight).sum(-1))
        *pair, v = convolved.split([keys, keys, heads * e], -1)
        pair = [part.unflatten(-1, (-1, d)) for part in pair]
        pair = [part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in pair]
        q, k = (part.repeat_interleave(heads // part.size(1), 1)[..., None] for part in pair)  # [n, heads, d, 1]
        old = state[running] * decay[rows][..., None, None]
        change = (v.unflatten(-1, (heads, e))[..., None] - old @ k) * strength[rows][..., None, None]
        state[running] = new = old + change @ k.transpose(-1, -2)
        out[rows] = (new @ q)[..., 0] * d**-0.5
    return out
