"""Programs that are run on tests: reward 1 if all pass, else 0, or with `partial_credit` the share that passes.

A program that fails or exceeds a limit fails its test. If the sandbox itself breaks, or a prompt's tests cannot be
read, the sample has no reward: it is excluded and counted.
"""

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from grpo_mcore.base.text import shorten
from grpo_mcore.environments.answers import UNFINISHED, split_messages
from grpo_mcore.environments.code.asserts import SplitTest, split_test
from grpo_mcore.environments.code.sandbox.sandboxes import (
    BUBBLEWRAP,
    TRUST,
    Limits,
    Sandbox,
    SandboxError,
    Sandboxes,
    SandboxKind,
)
from grpo_mcore.environments.code.tests import (
    AssertTest,
    CallTest,
    CodeTest,
    CodeTestError,
    StdinTest,
    defines,
    missing_packages,
    read_tests,
    same_text,
    same_value,
    with_imports,
)
from grpo_mcore.environments.config import AnswerConfig
from grpo_mcore.environments.interfaces import EnvironmentInterface, EnvironmentReturn, single_turn_return

_REASONS = 3  # failed tests that a reason names
_NO_TEST = "the program ended before its test"
# Possessive quantifiers: no line that a model writes makes it backtrack.
_FENCE = re.compile(r"\s*+(?P<fence>`{3,}+|~{3,}+)\s*+(?P<language>[^`\s]*+)[^`]*+$")
_PYTHON = {"", "python", "python3", "py", "py3"}


class CodeEnvConfig(AnswerConfig):
    """The recipe's section `env.code`."""

    section: ClassVar[str] = "env.code"

    solved_at: float | None = 1.0
    """Lowest reward of a sample that counts as solved, for `accuracy` and `pass@k`. 1: all tests passed."""
    num_workers: int = Field(8, ge=1)
    """Maximum programs that run at the same time."""
    sandbox: SandboxKind = BUBBLEWRAP
    """Where programs run. bubblewrap: without this machine's network, files, processes and users.
    none_i_trust_the_code: with the rights of this process, and only the limits below."""
    partial_credit: bool = False
    """Whether the reward is the share of tests that pass. false: 1 if all pass, else 0; the tests after the first that
    fails are then skipped."""
    max_tests: int | None = Field(None, ge=1)
    """Maximum tests of a prompt: the first ones are run. null: all."""
    cpu_limit_s: float = Field(5.0, gt=0)
    """Seconds of processor time of one test."""
    wall_limit_s: float = Field(20.0, gt=0)
    """Seconds of wall-clock time of one test, waiting and sleeping included."""
    answer_limit_s: float = Field(120.0, gt=0)
    """Seconds after which no further test of an answer is started; the rest count as failed."""
    memory_limit_gb: float = Field(0.5, gt=0)
    """GiB of memory of all processes of one test together."""
    max_processes: int = Field(16, ge=1)
    """Processes and threads of one test. Not enforced with none_i_trust_the_code."""
    output_limit_mb: float = Field(1.0, gt=0)
    """MiB that one test may print."""
    scratch_limit_mb: float = Field(64.0, gt=0)
    """MiB of files in the scratch folder."""
    float_tolerance: float = Field(0.0, ge=0)
    """Maximum difference, relative or absolute, between numbers with a point and the expected ones."""

    def tests(self, row: Mapping[str, Any]) -> list[CodeTest]:
        """Return the tests of a prompt that are run. Raises CodeTestError if they cannot be read, or need packages: the
        sandbox has none, so every answer would fail."""
        tests = read_tests(row)[: self.max_tests]
        if self.sandbox == BUBBLEWRAP and (missing := missing_packages(tests)):
            raise CodeTestError(f"its tests import {', '.join(missing)}; the sandbox has the standard library alone")
        return tests


class Report(NamedTuple):
    """The result of an answer's tests. `failed`: a reason for each test that failed, skipped ones included. `broken`:
    why there is no reward."""

    program: str | None
    passed: int
    tests: int
    failed: list[str]
    broken: str | None
    seconds: float

    def reward(self, partial_credit: bool) -> float | None:
        if self.broken is not None:
            return None
        return self.passed / self.tests if partial_credit else float(self.passed == self.tests)

    @property
    def reason(self) -> str:
        if self.broken is not None:
            return self.broken
        if self.program is None:
            return "no code block found"
        shown = self.failed[:_REASONS] + (["..."] if len(self.failed) > _REASONS else [])
        return "; ".join([f"{self.passed} of {self.tests} tests passed", *shown])


