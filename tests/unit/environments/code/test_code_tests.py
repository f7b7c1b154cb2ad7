"""Rows of the public benchmarks, as published, become tests; and outputs are compared with the expected ones."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from contextlib import nullcontext
from typing import Any

import pytest

from grpo_mcore.environments.code.asserts import split_test
from grpo_mcore.environments.code.tests import (
    AssertTest,
    CallTest,
    CodeTestError,
    StdinTest,
    missing_packages,
    read_tests,
    same_text,
    same_value,
    with_imports,
)

ADD = "def add(a, b):\n    return a + b\n"


def test_forms_that_were_read_as_others() -> None:
    assert read_tests({"input_output": {"inputs": "12\n", "outputs": "3\n"}}) == [StdinTest("12\n", "3\n")]
    assert read_tests({"test_cases": ["assert add(1, 2) == 3"]}) == [AssertTest("assert add(1, 2) == 3")]
    assert read_tests({"test": "assert add(1, 2) == 3", "entry_point": "add"})[0].code == "assert add(1, 2) == 3"
    packed = {"public_tests": {"input": ["1"], "output": ["2"]}, "private_tests": {"input": ["3"], "output": ["4"]}}
    assert read_tests(packed) == [StdinTest("1", "2"), StdinTest("3", "4")]
    assert len(read_tests({"test": "def test_a():\n    assert add(1, 2) == 3", "entry_point": None})) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_the_form_of_our_own(packed: bool) -> None:
    tests: Any = [
        {"input": "1 2\n", "output": "3"},
        {"input": ["1", "2"], "output": [3]},
        {"call": "add", "args": [1, [2]], "output": 3},
        {"assert": "assert add(1, 2) == 3"},
    ]
    assert read_tests({"tests": json.dumps(tests) if packed else tests}) == [
        StdinTest("1 2\n", "3"),
        StdinTest("1\n2", "3"),
        CallTest("add", [1, [2]], (3,)),
        AssertTest("assert add(1, 2) == 3"),
    ]


def test_apps() -> None:
    row = {"question": "?", "input_output": json.dumps({"inputs": ["1\n", ["2", "3"]], "outputs": ["1\n", ["5"]]})}
    assert read_tests(row) == [StdinTest("1\n", "1\n"), StdinTest("2\n3", "5")]
    called = {"fn_name": "add", "inputs": [[1, 2], [[], []]], "outputs": [[3], [[]]]}
    assert read_tests({"input_output": called}) == [
        CallTest("add", [1, 2], ([3], 3)),  # results come with a list around them, and without
        CallTest("add", [[], []], ([[]], [])),
    ]
    called = {"fn_name": "two_sum", "inputs": [[[2, 7], 9], "[2, 7]\n9"], "outputs": [[0, 1], "[0, 1]"]}  # one result
    assert read_tests({"input_output": called}) == [CallTest("two_sum", [[2, 7], 9], ([0, 1],))] * 2
    for wrong, message in (({"a": 1}, "the arguments of 'add' must be a list"), ("[1, 2", "not JSON: '.1, 2'")):
        with pytest.raises(CodeTestError, match=message):
            read_tests({"input_output": {"fn_name": "add", "inputs": [wrong], "outputs": ["3"]}})


def test_live_code_bench() -> None:
    row = {
        "public_test_cases": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}]),
        "private_test_cases": json.dumps([{"input": '[1, 2]\n"a"\n', "output": "[3]", "testtype": "functional"}]),
        "metadata": '{"func_name": "add"}',
    }
    assert read_tests(row) == [StdinTest("1\n", "2\n"), CallTest("add", [[1, 2], "a"], ([3],))]
    with pytest.raises(CodeTestError, match="private_test_cases: a functional test needs func_name in 'metadata'"):
        read_tests(row | {"metadata": "{}"})


def test_the_packed_tests_of_live_code_bench() -> None:
    """Base64, zlib and a pickle of the JSON, as the dataset has its private tests; no other pickle is loaded."""

    def packed(value: Any) -> str:
        return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()

    tests = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
    row = {"public_test_cases": "[]", "private_test_cases": packed(json.dumps(tests))}
    assert read_tests(row) == [StdinTest("1\n", "2\n")]
    for wrong, message in (
        (packed(os.getcwd), "it names posix.getcwd"),
        (packed(tests), "JSON object must be str"),
        ("eJwrSS0uAQAEXQHB", "packed tests that are not LiveCodeBench's: 'eJwr"),
        ("AAAA", "not JSON: 'AAAA'"),
    ):
        with pytest.raises(CodeTestError, match=message):
            read_tests(row | {"private_test_cases": wrong})


@pytest.mark.parametrize("field", ["tests", "verification_info", "ground_truth", "official_tests"])
def test_the_forms_of_collections(field: str) -> None:
    """DeepCoder, Eurus-2, SYNTHETIC-1 and open-r1/codeforces write theirs under different names."""
    pairs = {"inputs": ["1\n"], "outputs": ["2\n"]}
    cases = [
        {"type": "stdin_stdout", "input": "1\n", "output": "2\n"},
        {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]},
        {"testtype": "functional", "input": "1\n2", "output": "3", "metadata": {"func_name": "add"}},
    ]
    read = [StdinTest("1\n", "2\n"), CallTest("add", [1, 2], ([3], 3)), CallTest("add", [1, 2], (3,))]
    assert read_tests({field: json.dumps(pairs)}) == read[:1]
    assert read_tests({field: cases}) == read_tests({field: json.dumps({"test_cases": cases})}) == read


def test_functions_of_pytest() -> None:
    code = """
