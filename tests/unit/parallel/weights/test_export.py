"""Adapters get the names that PEFT looks for: those of transformers' modules."""

from pathlib import Path

import pytest

from grpo_mcore.families import params_of, read_hf_config, shape_of
from grpo_mcore.parallel.weights.export import module_name
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.parity import load_network


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_layers_have_the_names_of_transformers_modules(tmp_path: Path, family: str) -> None:
    folder = make_tiny_model(family, tmp_path)
    shape, modules = shape_of(read_hf_config(folder)), {name for name, _ in load_network(folder).named_modules()}
    names = {tensor.name.removesuffix(".weight") for param in params_of(shape) for tensor in param.hf}
    layers = {name for name in names if ".layers." in name and not name.endswith(".bias")}
    assert len(layers) > 30 and {module_name(name, shape) for name in layers} <= modules
