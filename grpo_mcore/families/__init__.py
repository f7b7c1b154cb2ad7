"""Model families: their shapes, parameters, splits and FLOPs, as plain values. One file a family.

To add a family, write a module named after its `model_type` and add it to `registry.MODULES`. The module defines

- `shape(config) -> ModelShape`: reads `config.json`, and raises FamilyError for values that it does not support;
- `params(shape) -> tuple[Param, ...]`: declares every parameter: its Hugging Face tensors, Megatron-Core's name, vLLM's
  name, and how it is split. `dense.decoder_params` builds it from a declaration of attention and one of the network;
- `flops(shape, tokens, sum_of_squared_lengths)`, only if `dense.dense_flops` does not fit.

Building, loading, export, refit, checkpoints and `plan` follow from that. Add a tiny model to
`tools/demo/tiny_models.yaml`: `tests/distributed/test_policy_parity.py` then compares the family with transformers.
Only a new kind of layer needs code in `parallel/`.
"""

from grpo_mcore.families.adapters import (
    DOWN,
    ENGINE_ADAPTER,
    UP,
    AdapterShape,
    adapter_params,
    adapter_shape,
    adapters_of,
    frozen_parts,
    is_adapted,
    is_trained,
)
from grpo_mcore.families.engine import (
    engine_options,
    engine_pieces,
    engine_shape,
    engine_sizes,
    missing_on_cpu,
    needs_output_layer,
    unquantized_layers,
)
from grpo_mcore.families.registry import (
    FAMILIES,
    engine_overrides,
    forward_flops,
    head_of,
    other_trainers_checkpoint,
    parameter_count,
    params_of,
    read_hf_config,
    shape_of,
    with_overrides,
)
from grpo_mcore.families.settings import (
    check_attention,
    check_context_parallel,
    check_fused_attention,
    check_images,
    check_length,
    check_settings,
    grouped_experts,
)
from grpo_mcore.families.spec import (
    VALUE_HEAD,
    Block,
    Box,
    DeltaShape,
    ExpertShape,
    FamilyError,
    HfTensor,
    MambaShape,
    ModelShape,
    Param,
    Piece,
    Split,
    Stage,
    VisionShape,
    from_key,
    local_shape,
    pieces,
    tensor_parallel_sizes,
)
