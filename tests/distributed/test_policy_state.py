"""Checkpoints, exports, offloading, the reference, and losses that are not finite, on real meshes."""

import shutil
from pathlib import Path

import pytest
import torch

from grpo_mcore.tools.demo.tiny_models import SIZES, make_tiny_model
from grpo_mcore.tools.parity.rank import LayoutCase, sequences
from grpo_mcore.tools.parity.rank_pool import RankFailed, RankPool

CASES = "tests.distributed.policy_state_cases"
TP1, TP2, TP2_PP2 = LayoutCase("TP1"), LayoutCase("TP2", tensor=2), LayoutCase("TP2xPP2", tensor=2, pipeline=2)
TP4 = LayoutCase("TP4", tensor=4)
DP2 = LayoutCase("DP2", data=2)
VPP2 = LayoutCase("VPP2", pipeline=2, virtual=2)
PP2_DP2 = LayoutCase("PP2xDP2", pipeline=2, data=2)
CP2 = LayoutCase("CP2", context=2)
PP2_UNEVEN = LayoutCase("PP2-uneven", pipeline=2, first_stage=1)
EP2 = LayoutCase("EP2", data=2, expert=2)
ETP2 = LayoutCase("ETP2", tensor=2, sequence_parallel=True, expert_tensor=2)
EP2_CP2 = LayoutCase("EP2xCP2", context=2, expert=2)
EP2_DP4 = LayoutCase("EP2xDP4", data=4, expert=2)
EP2_PP2 = LayoutCase("EP2xPP2", pipeline=2, data=2, expert=2)
DENSE_FIRST = LayoutCase("EP2xPP2-dense-first", pipeline=2, data=2, expert=2, first_stage=1)
EP2_ETP2 = LayoutCase("EP2xETP2", tensor=2, data=2, sequence_parallel=True, expert=2, expert_tensor=2)
CP2_DP2_EP2 = LayoutCase("CP2xDP2-EP2", context=2, data=2, expert=2)

ADAM = {"lr": 0.01, "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        family: str(
            make_tiny_model(family, tmp_path_factory.mktemp(family), tie_word_embeddings=family != "nemotron_h_moe")
        )
        for family in ("qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "nemotron_h_moe")
    }


@pytest.fixture(scope="module")
def model(models: dict[str, str]) -> str:
    return models["qwen3"]


