"""Completion and colours: what the command does for a person at a terminal."""

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mcore.cli.completion import presets, recipes_and_keys, words_so_far
from grpo_mcore.cli.main import guarded, main
from grpo_mcore.observe.console.colors import painted


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("grpo_ma", ["grpo_math_1B", "grpo_math_1B_megatron"]),
        ("policy.megatron_cfg.opt", ["policy.megatron_cfg.optimizer."]),
        ("policy.megatron_cfg.optimizer.l", ["policy.megatron_cfg.optimizer.lr="]),
        ("policy.megatron_cfg.optimizer.lr=", []),
    ],
)
def test_recipes_and_keys_are_completed_up_to_the_next_dot(prefix: str, words: list[str]) -> None:
    assert recipes_and_keys(prefix) == words


def test_a_console_that_cannot_show_a_letter_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", console)
    assert main(["config", "grpo-arithmetic-cpu", "logger.wandb.name=ü"]) == 0
    assert b"    name: \\xfc " in console.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "<&-", ">&-"])
def test_a_command_without_standard_files_ends_as_it_should(closed: str, tmp_path: Path) -> None:
    """It ended with 1 and a traceback, and the file that it opened first was its standard output."""
    program = """
import os, sys
from grpo_mcore.cli.main import main
code = main(["config", "grpo-arithmetic-cpu"])
with open(sys.argv[1], "w") as file:
    os.write(1, b"of a library")
    print(code, file.fileno() > 2, [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)], file=file)
"""
    told = tmp_path / "told"
    shell = f'exec "$0" -c "$1" "$2" {closed}'
    done = subprocess.run(["sh", "-c", shell, sys.executable, program, str(told)], capture_output=True, timeout=60)
    assert done.returncode == 0 and told.read_text() == "0 True [False, False, False]\n", done.stderr


def test_the_shell_gets_the_options_of_the_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bash calls it, by argcomplete's protocol."""
    line = "grpo-mcore train --val ignored"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len("grpo-mcore train --val"))}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words"), "_ARGCOMPLETE_COMP_WORDBREAKS": " =:"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert words_so_far() == ["train", "--val"]
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", end)  # argcomplete's, which the tests' process must outlive
    with pytest.raises(SystemExit):
        main()
    assert ended == [0] and (tmp_path / "words").read_text().strip() == "--validate-only"


def test_install_completion_is_read_by_the_shell_and_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    (tmp_path / ".bashrc").write_text("alias l=ls")
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            main(["--install-completion"])
        assert end.value.code == 0
    assert (tmp_path / ".bashrc").read_text().count("completion.bash") == 1
    told = subprocess.run(
        ["bash", "-c", ". ~/.bashrc && complete -p grpo-mcore"], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0 and told.stdout.strip().endswith("grpo-mcore"), told.stderr
    monkeypatch.setenv("SHELL", "/bin/fish")
    with pytest.raises(SystemExit):
        main(["--install-completion"])
    assert "knows bash and zsh, and SHELL is fish" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("terminal", "variables", "coloured"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_colours_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, variables: dict[str, str], coloured: bool
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert painted("fault", "red", stream) == ("\x1b[31mfault\x1b[0m" if coloured else "fault")


def test_what_no_user_can_act_on_is_not_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = logging.getLogger("torch._library.triton")
    monkeypatch.setattr(triton, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(triton, "propagate", False)  # torch, where it is imported, has a handler too
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")  # a user's own word stays

    def work() -> int:
        triton.warning("Triton not available, find_triton_kernels = []")
        triton.error("something else")
        return 0

    assert guarded("train", work) == 0
    assert capfd.readouterr().err == "something else\n" and os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_presets_are_completed() -> None:
    assert presets("gs") == ["gspo"] and {"dapo", "rloo"} <= set(presets(""))
