"""Copies of a run on a server that speaks S3's protocol, and `grpo-mcore fetch`, which brings them back."""

from pathlib import Path

import obstore
import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.driver.checkpoints.copy_to_url import ID_FILE, CopyError, open_store, sizes_of
from grpo_mcore.recipe import CheckpointingConfig
from tests.unit.driver.checkpoints.saving import save

LARGE = bytes(range(256)) * 2**17  # two pieces, so it is uploaded in parts


def copied_run(folder: Path, url: str, *steps: int) -> str:
    """Save these steps as a run does, with a large file in its log, and return the id of its copies."""
    checkpoints = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(folder), mirror=url))
    checkpoints.open("auto")
    with checkpoints.held():
        assert checkpoints.copy is not None
        checkpoints.copy.log_dir = folder.with_name("logs") / "exp_001"
        checkpoints.copy.log_dir.mkdir(parents=True, exist_ok=True)
        (checkpoints.copy.log_dir / "metrics.jsonl").write_bytes(LARGE)
        (folder / "ledger.jsonl").write_text("{}\n")
        for step in steps:
            save(checkpoints, step)
        checkpoints.copy.finish()
        assert checkpoints.copy.lacking() == {}
    return (folder / ID_FILE).read_text().strip()


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_fetched(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{bucket}/of/run"
    run_id = copied_run(tmp_path / "checkpoints", url, 2, 10)
    obstore.put(open_store(url), f"{run_id}/step_11/training_info.json", b"{}")  # half of an upload
    assert main(["fetch", url, "--to", str(tmp_path / "newest")]) == 0
    assert f"newest: {run_id}, logs and ledger, step_10\n" in capsys.readouterr().out
    checkpoint = {f"step_10/{name}" for name in files(tmp_path / "checkpoints" / "step_10")}
    assert files(tmp_path / "newest") == {"ledger.jsonl", "logs/exp_001/metrics.jsonl"} | checkpoint
    assert (tmp_path / "newest" / "logs" / "exp_001" / "metrics.jsonl").read_bytes() == LARGE
    assert main(["fetch", url, "--to", str(tmp_path / "newest")]) == 0, "what is there stays"
    for number, address in enumerate((f"{url}/step_2", f"{url}/{run_id}/step_2/")):
        assert main(["fetch", address, "--to", str(tmp_path / f"{number}")]) == 0
        assert (tmp_path / f"{number}" / "step_2").is_dir() and not (tmp_path / f"{number}" / "step_10").exists()
    assert main(["fetch", f"{url}/{run_id}", "--logs", "--to", str(tmp_path / "logs only")]) == 0
    assert files(tmp_path / "logs only") == {"ledger.jsonl", "logs/exp_001/metrics.jsonl"}


def test_a_run_that_is_not_there_or_damaged_is_said(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{bucket}/other/run"
    run_id = copied_run(tmp_path / "checkpoints", url, 2, 10)
    for wrong, hint in (
        (f"{url}/step_11", "holds no whole checkpoint; whole are step_2, step_10"),
        (f"{bucket}/other", "holds no whole checkpoint; give a run's own URL"),
    ):
        assert main(["fetch", wrong, "--to", str(tmp_path / "to")]) == 1
        assert f"grpo-mcore fetch: {wrong} {hint}\n" in capsys.readouterr().err
    obstore.put(open_store(url), f"{run_id}/step_10/policy/weights", b"4321")
    assert main(["fetch", url, "--to", str(tmp_path / "to")]) == 1
    assert (
        "grpo-mcore fetch: step_10 is damaged: policy/weights is not what was saved (its digest differs); others: "
        f"{url}/{run_id}/step_2\n"
    ) in capsys.readouterr().err
    assert not (tmp_path / "to" / "step_10").exists()


@pytest.mark.parametrize(
    "words",
    [["report"], ["watch"], ["runs"], ["ledger"], ["replay", "--step", "1"], ["verdict"], ["export", "--output", "x"],
     ["eval"], ["rehearse", "grpo-arithmetic-cpu", "--from"], ["train", "grpo-arithmetic-cpu", "--follow"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_commands_read_folders(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, "s3://bucket/run"])
    message = capsys.readouterr().err
    assert (
        "s3://bucket/run is a URL; fetch the run first, then name its folder: grpo-mcore fetch s3://bucket/run"
        in message
    )


def test_what_is_wrong_with_a_store_is_said(bucket: str) -> None:
    def probe(url: str, **options: str) -> None:
        manager = CheckpointManager(CheckpointingConfig(checkpoint_dir="x", mirror=url, mirror_options=options))
        manager.open(None)

    with pytest.raises(CopyError, match="checkpointing.mirror s3://no-such-bucket/x: there is no such bucket; make it"):
        probe("s3://no-such-bucket/x")
    with pytest.raises(CopyError, match="s3://runs/x: Configuration key: 'no_such_option' is not valid"):
        probe(f"{bucket}/x", no_such_option="1")
    with pytest.raises(CopyError, match="the store does not answer; see its endpoint"):
        probe(f"{bucket}/x", endpoint="http://127.0.0.1:9")


def test_a_folder_is_a_store_too(tmp_path: Path) -> None:
    run_id = copied_run(tmp_path / "checkpoints", f"file://{tmp_path}/copy", 1)
    assert f"{run_id}/step_1/digests.json" in sizes_of(open_store(f"file://{tmp_path}/copy"))
    assert main(["fetch", f"file://{tmp_path}/copy", "--to", str(tmp_path / "to")]) == 0
