"""docs/objective.md names all keys and metrics and no others, and its pictures agree with the papers."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from grpo_mcore.objective import METRIC_REDUCTIONS
from grpo_mcore.recipe import (
    AdvEstimatorConfig,
    ClippedPGLossConfig,
    GRPOConfig,
    RewardScalingConfig,
    RewardShapingConfig,
    load_recipe,
)

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "objective.md").read_text()
CODE = re.findall(r"`([^`\n]+)`", TEXT)
WORDS = {word for span in CODE for word in re.findall(r"[A-Za-z_][\w.]*", span)}


@pytest.mark.parametrize("key", ClippedPGLossConfig.model_fields)
def test_every_key_of_the_loss_is_in_the_doc(key: str) -> None:
    assert key in WORDS


@pytest.mark.parametrize("name", get_args(AdvEstimatorConfig.model_fields["name"].annotation))
def test_every_estimator_is_in_the_doc(name: str) -> None:
    assert name in WORDS


@pytest.mark.parametrize("section", [AdvEstimatorConfig, RewardShapingConfig, RewardScalingConfig])
def test_the_keys_of_rewards_and_advantages_are_in_the_doc(section: Any) -> None:
    assert set(section.model_fields) - {"name", "enabled"} <= WORDS | {word.rpartition(".")[2] for word in WORDS}


def test_a_key_that_the_doc_names_exists() -> None:
    named = [word for word in WORDS if word.startswith("grpo.") and not word.endswith(".yaml")]
    assert len(named) >= 15
    for word in named:
        _, first, *rest = word.split(".")
        assert first in GRPOConfig.model_fields, word
        inner = GRPOConfig.model_fields[first].annotation
        assert not rest or rest[0] in inner.model_fields, word  # type: ignore[union-attr]


def test_every_metric_of_the_loss_is_in_the_doc() -> None:
    others = [(ROOT / "docs" / name).read_text() for name in ("dpo.md", "distillation.md")]
    table = TEXT[TEXT.index("## Metrics") :] + "".join(others)
    names = set()
    for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE):
        first = ""
        for name in re.findall(r"`([^`]+)`", row):
            first, name = (first, first + name) if name.startswith("_") else (name, name)
            names.add(name.partition("/age_")[0])
    assert set(METRIC_REDUCTIONS) <= names


def test_every_variant_is_in_the_doc_with_the_keys_that_make_it() -> None:
    rows = {
        Path(path): row for row, path in re.findall(r"^(\|.*`(recipes/variants/[\w-]+\.yaml)`.*)$", TEXT, re.MULTILINE)
    }
    assert {ROOT / path for path in rows} == set((ROOT / "recipes" / "variants").glob("*.yaml"))
    for path, row in rows.items():
        set_here = {
            part
            for key, source in load_recipe(ROOT / path).provenance.items()
            if Path(source.rpartition(":")[0]).name == path.name and key.startswith(("grpo.", "loss_fn.", "data."))
            for part in key.split(".")
        }
        for key in re.findall(r"(\w+):", row.split("|")[3]):
            assert key in set_here, (path, key)


def test_pictures_are_there_and_small() -> None:
    images = re.findall(r"\]\((images/[\w-]+\.png)\)", TEXT)
    assert [Path(image).stem for image in images] == [*PLOT.figures(), "learning"]  # the last by benchmarks/learning.py
    for image in images:
        assert 1000 < (ROOT / "docs" / image).stat().st_size < 60_000


def test_links_within_the_doc_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+(.*)$", TEXT, re.M)
    }
    anchors = re.findall(r"\]\(#([\w-]+)\)", TEXT)
    assert anchors and set(anchors) <= headings


def plot_script() -> Any:
    spec = importlib.util.spec_from_file_location("plot_objective", ROOT / "scripts" / "plot_objective.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


PLOT = plot_script()


def near(got: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.fixture
def float64() -> Any:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


@pytest.mark.parametrize(
    ("config", "positive", "negative"),
    [
        ({}, [0.5, 1.1, 0, 0], [0, -1.1, -1.25, -5]),
        ({"ratio_clip_max": 0.28}, [0.5, 1.1, 1.25, 0], [0, -1.1, -1.25, -5]),
        ({"ratio_clip_c": 3.0}, [0.5, 1.1, 0, 0], [0, -1.1, -1.25, 0]),
        ({"use_cispo": True, "ratio_clip_max": 1.0}, [0.8, 1.1, 1.25, 2], [-0.8, -1.1, -1.25, -2]),
        ({"disable_ppo_ratio": True}, [1, 1, 1, 1], [-1, -1, -1, -1]),
        ({"force_on_policy_ratio": True}, [1, 1, 1, 1], [-1, -1, -1, -1]),
        ({"sequence_level_importance_ratios": True, "token_level_loss": False}, [0.5, 1.1, 0, 0], [0, -1.1, -1.25, -5]),
    ],
)
def test_the_push_on_a_log_prob(float64: None, config: Any, positive: list[float], negative: list[float]) -> None:
    ratio = torch.tensor([0.5, 1.1, 1.25, 5.0])
    near(PLOT.push(ratio, 1.0, **config), positive)
    near(PLOT.push(ratio, -1.0, **config), negative)


def test_the_weight_in_the_loss(float64: None) -> None:
    raw = torch.tensor([0.1, 1.0, 1.5, 3.0])
    near(PLOT.weight(raw), [0.1, 1.0, 1.5, 3.0])
    tis = {"truncated_importance_sampling_type": "tis"}
    near(PLOT.weight(raw, **tis, truncated_importance_sampling_ratio=2.0), [0.1, 1.0, 1.5, 2.0])
    by_age = {"truncated_importance_sampling_ratio_by_age": [2.0, 1.2]}
    near(PLOT.weight(raw, 0, **tis, **by_age), [0.1, 1.0, 1.5, 2.0])
    near(PLOT.weight(raw, 7, **tis, **by_age), [0.1, 1.0, 1.2, 1.2])


@pytest.mark.slow
def test_the_pictures_hold_curves_over_their_whole_range(tmp_path: Path) -> None:
    before = torch.get_default_dtype()
    figures = PLOT.figures()
    assert torch.get_default_dtype() == before
    for panels in figures.values():
        for panel in panels:
            for curve in panel.curves:
                assert curve.x.shape == curve.y.shape and len(curve.x) >= 200
                assert bool(torch.isfinite(curve.y).all())
    value, implemented, alone = figures["kl"]
    x = value.curves[2].x
    near(implemented.curves[2].y, x.tolist())  # k3 with the score-function term: the gradient of the KL itself
    near(alone.curves[0].y, [1.0] * len(x))  # without it k1 has no effect
    right, wrong, stopped = figures["overlong"][0].curves
    assert (right.y.min(), wrong.y.min(), stopped.y.min()) == (0.0, -1.0, 0.5)  # the penalty has a floor
    PLOT.draw(figures["overlong"], tmp_path / "overlong.png")
    assert (tmp_path / "overlong.png").read_bytes().startswith(b"\x89PNG")
