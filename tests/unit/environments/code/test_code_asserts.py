"""Split assertions: the same verdicts as Python's own on honest programs, and none that a program can forge."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_mcore.environments import create_env
from grpo_mcore.environments.code.asserts import split_test
from grpo_mcore.environments.code.environment import CodeEnvironment
from grpo_mcore.environments.code.sandbox.program import evaluate, plain
from grpo_mcore.environments.code.sandbox.sandboxes import BUBBLEWRAP, TRUST
from tests.unit.environments.code.code_answers import judge
from tests.unit.environments.code.sandbox_here import needs_sandbox

pytestmark = pytest.mark.slow  # a sandbox for each answer

KINDS = [TRUST, pytest.param(BUBBLEWRAP, marks=needs_sandbox)]


@pytest.fixture(scope="module", params=KINDS)
def env(request: pytest.FixtureRequest) -> Iterator[CodeEnvironment]:
    env = create_env("code", {"num_workers": 2, "sandbox": request.param, "partial_credit": True})
    assert isinstance(env, CodeEnvironment)
    yield env
    env.shutdown()


@pytest.mark.parametrize(
    ("code", "steps"),
    [
        ("assert f(1) == 3, 'why'", [("value", "f(1)")]),
        ("assert [1, (2,), {'a': {3}}] == f(1)", [("value", "f(1)")]),
        ("assert f(1) != -2.5", [("value", "f(1)")]),
        ("assert f(1) is None", [("value", "f(1)")]),
        ("assert f(1) is not True", [("value", "f(1)")]),
        ("assert f(1)", [("truth", "f(1)")]),
        ("assert not f(1)", [("truth", "f(1)")]),
        ("assert sorted(f(1)) == [1] and f(2) == b'x'", [("value", "sorted(f(1))"), ("value", "f(2)")]),
        ("assert abs(f(1) - 0.5) < 1e-6", [("value", "f(1)")]),
        ("assert abs(0.5 - f(1)) <= 1e-6", [("value", "f(1)")]),
        ("assert math.isclose(f(1), 0.5, rel_tol=1e-3)", [("value", "f(1)")]),
        ("import math\nx = 2\nassert f(x) == 1", [("run", "import math\nx = 2"), ("value", "f(x)")]),
        (
            "assert f(1) == g\nassert f(2) == 2\ny = 1",
            [("run", "assert f(1) == g"), ("value", "f(2)"), ("run", "y = 1")],
        ),
        (
            "M = {}\n\ndef check(c):\n    a = 1\n    assert c(a) == 2\n\ncheck(f)\n",
            [("run", "M = {}"), ("scope", "f", "c"), ("run", "a = 1"), ("value", "c(a)")],
        ),
    ],
)
def test_assertions_that_are_split(code: str, steps: list[tuple[str, ...]]) -> None:
    split = split_test(code)
    assert split is not None and list(split.steps) == steps


@pytest.mark.parametrize(
    "code",
    [
        "assert f(1) == g(1)",
        "assert f(1) < 3",
        "assert f(1) == 3 or f(1) == 4",
        "assert 3 in f(1)",
        "assert 1 < f(1) == 3",
        "assert f(1) == [x]",
        "assert f(1) == ...",
        "assert f(1) is 3",
        "assert f(1) == 3 and x",
        "for n in range(3):\n    assert f(n) == 3",
        "def check(c):\n    for n in range(3):\n        assert c(n) == n\ncheck(f)",
        "def check(c):\n    assert c(1) == 3\n    return\ncheck(f)",
        "def check(c, d=1):\n    assert c(1) == 3\ncheck(f)",
        "def check(c):\n    assert c(1) == 3\ncheck(f)\ncheck(f)",
        "f(",
        "",
        "x" + "+x" * 100_000,
    ],
)
def test_assertions_that_run_whole(code: str) -> None:
    assert split_test(code) is None


VALUES = {
    "number": "3",
    "float": "3.0",
    "true": "True",
    "none": "None",
    "text": "'3'",
    "half a pair": "'\\ud800'",
    "bytes": "b'3'",
    "bytearray": "bytearray(b'3')",
    "complex": "3 + 0j",
    "nan": "float('nan')",
    "infinity": "float('inf')",
    "list": "[3, [None]]",
    "tuple": "(3, [None])",
    "set": "{3, (4, 'a')}",
    "frozenset": "frozenset([3, (4, 'a')])",
    "keys": "{3: 1, (4, 'a'): 2}.keys()",
    "dict": "{3: [1], (4, 'a'): {'b': None}}",
    "ordered": "__import__('collections').OrderedDict({(4, 'a'): {'b': None}, 3: [1]})",
    "named": "__import__('collections').namedtuple('P', 'x y')(3, [None])",
    "fraction": "__import__('fractions').Fraction(6, 2)",
    "decimal": "__import__('decimal').Decimal('3.00')",
    "decimal nan": "__import__('decimal').Decimal('nan')",
    "enum": "__import__('enum').IntEnum('E', 'a b c').c",
    "object": "object()",
    "match": "__import__('re').match('a', 'a')",
    "empty": "[]",
}
ASSERTIONS = [
    *(
        f"assert value == {other}"
        for other in ("3", "3.0", "True", "None", "'3'", "b'3'", "3+0j", "'\\ud800'", "1e999")
    ),
    *(
        f"assert value == {other}"
        for other in ("[3, [None]]", "(3, [None])", "{3, (4, 'a')}", "[]", "[3]", "{3}", "{}")
    ),
    "assert value == {(4, 'a'): {'b': None}, 3: [1]}",
    "assert value == {(4, 'a'): {'b': 0}, 3: [1]}",
    "assert {3.0, (4, 'a')} == value",
    "assert value != 3",
    "assert not value == 3",
    "assert value is None",
    "assert value is not None",
    "assert value is True",
    "assert id(value) and value == 3 and value == 3.0",
    "assert bool(value)",
    "assert not (lambda: value)()",
]


@pytest.mark.parametrize("name", VALUES)
def test_the_verdicts_are_those_of_python(name: str) -> None:
    """Every value is tried with every assertion, whole and split, in this process."""
    for code in ASSERTIONS:
        names: dict[str, Any] = {"value": eval(VALUES[name])}
        try:
            exec(code, dict(names))
            passes = True
        except AssertionError:
            passes = False
        split = split_test(code)
        assert split is not None
        module = type(pytest)("solution")
        vars(module).update(names)
        assert split.holds(evaluate([list(step) for step in split.steps], module)) is passes, code


NUMBERS = ["3", "3.0000001", "3.1", "True", "None", "'3'", "float('nan')", "[3]", "10**400"]
CLOSE = [
    "assert abs(value - 3.0) < 1e-3",
    "assert abs(3 - value) <= 0",
    "assert math.isclose(value, 3.0)",
    "assert math.isclose(3, value, abs_tol=1e-3)",
    "assert math.isclose(value, 3.0, rel_tol=0.5)",
]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_that_are_close(number: str) -> None:
    for code in CLOSE:
        names = {"value": eval(number)}
        try:
            exec(f"import math\n{code}", dict(names))
            passes = True
        except (AssertionError, TypeError, OverflowError):
            passes = False
        split = split_test(code)
        assert split is not None and split.holds([plain(names["value"])]) is passes, code


@pytest.mark.parametrize(
    "claim",
    [
        None, 3, "3", [], {}, [[]], [{}], [{"list": 3}], [{"set": [[1]]}], [{"dict": [1, 2]}], [{"ratio": [1, 0]}],
        [{"bytes": "x"}], [{"complex": ["a", 1]}], [{"tuple": [{"tuple": None}]}], [{"object": True}], [1, 2],
    ],
)  # fmt: skip
def test_claims_that_are_no_values(claim: Any) -> None:
    for literal in ("5", "[1]", "{1}", "{1: 2}", "(1, 2)", "b'1'", "{(1,)}"):
        split = split_test(f"assert f() == {literal}")
        assert split is not None and not split.holds(claim)


def test_a_claim_cannot_keep_the_comparison_busy() -> None:
    """Keys may be chosen to collide: comparing a million of them would take hours."""
    keys = [number * (2**61 - 1) for number in range(100_000)]
    split = split_test("assert f() == {1, 2}")
    nested = split_test("assert f() == [{(1, 2): 3}]")
    assert split is not None and nested is not None
    start = time.process_time()
    assert not split.holds([{"set": keys}])
    assert not nested.holds([[{"dict": [[{"set": keys}, 3]]}]])
    assert time.process_time() - start < 60


TESTS = [
    "assert add(86000, 420) == 86420",
    "assert [7] == add([], [7])",
    "assert add(1, 1) is not None and add(0, 0) == 0",
]
FORGERIES = {
    "equal to everything": """
class Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def add(a, b): return Same(99)""",
    "an object that is equal to everything": """
class Same:
    def __eq__(self, other): return True
def add(a, b): return Same()""",
    "a list that is equal to everything": """
class Same(list):
    def __eq__(self, other): return True
    def __len__(self): return 1
def add(a, b): return Same([99])""",
    "what the comparison stands on": """
class Same:
    def __eq__(self, other):
        self.seen = other
        return True
    def __reduce__(self): return (int, (3,))
    def __index__(self): return 3
def add(a, b): return Same()""",
    "ends early and well": "import os\ndef add(a, b): os._exit(0)",
    "ends while it is loaded": "import os\nos.write(1, b'passed')\nos._exit(0)",
    "claims to have passed": """
import json, os
check = json.loads(os.read(4, 10**6))
os.write(3, json.dumps({"passed": check["secret"]}).encode())
os._exit(0)""",
    "claims values": """
import json, os
check = json.loads(os.read(4, 10**6))
values = [99] * sum(kind in ("value", "truth") for kind, *_ in check["steps"])
os.write(3, json.dumps({"passed": check["secret"], "values": values}).encode())
os._exit(0)""",
    "claims conditions": """
import json, os
secret = json.loads(os.read(4, 10**6))["secret"]
os.write(3, json.dumps({"passed": secret, "value": True, "values": [{"object": "x"}] * 2}).encode())
os._exit(0)""",
    "replaces exceptions": """
