"""Scripts and recipes of 0.2 find what they import, under the path that it had then."""

import subprocess
import sys
from importlib import import_module

import pytest

from grpo_mcore.base.former_paths import MOVED


@pytest.mark.parametrize("former", MOVED)
def test_a_former_path_gives_the_module_itself(former: str) -> None:
    assert import_module(f"grpo_mcore.{former}") is import_module(f"grpo_mcore.{MOVED[former]}")


def test_names_that_never_existed_are_not_found() -> None:
    with pytest.raises(ImportError, match="grpo_mcore.algorithms.walk"):
        import_module("grpo_mcore.algorithms.walk")
    from grpo_mcore.algorithms.lifecycle.grpo_run import prepare, started  # noqa: F401

    with pytest.raises(ImportError):
        from grpo_mcore.algorithms.lifecycle.grpo_run import nothing_of_this_name  # noqa: F401


def test_they_cost_no_import() -> None:
    program = "import sys, grpo_mcore.algorithms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
