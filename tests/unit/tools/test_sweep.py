"""A sweep is planned as ordinary runs, and knows which of them are finished."""

import json
import re
import time
from pathlib import Path

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.cli.train import sweep
from grpo_mcore.cli.train.sweep import Stop, _show, run_command
from grpo_mcore.observe.band import read_band
from grpo_mcore.recipe import RecipeError, algorithm_of, load_recipe
from grpo_mcore.tools.sweep import SweepError, SweepRun, by_setting, claim_folder, split_values, state, sweep_runs

DEMO = "grpo-arithmetic-cpu"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", ["1"]),
        ("0.2,0.28", ["0.2", "0.28"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{a: 1, b: 2},null", ["{a: 1, b: 2}", "null"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("${mul:2,3},7", ["${mul:2,3}", "7"]),
    ],
)
def test_commas_separate_values_outside_of_brackets(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_each_combination_and_seed_is_a_run_of_its_own(tmp_path: Path) -> None:
    words = ["preset=grpo,gspo", "loss_fn.kl_input_clamp_value=5,6", "grpo.max_num_steps=3"]
    words.append("checkpointing.mirror=s3://bucket/sweep/")
    runs = sweep_runs(DEMO, words, 3, tmp_path)
    assert len(runs) == 12 and len({run.folder for run in runs}) == 12
    assert runs[0].name == "preset=grpo,kl_input_clamp_value=5,seed=1"
    configs = [load_recipe(DEMO, run.words).config for run in runs]
    assert [config.grpo.seed for config in configs[:4]] == [1, 2, 3, 1]  # the recipe's own, and the next ones
    assert [config.loss_fn.sequence_level_importance_ratios for config in configs] == [False] * 6 + [True] * 6
    assert {config.loss_fn.kl_input_clamp_value for config in configs} == {5.0, 6.0}
    assert {config.grpo.max_num_steps for config in configs} == {3}
    for run, config in zip(runs, configs, strict=True):
        assert config.logger.log_dir == str(run.folder / "logs")
        assert config.checkpointing.checkpoint_dir == str(run.folder / "checkpoints")
        assert config.checkpointing.mirror == f"s3://bucket/sweep/{run.folder.name}"


def test_a_recipe_of_distillation_has_its_seed_in_its_own_section(tmp_path: Path) -> None:
    runs = sweep_runs("distill-arithmetic-cpu", [], 2, tmp_path)
    assert [load_recipe("distill-arithmetic-cpu", run.words).config.grpo.seed for run in runs] == [1, 2]


def test_keys_of_the_same_last_part_are_written_in_full(tmp_path: Path) -> None:
    words = ["policy.megatron_cfg.optimizer.lr=1e-5,2e-5", "policy.megatron_cfg.optimizer.min_lr=0,1e-6"]
    assert sweep_runs(DEMO, words, 1, tmp_path)[0].name == "lr=1e-5,min_lr=0"
    words = ["data.train.data_path=a,b", "data.validation.data_path=a,b"]
    assert sweep_runs(DEMO, words, 1, tmp_path)[0].name == "data.train.data_path=a,data.validation.data_path=a"


def test_a_sweep_without_values_or_with_a_wrong_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="nothing varies: give a key several values"):
        sweep_runs(DEMO, ["grpo.max_num_steps=3"], 1, tmp_path)
    with pytest.raises(SweepError, match="checkpointing.checkpoint_dir: each run has its own, .* with --folder"):
        sweep_runs(DEMO, ["checkpointing.checkpoint_dir=/big", "grpo.seed=1,2"], 1, tmp_path)
    (run, _) = sweep_runs(DEMO, ["grpo.seed=1,2"], 1, tmp_path / "my: #1")
    assert load_recipe(DEMO, run.words).config.logger.log_dir == f"{tmp_path}/my: #1/seed=1/logs"
    with pytest.raises(RecipeError, match="loss_fn.ratio_clip_min"):
        sweep_runs(DEMO, ["loss_fn.ratio_clip_min=0.1,much"], 1, tmp_path)
    with pytest.raises(SweepError, match="two runs would share a folder"):
        sweep_runs(DEMO, ["grpo.max_num_steps=3,3"], 1, tmp_path)


