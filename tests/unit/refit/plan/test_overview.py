import json
import time
from pathlib import Path

import numpy as np
import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.families import shape_of
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.delivery import bytes_to
from grpo_mcore.refit.plan.overview import Overview, draw
from tests.unit.refit.whole_split import QWEN, make_shape, with_experts

RECIPES = Path(__file__).resolve().parents[4] / "recipes"


def test_what_is_read_is_what_every_rank_needs(tmp_path: Path) -> None:
    shape = shape_of(QWEN)
    found = Overview.of(shape, PolicyLayout(2, 1, 2), EngineLayout(2), dtype="bfloat16", buffer_gb=0.5, nodes=3)
    links, sent = found.traffic(), found.sent()
    assert found.plan.block_bytes == found.needed_bytes and sent.sum() == 3 * found.needed_bytes
    whole = Overview.of(shape, PolicyLayout(), EngineLayout(2), dtype="bfloat16", buffer_gb=0.5)
    needs = whole.traffic().sum(axis=(0, 1))  # of each engine rank
    assert np.array_equal(links.sum(axis=0), np.stack([needs] * 3))
    # Another node takes a replicated slice from another policy rank.
    assert links[0, 0].sum() and links[2, 1].sum() and sent.max() < 1.4 * sent.min()
    text = found.text()
    assert "4 ranks" in text and "1.000 of what is needed" in text and "3 engine(s) of TP 2" in text
    draw(tmp_path / "plan.png", found)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_engines_over_nodes_get_each_byte_where_it_is_read() -> None:
    shape = make_shape(hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32, ffn_hidden_size=512, vocab_size=400)
    layout = EngineLayout(4, nodes=2)
    found = Overview.of(shape, PolicyLayout(2, 1, 2), layout, dtype="bfloat16", buffer_gb=0.5, nodes=4)
    inside = Overview.of(shape, PolicyLayout(2, 1, 2), EngineLayout(4), dtype="bfloat16", buffer_gb=0.5, nodes=2)
    assert np.array_equal(found.traffic().sum(axis=0), inside.traffic().sum(axis=0)), (
        "a rank reads what it reads anywhere"
    )
    assert found.sent().sum() == 2 * sum(bytes_to(found.plan, ranks) for ranks in ((0, 1), (2, 3)))
    assert found.needed_bytes < found.sent().sum() / 2 < 1.5 * found.needed_bytes  # 2 key-value heads, norms
    text = found.text()
    assert "2 engine(s) of TP 4 over 2 nodes, 1 on each 2 of 4 nodes" in text and "node 3 rank 3" in text


@pytest.mark.every_state
def test_1024_ranks_and_235b_in_seconds() -> None:
    shape = make_shape(
        hidden_size=4096, num_layers=94, num_heads=64, num_kv_heads=4, head_dim=128, ffn_hidden_size=12288,
        vocab_size=151936, qk_norm=True,
    )  # fmt: skip
    began = time.process_time()  # other processes on the machine do not count
    found = Overview.of(
        shape, PolicyLayout(4, 2, 64, expert=32, expert_tensor=1), EngineLayout(8, 1, True), dtype="bfloat16",
        buffer_gb=4, nodes=64, params=with_experts(shape, experts=128, ffn=1536),
    )  # fmt: skip
    text = found.text()
    assert time.process_time() - began < 20
    assert "512 ranks" in text and "64 engine(s) of TP 8 with expert parallelism" in text
    assert found.sent().sum() == 64 * found.needed_bytes


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    words = ["refit", "plan", "grpo-arithmetic-cpu", f"policy.model_name={tmp_path}", "policy.refit_buffer_size_gb=0.5"]
    assert main([*words, "--picture", str(tmp_path / "plan.png"), "policy.precision=bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "moves    988.1 MB" in printed and "policy rank 1" in printed and (tmp_path / "plan.png").exists()
    assert main([*words, "--json", "--picture", str(tmp_path / "plan.png")]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_needed"] > 0
    assert main([*words, "policy.refit_buffer_size_gb=1.0e-6"]) == 1
    assert "one row of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--picture"])


SMALL, MEDIUM = "grpo-qwen3-32B-2n8g", "grpo-nanov3-30BA3B-2n8g"
LARGE = ("grpo-qwen3-30BA3B-4n8g", "grpo-deepseekv3-32n8g", "grpo-kimi-k2-64n8g", "grpo-glm4.5-air-106BA12B-8n8g")
OTHERS = sorted({path.stem for path in RECIPES.glob("grpo*.yaml")} - {SMALL, MEDIUM, *LARGE})
QUICK = ("grpo-gpt-oss-20B-1n8g", "grpo-qwen3-8B-1n2g")  # tools/test_plan.py plans the refit of every recipe


@pytest.mark.parametrize(
    "recipe",
    [
        SMALL,
        pytest.param(MEDIUM, marks=pytest.mark.slow),
        *(pytest.param(recipe, marks=pytest.mark.every_state) for recipe in LARGE),
    ],
)
def test_what_a_refit_costs_beyond_its_bytes(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["refit", "plan", recipe, "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert costs["bytes_read"] == costs["bytes_needed"] > 0
    assert costs["serial_path_ratio"] <= 1.3 and costs["reader_path_ratio"] <= 1.5
    assert costs["calls_per_process"] <= 4 < costs["buckets"]
    assert costs["plan_bytes_sent"] <= 3 * costs["plan_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [recipe if recipe in QUICK else pytest.param(recipe, marks=pytest.mark.every_state) for recipe in OTHERS]
)
def test_the_buffers_of_the_other_recipes_hold_their_models(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["refit", "plan", recipe]) == 0, capsys.readouterr().err
    assert "1.000 of what is needed" in capsys.readouterr().out
