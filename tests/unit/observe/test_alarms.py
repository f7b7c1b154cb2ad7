"""Alarms of a running training: raised once, with the numbers; the run stops where the recipe asks for that."""

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from grpo_mcore.observe.alarms import KINDS, Alarm, StepAlarms, alarms_of, post_alarm

AGAIN = KINDS["equal_rewards"].in_a_row

GOOD = {
    **{"loss": 0.1, "lr": 1e-6, "grad_norm": 0.3, "token_mult_prob_error": 1.001, "zero_advantage_rate": 0.2},
    **{"num_samples": 64.0, "num_failed_samples": 3.0},
}
ASYNC = {"token_mult_prob_error": 1.3, "token_mult_prob_error/age_0": 1.002, "token_share/age_0": 0.4}
AT_ONCE = [
    ("engine_mismatch", {"token_mult_prob_error": 1.17}),
    ("engine_mismatch", {"token_mult_prob_error": 1_249_893.0}),
    ("engine_mismatch", {"token_mult_prob_error": float("nan")}),
    ("engine_mismatch", ASYNC | {"token_mult_prob_error/age_0": 1.2}),
    ("stale_samples", ASYNC | {"token_mult_prob_error": 1.8, "trajectory_age_mean": 1.5}),
    ("refit_mismatch", {"refit/mult_prob_error": 1.06}),
    ("refit_mismatch", {"refit/mult_prob_error": float("nan")}),
    ("failed_samples", {"num_failed_samples": 7.0}),
    ("tokens_left_out", {"token_mult_prob_error": 0.75}),
]
IN_A_ROW = [
    ("equal_rewards", {"zero_advantage_rate": 1.0, "grad_norm": 0.0}),
    ("policy_stands_still", {"grad_norm": 0.0}),
    ("policy_stands_still", {"lr": 0.0}),
    ("answers_cut", {"truncation_rate": 0.95}),
]


def kinds(alarms: StepAlarms, step: int, changed: dict[str, float]) -> list[str]:
    return [alarm.kind for alarm in alarms.of_step(step, GOOD | changed)]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        ASYNC,  # the share of older weights moves away from the policy as training does
        # all tokens are of older weights: the mean over them is 0 / 0
        {"token_mult_prob_error": 1.3, "token_mult_prob_error/age_0": float("nan"), "token_share/age_0": 0.0},
        {"num_samples": 0.0, "num_failed_samples": 0.0},
        {"truncation_rate": 1.0, "generated_length_max": 1.0},  # a choice by one token
    ],
)
def test_a_healthy_step_raises_nothing(changed: dict[str, float]) -> None:
    alarms = StepAlarms(stop_after=1)
    for step in range(2 * AGAIN):
        assert kinds(alarms, step, changed) == []
    assert alarms.stop_reason is None


@pytest.mark.parametrize(("kind", "changed"), AT_ONCE)
def test_what_can_never_be_right_is_said_at_once_and_once(kind: str, changed: dict[str, float]) -> None:
    alarms = StepAlarms()
    assert [kinds(alarms, step, changed) for step in (1, 2, 3)] == [[kind], [], []]
    assert [(alarm.kind, alarm.step) for alarm in alarms.raised] == [(kind, 1)]
    assert alarms.stop_reason is None  # nobody has asked for it


@pytest.mark.parametrize(("kind", "changed"), IN_A_ROW)
def test_what_may_happen_once_is_said_after_some_steps(kind: str, changed: dict[str, float]) -> None:
    alarms = StepAlarms()
    for step in range(AGAIN - 1):
        assert kinds(alarms, step, changed) == []
    assert kinds(alarms, 10, {}) == []  # it has stopped: they are counted from 0 again
    said = [kinds(alarms, step, changed) for step in range(AGAIN + 1)]
    assert said == [[]] * (AGAIN - 1) + [[kind], []]


def test_a_run_that_solves_everything_is_told_so() -> None:
    solved = {"zero_advantage_rate": 1.0, "accuracy": 1.0}
    alarms = StepAlarms()
    (alarm,) = [alarm for step in range(AGAIN) for alarm in alarms.of_step(step, GOOD | solved)]
    assert alarm.text.startswith("every sample is solved") and "too hard" not in alarm.text


def test_recorded_metrics_raise_the_alarms_that_the_run_raised() -> None:
    """A loss that was not finite is null there."""
    lines: list[Mapping[str, float | None]] = [
        GOOD | {"step": 1},
        GOOD | {"step": 2, "loss": None, "token_mult_prob_error": 2.0},
        GOOD | {"step": 3},
    ]
    assert [(alarm.kind, alarm.step) for alarm in alarms_of(lines)] == [("engine_mismatch", 2)]


def test_the_run_stops_after_as_many_steps_in_a_row_as_the_recipe_says() -> None:
    alarms = StepAlarms(stop_after=3)
    bad = {"token_mult_prob_error": 2.0}
    stops = []
    for step, changed in enumerate([bad, bad, {}, bad, bad, bad]):
        alarms.of_step(step, GOOD | changed)
        stops.append(alarms.stop_reason)
    assert stops == [None] * 5 + ["the alarm engine_mismatch for 3 steps (logger.alarms.stop_after)"]


def test_a_webhook_gets_the_alarm() -> None:
    received: list[Any] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if len(received) > 1 else 503)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/hook"
    alarm = Alarm("engine_mismatch", 7, "engine and policy disagree")
    with pytest.raises(OSError, match="503"):
        post_alarm(url, "logs/exp_001", alarm)
    post_alarm(url, "logs/exp_001", alarm)
    server.shutdown()
    server.server_close()
    text = "logs/exp_001, step 7: engine and policy disagree"
    assert received == [{"text": text, "run": "logs/exp_001", "step": 7, "kind": "engine_mismatch"}] * 2