def test_a_folder_holds_one_sweep(tmp_path: Path) -> None:
    claim_folder(tmp_path, DEMO, sweep_runs(DEMO, ["grpo.max_num_steps=3,4"], 1, tmp_path))
    claim_folder(tmp_path, DEMO, sweep_runs(DEMO, ["grpo.max_num_steps=3,4"], 1, tmp_path))
    for words, what in (
        (["grpo.max_num_steps=3,5"], r"other runs \(max_num_steps=4, max_num_steps=5\)"),
        (["grpo.max_num_steps=3,4", "grpo.val_period=7"], "the same runs with other settings"),
    ):
        with pytest.raises(SweepError, match=f"holds another sweep, of {DEMO} with {what}; choose another --folder"):
            claim_folder(tmp_path, DEMO, sweep_runs(DEMO, words, 1, tmp_path))


def test_the_state_of_a_run_is_read_from_its_files(tmp_path: Path) -> None:
    run = SweepRun("lr=1", 1, tmp_path / "lr=1,seed=1", ())
    assert state(run, 0.0) == "not begun" and by_setting([run]) == {}
    logs = run.folder / "logs" / "exp_001"
    logs.mkdir(parents=True)
    (logs / "hyperparams.json").write_text("{}")
    (logs / "metrics.jsonl").write_text('{"step": 1, "prefix": "train", "unix_time": 1000, "reward": 0}\n')
    assert state(run, 1100.0) == "running"
    assert state(run, 9000.0) == "interrupted"
    for early, expected in ((True, "interrupted"), (False, "finished")):
        (logs / "summary.json").write_text(json.dumps({"end": "it says", "stopped_early": early}))
        assert state(run, time.time()) == expected
    assert [files.steps for files in by_setting([run])["lr=1"]] == [[1]]


