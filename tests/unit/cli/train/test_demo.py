"""The demo replaces everything in its folder, but nothing that lives."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.cli.train import demo
from grpo_mcore.cli.train import train as cli_train
from grpo_mcore.driver.checkpoints.lease import LEASE_FILE, FolderInUse, Lease
from grpo_mcore.driver.run import run_recipe
from grpo_mcore.observe.band import LARGEST_BYTES, band_of, band_text
from grpo_mcore.recipe import MasterConfig, changes, load_recipe
from grpo_mcore.tools.demo import demo as tools_demo

TP1 = "policy.megatron_cfg.tensor_model_parallel_size=1"


@pytest.mark.parametrize("held", [".", "checkpoints", "deep/inside/it"])
def test_a_folder_with_a_live_run_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], held: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("results/demo")
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "metrics.jsonl").write_text("results")
    with Lease(folder / held):
        assert main(["demo"]) == 1
    said = capsys.readouterr().err
    assert f"the demo replaces everything in its folder, and {folder / held} is in use by process" in said
    assert (folder / "logs" / "metrics.jsonl").read_text() == "results"


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        *((recipe, demo.quick_recipe(recipe)) for recipe in demo.QUICK),
        (demo.GRPO, demo.whole_recipe(demo.GRPO)),
        (demo.DISTILL, [*demo.whole_recipe(demo.DISTILL), "distillation.val_period=0", TP1]),
        ("sft-sliding-puzzle-cpu", []),
    ],
)
def test_a_band_is_of_the_recipe_as_it_is(recipe: str, words: list[str]) -> None:
    """A changed recipe needs a new one: `grpo-mcore sweep grpo-arithmetic-cpu --algorithm demo --seeds 20 --band ...`,
    or `--algorithm demo-quick`. That of distillation is of runs in one process without validations, each with a teacher
    of its own seed (`grpo-mcore demo grpo.seed=...`): a band of one teacher would call runs with another one different.
    """
    config = load_recipe(recipe, words).config
    band, reason = band_of(config.model_dump(mode="json"))
    assert band is not None and reason is None and len(band.seeds) >= 20 and len(band_text(band)) <= LARGEST_BYTES
    assert [change for change in changes(band.settings, config) if change.key in band.settings] == []


@pytest.mark.parametrize("val_period", [0, 5])
def test_distillation_ends_with_its_band_and_has_grpo_beside_it_where_it_is_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], val_period: int
) -> None:
    trained = list[MasterConfig]()

    def train(config: MasterConfig) -> dict[str, Any]:
        trained.append(config)
        (logs := Path(config.logger.log_dir) / "exp_001").mkdir(parents=True)
        (logs / "metrics.jsonl").write_text("")
        band = {"band": "inside the band of 20 runs"} if config.on_policy_distillation.enabled else {}
        return {"stopped_early": False, "end_kind": "finished", "exit_code": 0} | band

    monkeypatch.chdir(tmp_path)
    Path("results/demo/model").mkdir(parents=True)
    monkeypatch.setattr(run_recipe, "run_recipe", lambda *_: {"stopped_early": False})
    monkeypatch.setattr(demo, "make_untrained", lambda *_: ("Qwen3", 300_000))
    monkeypatch.setattr(cli_train, "train", train)
    monkeypatch.setattr(tools_demo, "read_course", lambda _: tools_demo.Course([100.0], [1.0], [0.95]))
    monkeypatch.setattr(tools_demo, "courses_png", lambda *_: None)
    assert main(["demo", f"--recipe={demo.DISTILL}", f"distillation.val_period={val_period}"]) == 0
    assert [config.on_policy_distillation.enabled for config in trained] == [True, False][: 1 + bool(val_period)]
    assert trained[0].logger.alarms.band == f"bands/{demo.DISTILL}.json"
    assert ("distillation is inside the band of 20 runs" in capsys.readouterr().out) == bool(val_period)


def test_a_recipe_without_a_quick_form_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--quick", "--recipe", demo.NANO]) == 2
    assert f"{demo.NANO} has no quick demo; {', '.join(demo.QUICK)} have one" in capsys.readouterr().err


def test_what_a_run_that_is_over_has_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    lease = Lease(tmp_path / "saved")
    dead = (tmp_path / "saved" / LEASE_FILE).read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194305')
    lease.release()
    (tmp_path / "saved" / LEASE_FILE).write_text(dead)
    with ExitStack() as held:
        demo._begin(tmp_path, held)
        assert [path.name for path in tmp_path.iterdir()] == [LEASE_FILE]
        with pytest.raises(FolderInUse):
            demo._begin(tmp_path, held)
    assert not list(tmp_path.iterdir())
