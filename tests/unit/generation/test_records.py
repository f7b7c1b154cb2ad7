"""Records of an engine's forward passes: what comes out of each layer, at each token's place."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from grpo_mcore.generation.worker_calls import record_layers, take_records


def worker_of(model: torch.nn.Module, layers: int) -> Any:
    config = SimpleNamespace(get_total_num_hidden_layers=lambda: layers, max_model_len=6)
    batch = SimpleNamespace(req_ids=["a", "b"], num_computed_tokens_cpu=np.array([2, 0]))
    starts = SimpleNamespace(np=np.array([0, 1, 4]))
    runner = SimpleNamespace(model=model, model_config=config, input_batch=batch, query_start_loc=starts)
    return SimpleNamespace(model_runner=runner, rank=0)


def test_each_layers_output_is_recorded_at_its_tokens_place() -> None:
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    worker, direction = worker_of(model, 3), torch.randn(4, dtype=torch.float64)
    assert record_layers(worker, direction)
    hidden = torch.randn(4, 4)
    with torch.no_grad():
        outputs = [hidden := layer(hidden) for layer in model.layers]
    one, other, none = take_records(worker, "layer_recorder", ["a", "b", "c"])
    assert none is None and one is not None and other is not None
    for layer, output in enumerate(outputs):
        right = torch.stack([output.double().norm(dim=1), output.double() @ direction], 1).numpy()
        np.testing.assert_allclose(one[2, layer], right[0], rtol=1e-12)
        np.testing.assert_allclose(other[:3, layer], right[1:], rtol=1e-12)
    assert np.isnan(one[[0, 1, 3, 4, 5]]).all() and np.isnan(other[3:]).all()


def test_a_model_without_a_list_of_its_layers_is_not_recorded() -> None:
    model = torch.nn.Module()
    model.some = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    worker = worker_of(model, 3)
    assert not record_layers(worker, torch.zeros(4, dtype=torch.float64))
    assert not hasattr(worker, "layer_recorder")
