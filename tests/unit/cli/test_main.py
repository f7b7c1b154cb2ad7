import argparse
import gc
import os
import resource
import subprocess
import sys
import types
import warnings

import pytest
import torch

import grpo_mcore
from grpo_mcore.base.processes import COLLECT_AFTER
from grpo_mcore.cli import main as command
from grpo_mcore.cli.train import train
from grpo_mcore.recipe import MasterConfig

RECIPE = "policy: {model_name: m}\ndata: {train: {data_path: x.jsonl}}\n"


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """The arguments that a verb was called with; every verb is a stand-in that returns 7."""
    calls: list[argparse.Namespace] = []

    def verb(name: str) -> types.SimpleNamespace:
        options = {"add_arguments": train.add_arguments} if name == train.__name__ else {}
        return types.SimpleNamespace(run=lambda args: calls.append(args) or 7, **options)

    monkeypatch.setattr(command, "import_module", verb)
    return calls


@pytest.mark.parametrize(
    ("words", "recipe", "overrides", "resume"),
    [
        ("train r.yaml", "r.yaml", [], None),
        ("train r.yaml a.b=1 +c.d=2 ~e.f", "r.yaml", ["a.b=1", "+c.d=2", "~e.f"], None),
        ("train --config r.yaml a.b=1", "r.yaml", ["a.b=1"], None),
        ("train a.b=1 --config r.yaml c.d=2", "r.yaml", ["a.b=1", "c.d=2"], None),
        ("train a.b=1 r.yaml", "r.yaml", ["a.b=1"], None),
        ("train r.yaml --resume", "r.yaml", [], True),
        ("train r.yaml --resume a.b=1", "r.yaml", ["a.b=1"], True),
        ("train --resume r.yaml a.b=1", "r.yaml", ["a.b=1"], True),
        ("train r.yaml --resume results/step_10", "r.yaml", [], "results/step_10"),
        ("train r.yaml --resume=results/step_10 a.b=1", "r.yaml", ["a.b=1"], "results/step_10"),
        ("train r.yaml --follow logs --tokens recorded", "r.yaml", [], None),
        ("sft grpo_math_1B --resume auto", "grpo_math_1B", [], "auto"),
    ],
)
def test_words(called, words: str, recipe: str, overrides: list[str], resume: object) -> None:
    assert command.main(words.split()) == 7
    (args,) = called
    assert (args.recipe, args.overrides, getattr(args, "resume", None)) == (recipe, overrides, resume)


def test_demo_takes_overrides_only(called, capsys) -> None:
    assert command.main(["demo", "grpo.seed=3"]) == 7
    assert called[0].overrides == ["grpo.seed=3"]
    with pytest.raises(SystemExit) as exit:
        command.main(["demo", "r.yaml"])
    assert exit.value.code == 2 and "not an override (key=value): r.yaml" in capsys.readouterr().err


def test_a_verb_may_have_options_of_its_own(monkeypatch) -> None:
    seen = []
    module = types.SimpleNamespace(
        run=lambda args: seen.append(args.out) or 0, add_arguments=lambda parser: parser.add_argument("--out")
    )
    monkeypatch.setattr(command, "import_module", lambda name: module)
    assert command.main(["demo", "--out", "there", "a.b=1"]) == 0 and seen == ["there"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train", "a recipe is required"),
        ("train a.yaml b.yaml", "one recipe at a time, got a.yaml and b.yaml"),
        ("train r.yaml --bogus", "unknown option: --bogus"),
        ("train r.yaml --follow logs --tokens generated", "invalid choice: 'generated'"),
        ("trian r.yaml", "there is no command 'trian'; nearest: train"),
        ("", "VERB"),
    ],
)
def test_wrong_command_lines(called, capsys, words: str, message: str) -> None:
    with pytest.raises(SystemExit) as exit:
        command.main(words.split())
    assert exit.value.code == 2 and message in capsys.readouterr().err and not called


