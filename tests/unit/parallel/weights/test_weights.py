"""Loading a rank's weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import save_file

from grpo_mcore.parallel.weights import weights
from grpo_mcore.parallel.weights.weights import ShardedWeights


def test_a_long_load_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A start that takes minutes shows this line of the late rank."""
    values = torch.arange(1_000_000.0).reshape(1000, 1000)
    save_file({"w": values}, tmp_path / "model.safetensors")
    local = torch.ones(25, 1000, 1000)  # 0.1 GB; the last part is padding
    slices = [("w", ((0, 1000), (0, 1000)), part) for part in local[:-1]]
    rank = SimpleNamespace(local=[(None, local)], slices=lambda owned_only: iter(slices))
    monkeypatch.setattr(weights, "NOTE_S", 0.0)
    caplog.set_level("INFO", weights.__name__)
    ShardedWeights.load_hf(cast(ShardedWeights, rank), tmp_path)
    assert len(caplog.messages) == len(slices)
    assert (caplog.messages[0], caplog.messages[-1]) == ("weights: 0.0 of 0.1 GB", "weights: 0.1 of 0.1 GB")
    assert torch.equal(local[1], values) and not local[-1].any()
