"""The platform that is detected."""

from __future__ import annotations

import pytest
import torch

from grpo_mcore.parallel.platform import Platform

PLATFORMS = {
    "cpu": Platform("cpu"),
    "gpu": Platform("gpu"),
    "gpu with TransformerEngine": Platform("gpu", transformer_engine=True),
}


def test_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Platform.detect() == Platform.detect("cpu") == PLATFORMS["cpu"]
    with pytest.raises(RuntimeError, match="cluster.platform is gpu, but torch sees no GPU"):
        Platform.detect("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("grpo_mcore.parallel.platform.find_spec", lambda name: None)
    assert Platform.detect() == Platform.detect("gpu") == PLATFORMS["gpu"]
    assert Platform.detect("cpu") == PLATFORMS["cpu"]
    monkeypatch.setattr("grpo_mcore.parallel.platform.find_spec", lambda name: object())
    assert Platform.detect() == PLATFORMS["gpu with TransformerEngine"]
