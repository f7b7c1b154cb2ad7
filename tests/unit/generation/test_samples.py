"""The sampling parameters that a request gives vLLM, and its own defaults beside them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.families import shape_of
from grpo_mcore.families.known import known_config
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Turn, sample_seed

SEEDS = st.one_of(
    st.integers(0, 2**63 - 1),
    st.builds(sample_seed, st.integers(), st.integers(0), st.text(), st.integers(0), st.integers(0)),
)
SAMPLINGS = st.builds(
    Sampling,
    max_new_tokens=st.integers(1, 64),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.none() | st.integers(1, 100),
    stop_token_ids=st.tuples(st.integers(0, 99)),
    stop_strings=st.tuples(st.text(min_size=1)),
    scores_prompt=st.booleans(),
)


@settings(max_examples=25)
@given(SEEDS, SAMPLINGS)
def test_every_request_brings_its_seed(seed: int, sampling: Sampling) -> None:
    """FlashInfer's sampler, which GPUs have, ends an engine whose requests have none, and ours would not repeat."""
    from grpo_mcore.generation.samples import sampling_params

    request = GenerationRequest("p", 0, (Turn("user", torch.ones(3, dtype=torch.int64)),), seed=seed)
    assert sampling_params(request, sampling, 128, {}).seed == seed
    sampling = replace(sampling, temperature=0.7, first_is_greedy=True)
    requests = request, replace(request, generation_index=1)
    assert [sampling_params(each, sampling, 128, {}).temperature for each in requests] == [0.0, 0.7]


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("name", ["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen/Qwen3.5-35B-A3B"])
def test_a_state_is_as_large_as_vllms(name: str, tensor: int) -> None:
    """Shape times number format, of a layer on a rank."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator

    config = known_config(name)
    shape, text = shape_of(config), config.get("text_config", config)
    if (mamba := shape.mamba) is not None:
        shapes = MambaStateShapeCalculator.mamba2_state_shape(
            tensor, mamba.inner, mamba.groups, mamba.heads, mamba.head_dim, mamba.state_size, mamba.kernel
        )
        of_layer, dtype = mamba.state(2), text.get("mamba_ssm_cache_dtype", "float32")
        dtypes = MambaStateDtypeCalculator.mamba2_state_dtype(torch.bfloat16, "auto", dtype)
    else:
        delta = shape.delta
        assert delta is not None
        heads, dims = (delta.key_heads, delta.value_heads), (delta.key_dim, delta.value_dim)
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(tensor, *heads, *dims, delta.kernel)
        of_layer, dtype = delta.state(2), text["mamba_ssm_dtype"]
        dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(torch.bfloat16, "auto", dtype)
    assert of_layer == tensor * sum(
        math.prod(size) * dtype.itemsize for size, dtype in zip(shapes, dtypes, strict=True)
    )
