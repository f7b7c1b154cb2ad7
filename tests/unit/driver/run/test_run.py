"""A run is prepared and opened in one place."""

from __future__ import annotations

from pathlib import Path

from tests.unit.driver.checkpoints.saving import manager


def test_a_folder_that_is_held_already_stays_held(tmp_path: Path) -> None:
    """Scripts hold it themselves around the run, which holds it too."""
    checkpoints = manager(tmp_path)
    with checkpoints.held():
        with checkpoints.held():
            pass
        assert (tmp_path / "in_use.json").is_file()
    assert not list(tmp_path.iterdir())
