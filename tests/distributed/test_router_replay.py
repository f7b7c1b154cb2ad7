"""Routers that replay given choices: every token gets its own experts on every layout."""

from pathlib import Path

import pytest
import torch

from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.parity import GRADIENT_LIMIT, LOGPROB_LIMIT, Reference, compare
from grpo_mcore.tools.parity.rank import LayoutCase
from grpo_mcore.tools.parity.rank_pool import RankPool

TARGET = "tests.distributed.replay_cases:replayed"
LAYOUTS = (
    LayoutCase("TP1-recompute", recompute=True),
    LayoutCase("EP2xTP2-SP", tensor=2, sequence_parallel=True, expert=2),
    LayoutCase("CP2", context=2),
    LayoutCase("VPP2", pipeline=2, virtual=2),
    LayoutCase("EP2-allgather", data=2, expert=2, dispatcher="allgather"),
)


def joined(pieces: list[tuple[str, tuple[tuple[int, int], ...], torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Assemble the whole trained tensors from the slices of a rank that has all of them."""
    found: dict[str, torch.Tensor] = {}
    for name, box, _ in pieces:
        size = [stop for _, stop in box]
        found[name] = torch.zeros(*map(max, size, found[name].shape)) if name in found else torch.zeros(*size)
    for name, box, values in pieces:
        found[name][tuple(slice(*span) for span in box)] = values
    return {name: values for name, values in found.items() if "correction_bias" not in name}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_every_layout_replays_the_same_routes(ranks: RankPool, tmp_path: Path, family: str) -> None:
    folder = make_tiny_model(family, tmp_path)
    (alone,) = ranks.run(1, TARGET, str(folder), LayoutCase("TP1"), True)
    (free,) = ranks.run(1, TARGET, str(folder), LayoutCase("TP1"), False)
    reference = Reference(folder, family, torch.nn.Module(), alone["logprobs"], joined(alone["gradients"]))
    assert max((free["logprobs"][i] - found).abs().max() for i, found in alone["logprobs"].items()) > 0.01
    for case in LAYOUTS if family == "qwen3_moe" else LAYOUTS[1:3]:
        results = ranks.run(case.world_size, TARGET, str(folder), case, True)
        found = compare(reference, results, case.name, packed=True)
        assert max(found.logprobs.values()) < LOGPROB_LIMIT, case.name
        assert max(found.gradients.values()) < GRADIENT_LIMIT, (case.name, found.by_layer())
