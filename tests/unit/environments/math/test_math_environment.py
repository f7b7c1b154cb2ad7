"""The math environment as the loop uses it: conversations or trajectories in, scores and metrics out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from grpo_mcore.environments import create_env
from grpo_mcore.environments.errors import EnvironmentConfigError
from grpo_mcore.environments.math.math_environment import MathEnvConfig, MathEnvironment, Verification, response_text
from grpo_mcore.rollout.trajectory import Score, Trajectory, Turn


@pytest.fixture(scope="module")
def env() -> Iterator[MathEnvironment]:
    env = create_env(
        env_name="math", env_config={"num_workers": 2, "verify_timeout_s": 3.0, "stop_strings": ["</answer>"]}
    )
    yield env
    env.shutdown()


def answered(*texts: str, prompt: str = "what is 40+42?") -> Trajectory:
    turns = [Turn("user", torch.tensor([1, 2]), text=prompt)]
    for text in texts:
        turns.append(Turn("assistant", torch.tensor([3]), torch.zeros(1), loss_mask=True, text=text))
    return Trajectory("t:1", 0, tuple(turns), ((0, 2, 2 + len(texts)),), "stop", False)


def test_step_answers_every_conversation(env):
    logs = [
        [{"role": "user", "content": "40+42=5"}, {"role": "assistant", "content": text}]
        for text in ("082", "81", "none", "\\boxed{10!!!}")
    ]
    result = env.step(logs, [{"ground_truth": 82, "level": 3}] * 4)
    assert result.rewards == [1.0, 0.0, 0.0, 0.0]
    assert result.answers == ["082", "81", None, None]
    assert result.reasons == ["correct", "wrong: 81 != 82", "no answer found", "timed out after 3 s"]
    assert result.terminateds == [True] * 4
    assert result.metadata == [{"ground_truth": 82, "level": 3}] * 4
    assert result.observations[1] == {"role": "environment", "content": "Environment: wrong: 81 != 82"}


@pytest.mark.parametrize(
    ("response", "truth", "reward", "answer", "reason"),
    [
        (r"It is $\frac{1}{2}$", "0.5", 1.0, r"\frac{1}{2}", "correct"),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0, "x^2+2x+1", "correct"),
        (r"\boxed{x^2+1}", r"\boxed{(x+1)^2}", 0.0, "x^2+1", r"wrong: x^2+1 != \boxed{(x+1)^2}"),
        ("I do not know", "82", 0.0, None, "no answer found"),
        ("", "82", 0.0, None, "no answer found"),
        (r"\boxed{10!!!}", "7", 0.0, None, "timed out after 3 s"),
    ],
)
def test_answer_reward_and_reason(env, response, truth, reward, answer, reason):
    [verdict] = env._verify([response], [truth])
    assert verdict[:3] == (reward, answer, reason)


def test_the_reasoning_is_not_scored(env):
    logs = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        for prompt, text in (
            ("?", "<think>so 5</think> <answer>6</answer>"),
            ("?", "<think>maybe 6 </think>\n<answer>5</answer>"),
            ("?", r"<think>\boxed{5}</think> It is $\frac{12}{2}$"),
            ("?<think>", "so 5"),
            ("?<think>", r"so 6</think> \boxed{5}"),
        )
    ]
    result = env.step(logs, [{"ground_truth": "5"}] * 5)
    assert result.rewards == [0.0, 1.0, 0.0, 0.0, 1.0]
    assert result.reasons[3] == "no answer: the reasoning is not closed"
    whole = copy.copy(env)
    whole.config = MathEnvConfig.read({"thoughts": "none"})
    assert whole.step(logs, [{"ground_truth": "5"}] * 5).rewards[3] == 1.0


def test_a_list_of_truths_means_any_of_them(env):
    logs = [[{"role": "assistant", "content": text}] for text in ("5", r"\boxed{\frac{1}{2}}", "7")]
    assert env.step(logs, [{"ground_truth": ["5", 0.5]}] * 3).rewards == [1.0, 1.0, 0.0]
    assert env.step(logs, [{"ground_truth": np.array([5, 7])}] * 3).rewards == [1.0, 0.0, 1.0]
    assert env.step(logs[:1], [{"ground_truth": "2 + 3 = 5\n#### 5"}]).rewards == [1.0]


@pytest.mark.parametrize(
    ("truth", "kind"),
    [
        ({"ground_truth": "5"}, "a dict"),
        ([], "an empty list"),
        ("", "blank"),
        ([["5"]], "a list"),
        (["5", None], "blank"),
    ],
)
def test_a_truth_that_no_answer_can_match_is_an_error(env, truth, kind):
    with pytest.raises(ValueError, match=f"is {kind}, which no answer can match"):
        env.step([[{"role": "assistant", "content": "5"}]], [{"ground_truth": truth}])


def test_letters_of_one_ground_truth_are_a_set():
    env = create_env("math", {"num_workers": 1, "verifier_type": "english_multichoice"})
    try:
        logs = [[{"role": "assistant", "content": text}] for text in ("Answer: C and A", "Answer: A")]
        result = env.step(logs, [{"ground_truth": ["A", "C"]}] * 2)
    finally:
        env.shutdown()
    assert result.rewards == [1.0, 0.0]
    assert result.reasons == ["correct", "wrong: A != A, C"]


def test_a_verifier_of_ones_own_by_import_path():
    """It may return a number, or an answer too; one that fails costs its own sample."""
    jobs = "tests.unit.environments.pool_jobs"
    section = {
        "num_workers": 2,
        "verify_timeout_s": 0.5,
        "verify_timeout_reward": -1,
        "math_verify_impl": f"{jobs}:verify",
    }
    env = create_env("math", section)
    try:
        said = ["half", "82", "81", "die", "sleep"]
        result = env.step([[{"role": "assistant", "content": text}] for text in said], [{"ground_truth": 82}] * 5)
    finally:
        env.shutdown()
    assert result.rewards == [0.5, 1.0, 0.0, None, -1.0], (
        "a lost worker has no reward, a slow answer has verify_timeout_reward"
    )
    assert result.answers == [None, "82", "81", None, None]
    assert result.reasons == [
        "partly correct: 0.5",
        "correct",
        "wrong: 81 != 82",
        "crashed: the worker process ended: killed by SIGKILL",
        "timed out after 0.5 s",
    ]
    with pytest.raises(EnvironmentConfigError, match=f"cannot import the verifier '{jobs}:missing'"):
        create_env("math", {"math_verify_impl": f"{jobs}:missing"})


def test_score_reads_only_what_the_policy_said(env):
    scores = env.advance(
        [{"ground_truth": "82"}] * 3,
        answered("082"),
        answered("7", prompt="82"),
        answered("it is ", r"$\frac{164}{2}$"),
    )
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0]
    assert isinstance(scores[0], Score)
    assert (scores[1].answer, scores[1].reason) == ("7", "wrong: 7 != 82")
    assert all(0 < score.seconds < 60 for score in scores)


def test_score_wants_one_metadata_a_trajectory(env):
    with pytest.raises(ValueError, match="1 metadata for 2 trajectories"):
        env.advance([{"ground_truth": "82"}], answered("1"), answered("2"))


def test_scores_from_several_threads_do_not_mix(env):
    def one(number: int) -> list[float | None]:
        scores = env.advance([{"ground_truth": f"{number}/7"}] * 8, *[answered(f"{i}/7") for i in range(8)])
        return [score.reward for score in scores]

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(one, range(8)))
    assert results == [[float(i == number) for i in range(8)] for number in range(8)]


def test_a_missing_truth_is_an_error_that_says_where_to_look(env):
    with pytest.raises(ValueError, match=r"needs 'ground_truth' .* got \['level'\]; check the dataset's output_key"):
        env.step([[{"role": "assistant", "content": "1"}]], [{"level": 3}])


def test_marked_messages_win_over_the_role():
    few_shot = {"role": "assistant", "content": "an example", "generated": False}
    said = {"role": "assistant", "content": "82", "generated": True}
    assert response_text([few_shot, said]) == "82"
    assert response_text([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]) == "a"


def test_metrics_count_failures_apart(env):
    batch = {"rewards": [1.0, 0.0, None, 1.0], "uid": ["a", "a", "a", "b"], "k": [1, 2, 3]}
    metrics = env.global_post_process_and_metrics(batch)
    assert metrics == {
        "num_scored": 3.0,
        "num_failed": 1.0,
        "accuracy": pytest.approx(2 / 3),
        "pass@1": pytest.approx((0.5 + 1) / 2),
        "pass@2": 1.0,  # only prompt a has two scored samples, and none has three
    }
    assert env.global_post_process_and_metrics({"rewards": [None]}) == {"num_scored": 0.0, "num_failed": 1.0}


def test_a_format_is_a_second_named_reward(env):
    section = {"verify_timeout_s": 1.0, "format_pattern": r"0\d+|none"}
    logs = [[{"role": "assistant", "content": text}] for text in ("082", "82", "081", "x081", "none")]
    for weight, rewards in ((0.0, [1, 1, 0, 0, 0]), (0.25, [1.25, 1, 0.25, 0, 0.25])):
        formatted = copy.copy(env)  # with the same workers
        formatted.config = MathEnvConfig.read(section | {"format_reward": weight})
        result = formatted.step(logs, [{"ground_truth": 82}] * 5)
        assert result.rewards == rewards
        assert result.rewards_by_name == [
            {"correct": 1.0, "format": 1.0},
            {"correct": 1.0, "format": 0.0},
            {"correct": 0.0, "format": 1.0},
            {"correct": 0.0, "format": 0.0},  # the whole response must match
            {"correct": 0.0, "format": 1.0},
        ]
        batch = {"rewards": result.rewards, "uid": ["p"] * 5, "k": [1]}
        metrics = env.global_post_process_and_metrics(batch)
        assert metrics["accuracy"] == metrics["pass@1"] == pytest.approx(2 / 5)  # the format alone is not right
    failed = Verification(None, None, "crashed: the worker process ended", 1.0)
    assert formatted._parts(failed, "none") == {} and formatted._reward(failed, {}) is None


def test_one_reward_has_no_parts(env):
    (score,) = env.advance([{"ground_truth": "82"}], answered("82"))
    assert score.rewards_by_name == {}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"num_worker": 2}, "env.math.num_worker: unknown key; did you mean 'num_workers'?"),
        ({"num_workers": 0}, "env.math.num_workers: Input should be greater than or equal to 1, got 0"),
        ({"verify_timeout_s": "soon"}, "env.math.verify_timeout_s: Input should be a valid number"),
        ({"format_pattern": "(0"}, r"env.math.format_pattern: '\(0' is not a regular expression: missing \)"),
        ({"format_reward": 0.5}, "env.math.format_reward has no effect without env.math.format_pattern"),
        ({"format_pattern": ".", "format_reward": 1}, "env.math.format_reward: Input should be less than 1, got 1"),
    ],
)
def test_a_wrong_section_names_its_key(section, message):
    with pytest.raises(EnvironmentConfigError, match="^" + message.replace("?", r"\?")):
        MathEnvConfig.read(section)