@pytest.mark.parametrize(
    ("verb", "recipe", "runs"),
    [
        ("train", "grpo_math_1B", "grpo"),
        ("train", "sft", "sft"),
        ("train", "dpo", "dpo"),
        ("train", "distillation_math", "grpo"),
        ("train", "eval", "grpo"),
        ("sft", "grpo_math_1B", "sft"),
        ("dpo", "dpo", "dpo"),
        ("dpo", "sft", "default: dpo: the recipe needs a section dpo, and none for grpo"),
        ("distill", "distillation_math", "grpo"),
        ("distill", "sft", "default: distillation: the recipe needs the sections distillation and teacher"),
    ],
)
def test_train_runs_the_recipes_algorithm_and_its_aliases_their_own(
    monkeypatch, capsys, verb: str, recipe: str, runs: str
) -> None:
    seen = []
    monkeypatch.setattr(train, "run_to_end", lambda algorithm, config, resume: seen.append(algorithm) or 0)
    code = command.main([verb, recipe])
    assert (code, seen) == (0, [runs]) or (code == 2 and runs in capsys.readouterr().err)


@pytest.mark.parametrize("option", ["--validate-only", "--follow=logs"])
def test_only_grpo_validates_alone_or_follows(capsys, option: str) -> None:
    assert command.main(["train", "sft", option]) == 2
    assert f"sft: {option.partition('=')[0]} is for GRPO" in capsys.readouterr().err


def test_version_and_help(capsys) -> None:
    for option, text in (("--version", grpo_mcore.__version__), ("--help", "run on a cluster:\n  launch ")):
        with pytest.raises(SystemExit) as exit:
            command.main([option])
        assert exit.value.code == 0 and text in capsys.readouterr().out


def test_a_terminal_without_a_size_has_no_size(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setenv("LINES", "0")
    with pytest.raises(SystemExit):
        command.main(["--version"])
    assert not {"COLUMNS", "LINES"} & set(os.environ)


def test_a_run_may_open_as_many_files_as_its_user() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen: list[int] = []

    def work() -> int:
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return 0

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert command.guarded("report", work) == command.guarded("sweep", work) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert seen == [256, min(hard, command.OPEN_FILES)]


def test_config_prints_the_recipe(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    assert command.main(["config", "r.yaml", "grpo.seed=3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# 32 prompts x 16 generations = 512 samples = 1 optimizer step x 512 = DP 1 x 512 samples")
    assert "model_name: m " in out and "# r.yaml:1" in out and "# command line" in out


def test_a_wrong_recipe_is_one_block_on_stderr_and_exit_code_2(tmp_path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE + "grpo: {sed: 1}\nenv: 3\n")
    result = subprocess.run(
        [sys.executable, "-m", "grpo_mcore.cli.main", "config", "r.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "grpo-mcore config: 2 problems in r.yaml\n"
        "  r.yaml:3: grpo.sed: unknown key; nearest known key: grpo.seed\n"
        "  r.yaml:4: env: expected a mapping of keys, got 3\n"
    )


def test_the_command_imports_without_torch() -> None:
    code = "import sys, grpo_mcore.cli.main, grpo_mcore.cli.check.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_names_of_the_public_api_are_there() -> None:
    assert set(MasterConfig.model_fields) == set(
        "policy loss_fn env data grpo sft dpo rm eval logger cluster checkpointing launch on_policy_distillation "
        "rehearse ppo value value_loss_fn".split()
    )


def test_a_warning_about_megatrons_shards_is_not_shown() -> None:
    """torch warns whoever asks for the gradient of a view of a weight, which Megatron-Core sets itself."""
    shard = torch.ones(4, requires_grad=True).view(-1)[:2]
    with warnings.catch_warnings(record=True) as shown:
        assert command.guarded("config", lambda: int(shard.grad is not None)) == 0
    assert shown == []


def test_a_command_looks_for_garbage_rarely() -> None:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        with pytest.raises(SystemExit):
            command.main(["--help"])
        assert gc.get_threshold() == (COLLECT_AFTER, 10, 10)
    finally:
        gc.set_threshold(*before)
