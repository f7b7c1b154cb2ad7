import pytest

from grpo_mcore.families import ExpertShape
from grpo_mcore.tools.parity.parity import ParityCase
from grpo_mcore.tools.parity.rank import LayoutNameError, layout_named
from tests.unit.refit.whole_split import make_shape

DENSE, EXPERTS = make_shape(), make_shape(experts=ExpertShape(4, 2, 8))


def test_names_give_the_smallest_layout() -> None:
    both = layout_named("TP2xPP2", DENSE)
    assert (both.tensor, both.pipeline, both.world_size, both.sequence_parallel) == (2, 2, 4, False)
    assert layout_named("TP2-SPxCP2", DENSE).sequence_parallel
    assert layout_named("VPP2", DENSE).pipeline == layout_named("VPP2", DENSE).virtual == 2
    assert layout_named("EP2", EXPERTS).data == 2
    assert layout_named("EP2xTP2", EXPERTS).world_size == 2, "experts lie across the tensor-parallel ranks"
    sharded = layout_named("EP2xETP2", EXPERTS)
    assert (sharded.tensor, sharded.data, sharded.sequence_parallel) == (2, 2, True)


@pytest.mark.parametrize("name", ["tp2", "Tp2xCp2", "ep2xtp2-sp", "tp2xpp2xDP2"])
def test_names_may_be_in_lower_case(name: str) -> None:
    shape = EXPERTS if "ep" in name else DENSE
    assert layout_named(name, shape) == layout_named(name.upper().replace("X", "x"), shape)


@pytest.mark.parametrize("name", ["", "TP", "TP0", "XP2", "TP2,PP2", "TP2 PP2"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(LayoutNameError, match="is not one of TP, PP"):
        layout_named(name, DENSE)


def test_a_case_is_ok_only_if_every_parameter_is() -> None:
    errors = {"model.layers.0.a": 1e-6, "model.layers.0.b": 2e-3, "lm_head.weight": 1e-5}
    case = ParityCase("qwen3", "TP2", True, {0: 1e-6, 1: 2e-6}, errors)
    assert not case.ok
    assert case.by_layer() == {
        "layer 0": (2e-3, "model.layers.0.b"), "lm_head.weight": (1e-5, "lm_head.weight"),
    }  # fmt: skip
    assert case.plain()["max_logprob_diff"] == 2e-6 and case.plain()["max_grad_rel_diff"] == 2e-3
    assert not ParityCase("qwen3", "engine", None, {0: float("nan")}, {}).ok
    assert ParityCase("qwen3", "engine", None, {0: 1e-5}, {}).plain()["max_grad_rel_diff"] is None
