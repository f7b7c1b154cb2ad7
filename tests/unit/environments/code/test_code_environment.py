"""Rewards and reasons of answers with programs, in a sandbox and, for trusted code, without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.environments import create_env
from grpo_mcore.environments.code.environment import CodeEnvConfig, CodeEnvironment, last_program
from grpo_mcore.environments.code.sandbox import command as sandbox_command
from grpo_mcore.environments.code.sandbox.sandboxes import BUBBLEWRAP, TRUST, SandboxError
from grpo_mcore.environments.registry import EnvironmentConfigError
from tests.unit.environments.code.code_answers import judge, said
from tests.unit.environments.code.sandbox_here import needs_sandbox

pytestmark = pytest.mark.slow  # a sandbox for each answer

SECTION = {"num_workers": 2, "cpu_limit_s": 5.0, "output_limit_mb": 0.1, "stop_strings": ["</code>"]}
KINDS = [TRUST, pytest.param(BUBBLEWRAP, marks=needs_sandbox)]


@pytest.fixture(scope="module", params=KINDS)
def env(request: pytest.FixtureRequest) -> Iterator[CodeEnvironment]:
    env = create_env("code", SECTION | {"sandbox": request.param, "partial_credit": True})
    assert isinstance(env, CodeEnvironment)
    yield env
    env.shutdown()


SUM = [{"input": f"{n}\n{n + 1}\n", "output": f"{2 * n + 1}\n"} for n in range(3)]
CORRECT = "print(int(input()) + int(input()))"
ADD = "def add(a, b):\n    return a + b"


def test_a_batch(env: CodeEnvironment) -> None:
    programs = [CORRECT, "print(1)", "import sys; print(sum(map(int, sys.stdin)))", "print(", "print(input())"]
    logs = [*said(*programs), [{"role": "assistant", "content": "I do not know"}]]
    row = {"tests": SUM, "level": 3}
    result = env.step(logs, [row] * 6)
    assert result.rewards == [1.0, 1 / 3, 1.0, 0.0, 0.0, 0.0]
    assert result.answers == [*(f"{program}\n" for program in programs), None]
    assert result.reasons == [
        "3 of 3 tests passed",
        "1 of 3 tests passed; test 2: printed '1', expected '3'; test 3: printed '1', expected '5'",
        "3 of 3 tests passed",
        "0 of 3 tests passed; " + "; ".join(f"test {n}: crashed: SyntaxError: '(' was never closed" for n in (1, 2, 3)),
        "0 of 3 tests passed; test 1: printed '0', expected '1'; test 2: printed '1', expected '3'; "
        "test 3: printed '2', expected '5'",
        "no code block found",
    ]
    assert result.terminateds == [True] * 6 and result.metadata == [row] * 6
    assert result.observations[0] == {"role": "environment", "content": "Environment: 3 of 3 tests passed"}
    assert result.seconds is not None and min(result.seconds) >= 0


def test_calls_and_assertions(env: CodeEnvironment) -> None:
    tests = [{"call": "add", "args": [1, 2], "output": 3}, {"call": "add", "args": [[1], [2]], "output": [1, 2]}]
    assert judge(env, ADD, tests=tests) == (1.0, "2 of 2 tests passed")
    method = f"class Solution:\n    @staticmethod\n    {ADD}".replace("\n    return", "\n        return")
    assert judge(env, method, tests=tests)[0] == 1.0
    assert judge(env, "pass", tests=tests)[0] == 0.0, "operator.add is not the program's"
    merge = "class Solution:\n    def merge(self, a):\n        return sorted(a)"  # heapq has one too
    assert judge(env, merge, tests=[{"call": "merge", "args": [[2, 1]], "output": [1, 2]}])[0] == 1.0
    assert judge(env, ADD.replace("+", "*"), tests=tests) == (
        0.0,
        "0 of 2 tests passed; test 1: add returned 2, expected 3; "
        "test 2: crashed: TypeError: can't multiply sequence by non-int of type 'list'",
    )
    mbpp = {"test_list": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], "test_setup_code": ""}
    assert judge(env, ADD, **mbpp) == (
        0.5,
        "1 of 2 tests passed; test 2: crashed: AssertionError in 'assert add(1, 2) == 4'",
    )
    human_eval = {"entry_point": "add", "prompt": "def add(a, b):\n", "test": "def check(f):\n    assert f(1, 2) == 3"}
    assert judge(env, "    return a + b", **human_eval)[0] == 1.0
    assert judge(env, ADD, **human_eval)[0] == 1.0
    assert judge(env, "    return a", **human_eval)[0] == 0.0
    one, two = "def test_1():\n    assert add(1, 2) == 3\n", "def test_2():\n    assert add(1, 0)\n"
    kod_code = {"test": f"from solution import add\n{one}{two}"}
    assert judge(env, ADD, **kod_code)[0] == 1.0
    assert judge(env, ADD.replace("+", "*"), **kod_code)[0] == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "exit()",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "def add(a, b): exit(0)",
        "import os; os.write(3, b'{}')",
    ],
)
def test_a_program_that_ends_before_its_test_has_failed_it(env: CodeEnvironment, program: str) -> None:
    for row in ({"test_list": ["assert add(1, 2) == 3"]}, {"tests": [{"call": "add", "args": [1, 2], "output": 3}]}):
        reward, reason = judge(env, program, **row)
        assert reward == 0.0 and reason.startswith("0 of 1 tests passed; test 1: ")


def test_an_answer_that_cannot_be_compared_has_failed(env: CodeEnvironment) -> None:
    call = {"tests": [{"call": "f", "args": [], "output": 1.5}]}
    for value in ("10**400", "10**5000", "float('nan')", "object()", "'\\ud800'"):
        assert judge(env, f"def f(): return {value}", **call)[0] == 0.0, value
    deep = "def f():\n    value = []\n    for _ in range(900): value = [value]\n    return value"
    assert judge(env, deep, **call)[0] == 0.0
    assert judge(env, "import os\nos.kill(os.getpid(), 40)", **call)[0] == 0.0


def test_limits_fail_their_test_with_a_reason(env: CodeEnvironment) -> None:
    program = "n = int(input())\nif n == 1: print('x' * 10**6)\nif n == 2: raise ValueError('two')\nprint(2 * n + 1)"
    assert judge(env, program, tests=SUM) == (
        1 / 3,
        "1 of 3 tests passed; test 2: output limit of 0.1 MiB; test 3: crashed: ValueError: two",
    )


def test_several_threads_do_not_mix(env: CodeEnvironment) -> None:
    def one(number: int) -> Any:
        rows = [{"tests": [{"input": "", "output": str(n)}]} for n in range(4)]
        return env.step(said(*[f"print({number})"] * 4), rows).rewards

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(one, range(4))) == [[float(n == number) for n in range(4)] for number in range(4)]


def test_a_prompt_whose_tests_cannot_be_read_has_no_reward(env: CodeEnvironment) -> None:
    result = env.step(said(*[CORRECT] * 3), [{"ground_truth": "3"}, {"tests": SUM}, {"tests": "[{"}])
    assert result.rewards == [None, 1.0, None]
    assert result.reasons[0].startswith("the code environment needs tests in one of tests, input_output")
    assert result.reasons[2] == "not JSON: '[{'"


def test_tests_that_need_packages_fail_no_answer() -> None:
    row = {"tests": ["import numpy as np\nassert np.all(f() == 1)"]}
    [problem] = CodeEnvironment.check_truths({}, [row])
    assert problem == "its tests import numpy; the sandbox has the standard library alone"
    assert CodeEnvironment.check_truths({"sandbox": "none_i_trust_the_code"}, [row]) == [None]


@pytest.mark.parametrize(
    ("keys", "reward", "reason"),
    [
        ({}, 0.0, "1 of 3 tests passed; test 2: printed '1', expected '3'"),  # the third is left out
        ({"max_tests": 1}, 1.0, "1 of 1 tests passed"),
        (
            {"answer_limit_s": 1e-9, "partial_credit": True},
            0.0,
            "0 of 3 tests passed; tests from 1 on: limit of 1e-09 s",
        ),
        ({"float_tolerance": 0.5, "partial_credit": True}, 1 / 3, "1 of 3 tests passed"),
    ],
)
def test_keys(keys: dict[str, Any], reward: float, reason: str) -> None:
    env = CodeEnvironment(SECTION | {"sandbox": TRUST} | keys)
    found = judge(env, "print(1)", tests=SUM)
    env.shutdown()
    assert found[0] == reward and found[1].startswith(reason)


def test_a_tolerance() -> None:
    env = CodeEnvironment({"sandbox": TRUST, "num_workers": 1, "float_tolerance": 1e-6})
    assert judge(env, "print(1 / 3)", tests=[{"input": "", "output": "0.3333333"}])[0] == 1.0
    assert judge(env, "print(0.3333)", tests=[{"input": "", "output": "0.3333333"}])[0] == 0.0
    env.shutdown()


def test_a_sandbox_that_breaks_gives_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample is excluded and counted."""
    env = CodeEnvironment(SECTION | {"sandbox": TRUST})
    start = env._sandboxes.start
    calls = iter(range(100))

    def broken() -> Any:
        if next(calls) < 3:
            raise OSError("too many open files")
        return start()

    monkeypatch.setattr(env._sandboxes, "start", broken)
    rewards, reasons = [], []
    for _ in range(2):
        result = env.step(said(CORRECT), [{"tests": SUM}])
        rewards += result.rewards
        reasons += result.reasons
    env.shutdown()
    assert rewards == [None, 1.0]
    assert reasons[0] == "the sandbox broke 3 times in a row: OSError: too many open files"


