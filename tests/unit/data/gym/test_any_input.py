"""Random input: random values at random places of a rollout, and random damage to its bytes."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.gym.conftest import TRANSFORMS, adds_up, call, call_output, message, rollout, thought

WHOLE = rollout(
    [message("be brief", "developer"), message("1+1?", "user")],
    [thought("hm"), call("add", '{"a": 1}'), call_output("2"), message("2")],
    params={"tools": [{"type": "function", "name": "add", "parameters": {}}], "instructions": "go", "metadata": {}},
    expected_answer="2",
    _ng_task_index=0,
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "type", "name", "x"]), inner),
    max_leaves=6,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key in keys for found in _paths(value[key], (*path, key))]


PATHS = _paths(WHOLE)


@st.composite
def odd_rollouts(draw: st.DrawFn) -> bytes:
    row = copy.deepcopy(WHOLE)
    for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=3)):
        place: Any = row
        for key in path[:-1]:
            if not isinstance(place, dict | list) or (
                isinstance(place, list) and not (type(key) is int and key < len(place))
            ):
                break
            place = place[key] if isinstance(place, list) else place.get(key)
        else:
            if isinstance(place, dict) or (isinstance(place, list) and type(path[-1]) is int and path[-1] < len(place)):
                place[path[-1]] = draw(ANY)
    return json.dumps(row).encode()


@st.composite
def damaged_rollouts(draw: st.DrawFn) -> bytes:
    line = bytearray(json.dumps(WHOLE).encode())
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(line)))
        line[start : start + draw(st.integers(0, 5))] = draw(st.binary(max_size=4))
    return bytes(line).replace(b"\n", b"")


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(odd_rollouts() | damaged_rollouts() | ANY.map(lambda value: json.dumps(value).encode()), max_size=4)
)
def test_every_line_is_accounted_for(lines: list[bytes]) -> None:
    """Every transformation reads the same file, since making it takes the time."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "rollouts.jsonl")
        source.write_bytes(b"\n" + b"\n".join(lines))  # a first byte that cannot be mistaken for gzip
        rows = [line for line in lines if line.strip()]
        for name, transform in TRANSFORMS.items():
            target = Path(folder, f"{name}.jsonl")
            summary = transform(source, target)
            assert adds_up(summary) and summary.rows == len(rows), name
            assert str(summary)
            if target.exists():
                written = [json.loads(line) for line in target.read_bytes().splitlines()]
                assert len(written) == summary.written > 0, name
            listed = Path(f"{target}.rejected.txt")
            assert (len(listed.read_text().split("\n")) - 1 if listed.exists() else 0) >= summary.malformed, name
