from __future__ import annotations

import pytest

from grpo_mcore.recipe.loading.interpolate import InterpolationError, resolve_text
from tests.unit.recipe.conftest import MINIMAL

VALUES = {"a.n": 6, "a.m": 4, "a.f": 0.5, "a.s": "x", "a.none": None, "a.t": True}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${a.n}", 6),
        ("${ a.n }", 6),
        ("${a.s}", "x"),
        ("${a.none}", None),
        ("${a.t}", True),
        ("run-${a.s}-${a.n}", "run-x-6"),
        ("${a.t}!", "true!"),
        ("${mul:${a.n},${a.m}}", 24),
        ("${mul:${a.n}, 2, 3}", 36),
        ("${mul:a.n,a.m}", 24),
        ("${mul:a.n,a.f}", 3.0),
        ("${div:${mul:a.n,a.m},8}", 3),
        ("${div:a.n,4}", 1.5),
        ("${div:a.n,1.5}", 4.0),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_values(text: str, value: object) -> None:
    result = resolve_text(text, VALUES.__getitem__)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${div:a.n,0}", "division by 0"),
        ("${div:a.n}", "div takes 2 arguments, got 1"),
        ("${mul:a.n,a.s}", "expected a number, but a.s is 'x'"),
        ("${mul:a.n,a.t}", "expected a number, but a.t is true"),
        ("${sub:a.n,1}", "there is no function 'sub'; known: mul, div"),
        ("${.n}", "expected a full key such as"),
        ("${a.n", "is not closed"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(InterpolationError, match=message):
        resolve_text(text, VALUES.__getitem__)


def test_a_reference_keeps_its_own_source_and_follows_overrides(load) -> None:
    text = MINIMAL + "sft: {seed: '${grpo.seed}'}\ngrpo: {seed: 3}\n"
    recipe = load(text, "grpo.seed=8")
    assert recipe.config.sft.seed == 8 and recipe.provenance["sft.seed"] == "r.yaml:6"


def test_a_reference_to_a_key_that_is_not_set_takes_its_default(load) -> None:
    text = MINIMAL + "sft: {max_num_steps: '${mul:grpo.val_period,2}', val_batches: '${policy.logprob_batch_size}'}\n"
    sft = load(text).config.sft
    assert (sft.max_num_steps, sft.val_batches) == (20, 4), "4: derived from train_micro_batch_size"
    nulls = MINIMAL + "loss_fn: {kl_input_clamp_value: null}\nsft: {val_batches: '${loss_fn.kl_input_clamp_value}'}\n"
    assert load(nulls).config.sft.val_batches is None, "null, not the default 20"


def test_whole_sections_can_be_interpolated(load) -> None:
    text = "policy: {model_name: m}\ndata: {train: {data_path: a, input_key: q}, validation: '${data.train}'}\n"
    assert load(text).config.data.validation[0].input_key == "q"


def test_errors_have_their_place(problems) -> None:
    text = MINIMAL + (
        "grpo:\n  seed: ${policy.model_nam}\n  val_period: ${grpo.max_num_steps}\n  max_num_steps: ${grpo.val_period}\n"
    )
    lines = problems(text)
    assert "r.yaml:7: grpo.seed: '${policy.model_nam}': policy.model_nam has no value; " in lines[0]
    assert lines[0].endswith("nearest known key: policy.model_name")
    assert (
        "r.yaml:8: grpo.val_period: '${grpo.max_num_steps}': the keys refer to each other in a circle: "
        "grpo.max_num_steps -> grpo.val_period -> grpo.max_num_steps"
    ) in lines
