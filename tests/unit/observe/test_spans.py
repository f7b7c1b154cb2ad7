"""The events of a run by process."""

from pathlib import Path

import pytest

from grpo_mcore.observe import Timeline
from grpo_mcore.observe.run_folder import EventFile
from grpo_mcore.observe.spans import SpanFile, parts_of
from tests.clocks import StandingClock


def test_phases_and_calls_are_events(tmp_path: Path) -> None:
    clock = StandingClock()
    spans = SpanFile(tmp_path, step=lambda: 3, clock=clock)
    spans.begin({"policy-0": ["policy-0", "engine-0"]}, colocated=True, algorithm="grpo")
    timeline = Timeline(clock.now, spans.phase)
    with timeline.phase("refit"):
        clock.at += 1
        with timeline.phase("commit"):
            clock.at += 2
    with timeline.pause("validation"):
        clock.at += 4
    spans.span("engine-0", "generate", 5.0, 7.0)
    spans.optimizer_step("policy-0", (1000.0, 1000.5, 1002.0, 1002.25))
    spans.restarted("engine-0", "died")
    spans.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('\0\0\n[]\n{}\n{"what": "tr')  # a machine that lost its power, and a kill
    begin, *events = EventFile(tmp_path)
    (restart,) = (event for event in events if event["what"] == "restart")
    found = sorted((event for event in events if event is not restart), key=lambda event: event["process"])
    assert begin["devices"] == {"policy-0": ["policy-0", "engine-0"]} and restart["why"] == "died"
    assert [(event["process"], event["what"], event["seconds"]) for event in found] == [
        ("driver", "refit/commit", 2.0),
        ("driver", "refit", 3.0),
        ("driver", "validation", 4.0),
        ("engine-0", "generate", 2.0),
        ("policy-0", "train", 2.25),
    ]
    parts = [("train/micro-batch", 1000.0, 0.5), ("train/micro-batch", 1000.5, 1.5), ("train/update", 1002.0, 0.25)]
    assert [(part["what"], part["start"], part["seconds"]) for part in parts_of(found[-1])] == parts
    assert not list(parts_of(found[0]))
    assert {event["step"] for event in found} == {3}
    commit, refit, validation, *_ = (event["start"] for event in found)
    assert (commit - refit, validation - commit) == (pytest.approx(1, abs=1e-3), pytest.approx(2, abs=1e-3))