def test_without_bubblewrap_it_refuses_and_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_command.shutil, "which", lambda _: None)
    wanted = rf"(?s)bubblewrap \(bwrap\) is not installed.*set env\.code\.sandbox: {TRUST}"
    with pytest.raises(SandboxError, match=wanted):
        CodeEnvironment({})
    CodeEnvironment({"sandbox": TRUST}).shutdown()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"num_worker": 2}, "env.code.num_worker: unknown key; did you mean 'num_workers'?"),
        ({"sandbox": "none"}, "env.code.sandbox: Input should be 'bubblewrap' or 'none_i_trust_the_code', got 'none'"),
        ({"cpu_limit_s": 0}, "env.code.cpu_limit_s: Input should be greater than 0, got 0"),
    ],
)
def test_a_wrong_section_names_its_key(section: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentConfigError) as error:
        CodeEnvConfig.read(section)
    assert str(error.value).startswith(message)


def test_the_example_problems_are_solved_by_their_own_answers() -> None:
    """The problems of recipes/grpo-code-cpu.yaml."""
    path = Path(__file__).resolve().parents[4] / "examples" / "code_problems" / "problems.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    env = CodeEnvironment({"num_workers": 2, "sandbox": TRUST})
    result = env.step([[{"role": "assistant", "content": row["output"]}] for row in rows], rows)
    env.shutdown()
    assert len(rows) == 16 and result.rewards == [1.0] * 16, result.reasons


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("so:\n```\nprint(1)\n```\nwhich prints 1", "print(1)\n"),
        ("```py\n1\n```\nbetter:\n```python3\n2\n```", "2\n"),
        ("```python\n1\n```\nit prints\n```text\n5\n```", "1\n"),
        ("```Python\r\nif 1:\r\n    2\r\n```", "if 1:\n    2\n"),
        ("  1. so\n     ```python\n     if 1:\n         2\n     ```", "if 1:\n    2\n"),
        ("~~~python\n'''```'''\n~~~", "'''```'''\n"),
        ("````python\n'''\n```\n'''\n````", "'''\n```\n'''\n"),
        ("```python title=a\n1\n```", "1\n"),
        ("``` python\n1\n```  ", "1\n"),
        ("```python\n```", "\n"),
        ("```python\nprint(1)", None),  # it was cut off
        ("```python\n1\n```\n```python\n2", "1\n"),
        ("```c\nint main;\n```", None),
        ("`print(1)` and ```print(2)```", None),
        ("print(1)", None),
        ("", None),
    ],
)
def test_the_last_closed_block_of_python(response: str, program: str | None) -> None:
    assert last_program(response) == program