class CodeEnvironment(EnvironmentInterface):
    """Single-turn. The program is the last block of Python between code fences; each conversation's metadata holds its
    tests, see tests.py."""

    concurrent_calls = 32
    config_class = CodeEnvConfig
    config: CodeEnvConfig

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        limits = Limits(
            cpu_s=self.config.cpu_limit_s,
            wall_s=self.config.wall_limit_s,
            memory_gb=self.config.memory_limit_gb,
            processes=self.config.max_processes,
            output_mb=self.config.output_limit_mb,
            scratch_mb=self.config.scratch_limit_mb,
        )
        try:
            self._sandboxes = Sandboxes(self.config.sandbox, limits)
        except SandboxError as error:
            raise SandboxError(
                f"{error}\nFor code that you trust as your own, set env.code.sandbox: {TRUST}"
            ) from error
        self._threads = ThreadPoolExecutor(self.config.num_workers, thread_name_prefix="code")

    @classmethod
    def check_truths(cls, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        section = CodeEnvConfig.read(config)
        problems: list[str | None] = []
        for row in rows:
            try:
                section.tests(row)
                problems.append(None)
            except CodeTestError as error:
                problems.append(str(error))
        return problems

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        answers = [split_messages(messages, self.config.thoughts).answer for messages in message_log_batch]
        reports = list(self._threads.map(self._report, answers, metadata))
        return single_turn_return(
            metadata,
            rewards=[report.reward(self.config.partial_credit) for report in reports],
            reasons=[
                UNFINISHED if answer is None and report.broken is None else report.reason
                for report, answer in zip(reports, answers, strict=True)
            ],
            seconds=[report.seconds for report in reports],
            answers=[report.program for report in reports],
        )

    def shutdown(self) -> None:
        self._sandboxes.close()
        self._threads.shutdown(cancel_futures=True)

    def _report(self, answer: str | None, metadata: Mapping[str, Any]) -> Report:
        """Run all tests of an answer in one sandbox, which no other answer uses."""
        try:
            tests = self.config.tests(metadata)
        except CodeTestError as error:
            return Report(last_program(answer or ""), 0, 0, [], str(error), 0.0)
        program = last_program(answer or "", _function_of(tests[0]))
        if program is None:
            return Report(None, 0, len(tests), [], None, 0.0)
        start, passed, failed = time.perf_counter(), 0, []
        try:
            with self._sandboxes.open() as sandbox:
                for number, test in enumerate(tests, 1):
                    if time.perf_counter() - start > self.config.answer_limit_s:
                        failed.append(f"tests from {number} on: limit of {self.config.answer_limit_s:g} s an answer")
                        break
                    try:
                        problem = self._problem(sandbox, program, test)
                    except SandboxError:
                        raise
                    except Exception as error:  # a value that can be neither compared nor shown
                        problem = f"its result cannot be compared: {type(error).__name__}"
                    passed += problem is None
                    if problem is not None:
                        failed.append(f"test {number}: {problem}")
                        if not self.config.partial_credit:
                            break
        except SandboxError as error:
            return Report(program, passed, len(tests), failed, shorten(str(error)), time.perf_counter() - start)
        return Report(program, passed, len(tests), failed, None, time.perf_counter() - start)

    def _problem(self, sandbox: Sandbox, program: str, test: CodeTest) -> str | None:
        """Return why a test failed; None if it passed."""
        limits, tolerance = self._sandboxes.limits, self.config.float_tolerance
        match test:
            case StdinTest(given, expected):
                ended = sandbox.run(with_imports(program, test), given)
                trouble = ended.trouble(limits)
                if trouble is None and not same_text(ended.stdout, expected, tolerance):
                    trouble = f"printed {_shown(ended.stdout)}, expected {_shown(expected)}"
                return trouble
            case CallTest(function, args, outputs):
                ended = sandbox.run(with_imports(program, test), check={"call": function, "args": args})
                trouble = ended.trouble(limits)
                if trouble is None and (ended.result is None or "value" not in ended.result):
                    trouble = _NO_TEST
                if trouble is None and ended.result is not None:
                    value = ended.result["value"]
                    if not any(same_value(value, output, tolerance) for output in outputs):
                        trouble = f"{function} returned {_shown(value)}, expected {_shown(outputs[0])}"
                return trouble
            case AssertTest(code):
                split = split_test(code)
                check = {"assert": code} if split is None else {"steps": split.steps}
                ended = sandbox.run(with_imports(test.whole_program(program), test), check=check)
                trouble = ended.trouble(limits)
                if trouble is None:
                    trouble = _failure(split, ended.result)
                return trouble and f"{trouble} in {_shown(code)}"


def _failure(split: SplitTest | None, result: dict[str, Any] | None) -> str | None:
    """Return why an assertion failed; None if it holds."""
    if result is None or ("passed" if split is None else "values") not in result:
        return _NO_TEST
    return None if split is None or split.holds(result["values"]) else "crashed: AssertionError"


def _shown(value: Any) -> str:
    return repr(shorten(value)) if isinstance(value, str) else shorten(repr(value))


def _function_of(test: CodeTest) -> str:
    """Return the name of the function that a test calls; "" if it calls none, or does not say which."""
    match test:
        case CallTest(function):
            return function
        case AssertTest(defines=name):
            return name
    return ""


def last_program(response: str, function: str = "") -> str | None:
    """Return the last closed block that is marked as Python, else the last that is not marked; None if there is none.
    A block that defines `function` is preferred: a later one may show how to call it, or what it prints.

    A fence is a line of three or more backticks or tildes; a block ends at a line with as many or more of the same and
    nothing else. The indentation of the opening fence is removed from every line.
    """
    inside: list[str] = []
    marked: list[str] = []
    unmarked: list[str] = []
    fence, language, indent = "", "", 0
    for line in response.replace("\r\n", "\n").split("\n"):
        match = _FENCE.match(line)
        if not fence:
            if match:
                fence, language, inside = match["fence"], match["language"].lower(), []
                indent = len(line) - len(line.lstrip())
        elif match and not match["language"] and match["fence"].startswith(fence):
            if language in _PYTHON:
                (marked if language else unmarked).append("\n".join(inside) + "\n")
            fence = ""
        else:
            inside.append(line[min(indent, len(line) - len(line.lstrip())) :])
    blocks = marked or unmarked
    defining = [block for block in blocks if function and defines(block, function)]
    chosen = defining or blocks
    return chosen[-1] if chosen else None
