"""Import paths in recipes: found in the working directory too; the error says what to do."""

import os
import sys
from pathlib import Path

import pytest

from grpo_mcore.base.imports import NOT_INSTALLED, import_by_path, why_not_imported


def test_both_ways_to_write_a_path() -> None:
    assert import_by_path("os.path:join", "function", ValueError) is os.path.join
    assert import_by_path("os.path.join", "function", ValueError) is os.path.join


def test_a_module_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("best = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert import_by_path("my_rewards:best", "reward", ValueError) == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "cannot import the reward 'no_such_module:f': No module .* installed packages, then in /"),
        ("os.path:no_such", r"module 'os.path' has no attribute 'no_such' \(/.*posixpath.py\)"),
        ("os.path:joinn", r"module 'os.path' has no attribute 'joinn'; did you mean 'join'\?"),
        ("grpo_mcore.base.imports", "it is a module; write 'grpo_mcore.base.imports:name'"),
        ("benchmarks.export", "it is a module; write 'benchmarks.export:name'"),  # one that nothing has imported
        ("no_path", "write it as 'package.module:name'"),
        ("./mine/my_rewards.py:f", "for the file ./mine/my_rewards.py write 'my_rewards:f', and start the run in its"),
        ("/else/my_rewards.py", "a module, not a file; for the file /else/my_rewards.py write 'my_rewards:name'"),
        ("my_rewards.py:f", "for the file my_rewards.py write 'my_rewards:f'"),
        ("examples.no_such:f", "examples/ is not part of the installed package; run this in the root of a checkout"),
    ],
)
def test_an_error_names_the_path_and_the_remedy(path: str, message: str) -> None:
    with pytest.raises(KeyError, match=message):
        import_by_path(path, "reward", KeyError)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_thing", r"ModuleNotFoundError: No module named 'no_such_thing' \(.*/own_code.py:2\)"),
        ("[].sort_by", r"AttributeError: 'list' object has no attribute 'sort_by' \(.*/own_code.py:2\)"),
        ("int('x')", r"ValueError: invalid literal .* \(.*/own_code.py:2\)"),
        (
            "raise SystemExit(2)",
            r"ends the process when it is imported \(.*/own_code.py:2\); put what runs as a program",
        ),
        ("def f(:", r"SyntaxError: invalid syntax \(own_code.py, line 2\)['\"]$"),
    ],
)
def test_an_error_of_the_module_itself_names_its_line(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_code.py").write_text(f"# a comment\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyError, match=message):
        import_by_path("own_code:f", "reward", KeyError)


def test_a_package_that_is_installed_and_broken_is_not_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_kernels.py").write_text("raise FileNotFoundError('no shared object')\n")
    (tmp_path / "needs_another.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert why_not_imported("json.decoder") is None
    assert why_not_imported("no_such_package.kernels") == NOT_INSTALLED
    assert why_not_imported("broken_kernels") == "FileNotFoundError: no shared object"
    assert str(why_not_imported("needs_another")).startswith("ModuleNotFoundError: No module named 'a_package")
