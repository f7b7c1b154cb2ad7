"""The console's output, with and without a terminal."""

import fcntl
import io
import os
import struct
import subprocess
import sys
import termios
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from grpo_mcore.observe.console import console_stream
from grpo_mcore.observe.console.console import LONGEST_TEXT, WIDTH, RunConsole
from grpo_mcore.observe.console.step_table import StepRow, fit, header_lines, row_line
from tests.waiting import wait_until

SECONDS = {"generate": 3.0, "reward": 0.5, "logprobs": 1.0, "train": 2.0, "refit": 0.25, "refit/commit": 0.1}
ROW = StepRow(
    step=7, max_steps=200, reward=0.4375, kl=1.2e-4, token_mult_prob_error=1.0012, length=123.4, entropy=1.5,
    grad_norm=2.0, tokens_per_second=5123.4,
    seconds={**SECONDS, "prepare": 0.05, "everything_else": 0.2, "total": 7.0},
)  # fmt: skip


@dataclass
class Sample:
    prompt: str = "3 + 4?"
    response: str = "7"
    truth: str = "7"
    answer: str | None = "7"
    reward: float | None = 1.0
    reason: str = ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (None, 6, "     -"),
        (float("nan"), 5, "  nan"),
        (0.0, 7, "  0.000"),
        (0.4375, 7, "  0.438"),
        (1.0012, 8, "   1.001"),
        (12.3456, 7, "  12.35"),
        (1234.56, 7, "   1235"),
        (-123.456, 6, "-123.5"),
        (99999.0, 5, "99999"),
        (851230.4, 6, "851230"),
        (851230.4, 5, "8.5e5"),
        (-851230.4, 5, " -9e5"),
        (1.2e-4, 7, " 1.2e-4"),
        (3.21e-12, 8, " 3.2e-12"),
        (1e9, 7, "  1.0e9"),
        (1.5e20, 8, "  1.5e20"),
    ],
)
def test_numbers_fit_their_column(value, width, text):
    assert fit(value, width) == text


def test_lines_are_as_wide_as_the_header_and_fit_a_screen():
    widths = {len(line) for line in (*header_lines()[1:], row_line(ROW), row_line(StepRow(step=1)))}
    assert len(widths) == 1 and 90 <= widths.pop() <= 106


def test_a_row_has_its_values_under_their_names():
    _, names, _ = header_lines()
    line = row_line(ROW)
    for name, text in (
        *(("step", "7/200"), ("reward", "0.438"), ("acc", "-"), ("KL", "1.2e-4"), ("prob err", "1.001")),
        *(("length", "123.4"), ("gen", "3.000"), ("score", "0.500"), ("refit", "0.250"), ("total", "7.000")),
        *(("other", "1.250"), ("tok/s", "5123")),  # other: 7 - 5.75, log-probs and "prepare" among it
    ):
        end = names.index(name) + len(name)
        assert line[:end].endswith(text), (name, line)


def test_the_header_says_which_share_of_the_tokens_is_computed():
    assert header_lines(0.224)[0].startswith("22% of the tokens computed: samples share prefixes  ")
    assert header_lines(1.0) == header_lines() and header_lines(0.224)[1:] == header_lines()[1:]
    assert len(header_lines(0.224)[0]) == len(header_lines()[0])
    out = io.StringIO()
    RunConsole(out).step(replace(ROW, computed_tokens=0.224))
    assert "22% of the tokens" in out.getvalue()


def test_the_header_comes_every_20_lines_and_after_samples():
    out = io.StringIO()
    console = RunConsole(out)
    for _ in range(21):
        console.step(ROW)
    assert out.getvalue().count("prob err") == 2
    console.samples(7, [Sample()])
    console.step(ROW)
    assert out.getvalue().count("prob err") == 3
    console.validation(7, {"accuracy": 0.9}, 1.0)
    console.step(ROW)
    assert out.getvalue().count("prob err") == 3


def test_a_validation_is_one_line_of_what_its_rewards_have():
    out = io.StringIO()
    console = RunConsole(out)
    console.validation(2, {"accuracy": None, "reward": 0.5, "num_failed_samples": 0.0}, 1.0)
    console.validation(4, {"accuracy": None, "reward": None, "num_failed_samples": 8.0}, 1.0)
    console.validation(12, {"accuracy": 0.87512, "pass@8": 1.0, "reward": None}, 12.34)
    assert out.getvalue().splitlines() == [
        "validation after step 2: reward 0.5  (1.0 s)",
        "validation after step 4: accuracy -  reward -  num_failed_samples 8  (1.0 s)",
        "validation after step 12: accuracy 0.8751  pass@8 1  reward -  (12.3 s)",
    ]


def test_banner_and_summary_show_their_facts_and_existing_paths():
    out = io.StringIO()
    console = RunConsole(out)
    equation = "32 prompts x 16 generations = 512 samples = 1 optimizer step x 512 = DP 4 x 128 samples" + " x" * 40
    console.banner("run", {"batch": equation, "engines": 2})
    console.summary("done", {"accuracy": "0.4 -> 0.9"}, {"metrics": Path("a/b.jsonl"), "TensorBoard": None})
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "  batch    32 prompts x 16" in text and "  engines  2" in text
    assert "metrics  a/b.jsonl" in text and "TensorBoard" not in text


