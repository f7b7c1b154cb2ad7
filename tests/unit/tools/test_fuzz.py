"""Draws of `tests.parity_fuzz`: repeatable, written and read, and made smaller."""

from dataclasses import replace
from itertools import islice

import pytest

from grpo_mcore.tools.demo.tiny_models import FAMILIES, SIZES, UnknownFamily
from grpo_mcore.tools.parity.rank import LayoutCase, ParityWorkload
from tests import parity_fuzz
from tests.parity_fuzz import Draw, Failure, draws, shrunk, tiny_like


def test_draws_follow_from_the_seed_and_differ() -> None:
    first, again, other = (list(islice(draws(seed, "qwen3_moe", {}, 4), 60)) for seed in (3, 3, 4))
    assert first == again != other
    assert {draw.layout.world_size for draw in first} == {2, 4}
    assert any(draw.layout.expert > 1 for draw in first) and any(draw.layout.virtual for draw in first)
    for draw in first:
        assert sorted(i for bin in draw.work.bins for i in bin) == list(range(len(draw.work.lengths)))
        assert len(draw.work.bins) >= draw.layout.data
        assert Draw.from_json(draw.to_json()) == draw
    dense = islice(draws(3, "qwen3", {"tie_word_embeddings": True}, 2), 60)
    assert not any(draw.layout.expert > 1 or "tie_word_embeddings" in draw.sizes for draw in dense)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"layout": {}, "work": {"lengths": [1]}}'])
def test_other_text_is_no_case(text: str) -> None:
    with pytest.raises(ValueError, match="--case: not a case"):
        Draw.from_json(text)


def test_the_smallest_case_keeps_only_what_the_fault_needs() -> None:
    """Of a fault that needs TP 2, two sequences of at least four tokens in a row, and an odd vocabulary."""

    def fails(draw: Draw) -> str | None:
        rows = (sum(draw.work.lengths[i] >= 4 for i in bin) for bin in draw.work.bins)
        odd = draw.sizes.get("vocab_size", 0) % 2 == 1
        return "wrong" if draw.layout.tensor == 2 and max(rows) >= 2 and odd else None

    layout = LayoutCase("?", tensor=2, pipeline=2, sequence_parallel=True, recompute=True)
    sizes = {"vocab_size": 97, "hidden_size": 32}
    work = ParityWorkload(
        (9, 30, 2, 17), ((0, 2), (1, 3)), (1, 15, 1, 2), left_out=(2,), common=4, temperature=0.7, top_k=20, top_p=0.9
    )
    start = Failure(Draw(layout, work, sizes, 16), "wrong at first")
    smallest = shrunk(start, lambda draw: True, fails)
    assert smallest == Failure(
        Draw(
            LayoutCase("TP2", tensor=2),
            ParityWorkload((30, 17), ((0, 1),), (15, 2), entropy_coeff=0.0),
            {"vocab_size": 97},
        ),
        "wrong",
    )
    assert (
        smallest.draw.describe()
        == "tensor=2, vocab_size=97, lengths=(30, 17), bins=((0, 1),), entropy_coeff=0.0, logprob_chunk_size=1024"
    )
    assert shrunk(start, lambda draw: draw.layout.pipeline == 2, fails).draw.layout.pipeline == 2, "only what fits"


def test_a_search_without_end_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_fuzz, "SHRINK_RUNS", 3)
    seen: list[Draw] = []
    draw = next(draws(0, "qwen3", {}, 4))
    shrunk(Failure(draw, "wrong"), lambda _: True, lambda one: seen.append(one))  # type: ignore[func-returns-value]
    assert len(seen) == 3


def test_a_users_model_gives_the_form_and_the_tiny_one_the_sizes() -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_experts": 128,
        "norm_topk_prob": False,
        "rope_theta": 1e6,
        "eos_token_id": 151645,
        "mlp_only_layers": [],
        "q_lora_rank": None,
    }
    family, values = tiny_like(config)
    assert family == "qwen3_moe"
    assert values == {"norm_topk_prob": False, "rope_theta": 1e6, "q_lora_rank": None}
    latent = {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": None, "kv_lora_rank": 512}
    assert tiny_like(latent)[1] == {"q_lora_rank": None}, "no tiny size where the model has none"
    hybrid = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*", "num_hidden_layers": 52}
    assert tiny_like(hybrid)[1] == {}
    sections = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {
        "rope_parameters": {"mrope_section": [11, 11, 10]}, "attention_bias": True}}  # fmt: skip
    assert tiny_like(sections) == ("qwen3_5_text", {"attention_bias": True})
    with pytest.raises(UnknownFamily, match="GPT2LMHeadModel"):
        tiny_like({"architectures": ["GPT2LMHeadModel"]})
    assert all(
        tiny_like({"architectures": [f"{tiny['class']}ForCausalLM"], **SIZES})
        for tiny in FAMILIES.values()
        if "vision" not in tiny
    )


def test_a_draw_of_few_sequences_still_gives_every_rank_a_row() -> None:
    draw = next(one for one in draws(0, "qwen3", {}, 2) if one.layout.data == 2)
    for simpler in parity_fuzz.simpler_draws(replace(draw, work=ParityWorkload((5, 6, 7), ((0,), (1, 2)), (1, 1, 1)))):
        assert simpler.work.lengths and all(simpler.work.bins)
