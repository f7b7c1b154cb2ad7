"""Megatron-Core accepts the settings of every recipe on every platform; it checks them when they are built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_mcore.families import shape_of
from grpo_mcore.families.known import known_config
from grpo_mcore.parallel import cpu_platform

cpu_platform.install()

from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

from grpo_mcore.parallel.optimizer import ddp_config, optimizer_config  # noqa: E402
from grpo_mcore.parallel.platform import Platform  # noqa: E402
from grpo_mcore.parallel.policy import layout_of  # noqa: E402
from grpo_mcore.parallel.settings import transformer_config  # noqa: E402
from grpo_mcore.recipe import load_recipe, world_size  # noqa: E402

RECIPES = sorted((Path(__file__).parents[3] / "recipes").rglob("*.yaml"))
PLATFORMS = {
    "cpu": Platform("cpu"),
    "gpu": Platform("gpu"),
    "gpu with TransformerEngine": Platform("gpu", transformer_engine=True),
}


@pytest.fixture
def transformer_engine_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for TransformerEngine's fused kernels, of which Megatron-Core's settings check only the presence."""
    for module in (rope_utils, moe_utils):
        for name in [name for name in vars(module) if name.startswith("fused_")]:
            monkeypatch.setattr(module, name, object())


@pytest.mark.usefixtures("transformer_engine_kernels")
@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=PLATFORMS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_settings_of_every_recipe_are_accepted(recipe: Path, platform: Platform) -> None:
    config = load_recipe(str(recipe)).config
    policy, hf_config = config.policy, known_config(config.policy.model_name)
    assert hf_config is not None
    shape = shape_of(hf_config)
    layout = layout_of(policy, world_size(config))
    dtype = getattr(torch, policy.precision)
    model = transformer_config(shape, layout, policy.megatron_cfg, dtype, platform)
    assert model.use_cpu_initialization is not platform.on_gpu
    if not platform.transformer_engine:
        fusions = (model.bias_activation_fusion, model.apply_rope_fusion, model.moe_permute_fusion)
        assert not any(fusions), "only TransformerEngine has these kernels"
    ddp = ddp_config(policy.megatron_cfg, platform)
    assert platform.on_gpu or not ddp.overlap_grad_reduce, "Gloo has no streams"
    assert optimizer_config(policy).params_dtype == dtype


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