def test_samples_are_shown_with_truth_answer_reward_and_reason():
    out = io.StringIO()
    long = Sample(response="x " * LONGEST_TEXT, answer=None, reward=None, reason="timeout")
    RunConsole(out).samples(3, [Sample(prompt="two\nlines"), long])
    text = out.getvalue()
    assert "    prompt  two\n            lines\n" in text
    assert "  response  7\n    answer  7\n     truth  7\n    reward  1\n" in text
    assert f"({LONGEST_TEXT:,} characters more)" in " ".join(text.split())
    assert "    answer  none found\n" in text and "    reward  not scored (timeout)\n" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_progress_moves_only_on_a_terminal():
    out = io.StringIO()
    RunConsole(out).progress("samples", 1, 2)
    assert out.getvalue() == ""
    now = [0.0]
    terminal = Terminal()
    console = RunConsole(terminal, clock=lambda: now[0])
    console.progress("samples", 99, 100)
    console.progress("samples", 99, 100)  # too soon
    console.progress("samples", 100, 100)  # the last always
    full = "━" * 20
    first = f"\rsamples: 99 / 100 {full[1:]}─"
    assert terminal.getvalue() == f"{first}\rsamples: 100 / 100 {full} 0 s left"
    now[0] = 1.0
    console.progress("s", 1, 4)
    assert terminal.getvalue().endswith(f"\rs: 1 / 4 {full[:5]}{'─' * 15}".ljust(len(first) + 10))  # nothing stays
    now[0] = 3.0
    console.progress("s", 2, 4)
    assert terminal.getvalue().endswith(" 4 s left")
    console.note("a line")
    assert terminal.getvalue().endswith(f"\r{' ' * len('s: 2 / 4 ' + full + ' 4 s left')}\ra line\n")


def test_progress_fits_a_narrow_terminal():
    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with open(terminal, "w", encoding="utf-8") as stream:
        RunConsole(stream).progress("step 12, samples", 50, 100)
        shown = os.read(screen, 1000).decode()
    os.close(screen)
    assert shown == "\r" + f"step 12, samples: 50 / 100 {'━' * 10}{'─' * 10}"[:39]


PRINTS = """
import sys, logging
from grpo_mcore.cli.main import guarded
from grpo_mcore.observe.console.console import RunConsole
from grpo_mcore.observe.append_file import AppendFile
from grpo_mcore.observe.console import console_stream
from pathlib import Path

console_stream.LAST_S = 0.1

def work():
    console = RunConsole(kept=AppendFile(Path(sys.argv[1])))
    for step in range(200):
        console.note(f"step {step} " + "x" * 200)
        print("something else prints too")
        logging.getLogger("grpo_mcore").info("a message")
        logging.getLogger("grpo_mcore").warning("a warning")
    return 7

sys.exit(guarded("train", work))
"""
NOT_READ = ("full pipe", "stopped terminal")


@pytest.mark.parametrize(
    "console", ["/dev/full", "dead pipe", "closed terminal", "closed", "none", "full pipe", "stopped terminal"]
)
def test_a_run_outlives_its_console(tmp_path: Path, console: str) -> None:
    """Its own exit code, and every line in the file that keeps them."""
    if console == "/dev/full":
        there = os.open("/dev/full", os.O_WRONLY)
    else:
        here, there = os.openpty() if "terminal" in console else os.pipe()
    if console not in ("/dev/full", *NOT_READ):
        os.close(here)
    elif console == "full pipe":
        fcntl.fcntl(there, fcntl.F_SETPIPE_SZ, 4096)
    elif console == "stopped terminal":
        termios.tcflow(there, termios.TCOOFF)
    kept = tmp_path / "console.txt"
    without = {"closed": "sys.stdout.close()", "none": "sys.stdout = sys.stderr = None"}
    code = PRINTS.replace("def work():", f"{without.get(console, '')}\n\ndef work():")
    try:
        words = [sys.executable, "-c", code, str(kept)]
        ended = subprocess.run(words, stdout=there, stderr=there, check=False, timeout=60)
    finally:
        os.close(there)
        if console in NOT_READ:
            os.close(here)
    assert ended.returncode == 7
    assert len(kept.read_text().splitlines()) == 200


def test_a_terminal_without_a_character_shows_its_code() -> None:
    shown = io.BytesIO()
    console = RunConsole(io.TextIOWrapper(shown, encoding="latin-1"))
    console.note("caf\xe9 ━ 6 / 9")
    assert shown.getvalue() == b"caf\xe9 \\u2501 6 / 9\n"


def test_a_reader_that_comes_back_gets_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_stream, "KEPT", 100)
    reads, writes = os.pipe()
    with open(reads) as reader:
        with open(writes, "w") as pipe:
            monkeypatch.setattr(sys, "stdout", pipe)
            lines: list[str] = []
            reading = threading.Thread(target=lambda: lines.extend(reader), daemon=True)
            with console_stream.unfailing_console():
                for number in range(300):
                    sys.stdout.write(f"{number} " + "x" * 1000 + "\n")  # a pipe holds 64 KiB
                reading.start()
                wait_until(lambda: len(lines) >= 80, "what was kept")
                print("last", flush=True)
        reading.join(60.0)
    assert lines[-1] == "last\n"
    numbers = [int(line.partition(" ")[0]) for line in lines if "x" in line]
    assert numbers == sorted(set(numbers)) and 80 < len(numbers) < 300  # a slow thread may leave out some in between
