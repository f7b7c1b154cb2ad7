from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.data.gym import gym_to_dpo
from grpo_mcore.data.gym.pairing import PairIndex, pair_index
from grpo_mcore.data.interfaces import DataError
from tests.unit.data.gym.conftest import adds_up, call, message, read, rollout, write


def rewarded(question: Any, rewards: dict[str, float], **more: Any) -> list[dict[str, Any]]:
    return [rollout(question, answer, reward, **more) for answer, reward in rewards.items()]


def pairs(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(row["prompt"], row["chosen"], row["rejected"]) for row in rows]


def test_the_documented_rows(run: Any) -> None:
    summary, rows = run("dpo", rewarded("q", {"best": 1.0, "middle": 0.5, "worst": 0.25}))
    assert rows == [
        {
            "prompt": "q",
            "chosen": "best",
            "rejected": "worst",
            "reward_gap": 0.75,
            "chosen_reward": 1.0,
            "rejected_reward": 0.25,
        }
    ]
    assert (summary.kept, summary.written) == (2, 1)
    assert summary.filtered == {"neither best nor worst of its prompt": 1}


@pytest.mark.parametrize(
    ("high", "low", "gap", "paired"),
    [
        (0.7, 0.5, 0.2, True),
        (0.8, 0.6, 0.2, True),
        (0.69, 0.5, 0.2, False),
        (1.0, 1.0, 0.0, False),
        (1.0, 0.9, 0.0, True),
    ],
)  # fmt: skip
def test_the_gap(run: Any, high: float, low: float, gap: float, paired: bool) -> None:
    summary, rows = run("dpo", rewarded("q", {"a": high, "b": low}), min_gap=gap)
    assert bool(rows) is paired
    if not paired:
        assert summary.filtered == {f"rewards for its prompt differ by less than {gap:g}": 2}


def test_only_answers_to_the_same_whole_input_are_paired(run: Any) -> None:
    tools = [{"type": "function", "name": "f"}]
    others = [
        rollout([message("be kind", "system"), message("q", "user")], "a", 1.0),
        rollout([message("be brief", "system"), message("q", "user")], "b", 0.0),
        rollout([message("q0", "user"), message("q", "user")], "c", 0.0),
        rollout("q", "d", 0.0, params={"tools": tools}),
        rollout("q", "e", 0.0, params={"instructions": "be quick"}),
        rollout("q", "f", 0.0, _ng_task_index=1),
        rollout("q", "g", 0.0, _ng_task_index=2),
        rollout("p", "h", 0.0, _ng_task_index=2),
    ]
    summary, rows = run("dpo", others)
    assert rows == [] and summary.filtered == {"the only answer to its prompt": 8}


def test_fields_that_differ_by_rollout_do_not_separate_answers(run: Any) -> None:
    rows = [
        rollout("q", "a", 1.0, params={"seed": 1}, _ng_task_index=3, _ng_rollout_index=0),
        rollout("q", "b", 0.0, params={"seed": 2}, _ng_task_index=3, _ng_rollout_index=1),
    ]
    assert pairs(run("dpo", rows)[1]) == [("q", "a", "b")]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([("x", 1.0), ("x", 0.0)], None),
        ([("x", 1.0), ("y", 0.6), ("x", 0.0)], ("y", "x")),
        ([("x", 1.0), ("y", 0.3), ("x", 0.0)], ("x", "y")),
        ([("x", 1.0), ("x", 0.9), ("y", 0.8)], ("x", "y")),
    ],
)
def test_equal_texts_are_not_paired(run: Any, answers: Any, expected: Any) -> None:
    summary, rows = run("dpo", [rollout("q", text, reward) for text, reward in answers])
    assert [(row["chosen"], row["rejected"]) for row in rows] == ([expected] if expected else [])
    if not expected:
        assert summary.filtered == {"all answers to its prompt are the same text": 2}


def test_rollouts_that_cannot_be_ranked(run: Any) -> None:
    rows = [rollout("q", "a", None), rollout("q", [call("f", "{}")], 0.0), rollout("q", "b", 1.0)]
    summary, _ = run("dpo", rows)
    assert sorted(summary.filtered.values()) == [1, 1, 1] and summary.kept == 0
    assert any("no pair" in note for note in summary.notes)


@pytest.mark.parametrize("transform", ["sft", "dpo", "grpo"])
def test_masked_samples_are_not_trained_on(run: Any, transform: str) -> None:
    rows = [rollout("q", "a", 1.0), rollout("q", "b", 0.0), rollout("q", "c", -1.0, mask_sample=True)]
    summary, found = run(transform, [*rows, rollout("p", "d", 0.0, mask_sample=False)])
    masked = sum(count for reason, count in summary.filtered.items() if "mask_sample" in reason)
    assert masked == (0 if transform == "grpo" else 1)  # its prompt is still usable
    assert transform == "grpo" or '"c"' not in str(found)


def test_prompts_as_messages(run: Any) -> None:
    asked = [message("be brief", "developer"), message("q", "user")]
    rows = [rollout(asked, text, reward, params={"tools": [{"name": "f"}]}) for text, reward in (("a", 1), ("b", 0))]
    _, (row,) = run("dpo messages", rows)
    assert row["prompt"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]
    assert row["tools"] == [{"type": "function", "function": {"name": "f"}}] and row["chosen"] == "a"