def test_files_of_the_working_directory_take_no_packages_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train` runs beside a datasets.py; the runs of a sweep ended with its error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("raise RuntimeError('the user runs this as a program')\n")
    assert run_command(["config", DEMO], tmp_path / "output.txt", Stop()) == 0, (tmp_path / "output.txt").read_text()


def test_a_dry_run_prints_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["grpo.max_num_steps=3,4", "--folder", str(tmp_path / "s"), "--dry-run"]
    assert main(["sweep", DEMO, *words]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"grpo-mcore train {DEMO} --resume auto grpo.max_num_steps=3 logger.log_dir=")
    assert main(["sweep", DEMO, *words, "--jobs", "slurm"]) == 0
    jobs = capsys.readouterr().out
    assert jobs.startswith(f"grpo-mcore launch slurm {DEMO} grpo.max_num_steps=3 ")
    names = re.findall(r" launch.name=(grpo-arithmetic-cpu-[0-9a-f]{8})$", jobs, re.MULTILINE)
    assert len(set(names)) == 2, "Kubernetes takes a name once"
    assert main(["sweep", DEMO, *words, "--jobs", "k8s", f"launch.name={'long-' * 7}name"]) == 0
    assert re.search(r" launch.name=(long-){5}long-l-[0-9a-f]{8}\n", capsys.readouterr().out)
    assert not (tmp_path / "s").exists()
    assert main(["sweep", DEMO, *words, "--jobs", "k8s", "--algorithm", "sft"]) == 2
    assert main(["sweep", DEMO, *words, "--preset", "gspo", "--preset", "async"]) == 0
    assert "each run has all presets, gspo, async; preset=gspo,async compares them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["grpo-nano-v3-cpu", "--algorithm", "demo-quick"], 2, "grpo-nano-v3-cpu has no quick demo; "),
        ([f"recipes/{DEMO}.yaml", "--algorithm", "demo"], 2, f"recipes/{DEMO}.yaml has no demo; "),
        ([DEMO, "--algorithm", "demo-quick", "cluster.num_nodes=2"], 2, "the local backend runs one rank in this"),
        ([DEMO, "--algorithm", "dpo"], 2, "the recipe needs a section dpo"),
        ([DEMO, "logger.alarms.band=nowhere.json"], 1, "nowhere.json is no band"),
    ],
)
def test_what_each_run_would_refuse_is_refused_before_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, reason: str
) -> None:
    assert main(["sweep", *words, "--seeds", "2", "--folder", str(tmp_path / "s")]) == code
    assert reason in capsys.readouterr().err and not (tmp_path / "s").exists()


@pytest.mark.parametrize("recipe", ["dpo", "sft", "rm", DEMO])
def test_without_an_algorithm_a_sweep_trains_that_of_the_recipe(tmp_path: Path, recipe: str) -> None:
    before = load_recipe(recipe).config
    for run in sweep_runs(recipe, [], 2, tmp_path):
        config = load_recipe(recipe, run.words).config
        assert algorithm_of(config) == algorithm_of(before)
        assert getattr(config, algorithm_of(config)).seed == run.seed


def test_the_finished_runs_of_twenty_seeds_make_a_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run is a demo's, which makes its model too."""
    began = list[list[str]]()

    def run(words: list[str], output: Path, stop: Stop) -> int:
        began.append(words)
        seed = int(output.parent.name.removeprefix("seed="))
        (logs := output.parent / "logs" / "exp_001").mkdir(parents=True)
        (logs / "hyperparams.json").write_text(load_recipe(DEMO, words[2:]).config.model_dump_json())
        (logs / "metrics.jsonl").write_text(json.dumps({"step": 1, "prefix": "train", "reward": seed / 20}) + "\n")
        (logs / "summary.json").write_text(json.dumps({"end": "it is done", "end_kind": "finished", "exit_code": 0}))
        return 0

    monkeypatch.setattr(sweep, "run_command", run)
    words = [
        "sweep",
        DEMO,
        "--seeds",
        "20",
        "--folder",
        str(tmp_path / "s"),
        "--band",
        str(tmp_path / "b" / "own.json"),
    ]
    words += ["logger.alarms.band=bands/not_there_yet.json"]
    assert main([*words, "--algorithm", "demo"]) == 0
    assert load_recipe(DEMO, began[0][2:]).config.logger.alarms.band is None
    assert len(began) == 20 and began[0][:2] == ["demo", f"--recipe={DEMO}"] and "grpo.seed=1" in began[0]
    band = read_band(str(tmp_path / "b" / "own.json"))
    assert (band.recipe, band.seeds[-1], band.curves["reward"][-1, 0]) == (DEMO, 20, 1.0)
    assert "own.json: the band of 20 runs; logger.alarms.band=" in capsys.readouterr().out
    (tmp_path / "s" / "seed=3" / "logs" / "exp_001" / "summary.json").unlink()
    monkeypatch.setattr(sweep, "run_command", lambda *_: 0)
    assert main([*words, "--algorithm", "demo"]) == 1
    assert "a band needs 20 runs or more, and 19 are finished" in capsys.readouterr().err
    assert main([*words, "--algorithm", "demo-quick", "--dry-run"]) == 0
    assert f"grpo-mcore demo --quick --recipe={DEMO} " in capsys.readouterr().out
    for changed in (["--seeds", "19"], ["grpo.max_num_steps=3,4"]):
        assert main([*words, *changed]) == 1
        assert "--band is of one setting with --seeds 20 or more" in capsys.readouterr().err
    assert main([*words, "--band", str(tmp_path)]) == 1 and len(began) == 20
    assert "cannot be written: Is a directory" in capsys.readouterr().err


def test_settings_with_several_seeds_are_ranked_under_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for setting, seed, accuracy in (("lr=1", 1, 0.5), ("lr=1", 2, 0.7), ("lr=2", 1, 0.65), ("lr=2", 2, 0.55)):
        run = SweepRun(setting, seed, tmp_path / f"{setting},seed={seed}", ())
        (logs := run.folder / "logs" / "exp_001").mkdir(parents=True)
        lines = [{"step": 0, "prefix": "validation", "accuracy": 0.9}, {"step": 1, "prefix": "train", "loss": 1.0}]
        lines += [{"step": 1, "prefix": "validation", "accuracy": accuracy}]
        (logs / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs.append(run)
    _show(runs, tmp_path)
    shown = capsys.readouterr().out
    assert "1. lr=1: 0.6 (0.5 to 0.7, 2 runs)" in shown and "1. lr=2: 0.6 (0.55 to 0.65, 2 runs)" in shown
    assert "0.9" not in shown and (tmp_path / "report.html").is_file()