def test_later_blocks_that_only_use_the_program_do_not_replace_it() -> None:
    answer = f"```python\n{ADD}\n```\nUse it:\n```python\nprint(add(1, 2))\n```\nIt prints\n```\n3\n```"
    assert last_program(answer, "add") == ADD + "\n"
    assert last_program(answer) == "print(add(1, 2))\n", "no function is known: the last marked block"
    assert last_program("```python\n1\n```\nIt prints\n```\n3\n```") == "1\n"
    assert last_program(f"```\n{ADD}\n```\n```\nadd(1)\n```", "add") == ADD + "\n"
    better = ADD.replace("a + b", "b + a")
    assert last_program(f"```python\n{ADD}\n```\nbetter\n```python\n{better}\n```", "add") == better + "\n"


@pytest.mark.parametrize("line", ["``` " + " " * 10**6 + "`", "`" * 10**6 + "a`", " " * 10**6, "~~~" + "`" * 10**6])
def test_no_line_takes_for_ever(line: str) -> None:
    """With backtracking the first line would take an hour."""
    assert last_program(line) is None


def test_a_program_in_the_thought_does_not_count(env: CodeEnvironment) -> None:
    block = f"```python\n{CORRECT}\n```"
    texts = (f"<think>{block}</think> I cannot.", f"<think>no</think>{block}", f"<think>{block}")
    result = env.step([[{"role": "assistant", "content": text}] for text in texts], [{"tests": SUM}] * 3)
    assert result.rewards == [0.0, 1.0, 0.0]
    assert result.reasons[2] == "no answer: the reasoning is not closed"


