"""A run on one machine does not depend on the machine's outward address, which goes with a VPN."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT


@pytest.mark.every_state
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="makes a network namespace: as root")
def test_a_ray_of_this_machine_works_on_without_its_outward_address(tmp_path: Path) -> None:
    words = ["unshare", "-n", sys.executable, "-m", "tests.functional.vanishing_address", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    steps = {name: float(seconds) for name, seconds in map(str.split, done.stdout.splitlines())}
    assert steps.keys() == {"call", "spawn", "closed"} and max(steps.values()) < 60.0