import pytest
from solution import add, subtract
BIG = 10
def test_add():
    a = BIG
    assert add(a, 1) == 11
    assert add(0, 0) == 0
def test_subtract():
    assert subtract(BIG, 1) == 9
"""
    first, second = read_tests({"test": code, "question": "?"})
    assert first == AssertTest(
        "BIG = 10\n\ndef test_add():\n    a = BIG\n    assert add(a, 1) == 11\n    assert add(0, 0) == 0\ntest_add()\n"
    )
    assert isinstance(second, AssertTest) and second.code.endswith("test_subtract()\n") and "add(a" not in second.code
    split = split_test(first.code)
    assert split is not None and split.steps == (
        ("run", "BIG = 10"), ("scope", "None", "_"), ("run", "a = BIG"), ("value", "add(a, 1)"), ("value", "add(0, 0)"),
    )  # fmt: skip


def test_mbpp() -> None:
    row = {
        "text": "?", "code": ADD, "task_id": 1, "test_setup_code": "import math", "challenge_test_list": ["assert 3"],
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    }  # fmt: skip
    assert read_tests(row) == [
        AssertTest("import math\nassert add(1, 2) == 3"),
        AssertTest("import math\nassert add(0, 0) == 0"),
        AssertTest("import math\nassert 3"),
    ]
    sanitized = {"test_list": ["assert 1"], "test_imports": ["import re"], "challenge_test_list": None}
    sanitized |= {"tests": [], "input_output": ""}  # of a table that was joined of several
    assert read_tests(sanitized) == [AssertTest("import re\nassert 1")]


def test_human_eval() -> None:
    prompt = "from typing import List\n\ndef add(a, b):\n    '''Sum.'''\n"
    row = {"entry_point": "add", "prompt": prompt, "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"}
    [test] = read_tests(row)
    assert isinstance(test, AssertTest) and test.code.endswith("assert candidate(1, 2) == 3\n\ncheck(add)\n")
    assert test.whole_program("    return a + b\n") == prompt + "    return a + b\n"
    for whole in (ADD, "import re\nasync  def add (a): pass", "def added(): pass\n\ndef add(): pass"):
        assert test.whole_program(whole) == f"from typing import List\n\n\n{whole}"
    assert test.whole_program("def added(): pass").startswith(prompt)
    assert test.whole_program("\n" * 10**6) == prompt + "\n" * 10**6  # and not in an hour


LEETCODE = {
    "prompt": "from typing import *\n\nclass ListNode: ...\n",
    "entry_point": "Solution().twice",
    "test": "def check(candidate):\n    assert candidate(n = 3) == 6\n",
}


@pytest.mark.parametrize(
    "row",
    [
        {**LEETCODE, "input_output": [{"input": "n = 3", "output": "6"}]},  # LeetCodeDataset
        {  # Skywork-OR1
            "ground_truth": json.dumps(
                {
                    "import_prefix": LEETCODE["prompt"],
                    "entry_point": LEETCODE["entry_point"],
                    "test_code": LEETCODE["test"],
                }
            )
        },
    ],
)
def test_problems_of_leetcode(row: dict[str, Any]) -> None:
    [test] = read_tests(row)
    assert isinstance(test, AssertTest) and test.code == LEETCODE["test"] + "\ncheck(Solution().twice)\n"
    answer = "TWO = 2\nclass Solution:\n    def twice(self, n): return TWO * n\n"
    for program, passes in ((answer, True), (answer.replace("TWO *", "3 *"), False)):
        scope: dict[str, Any] = {}
        exec(test.whole_program(program), scope)
        with nullcontext() if passes else pytest.raises(AssertionError):
            exec(test.code, scope)


def test_a_test_may_import_the_program_as_a_module() -> None:
    [test] = read_tests({"test": "import solution\ndef test_a():\n    assert solution.f() == 1\n"})
    assert isinstance(test, AssertTest) and test.code.startswith("import solution\n")


def test_packages_that_tests_need() -> None:
    human_eval_plus = {
        "entry_point": "f",
        "test": "import numpy as np\nimport os\ndef check(f):\n    assert f() == 1\n",
    }
    assert missing_packages(read_tests(human_eval_plus)) == ["numpy"]
    prompt = "import pandas.api\nfrom solution import g\ndef f():\n"
    assert missing_packages([AssertTest("assert f()", prompt, "f"), AssertTest("import (", "", "f")]) == ["pandas"]
    assert missing_packages([AssertTest("from math import inf\nassert f()"), StdinTest("import numpy", "")]) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "3"}, r"the code environment needs tests in one of tests, input_output, .*; the prompt has \['ans"),
        ({"tests": [], "test_list": []}, "there is no test in 'tests'"),
        ({"tests": "[{"}, r"not JSON: '\[\{'"),
        ({"tests": [{"in": ""}]}, r"test 0 of 'tests' has none of input, call, assert: \['in'\]"),
        ({"tests": [{"input": ""}]}, "the tests in 'tests' cannot be read: KeyError: 'output'"),
        ({"tests": [3]}, "the tests in 'tests' cannot be read: TypeError"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "'input_output' cannot be read: ValueError"),
        ({"test": "def check(c): pass"}, r"'test' has no function test_...\(\), and the row no 'entry_point'"),
        ({"test": "import pytest\ndef test_a(): pytest.raises(ValueError, f)"}, "'test' needs pytest"),
        ({"test": "def test_a(tmp_path): pass"}, "'test' needs pytest"),
        ({"test": "from solution import f as g\ndef test_a(): assert g()"}, "or renames what it imports"),
        ({"test": "def test_a(:"}, "the tests in 'test' cannot be read: SyntaxError"),
        (
            {  # BigCodeBench: nothing would run it, so that every program would pass
                "entry_point": "f",
                "test": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): assert f() == 1\n",
            },
            r"'test' has tests in a class, as unittest's; functions test_...\(\) and check\(\) are run",
        ),
        ({"test": "class A:\n    def test_a(self): assert 0\ndef test_b(): pass"}, "has tests in a class"),
        ({"entry_point": "f", "test": "expected = 1\ndef verify(f): assert f() == expected"}, "no function test_"),
        ({"tests": ["1 2\n"]}, r"test 0 of 'tests' asserts nothing: '1 2\\n'"),
        ({"tests": [{"input": "1", "output": None}]}, "an input or output is null"),
        ({"official_tests": [], "generated_checker": "import sys"}, "it has several right outputs"),
        ({"official_tests": [], "input_mode": "file"}, "its programs read and write files"),
        ({"input_output": {"inputs": ["1"], "outputs": [None]}}, "an input or output is null"),
        ({"ground_truth": "3"}, r"needs tests in one of tests, .*; the prompt has \['ground_truth'\]"),
        ({"ground_truth": "[1"}, r"not JSON: '\[1'"),
        ({"verification_info": '{"ground_truth": "5"}'}, "'verification_info' cannot be read: KeyError: 'inputs'"),
    ],
)
def test_rows_without_tests_say_so(row: dict[str, Any], message: str) -> None:
    with pytest.raises(CodeTestError, match=message):
        read_tests(row)


@pytest.mark.parametrize(
    ("said", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 \n2\t\n\n\n", "1\n2\n", True),
        ("1\r\n2\r\n", "1\n2", True),
        ("", "\n", True),
        (" 1", "1", True),  # as APPS, LiveCodeBench and verl compare
        ("1", "\n1\n", True),
        (" x", "x\n x", False),  # the beginning of a line counts
        ("1\n\n2", "1\n2", False),
        ("1 2", "1  2", True),
        ("a b", "a  b", False),
        ("1", "1.0", True),  # numbers are compared as such, other texts by their characters
        ("3.0", "3", True),
        ("3.00 x", "3 x", True),
        ("0.5000", ".5", True),
        ("1e3", "1000", True),
        ("+3", "3", True),
        ("007", "7", True),
        ("-0", "0", True),
        ("3.1", "3", False),
        ("0.333333", "0.333333333333", False),
        ("3.0.0", "3", False),
        ("v3.0", "v3", False),
        ("3,0", "3", False),
        ("1_0", "10", False),
        ("nan", "nan", True),
        ("1" * 5000, "1" * 5000, True),
        ("1" * 5000, "1" * 4999 + "2", False),
        ("1" * 5000 + ".0", "1" * 5000, True),
        ("9007199254740993", "9007199254740992", False),
        ("1e999999999999999999999", "1", False),
        ("YES", "yes", False),
    ],
)
def test_text(said: str, expected: str, same: bool) -> None:
    assert same_text(said, expected) is same


@pytest.mark.parametrize(
    ("said", "expected", "same"),
    [
        ("0.3333331 x\n1", "0.333333 x\n1", True),
        ("0.34 x", "0.333333 x", False),
        ("1e-9", "0.0", True),
        ("1000000.5", "1000000.0", True),  # relative
        ("1", "1.0", True),
        ("0.333333", "0.333333333333", True),
        ("1.000001", "1", False),  # an integer is expected to the digit
        ("1 2.0", "1 2.0 3.0", False),
        ("2.0\n2.0", "2.0", False),
        ("nan", "1.0", False),
        ("inf", "1.0", False),
        ("1_0.0", "10.0", False),  # what Python alone takes for a number
        ("a", "1.0", False),
        ("1e400", "1e400", True),
    ],
)
def test_text_with_a_tolerance(said: str, expected: str, same: bool) -> None:
    assert same_text(said, expected, 1e-5) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (True, 1, False),
        (0, False, False),
        (None, None, True),
        (None, 0, False),
        ("a", "a", True),
        ([1, [2.0]], [1, [2]], True),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        ([], {}, False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"b": 1}, False),
        ({"a": True}, {"a": 1}, False),
        (0.1 + 0.2, 0.3, False),
    ],
)
def test_values(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected) is same


def test_values_with_a_tolerance() -> None:
    assert same_value([{"x": 0.1 + 0.2}], [{"x": 0.3}], 1e-9)
    assert not same_value(4, 3, 0.5), "whole numbers are expected to the digit"
    assert same_value(3, 3.00001, 1e-4)


def test_the_head_of_the_prompt_comes_before_an_answer_that_defines_the_function() -> None:
    prompt = "import math\n\ndef half(n):\n    return n / 2\n\ndef add(a, b):\n    '''Sum.'''\n"
    [test] = read_tests({"entry_point": "add", "prompt": prompt, "test": "def check(c): pass"})
    assert isinstance(test, AssertTest)
    assert test.whole_program(ADD) == f"import math\n\ndef half(n):\n    return n / 2\n\n\n{ADD}"
    assert test.whole_program("    return a + b\n") == prompt + "    return a + b\n"
    assert test.whole_program("return a + b\n") == prompt + "    return a + b\n"
    assert test.whole_program("c = a\nreturn c + b\n") == prompt + "    c = a\n    return c + b\n"
    [nested] = read_tests({"entry_point": "add", "prompt": "class A:\n    def add(self): ...", "test": "assert 1"})
    assert isinstance(nested, AssertTest) and nested.head() == ""


def test_the_benchmarks_imports_do_not_replace_what_a_program_needs() -> None:
    names: dict[str, Any] = {}
    program = (
        "from __future__ import annotations\nclass A:\n    x: Undefined\ndef f(a: List[int]) -> Optional[int]: pass\n"
    )
    exec(
        with_imports(program + "counts = Counter('aab')\nleast = inf\npower = pow(2, 5, 7)\n", StdinTest("", "")), names
    )
    assert names["counts"] == {"a": 2, "b": 1} and names["least"] == float("inf") and names["power"] == 4
    assert names["sum"] is sum and names["random"].random and names["bisect"].bisect and names["open"] is open


@pytest.mark.parametrize(
    "test",
    [CallTest("gcd", [4, 6], (2,)), AssertTest("assert gcd(4, 6) == 2"), AssertTest("check(gcd)", defines="gcd")],
)
def test_what_a_test_calls_is_not_imported_for_the_program(test: CallTest | AssertTest) -> None:
    names: dict[str, Any] = {}
    exec(with_imports("pass", test), names)
    assert "gcd" not in names and "sqrt" in names
    exec(with_imports("def gcd(a, b): return sqrt(4)", test), names)
    assert names["gcd"](1, 1) == 2


def test_what_a_test_imports_itself_stays() -> None:
    names: dict[str, Any] = {}
    exec(with_imports("pass", AssertTest("from math import sqrt\nassert f(sqrt(4)) == 2")), names)
    assert "sqrt" in names
