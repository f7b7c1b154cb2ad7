"""A run is prepared and opened in one place, also by scripts that know its former name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mcore.algorithms import run
from tests.unit.algorithms.checkpointing.saving import manager


def test_scripts_find_it_under_its_former_name() -> None:
    from grpo_mcore.algorithms.lifecycle.grpo_run import prepare, started, validate_only

    assert (prepare, started, validate_only) == (run.prepare, run.open_run, run.validate_only)
    with pytest.raises(ImportError):
        from grpo_mcore.algorithms.lifecycle.grpo_run import nothing_of_this_name  # noqa: F401


def test_the_former_name_costs_no_import() -> None:
    program = "import sys, grpo_mcore.algorithms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_folder_that_is_held_already_stays_held(tmp_path: Path) -> None:
    """Scripts hold it themselves around the run, which holds it too."""
    checkpoints = manager(tmp_path)
    with checkpoints.held():
        with checkpoints.held():
            pass
        assert (tmp_path / "in_use.json").is_file()
    assert not list(tmp_path.iterdir())
