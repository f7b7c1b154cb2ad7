"""A wrong argument of a remote call fails type checking. `typed_calls.py` has the calls of policy and engines, which
mypy checks with the package; here the mechanism is shown to refuse, with a class that takes no time to analyse."""

from __future__ import annotations

from pathlib import Path

import mypy.api
import pytest

pytestmark = pytest.mark.slow  # runs mypy

ROOT = Path(__file__).resolve().parents[3]
CALLS = """
from grpo_mcore.rollout.workers import Worker, remote_call

class Rank:
    def train(self, loss: str, steps: int = 1) -> float:
        return 0.0

def call(worker: Worker) -> None:
    remote_call(worker, Rank.train, timeout_s=1.0){arguments}
"""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ('("loss")', None),
        ('("loss", 2)', None),
        ('("loss", "2")', 'Argument 2 has incompatible type "str"; expected "int"'),
        ("()", "Too few arguments"),
        ('("loss", 2, 3)', "Too many arguments"),
    ],
)
def test_mypy_checks_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, error: str | None
) -> None:
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    (tmp_path / "calls.py").write_text(CALLS.replace("{arguments}", arguments))
    options = ["--config-file=", "--python-version=3.11", "--follow-imports=silent", "--explicit-package-bases"]
    cache = f"--cache-dir={tmp_path.parent / 'mypy'}"
    said, failed, code = mypy.api.run([*options, cache, str(tmp_path / "calls.py")])
    assert not failed and (code == 1) == (error is not None), said + failed
    assert error is None or error in said


def test_the_calls_of_policy_and_engines_are_checked_with_the_package() -> None:
    assert '"tests/unit/cluster/typed_calls.py"' in (ROOT / "pyproject.toml").read_text()