def test_answers_in_the_forms_of_the_public_benchmarks(env: CodeEnvironment) -> None:
    """Canonical solutions, as HumanEval, MBPP, LiveCodeBench and APPS have them, pass; wrong ones do not."""
    cases = json.loads((Path(__file__).parent / "code_cases.json").read_text())
    answers, rows, expected = [], [], []
    for case in cases:
        for kind, reward in (("right", 1.0), ("wrong", 0.0)):
            for program in case[kind]:
                answers.append([{"role": "assistant", "content": f"```python\n{program}\n```"}])
                rows.append(case["row"])
                expected.append(reward)
    result = env.step(answers, rows)
    assert [(reward > 0.99) * 1.0 for reward in result.rewards] == expected, result.reasons


def test_large_integers_are_printed_returned_and_read(env: CodeEnvironment) -> None:
    big = 7**6000  # 5,071 digits
    assert judge(env, "print(7**6000)", tests=[{"input": "", "output": f"{big}\n"}])[0] == 1.0
    assert judge(env, "print(7**6000 + 1)", tests=[{"input": "", "output": f"{big}\n"}])[0] == 0.0
    assert judge(env, "def f(n): return n + 1", tests=[{"call": "f", "args": [big - 1], "output": big}])[0] == 1.0
    assert judge(env, "def f(n): return n + 2", tests=[{"call": "f", "args": [big - 1], "output": big}])[0] == 0.0
    assert judge(env, "def f(): return 7**6000", test_list=[f"assert f() == {big}"])[0] == 1.0
