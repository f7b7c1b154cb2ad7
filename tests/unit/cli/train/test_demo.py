"""The demo replaces everything in its folder, but nothing that lives."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.cli.train import demo
from grpo_mcore.driver.checkpoints.lease import LEASE_FILE, FolderInUse, Lease


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
