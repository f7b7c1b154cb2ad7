"""No file operation of a run's driver that fails costs anything that was saved, or ends the loop."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "words",
    [
        ("EIO", "1", "6"),
        *(
            pytest.param(words, marks=pytest.mark.every_state)
            for words in (("EIO", "1"), ("ENOSPC", "1"), ("ESTALE", "15"), ("EROFS", "15"))
        ),
    ],
    ids=" ".join,
)
def test_a_disk_that_fails_anywhere_costs_nothing_that_was_saved(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.chaos.disk_errors", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and ", 0 of them lost something" in done.stdout, done.stdout + done.stderr
