"""Malformed input. Whatever a line holds, there is no traceback, the rows around it survive, and every row is either
kept or accounted for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.data.gym import files
from grpo_mcore.data.gym import run as one_pass
from tests.unit.data.gym.conftest import TRANSFORMS, adds_up, call, message, read, rollout, spec_rollout, thought, write

TRUTH = {"expected_answer": "2"}


@dataclass
class Case:
    """One file. `data` holds its lines, without the last line's end; `malformed` is the number of malformed `rows` for
    every transformation that `but` does not list, `kept` the number of GRPO's rows, `text` the output of GRPO's row."""

    name: str
    data: bytes
    malformed: int = 1
    kept: int = 0
    rows: int = 1
    text: str | None = None
    but: dict[str, int] | None = None
    images: int = 0
    """Number of rows that are kept only as messages."""


def line(row: Any) -> bytes:
    return json.dumps(row).encode()


def changed(path: str, value: Any, **more: Any) -> bytes:
    """Return a good rollout with one field replaced, or removed where `value` is `...`."""
    row = rollout(**TRUTH, **more)
    *way, last = path.split(".")
    place: Any = row
    for key in way:
        place = place[int(key)] if key.isdigit() else place[key]
    key = int(last) if last.isdigit() else last
    if value is ...:
        del place[key]
    else:
        place[key] = value
    return line(row)


GOOD = line(rollout("good?", "yes", 1.0, **TRUTH))
BAD = line(rollout("good?", "no", 0.0, **TRUTH))
CONTENT = "responses_create_params.input.0.content"
SAID = "response.output.0.content"


def _json_cases() -> Iterator[Case]:
    yield Case("cut off in a text", GOOD[:60])
    yield Case("cut off after a key", b'{"responses_create_params":')
    yield Case("cut off before the last brace", GOOD[:-1])
    yield Case("a placeholder", b"<PLACEHOLDER ROW>")
    yield Case("a list", b"[1, 2]")
    yield Case("a text", b'"rollout"')
    yield Case("a number", b"5")
    yield Case("null", b"null")
    yield Case("true", b"true")
    yield Case("NaN", b"NaN")
    yield Case("an empty object", b"{}")
    yield Case("a comma at the end", GOOD[:-1] + b",}")
    yield Case("Python's quotes", str(rollout()).encode())
    yield Case("two objects in a line", GOOD + GOOD)
    yield Case("an object and more", GOOD + b" trailing")
    yield Case("a control character in a text", GOOD.replace(b"yes", b"y\x01s"))
    yield Case("a raw vertical tab in a text", GOOD.replace(b"yes", b"y\x0bs"))
    yield Case("invalid UTF-8 in the answer", GOOD.replace(b"yes", b"y\xffs"))
    yield Case("invalid UTF-8 in an ignored field", GOOD.replace(b'"usage": null', b'"usage": "\xff"'))
    yield Case("Latin-1", GOOD.replace(b"yes", "schön".encode("latin-1")))
    yield Case("a surrogate in UTF-8", GOOD.replace(b"yes", b"\xed\xa0\x80"))
    yield Case("half a surrogate pair in the answer", GOOD.replace(b"yes", rb"\ud83d"))
    yield Case("half a surrogate pair in an ignored field", GOOD.replace(b'"usage": null', rb'"usage": "\ud83d"'), 0, 1)
    yield Case("a surrogate pair", GOOD.replace(b"yes", rb"\ud83d\ude00"), 0, 1, text="\U0001f600")
    yield Case("zero bytes", b"\0" * 4096)
    yield Case("binary", bytes(byte for byte in range(256) if byte != 10))
    yield Case("a byte order mark", b"\xef\xbb\xbf" + GOOD, 0, 1, text="yes")
    yield Case("a byte order mark and nothing", b"\xef\xbb\xbf", 0, 0, rows=0)
    yield Case("CRLF", GOOD + b"\r", 0, 1, text="yes")
    yield Case("CR alone between rows", GOOD + b"\r" + GOOD)
    yield Case("blank lines", b"\n  \n\t\r\n", 0, 0, rows=0)
    for name, separator in (("U+2028", "\u2028"), ("U+2029", "\u2029"), ("U+0085", "\x85"), ("U+FEFF", "\ufeff")):
        yield Case(f"{name} in a text", GOOD.replace(b"yes", f"a{separator}b".encode()), 0, 1, text=f"a{separator}b")
    yield Case("escaped line ends in a text", GOOD.replace(b"yes", rb"a\r\n\u2028\u0000b"), 0, 1, text="a\r\n\u2028\0b")
    yield Case("nested 100,000 deep", b"[" * 100_000)
    yield Case(
        "nested deep in an ignored field",
        changed("response.usage", 0).replace(b"0}", b"[" * 99999 + b"]" * 99999 + b"}"),
    )
    yield Case("a key twice", GOOD.replace(b'"reward": 1.0', b'"reward": "x", "reward": 1.0'), 0, 1)
    yield Case("a number of 40 digits in an ignored field", changed("response.usage", 10**40), 0, 1)
    digits = b"1" * 5000
    yield Case(
        "a number of 5,000 digits in an ignored field", GOOD.replace(b'null}, "reward', digits + b'}, "reward'), 0, 1
    )
    logprobs = GOOD.replace(b'"usage": null', b'"usage": [NaN, -Infinity, 1e999]')
    yield Case("NaN and infinities in an ignored field", logprobs, 0, 1, text="yes")


def _reward_cases() -> Iterator[Case]:
    for name, value in (("NaN", b"NaN"), ("Infinity", b"Infinity"), ("1e999", b"1e999"), ("of 400 digits", b"1" * 400)):
        yield Case(f"reward {name}", GOOD.replace(b'"reward": 1.0', b'"reward": ' + value))
    for name, value in (("text", "1.0"), ("a list", [1.0]), ("an object", {"score": 1})):
        yield Case(f"reward: {name}", changed("reward", value))
    yield Case("reward null", changed("reward", None), 0, 1)
    yield Case("no reward", changed("reward", ...), 0, 1)
    yield Case("reward true", changed("reward", True), 0, 1)
    yield Case("reward -2", changed("reward", -2), 0, 1)


def _input_cases() -> Iterator[Case]:
    params = "responses_create_params"
    for name, value in (("not there", ...), ("null", None), ("a list", []), ("text", "hi")):
        yield Case(f"parameters: {name}", changed(params, value))
    yield Case("no input", changed(f"{params}.input", ...))
    yield Case("input: text", changed(f"{params}.input", "1+1?"), 0, 1)
    for name, value in (
        ("null", None),
        ("empty", []),
        ("empty text", ""),
        ("no user", [message("be brief", "system")]),
    ):
        yield Case(f"input: {name}", changed(f"{params}.input", value), 0, 0, but={"sft": 0})
    for name, value in (("a number", 5), ("an object", {}), ("null in it", [None]), ("texts in it", ["1+1?"])):
        yield Case(f"input: {name}", changed(f"{params}.input", value))
    for name, value in (("null", None), ("an empty list", [])):
        yield Case(f"question: {name}", changed(CONTENT, value), 0, 0)
    yield Case("question: an image", changed(CONTENT, [{"type": "input_image", "image_url": "x"}]), 0, 0, images=1)
    for name, value in (
        ("a number", 5),
        ("an object", {"text": "x"}),
        ("a number in it", [5]),
        ("text 5", [{"text": 5}]),
    ):
        yield Case(f"question: {name}", changed(CONTENT, value))
    for name, value in (("null", None), ("text", "none"), ("a list", [1]), ("a number", 3)):
        yield Case(f"metadata: {name}", changed(f"{params}.metadata", value), 0, 1)
    yield Case(
        "tools: an object", changed(f"{params}.tools", {}), 0, 1, but={"sft": 1, "grpo messages": 1, "dpo messages": 1}
    )
    yield Case("a task's index: an object", changed("_ng_task_index", {}, _ng_task_index=0))


def _output_cases() -> Iterator[Case]:
    yield Case("no output at all", changed("response", ...))
    yield Case("response: null", changed("response", None))
    yield Case("response: text", changed("response", "2"))
    yield Case("response without output", changed("response", {"id": "r"}))
    for name, value in (("null", None), ("empty", []), ("an item that is empty", [{}])):
        yield Case(f"output: {name}", changed("response.output", value), 0, 1, text="")
    yield Case("output: null, and no ground truth", line(rollout(output=None)), 0, 0)
    yield Case("output: text", changed("response.output", "2"), 0, 1, text="2")
    for name, value in (("a number", 5), ("an object", {}), ("null in it", [None]), ("texts in it", ["2"])):
        yield Case(f"output: {name}", changed("response.output", value))
    yield Case("calls alone", changed("response.output", [call("f", "{}")]), 0, 1, text="")
    yield Case("calls alone, no ground truth", line(rollout(output=[call("f", "{}")])), 0, 0)
    yield Case("thoughts alone", changed("response.output", [thought("hm")]), 0, 1, text="")
    yield Case("answer: an empty list", changed(SAID, []), 0, 1, text="")
    yield Case("answer: null", changed(SAID, None), 0, 1, text="")
    yield Case("answer: a refusal", changed(SAID, [{"type": "refusal", "refusal": "no"}]), 0, 1, text="no")
    yield Case("answer: several parts", changed(SAID, [{"text": "a"}, {"text": "b"}, "c"]), 0, 1, text="a\nb\nc")
    for name, value in (("a number", 5), ("an object", {}), ("null in it", [None]), ("text 5", [{"text": 5}])):
        yield Case(f"answer: {name}", changed(SAID, value))
    yield Case("items nested by turn", changed("response.output", [[message("a")], [message("b")]]), 0, 1, text="b")
    web = [{"type": "web_search_call", "id": "w"}, message("2")]
    yield Case("an item of another kind", changed("response.output", web), 0, 1, text="2")
    yield Case("an item's type: a number", changed("response.output.0.type", 5))
    yield Case("an unknown role", changed("response.output.0.role", "critic"), 0, 1, text="", but={"sft": 1})
    yield Case("a role: a list", changed("response.output.0.role", ["user"]))
    yield Case(
        "a verifier's own output: text",
        line(rollout(**TRUTH, output_=0)).replace(b"output_", b"output"),
        0,
        1,
        text="2",
    )
    yield Case("a verifier's own output: an object", line({**rollout(**TRUTH), "output": {"ok": True}}), 0, 1, text="2")
    yield Case("a verifier's own output: null", line({**rollout(**TRUTH), "output": None}), 0, 1, text="2")
    yield Case("a verifier's own response", line({**spec_rollout(**TRUTH), "response": "2!", **TRUTH}), 0, 1, text="2")
    yield Case("both layouts", line({**rollout(**TRUTH), "output": [message("top")]}), 0, 1, text="2")


CASES = [*_json_cases(), *_reward_cases(), *_input_cases(), *_output_cases()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_row_is_accounted_for(case: Case, run: Any, tmp_path: Path, caplog: Any) -> None:
    for transform in TRANSFORMS:
        _check_every_row(case, transform, run, tmp_path, caplog)


def _check_every_row(case: Case, transform: str, run: Any, tmp_path: Path, caplog: Any) -> None:
    summary, rows = run(transform, [GOOD, case.data, BAD])
    assert adds_up(summary)
    assert summary.rows == case.rows + 2
    assert summary.malformed == (case.but or {}).get(transform, case.malformed)
    if transform.startswith("grpo"):
        kept = case.images if transform == "grpo messages" else 0
        assert summary.kept == len(rows) == 2 + kept + (case.kept if not summary.malformed else 0)
        if case.text is not None:
            assert rows[1]["output"] == case.text
    answers = [_answer(row) for row in rows]
    assert answers[0] == "yes" and (transform.startswith("dpo") or answers[-1] == "no")
    listed = tmp_path / "out" / "train.jsonl.rejected.txt"
    assert listed.exists() == bool(summary.malformed)
    if summary.malformed:
        (said,) = listed.read_text().splitlines()
        assert said.startswith(f"{tmp_path / 'rollouts.jsonl'}:2: ") and len(said) > len(str(tmp_path)) + 30
        assert said in caplog.text


def _answer(row: dict[str, Any]) -> str:
    if "messages" in row:
        return row["messages"][-1]["content"]
    return row["chosen"] if "chosen" in row else row["output"]


def test_there_are_enough_cases() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["grpo", "sft", "dpo"])
def test_a_line_of_50_mb(transform: str, tmp_path: Path) -> None:
    long = "x" * 50_000_000
    source = tmp_path / "rollouts.jsonl"
    write(source, [GOOD, rollout("long?", long + "a", 1.0), rollout("long?", "b", 0.0), BAD])
    summary = TRANSFORMS[transform](source, tmp_path / "out.jsonl")
    assert (summary.rows, summary.malformed, summary.kept) == (4, 0, 4)
    rows = read(tmp_path / "out.jsonl")
    assert any(long + "a" in str(row) for row in rows)


@pytest.mark.parametrize("transform", ["grpo", "sft", "dpo"])
def test_a_line_that_is_too_long(transform: str, tmp_path: Path, monkeypatch: Any) -> None:
    for module in (files, one_pass):
        monkeypatch.setattr(module, "LONGEST_LINE", 1 << 20)
    source = tmp_path / "rollouts.jsonl"
    write(source, [GOOD, b"x" * (3 << 20), rollout("long?", "y" * (2 << 20)), BAD])
    summary = TRANSFORMS[transform](source, tmp_path / "out.jsonl")
    assert adds_up(summary) and (summary.rows, summary.malformed, summary.kept) == (4, 2, 2)
    assert "longer than 1 MB" in (tmp_path / "out.jsonl.rejected.txt").read_text()