@pytest.fixture(scope="module")
def checkpoint(ranks: RankPool, model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint after two steps."""
    folder = str(tmp_path_factory.mktemp("saved") / "ckpt")
    ranks.run(1, f"{CASES}:train_save_train", model, TP1, folder)
    return folder


def steps_of(ranks: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return for each step the gradient norm, and the loss summed over the ranks that have a share of it."""
    return [(parts[0][0], sum(loss for _, loss in parts)) for parts in zip(*ranks, strict=True)]


def rarely(*values: object) -> object:
    """Return a case that only `--chaos` runs: the others enter every branch that it does."""
    return pytest.param(*values, marks=pytest.mark.every_state)


PARTS = "the optimizer in parts"


@pytest.mark.parametrize(
    ("family", "saved", "loaded", "how", "rel"),
    [
        ("qwen3", TP2, TP2, "", 0),
        ("qwen3", TP1, TP2, "", 1e-4),
        ("qwen3", DP2, TP1, "", 1e-4),
        ("qwen3", VPP2, CP2, "", 1e-3),
        ("qwen3", PP2_UNEVEN, TP4, "", 1e-3),  # of two key-value heads
        ("deepseek_v3", DENSE_FIRST, DENSE_FIRST, "", 0),
        ("deepseek_v3", DENSE_FIRST, DENSE_FIRST, PARTS, 0),
        ("deepseek_v3", DENSE_FIRST, ETP2, "", 1e-3),
        ("deepseek_v3", EP2_PP2, DENSE_FIRST, "", 1e-3),
        ("nemotron_h_moe", ETP2, CP2, "", 1e-3),
        ("qwen3", DP2, TP1, PARTS, 1e-3),
        rarely("qwen3", TP1, TP1, "", 0),
        rarely("qwen3", TP2, DP2, "", 1e-4),
        rarely("qwen3", PP2_DP2, PP2_DP2, "", 0),
        rarely("qwen3", VPP2, VPP2, "", 0),
        rarely("qwen3", CP2, PP2_UNEVEN, "", 1e-3),
        rarely("qwen3", TP4, TP2_PP2, "", 1e-3),
        rarely("qwen3", VPP2, TP4, "", 1e-3),
        rarely("qwen3_moe", EP2, EP2, "", 0),
        rarely("nemotron_h_moe", EP2_PP2, ETP2, "", 1e-3),
        rarely("qwen3_moe", EP2, EP2_CP2, PARTS, 1e-3),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_training_continues_from_a_checkpoint_as_without_interruption(
    ranks: RankPool, models: dict[str, str], tmp_path: Path, family: str, saved: LayoutCase, loaded: LayoutCase,
    how: str, rel: float,
) -> None:  # fmt: skip
    """On the same layout to the bit. Of an optimizer in parts each rank writes and reads its own, and none gathers
    whole parameters: it loads on other copies of the model alone."""
    folder = str(tmp_path / "ckpt")
    through = ranks.run(saved.world_size, f"{CASES}:train_save_train", models[family], saved, folder, how == PARTS)
    resumed = ranks.run(loaded.world_size, f"{CASES}:load_train", models[family], loaded, folder)
    for before, after in zip(steps_of(through), steps_of(resumed), strict=True):
        assert after == (pytest.approx(before, rel=rel) if rel else before), (through, resumed)
    if how == PARTS and family == "qwen3":
        with pytest.raises(RankFailed, match="dist_ckpt_optim_fully_reshardable: true load on every layout"):
            ranks.run(2, f"{CASES}:load_train", models[family], TP2, folder)


@pytest.mark.parametrize(
    ("family", "saved"),
    [("qwen3", PP2_DP2), rarely("qwen3_moe", EP2_DP4)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_save_gathers_the_optimizer_in_pieces(
    ranks: RankPool, models: dict[str, str], tmp_path: Path, family: str, saved: LayoutCase
) -> None:
    """A stage after the first has one bucket with all of its weights, and engines may hold most of the device."""
    most, folder = 1000, str(tmp_path / "ckpt")
    found = ranks.run(saved.world_size, f"{CASES}:train_save_train_in_pieces", models[family], saved, folder, most)
    assert all(0 < taken <= most for _, taken in found)
    resumed = ranks.run(1, f"{CASES}:load_train", models[family], TP1, folder)
    for before, after in zip(steps_of([steps for steps, _ in found]), steps_of(resumed), strict=True):
        assert after == pytest.approx(before, rel=1e-3)


@pytest.mark.parametrize(
    "changed",
    [{"lr": 0.02}, {"lr": 0.003, "weight_decay": 0.5}, {"adam_beta1": 0.5}, {"adam_beta2": 0.9}, {"adam_eps": 0.1}],
    ids=lambda changed: "-".join(changed),
)
def test_settings_that_changed_since_the_checkpoint_take_effect(
    ranks: RankPool, model: str, checkpoint: str, changed: dict[str, float]
) -> None:
    found = ranks.run(1, f"{CASES}:step_with_other_settings", model, checkpoint, ADAM | changed)
    assert found == [pytest.approx(0.0, abs=1e-6)]


def test_without_the_optimizer_the_weights_are_the_same_and_the_moments_start_at_0(
    ranks: RankPool, model: str, tmp_path: Path
) -> None:
    arguments = (model, DP2, str(tmp_path / "ckpt"), ADAM)
    saved = ranks.run(2, f"{CASES}:save_without_the_optimizer", *arguments)
    resumed = ranks.run(2, f"{CASES}:resume_without_the_optimizer", *arguments)
    for before, (after, equal, difference) in zip(saved, resumed, strict=True):
        assert [name for name, *_ in before] == [name for name, *_ in after]
        assert all(torch.equal(was, now) for (*_, was), (*_, now) in zip(before, after, strict=True))
        assert equal and difference < 1e-6


@pytest.mark.parametrize(
    ("family", "case"), [("qwen3_moe", EP2), rarely("nemotron_h_moe", ETP2)], ids=["qwen3_moe", "nemotron_h_moe"]
)
def test_grouped_experts_train_as_experts_one_at_a_time(
    ranks: RankPool, models: dict[str, str], tmp_path: Path, family: str, case: LayoutCase
) -> None:
    """Both with the same steps, and each loads the other's checkpoint."""
    through, resumed = [], []
    for grouped in (False, True):
        arguments = (models[family], case, str(tmp_path / str(grouped)))
        through.append(steps_of(ranks.run(2, f"{CASES}:train_with_experts", *arguments, grouped, False)))
        resumed.append(steps_of(ranks.run(2, f"{CASES}:train_with_experts", *arguments, not grouped, True)))
    for one, other in zip(*through, strict=True):
        assert one == pytest.approx(other, rel=5e-3)
    for before, after in zip(through, resumed, strict=True):
        assert [pytest.approx(value, rel=5e-3) for value in before[2:]] == after


def test_a_failed_background_save_is_reported_on_all_ranks(ranks: RankPool, model: str, tmp_path: Path) -> None:
    messages = ranks.run(2, f"{CASES}:save_failing_on_rank_1", model, TP2, str(tmp_path))
    for message in messages:
        assert message.startswith("weights and optimizer could not be written: rank 1: ") and "rank 0" not in message
    assert (tmp_path / "whole" / "metadata.json").is_file()
    assert not (tmp_path / "torn" / "metadata.json").exists()


@pytest.mark.parametrize(
    ("precision", "case"),
    [("float32", TP1), ("bfloat16", DP2), rarely("float32", DP2), rarely("bfloat16", TP1)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_offloading_changes_nothing_that_is_trained(
    ranks: RankPool, model: str, case: LayoutCase, precision: str
) -> None:
    run = [
        ranks.run(case.world_size, f"{CASES}:train_offload_train", model, case, precision, offload)
        for offload in (False, True)
    ]
    for (expected, _, _), (steps, moved, views_kept) in zip(*run, strict=True):
        assert steps == expected
        assert moved and views_kept


@pytest.mark.parametrize(
    ("level", "colocated", "times"), [(0, True, 1), (1, True, 1), (0, False, 0), (1, False, 1)], ids=str
)
def test_an_offload_gives_cached_memory_to_engines_on_the_same_device(
    ranks: RankPool, model: str, level: int, colocated: bool, times: int
) -> None:
    """NeMo RL's recipes have 0 for teachers, and it empties the cache all the same when it offloads."""
    assert ranks.run(1, f"{CASES}:caches_emptied", model, level, colocated) == [times]


def test_a_save_of_an_offloaded_optimizer_is_not_changed_by_the_next_offload(
    ranks: RankPool, model: str, tmp_path: Path
) -> None:
    ((after, resumed, ordinary),) = ranks.run(1, f"{CASES}:save_offloaded_load_train", model, TP1, str(tmp_path))
    assert resumed == after and ordinary


def test_a_frozen_router_does_not_change(ranks: RankPool, models: dict[str, str]) -> None:
    for routers_moved, others_moved in ranks.run(2, f"{CASES}:train_with_a_frozen_router", models["qwen3_moe"], EP2):
        assert others_moved and not routers_moved


def test_a_checkpoint_of_another_model_is_refused(ranks: RankPool, checkpoint: str, tmp_path: Path) -> None:
    other = make_tiny_model("qwen3", tmp_path / "other", tie_word_embeddings=False)
    with pytest.raises(RankFailed, match="CheckpointError.*holds another model"):
        ranks.run(1, f"{CASES}:load_train", str(other), TP1, checkpoint)
    more = {"tie_word_embeddings": True, "num_nextn_predict_layers": 1}  # layers that exports copy
    copied = make_tiny_model("qwen3", tmp_path / "copied", **more)
    ranks.run(1, f"{CASES}:load_train", str(copied), TP1, checkpoint)


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("qwen3", TP1),
        ("qwen3", TP2_PP2),
        ("qwen3", TP4),
        ("qwen3", VPP2),
        ("qwen3_moe", EP2_PP2),
        ("qwen3_moe", CP2_DP2_EP2),
        ("mixtral", EP2_ETP2),
        ("deepseek_v3", EP2_ETP2),
        ("nemotron_h_moe", EP2_PP2),
        ("nemotron_h_moe", EP2_ETP2),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_an_export_equals_the_loaded_checkpoint_bit_for_bit(
    ranks: RankPool, models: dict[str, str], tmp_path: Path, family: str, case: LayoutCase
) -> None:
    model = models[family]
    from safetensors.torch import load_file

    ranks.run(case.world_size, f"{CASES}:export", model, case, str(tmp_path / "out"))
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    expected = load_file(Path(model) / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_reference_does_not_change_while_the_policy_does(ranks: RankPool, model: str) -> None:
    for first, reference, now in ranks.run(2, f"{CASES}:reference_after_training", model, TP2):
        assert torch.equal(first, reference)
        assert (first - now).abs().max() > 1e-4


def test_bfloat16_is_near_transformers_in_float32(ranks: RankPool, model: str) -> None:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    (found,) = ranks.run(1, f"{CASES}:bfloat16_logprobs", model, TP1)
    for i, tokens in enumerate(sequences(SIZES["vocab_size"])):
        with torch.no_grad():
            scores = torch.log_softmax(network(tokens[None]).logits[0, :-1], -1)
        expected = scores.gather(1, tokens[1:, None]).squeeze(1)
        assert (found[i][1:] - expected).abs().mean() < 0.03


@pytest.mark.parametrize("case", [TP1, TP2_PP2], ids=lambda case: case.name)
def test_a_loss_that_is_not_finite_names_the_sample_on_every_rank(
    ranks: RankPool, model: str, case: LayoutCase
) -> None:
    results = ranks.run(case.world_size, f"{CASES}:train_on_a_broken_sample", model, case)
    for message, weights_unchanged in results:
        assert "not finite; the cause: samples 4." in message
        assert weights_unchanged


@pytest.mark.parametrize("case", [TP2, rarely(DP2)], ids=lambda case: case.name)
def test_a_state_that_is_not_finite_is_named_on_every_rank_and_never_saved(
    ranks: RankPool, model: str, case: LayoutCase, tmp_path: Path
) -> None:
    for said in ranks.run(2, f"{CASES}:break_the_state", model, case, str(tmp_path / "good")):
        weight = "not finite: weight decoder.layers.0.mlp.linear_fc2.weight (rank 1; "
        assert said["save a weight"].startswith(f"NonFiniteState: {weight}")
        assert "when it was to be saved; nothing was written" in said["save a weight"]
        assert said["train a weight"].startswith(f"NonFiniteState: {weight}")
        assert "before this optimizer step" in said["train a weight"]
        assert said["mended"] == said["loaded again"] == "no error"
        for act in ("save a moment", "train a moment"):
            assert said[act].startswith("NonFiniteState: not finite: moment exp_avg_sq of "), said[act]
        assert "after an update with learning rate" in said["train a moment"]
        assert "earning rate" in said["a learning rate"] and "samples" not in said["a learning rate"]
        assert said["written"] == "good, good-mended"


def test_a_moment_on_the_host_that_is_not_finite_shows_in_its_weight_or_is_not_saved(
    ranks: RankPool, model: str, tmp_path: Path
) -> None:
    (said,) = ranks.run(1, f"{CASES}:break_a_moment_on_the_host", model, str(tmp_path / "good"))
    assert said["update, exp_avg"].startswith("not finite: weight ")
    assert said["update, exp_avg_sq"] == "no error"
    assert "when it was to be saved; nothing was written" in said["save, exp_avg_sq"]
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_a_model_with_broken_values_is_named_and_leaves_no_mesh_behind(
    ranks: RankPool, model: str, tmp_path: Path
) -> None:
    """In a run without Ray the process lives on, and may build another policy."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, broken := tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.inf
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    ((said, grad_norm),) = ranks.run(1, f"{CASES}:build_after_a_failure", str(broken), model)
    assert "model.norm.weight holds NaN or infinite values" in said and grad_norm > 0


def test_interleaved_stages_keep_what_they_send_until_it_is_sent(ranks: RankPool, model: str) -> None:
    at_once, late = (steps_of(ranks.run(2, f"{CASES}:steps_with_late_sends", model, VPP2, wait)) for wait in (0, 0.02))
    assert late == at_once
