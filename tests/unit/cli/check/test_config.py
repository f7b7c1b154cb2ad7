"""`grpo-mcore config`: the reference of keys, and output whose reader goes away."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.recipe.loading.reference import explain, reference
from grpo_mcore.recipe.schema.keys import known_keys, section_of

ROOT = Path(__file__).resolve().parents[4]


def test_the_reference_needs_no_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["config", "--reference"])
    assert end.value.code == 0 and capsys.readouterr().out == reference()


def test_the_site_has_the_reference() -> None:
    plan = subprocess.check_output(["make", "-n", "docs"], cwd=ROOT, text=True)
    assert plan.index("grpo-mcore config --reference > docs/recipe.md") < plan.index("mkdocs build")
    assert "/docs/recipe.md" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_reference_has_every_key() -> None:
    section, found = "", set()
    for line in reference().splitlines():
        if line.startswith("## "):
            section = "" if line == "## Top level" else line.split("`")[1] + "."
        elif row := re.match(r"\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", line):
            assert all(cell.strip() for cell in row.groups())
            found.add(section + row[1])
    keys = {key for key, field in known_keys().items() if section_of(field.annotation)[0] is None}
    assert found == {key for key in keys if not key.startswith("data.validation.")}, "data.validation.* refers to train"


def test_sections_of_the_reference_have_a_purpose_and_links_lead_to_them() -> None:
    text = reference()
    titles = re.findall(r"^## `(.+)`\n\n(\S?)", text, re.MULTILINE)
    assert not [title for title, purpose in titles if purpose in ("", "|")]
    links = set(re.findall(r"\]\(#(\w+)\)", text))
    assert links and links <= {re.sub(r"[.*]", "", title) for title, _ in titles}


@pytest.mark.parametrize("words", [["config", "grpo_math_1B"], ["config", "--reference"], ["--version"]])
def test_a_reader_that_goes_away_ends_the_command_quietly(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `| head -1` has done by the time of the next write
    command = [sys.executable, "-m", "grpo_mcore.cli.main", *words]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=buffered, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def explained(capsys: pytest.CaptureFixture[str], key: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main(["config", "--explain", key])
    shown = capsys.readouterr()
    return int(end.value.code or 0), shown.out or shown.err


@pytest.mark.parametrize(
    ("key", "lines"),
    [
        ("optimizer.lr", ["policy.megatron_cfg.optimizer.lr", "type number > 0"]),
        ("grpo.seed", ["default 42", "on --resume must stay as it was"]),
        ("moe_router_dtype", ["effect No effect on a dense model"]),
        ("sequence_packing.algorithm", ["effect only with policy.sequence_packing.enabled: true"]),
        ("data.train.0.data_path", ["data.train.*.data_path"]),
        ("loss_fn", ["loss_fn", "sequence_length_normalizer Dr. GRPO: divide the sum"]),
    ],
)
def test_a_key_is_explained(capsys: pytest.CaptureFixture[str], key: str, lines: list[str]) -> None:
    code, text = explained(capsys, key)
    plain = [" ".join(line.split()) for line in text.splitlines()]
    assert code == 0
    assert all(any(line.startswith(wanted) for line in plain) for wanted in lines), text


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("optimizer.learning_rate", "nearest known key: policy.megatron_cfg.optimizer.lr"),
        ("seed", "which one? "),
        ("env.rules.num_workers", "an environment's keys are those of its class; docs/environments.md has them"),
    ],
)
def test_an_unknown_key_is_not_explained(capsys: pytest.CaptureFixture[str], key: str, message: str) -> None:
    code, text = explained(capsys, key)
    assert code == 2 and message in text


def test_every_key_can_be_explained() -> None:
    assert all(explain(key).startswith(key) for key in known_keys())


@pytest.mark.parametrize(
    "words",
    [
        ["grpo-gpt-oss-20B-1n8g", "policy.generation.vllm_cfg.tensor_parallel_size=2"],
        ["grpo-qwen3-30BA3B-4n8g", "policy.megatron_cfg.moe_router_bias_update_rate=0.001"],
        ["grpo-qwen3-32B-1n8g", "policy.hf_config_overrides={rope_scaling: {rope_type: linear, factor: 2}}"],
        ["grpo-qwen3-32B-1n8g", "policy.megatron_cfg.tensor_model_parallel_size=3", "cluster.gpus_per_node=3"],
        ["distillation_math", "teacher.model_name=Qwen/Qwen3-30B-A3B",
         "teacher.megatron_cfg={moe_router_load_balancing_type: aux_loss}"],
    ],
)  # fmt: skip
def test_what_plan_refuses_is_refused_in_the_same_words(words: list[str], capsys) -> None:
    refused = []
    for verb in ("config", "plan"):
        assert main([verb, *words]) in (1, 2)
        refused.append(capsys.readouterr().err.replace(f"grpo-mcore {verb}: ", ""))
    assert refused[0] == refused[1] != ""
