"""KubeRay's own schema of a RayJob, if the folder of test data next to the project has it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from grpo_mcore.tools.launch.kubernetes_check import Object, read_crd

FILE = Path(__file__).parents[5] / "shared" / "data" / "kuberay_rayjob_v1_schema.json"


@cache
def crd() -> Object:
    if not FILE.is_file():
        pytest.skip(f"no KubeRay schema: {FILE} is not there")
    return read_crd(FILE)