import builtins
builtins.AssertionError = type("Fine", (BaseException,), {"__new__": lambda *_: exit(0)})
def add(a, b): return 99""",
    "replaces eval, exec and compile": """
import builtins
builtins.eval = builtins.exec = builtins.compile = lambda *_, **__: True
def add(a, b): return 99""",
    "replaces what compares": """
import builtins, operator
builtins.abs = lambda _: 0
builtins.all = builtins.any = builtins.bool = lambda *_: True
operator.eq = lambda *_: True
def add(a, b): return 99""",
    "replaces json": """
import json
dumps = json.dumps
def wrong(what, **more):
    return dumps({**what, "values": [True] * len(what.get("values", ""))})
json.dumps = wrong
def add(a, b): return 99""",
    "replaces the making of the test": """
import sys
frame = sys._getframe()
while frame:
    for name in ("carry_out", "take", "plain", "run_source"):
        if name in frame.f_globals:
            frame.f_globals[name] = lambda *_: True
    frame = frame.f_back
def add(a, b): return 99""",
    "turns assertions off": """
import sys, ast, linecache
sys.flags = type("Flags", (), {"optimize": 2})
linecache.cache.clear()
def add(a, b): return 99""",
    "traces and returns elsewhere": """
import sys
def trace(frame, event, value):
    if event == "return": frame.f_locals.clear()
    return trace
sys.settrace(trace)
def add(a, b): return 99""",
    "looks for the expected value": """
import gc, sys, linecache
def add(a, b):
    frame = sys._getframe(1)
    text = "".join(linecache.cache.get("test.py", (0, 0, []))[2])
    found = [value for value in frame.f_code.co_consts if value not in (0, 1, 2, None)]
    while frame:
        found += frame.f_locals.values()
        frame = frame.f_back
    found += [value for one in gc.get_objects() if type(one) in (list, tuple) for value in one]
    found = [value for value in found if type(value) is int and 86000 < value < 87000]
    return found[0] if found else int(text.rpartition("==")[2] or 99)""",
    "forks and lets the child answer": """
import os
if os.fork(): os.wait(); os._exit(0)
def add(a, b): return 99""",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forgery_passes(env: CodeEnvironment, name: str) -> None:
    for row in ({"test_list": TESTS}, {"tests": [{"assert": "\n".join(TESTS)}]}):
        reward, reason = judge(env, FORGERIES[name], **row)
        assert reward == 0.0, reason
    check = "def check(candidate):\n" + "".join(f"    {test.replace('add', 'candidate')}\n" for test in TESTS)
    reward, reason = judge(env, FORGERIES[name], test=check, entry_point="add", prompt="")
    assert reward == 0.0, reason
    close = ["import math\nassert math.isclose(add(1, 2), 3.25)", "assert abs(add(1, 2) - 3.25) < 1e-6"]
    assert judge(env, FORGERIES[name], test_list=close)[0] == 0.0


def test_the_expected_value_is_not_in_the_sandbox(env: CodeEnvironment) -> None:
    spy = "import os\ntext = os.read(4, 10**6).decode()\nos.write(2, text.encode())\nraise ValueError(text)"
    reward, reason = judge(env, spy, test_list=["assert add(1, 2) == 86420"])
    told, _, code = reason.rpartition(" in 'assert")
    assert reward == 0.0 and "add(1, 2)" in told and "86420" not in told and "86420" in code


def test_an_honest_program_gets_what_its_tests_say(env: CodeEnvironment) -> None:
    tests = [*TESTS, "assert add(2, 2) == 5", "assert add(1, 2) < 4"]
    assert judge(env, "def add(a, b):\n    return a + b", test_list=tests) == (
        4 / 5,
        "4 of 5 tests passed; test 4: crashed: AssertionError in 'assert add(2, 2) == 5'",
    )
    names = "factor = 3\ndef scaled(n):\n    return {n: (n * factor, None)}"
    check = (
        "import math\ndef check(f):\n    factor = 100\n    half = math.sqrt(4)\n    assert f(half) == {2: (6, None)}\n"
    )
    check += "    assert all(f(n)[n][0] == 3 * n for n in range(int(half)))\n    assert not f(0)[0][0]\n"
    assert judge(env, names, test=check + "    assert f(1)\n", entry_point="scaled", prompt="")[0] == 1.0
    assert judge(env, "def f(): pass", test_list=["assert f() is None", "assert f() == None"])[0] == 1.0
    assert judge(env, "def f(): pass", test_list=["assert f(1) == None"])[1].endswith(
        "crashed: TypeError: f() takes 0 positional arguments but 1 was given in 'assert f(1) == None'"
    )
    cyclic = "def f():\n    a = []\n    a.append(a)\n    return a"
    assert judge(env, cyclic, test_list=["assert f() == [1]"])[0] == 0.0
