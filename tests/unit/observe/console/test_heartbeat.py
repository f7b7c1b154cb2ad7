"""No silence of the console lasts longer than ten seconds, whatever is slow."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mcore.cli.main import guarded
from grpo_mcore.observe.console import heartbeat


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(heartbeat, "QUIET_S", 0.3)
    monkeypatch.setattr(heartbeat, "LOOK_S", 0.02)
    yield
    heartbeat.expect(0.0)


def test_a_slow_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_library.py").write_text("import time\ntime.sleep(0.8)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def work() -> int:
        import slow_library  # noqa: F401

        return 0

    assert guarded("train", work) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) >= 2 and all(line.endswith(": importing slow_library") for line in lines)
    del sys.modules["slow_library"]


def test_what_prints_needs_no_other_line(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        for number in range(20):
            print(number)
            time.sleep(0.04)
        return 0

    assert guarded("eval", work) == 0
    assert capfd.readouterr().out.split() == [str(number) for number in range(20)]


def test_steps_may_take_as_long_as_those_before_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "grpo_mcore"), heartbeat.heartbeat():
        heartbeat.expect(60.0)
        time.sleep(0.5)
        assert not caplog.records
        heartbeat.expect(0.0)
        time.sleep(0.4)
    assert caplog.records


def test_the_function_of_the_package_is_named() -> None:
    frames = []

    class Here(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            frames.append(sys._getframe())

    package, handler = logging.getLogger("grpo_mcore"), Here()
    package.addHandler(handler)
    heartbeat.Heartbeat(-60.0).look()
    package.removeHandler(handler)
    assert heartbeat.doing(frames[0]) == "look in grpo_mcore/observe/console/heartbeat.py"
    assert heartbeat.doing(None) == "working"
