"""A run is prepared and opened in one place."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from grpo_mcore.data import load_tokenizer
from grpo_mcore.driver.run.checks import SetupError, check_writable
from grpo_mcore.driver.run.run import _failure_recorded, _load_data
from grpo_mcore.observe import Logger
from grpo_mcore.observe.trackers.tracker import Tracker
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.demo.arithmetic import make_tokenizer
from tests.unit.driver.checkpoints.saving import RECIPE, manager, save


def test_a_folder_that_is_held_already_stays_held(tmp_path: Path) -> None:
    """Scripts hold it themselves around the run, which holds it too."""
    checkpoints = manager(tmp_path)
    with checkpoints.held():
        with checkpoints.held():
            pass
        assert (tmp_path / "in_use.json").is_file()
    assert not list(tmp_path.iterdir())


def test_a_failure_is_the_end_in_the_summary_and_in_the_trackers(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path / "saved")
    save(checkpoints, 2)
    codes: list[int] = []
    log = Logger(RECIPE.logger.model_copy(update={"log_dir": str(tmp_path / "logs")}))
    log._backends.append(Tracker("backend", lambda: SimpleNamespace(close=codes.append)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no"), log, _failure_recorded(log, checkpoints, lambda: 5):
        raise ValueError("no")
    summary = json.loads((log.log_dir / "summary.json").read_text())
    assert (summary["steps"], summary["end"], summary["end_kind"]) == (5, "failed: no", "failed")
    assert (summary["exit_code"], summary["unsaved"]) == (1, 3) and codes == [1]


def test_prompts_have_the_stop_strings_of_their_environment(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer")
    (rows := tmp_path / "rows.jsonl").write_text('{"input": "1+1=", "output": "2"}')
    text = f"policy: {{model_name: m}}\ndata: {{train: {{data_path: {rows}}}}}\nenv: {{math: {{stop_strings: [=]}}}}"
    (tmp_path / "r.yaml").write_text(text)
    config = load_recipe(str(tmp_path / "r.yaml")).config
    assert _load_data(config, "grpo", load_tokenizer(str(tmp_path / "tokenizer"))).train[0]["stop_strings"] == ["="]


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a folder in which everybody may make files: others cannot come to those of pytest."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def test_files_of_another_user_are_named_before_a_run_goes_on_in_them(shared: Path) -> None:
    logs = shared / "logs" / "exp_001"
    logs.mkdir(parents=True)
    (logs / "metrics.jsonl").touch()
    recipe = RECIPE.model_copy(deep=True)
    recipe.logger.log_dir, recipe.checkpointing.checkpoint_dir = str(shared / "logs"), str(shared / "saved")
    check_writable(recipe, "exp_001")
    for path in (shared / "logs", logs, shared / "saved"):
        path.chmod(0o777)
    (logs / "metrics.jsonl").chmod(0o444)

    def refused() -> str:
        with pytest.raises(SetupError) as raised:
            check_writable(recipe, "exp_001")
        return str(raised.value)

    message = as_nobody(refused)
    assert str(logs / "metrics.jsonl") in message and "chmod -R g+w" in message


def as_nobody(function: Callable[[], str]) -> str:
    """Return what a function returns in a process of a user without rights."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        if os.getuid() == 0:
            os.setuid(65534)
        os.write(writer, function().encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        text = file.read().decode()
    os.waitpid(child, 0)
    return text