def test_stratified_pairs_high_with_low_of_the_same_prompt(run: Any) -> None:
    rows = rewarded("q", {"h1": 1.0, "h2": 0.7, "m": 0.5, "l1": 0.4, "l2": 0.0}) + rewarded("p", {"h": 1.0})
    summary, found = run("dpo stratified", rows)
    assert set(pairs(found)) == {("q", high, low) for high in ("h1", "h2") for low in ("l1", "l2")}
    assert summary.kept == 4 and summary.filtered == {
        "reward between the thresholds": 1,
        "no answer of the other stratum to its prompt": 1,
    }


def test_stratified_thresholds_and_gap(run: Any) -> None:
    rows = rewarded("q", {"a": 0.6, "b": 0.55, "c": 0.5})
    thresholds = {"high_threshold": 0.6, "low_threshold": 0.5}
    assert pairs(run("dpo stratified", rows, min_gap=0.1, **thresholds)[1]) == [("q", "a", "c")]
    assert run("dpo stratified", rows, **thresholds)[1] == []


def test_stratified_pairs_are_limited_and_drawn_by_seed(run: Any) -> None:
    rows = rewarded("q", {f"h{n}": 1.0 for n in range(30)} | {f"l{n}": 0.0 for n in range(30)})
    drawn = [run("dpo stratified", rows, max_pairs_per_prompt=5, seed=seed) for seed in (0, 0, 1)]
    assert [summary.written for summary, _ in drawn] == [5, 5, 5]
    assert pairs(drawn[0][1]) == pairs(drawn[1][1]) != pairs(drawn[2][1])
    assert len(set(pairs(drawn[0][1]))) == 5


def test_stratified_of_very_many_answers(run: Any) -> None:
    rows = rewarded("q", {f"h{n}": 1.0 for n in range(1500)} | {f"l{n}": 0.0 for n in range(1500)})
    summary, found = run("dpo stratified", rows)
    assert summary.written == 8 and all(row["chosen"][0] == "h" and row["rejected"][0] == "l" for row in found)


@pytest.mark.parametrize(
    "options", [{"min_gap": -0.1}, {"high_threshold": 0.1, "low_threshold": 0.2}, {"max_pairs_per_prompt": 0}]
)
def test_options_that_make_no_sense(run: Any, options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="must not be"):
        run("dpo", [], **options)


def _reference(rollouts: list[tuple[int, str, float]], min_gap: float) -> list[tuple[str, float, float]]:
    """Return (prompt, reward of the chosen, reward of the rejected) by brute force."""
    found = []
    for prompt in dict.fromkeys(prompt for prompt, _, _ in rollouts):
        answers = [(reward, text) for other, text, reward in rollouts if other == prompt]
        top, bottom = max(answers)[0], min(answers)[0]
        ends = [
            (better, worse)
            for better, one in answers
            for worse, other in answers
            if one != other and better > worse and (better == top or worse == bottom)
        ]
        best = max(ends, key=lambda pair: (pair[0] - pair[1], pair[0]), default=None)
        if best and best[0] - best[1] >= min_gap:
            found.append((str(prompt), *best))
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.sampled_from([0.0, 0.25, 0.5, 1.0])), max_size=12)
)
def test_against_the_definition(tmp_path_factory: Any, rollouts: list[tuple[int, str, float]]) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    rows = [rollout(str(prompt), text, reward) for prompt, text, reward in rollouts]
    summary = gym_to_dpo(write(folder / "in.jsonl", rows), folder / "out.jsonl", min_gap=0.25)
    found = read(folder / "out.jsonl") if summary.written else []
    got = [(row["prompt"], row["chosen_reward"], row["rejected_reward"]) for row in found]
    assert got == _reference(rollouts, 0.25)
    assert adds_up(summary) and all(row["chosen"] != row["rejected"] for row in found)


def test_the_index_is_deleted_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in.jsonl", rewarded("q", {"a": 1.0, "b": 0.0}))
    monkeypatch.setattr(PairIndex, "texts", lambda index, answer: index._database.execute("SELECT * FROM x"))
    with pytest.raises(DataError, match="temporary database .* failed: no such table: x"):
        gym_to_dpo(source, tmp_path / "out.jsonl")
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_signs_of_zero_and_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    with pair_index(tmp_path) as index:
        for number, reward in enumerate([0.0, -0.0, 1.0, -1.0, 0.0, 1.0]):
            index.add((7, reward, b"prompt", f"{number}".encode()))
        (group,) = [list(group) for group in index.groups()]
        assert [str(answer.reward) for answer in group] == ["1.0", "1.0", "0.0", "-0.0", "0.0", "-1.0"]
        assert [index.texts(answer) for answer in group] == [
            (b"prompt", b"%d" % number) for number in (2, 5, 0, 1, 4, 3)
        ]


def test_two_processes_make_the_same_file(tmp_path: Path) -> None:
    """The result does not depend on Python's hashes, which differ between processes."""
    rows = [rollout(f"q{n % 50}", f"a{n}", n % 7 / 6) for n in range(1000)]
    source = write(tmp_path / "in.jsonl", rows)
    code = "import sys; from pathlib import Path; from grpo_mcore.data.gym import gym_to_dpo as f; "
    code += "f(Path(sys.argv[1]), Path(sys.argv[2]), strategy='stratified', max_pairs_per_prompt=3)"
    for seed in "12":
        command = [sys.executable, "-c", code, str(source), str(tmp_path / seed)]
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
