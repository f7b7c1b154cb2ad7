"""Reads a program's tests as the public code benchmarks write them, and compares its outputs with the expected ones.

The first of these fields that a prompt's `extra_env_info` has is read:

tests                    [{"input", "output", "fn_name"?} | {"call", "args", "output"} | {"assert"} | "assert ...",
                         ...], or as input_output has them (DeepCoder); also as a JSON string
input_output             {"inputs": [...], "outputs": [...], "fn_name"?}, or that as a JSON string (APPS, TACO); of
                         LeetCodeDataset, which has a list there, `test` is read
public_test_cases,       [{"input", "output", "testtype": "stdin" | "functional"}], as JSON strings, with the
private_test_cases       function's name in `metadata` {"func_name"} (LiveCodeBench; the private ones also packed)
official_tests           as in tests (open-r1/codeforces), for problems without a checker or files
public_tests,            {"input": [...], "output": [...]} (CodeContests)
private_tests, generated_tests
test_cases               as in tests (AceCode)
test_list                ["assert ...", ...], with test_setup_code, test_imports, challenge_test_list (MBPP)
test, entry_point        code that defines check(candidate) (HumanEval); the head of `prompt` comes before an answer,
                         and all of it before one that does not define the function itself
test                     functions test_...() that import the program from `solution` (KodCode)
verification_info        {"test_cases": as in tests} (SYNTHETIC-1)
ground_truth             as in tests (Eurus-2, and what else comes by `output_key: reward_model.ground_truth`),
                         {"test_code", "entry_point", "import_prefix"?} (Skywork-OR1), {"assert_case": [...]} (verl)
"""

from __future__ import annotations

import ast
import base64
import builtins
import io
import json
import math
import pickle
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any, TypeGuard

_WORDS = re.compile(r"\s+|\S+")
_IMPORT = re.compile(r"^(?:import|from)\b", re.MULTILINE)
_FRACTION = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?")


class CodeTestError(ValueError):
    """A prompt's tests cannot be read."""


@dataclass(frozen=True)
class StdinTest:
    """The program reads `input` and must print `output`."""

    input: str
    output: str


@dataclass(frozen=True)
class CallTest:
    """`function`(*`args`), of the program or of its class Solution, must return one of `outputs`; all as JSON."""

    function: str
    args: list[Any]
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class AssertTest:
    """`code` runs after the program, in its namespace, and must not raise; asserts.py says which values are compared
    outside the sandbox. `before`: the prompt. A program that defines `defines` gets its head (imports and helpers) in
    front. Any other program is the function's body, or continues the prompt, and gets all of it in front."""

    code: str
    before: str = ""
    defines: str = ""

    def head(self) -> str:
        """Return what comes before a program that defines the function itself."""
        head = _definition(self.defines).split(self.before, maxsplit=1)[0] if self.before else ""
        try:
            ast.parse(head)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return ""  # the definition is not at the top level
        return head

    def whole_program(self, answer: str) -> str:
        """Return the program that runs: with the prompt or its head, and a body that was written without indentation
        under its function."""
        if not self.before:
            return answer
        if defines(answer, self.defines):
            return f"{self.head()}\n{answer}"
        first = next((line for line in answer.split("\n") if line.strip()), "")
        if first and not first[0].isspace() and not re.match(r"(?:def|class|import|from|@|#)\b", first):
            answer = "\n".join(f"    {line}" if line.strip() else line for line in answer.split("\n"))
        return self.before + answer


def _definition(name: str) -> re.Pattern[str]:
    return re.compile(rf"^[ \t]*+(?:async[ \t]++)?def[ \t]++{re.escape(name)}\b", re.MULTILINE)


def defines(program: str, name: str) -> bool:
    """Return whether a program defines this function, at any level."""
    return _definition(name).search(program) is not None


_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)


def with_imports(program: str, test: CodeTest) -> str:
    """Return a program with the imports in front that the public benchmarks' harnesses give it, on one line, so that
    line numbers in its errors move by one. `from __future__` stays first. What the test calls is left out of them: a
    program that does not define `gcd` itself has none."""
    called = sorted(name for name in _called(test) & imported_names() if not defines(program, name))
    future = "".join(f"{line}\n" for line in _FUTURE.findall(program))
    return f"{future}{_IMPORTS}{'; del ' if called else ''}{', '.join(called)}\n{_FUTURE.sub('', program)}"


def _called(test: CodeTest) -> set[str]:
    """Return the names that a test calls and does not import or define itself."""
    if isinstance(test, CallTest):
        return {test.function}
    if isinstance(test, StdinTest):
        return set()
    try:
        nodes = list(ast.walk(ast.parse(test.code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {test.defines} - {""}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    local = {alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    local |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stars = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in nodes)
    return {test.defines} - {""} if stars else (called - local) | ({test.defines} - {""})


@cache
def imported_names() -> frozenset[str]:
    """Return the names that the imports in front of a program define, but for those of Python itself."""
    scope: dict[str, Any] = {}
    exec(_IMPORTS.rpartition(";")[0], scope)
    return frozenset(scope) - set(dir(builtins))


# The imports of LiveCodeBench's harness: answers to starter code use List, inf or deque without an import. `builtins`
# is last, so that no built-in function is hidden; names that the program defines itself hide all of these.
_STARS = "string collections heapq bisect copy math random itertools functools operator typing builtins"
_MODULES = (
    "bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator, random, re, string"
)
_IMPORTS = "; ".join(
    [
        *(f"from {name} import *" for name in _STARS.split()),
        "from collections import Counter, OrderedDict, ChainMap",
        f"import {_MODULES}, sys, typing",
        "sys.setrecursionlimit(50_000)",
    ]
)


CodeTest = StdinTest | CallTest | AssertTest
Row = Mapping[str, Any]


def read_tests(row: Row) -> list[CodeTest]:
    """Return at least one test. Raises CodeTestError that says what is missing or wrong."""
    if row.get("generated_checker"):  # open-r1/codeforces
        raise CodeTestError("it has several right outputs, and its 'generated_checker' is not run")
    if row.get("input_mode") == "file":
        raise CodeTestError("its programs read and write files ('input_mode': file), which is not supported")
    empty = ""
    for field, reader in _READERS.items():
        if row.get(field) not in (None, "") and _holds_tests(row, field):
            try:
                tests = list(reader(row))
            except CodeTestError:
                raise
            except (KeyError, TypeError, ValueError, AttributeError, SyntaxError) as error:
                raise CodeTestError(
                    f"the tests in {field!r} cannot be read: {type(error).__name__}: {error}"
                ) from error
            if tests:
                return tests
            empty = empty or f"there is no test in {field!r}"  # joined tables have an empty list for other rows' field
    raise CodeTestError(
        empty or f"the code environment needs tests in one of {', '.join(_READERS)}; the prompt has {sorted(row)}"
    )


def _holds_tests(row: Row, field: str) -> bool:
    """Return whether a field has the row's tests. `ground_truth` has them if it is more than an answer. LeetCodeDataset
    has them in `test`; its list under `input_output` is for readers."""
    value = row[field]
    if field == "ground_truth":
        return isinstance(value, Mapping | list) or (isinstance(value, str) and value.lstrip()[:1] in ("{", "["))
    return field != "input_output" or not (isinstance(value, list) and row.get("test"))


def missing_packages(tests: Sequence[CodeTest]) -> list[str]:
    """Return the packages that tests import at their top, and that Python's standard library does not have."""
    names: set[str] = set()
    for test in tests:
        for code in (test.code, test.head()) if isinstance(test, AssertTest) else ():
            try:
                nodes = ast.parse(code).body if _IMPORT.search(code) else []
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            for node in nodes:
                names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
                names |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
    return sorted({name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"", "solution"})


def _cases(content: Any, field: str) -> Iterator[CodeTest]:
    """Read a list of tests, a mapping that has one as `test_cases`, inputs and outputs as APPS has them, or what
    Skywork-OR1 and verl have for LeetCode's problems and for assertions."""
    content = _parsed(content)
    if isinstance(content, Mapping) and "test_cases" in content:
        content = _parsed(content["test_cases"])
    if isinstance(content, Mapping):
        if "test_code" in content:
            prompt, name = content.get("import_prefix"), content.get("entry_point")
            yield from _human_eval({"test": content["test_code"], "prompt": prompt, "entry_point": name})
        elif "assert_case" in content:
            yield from map(AssertTest, content["assert_case"])
        else:
            yield from _inputs_and_outputs(content)
        return
    for number, test in enumerate(content):
        if isinstance(test, str):
            if "assert" not in test:
                raise CodeTestError(f"test {number} of {field!r} asserts nothing: {test[:60]!r}")
            yield AssertTest(test)
            continue
        kind = next((kind for kind in ("call", "assert", "input") if kind in test), None)
        if kind == "call":
            yield CallTest(test["call"], list(test["args"]), (test["output"],))
        elif kind == "assert":
            yield AssertTest(test["assert"])
        elif kind == "input" and test.get("fn_name"):
            yield _call(test["fn_name"], test["input"], test["output"])
        elif kind == "input":
            yield _case_of_live_code_bench(test, (test.get("metadata") or {}).get("func_name"), field)
        else:
            raise CodeTestError(f"test {number} of {field!r} has none of input, call, assert: {sorted(test)}")


def _inputs_and_outputs(content: Mapping[str, Any]) -> Iterator[CodeTest]:
    several = [[part] if isinstance(part, str) else part for part in (content["inputs"], content["outputs"])]
    for value, expected in zip(*several, strict=True):
        if content.get("fn_name"):
            yield _call(content["fn_name"], value, expected)
        else:
            yield StdinTest(_lines(value), _lines(expected))


def _call(function: str, args: Any, expected: Any) -> CallTest:
    """Read a call's arguments: a list, or text with a JSON value a line, as in Eurus-2, whose result is JSON too."""
    if isinstance(args, str):
        args = [_parsed(line) for line in args.splitlines() if line.strip()]
        expected = _parsed(expected)
    if not isinstance(args, list | tuple):
        raise CodeTestError(f"the arguments of {function!r} must be a list, or JSON a line, got {type(args).__name__}")
    wrapped = expected if isinstance(expected, list) and len(expected) == 1 else []  # many results are in a list
    return CallTest(function, list(args), (expected, *wrapped))


def _live_code_bench(row: Row) -> Iterator[CodeTest]:
    function = (_parsed(row.get("metadata")) or {}).get("func_name")
    for field in ("public_test_cases", "private_test_cases"):
        for test in _parsed(row.get(field)) or []:
            yield _case_of_live_code_bench(test, function, field)


def _case_of_live_code_bench(test: Mapping[str, Any], function: str | None, field: str) -> CodeTest:
    if test.get("testtype", "stdin") != "functional":
        return StdinTest(_lines(test["input"]), _lines(test["output"]))
    if not function:
        raise CodeTestError(f"{field}: a functional test needs func_name in 'metadata'")
    args = [json.loads(line) for line in test["input"].splitlines() if line.strip()]
    return CallTest(function, args, (json.loads(test["output"]),))


def _code_contests(row: Row) -> Iterator[CodeTest]:
    for field in ("public_tests", "private_tests", "generated_tests"):
        cases = row.get(field) or {}
        for value, expected in zip(cases.get("input") or [], cases.get("output") or [], strict=True):
            yield StdinTest(_lines(value), _lines(expected))


def _mbpp(row: Row) -> Iterator[CodeTest]:
    setup = "\n".join([*(row.get("test_imports") or []), row.get("test_setup_code") or ""]).strip()
    for code in [*_parsed(row["test_list"]), *(_parsed(row.get("challenge_test_list")) or [])]:
        yield AssertTest(f"{setup}\n{code}" if setup else code)


def _human_eval(row: Row) -> Iterator[CodeTest]:
    name, checks = row.get("entry_point"), defines(row["test"], "check")
    if not name or not (checks or _runs_something(row["test"])):
        yield from _pytest(row["test"])
        return
    call = f"\ncheck({name})\n" if checks else ""
    function = name.rpartition(".")[2]  # of Solution().twoSum
    yield AssertTest(f"{row['test']}{call}", before=row.get("prompt") or "", defines=function)


def _runs_something(code: str) -> bool:
    """Return whether code does more than define functions and classes that nobody calls."""
    nodes = ast.parse(code).body
    calls = (node for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    return any(isinstance(node, ast.Assert | ast.For | ast.With | ast.Try) for node in nodes) or any(calls)


def _pytest(code: str) -> Iterator[CodeTest]:
    """Read each function test_...() as a test. The import of the program is left out: its names are there already."""
    module = [node for node in ast.parse(code).body if not _imports(node, "pytest")]
    inside = [part for node in module if isinstance(node, ast.ClassDef) for part in node.body]
    if any(isinstance(part, ast.FunctionDef) and part.name.startswith("test") for part in inside):
        raise CodeTestError("'test' has tests in a class, as unittest's; functions test_...() and check() are run")
    names = [node.id for part in module for node in ast.walk(part) if isinstance(node, ast.Name)]
    renamed = any(alias.asname for node in module if _imports(node, "solution") for alias in node.names)
    module = [node for node in module if isinstance(node, ast.Import) or not _imports(node, "solution")]
    tests = [node for node in module if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    if "pytest" in names or renamed or any(test.args.args or test.decorator_list for test in tests):
        raise CodeTestError("'test' needs pytest (fixtures, marks, raises) or renames what it imports")
    if not tests:
        raise CodeTestError("'test' has no function test_...(), and the row no 'entry_point' that it could check")
    for test in tests:
        alone = ast.Module([node for node in module if node not in tests or node is test], [])
        yield AssertTest(f"{ast.unparse(alone)}\n{test.name}()\n")


def _imports(node: ast.stmt, module: str) -> TypeGuard[ast.Import | ast.ImportFrom]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names] == [module]
    return isinstance(node, ast.ImportFrom) and node.module == module


_READERS: dict[str, Callable[[Row], Iterator[CodeTest]]] = {
    "tests": lambda row: _cases(row["tests"], "tests"),
    "input_output": lambda row: _cases(row["input_output"], "input_output"),
    "public_test_cases": _live_code_bench,
    "official_tests": lambda row: _cases(row["official_tests"], "official_tests"),
    "public_tests": _code_contests,
    "test_list": _mbpp,
    "test_cases": lambda row: _cases(row["test_cases"], "test_cases"),
    "test": _human_eval,
    "verification_info": lambda row: _cases(row["verification_info"], "verification_info"),
    "ground_truth": lambda row: _cases(row["ground_truth"], "ground_truth"),
}


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        if (packed := _unpacked(value)) is not None:
            return packed
        raise CodeTestError(f"not JSON: {value[:60]!r}") from error


_MOST_UNPACKED = 1 << 30  # bytes


class _TextUnpickler(pickle.Unpickler):
    """Reads plain values. A pickle that names a class or a function, and could run code, is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpacked(value: str) -> Any:
    """Return LiveCodeBench's private tests as it publishes them: JSON, pickled, compressed and in base64. None for
    other text. Raises CodeTestError if they are too large, or the pickle holds more than text."""
    try:
        stream = zlib.decompressobj()
        content = stream.decompress(base64.b64decode(value, validate=True), _MOST_UNPACKED)
    except (ValueError, zlib.error):
        return None
    if stream.unconsumed_tail:
        raise CodeTestError(f"packed tests of more than {_MOST_UNPACKED >> 20} MiB: {value[:60]!r}")
    try:
        return json.loads(_TextUnpickler(io.BytesIO(content)).load())
    except (pickle.UnpicklingError, ValueError, TypeError, EOFError, AttributeError, IndexError, KeyError) as error:
        raise CodeTestError(f"packed tests that are not LiveCodeBench's: {value[:60]!r}: {error}") from error


def _lines(value: Any) -> str:
    """Return an input or output as text; it may also be a list of lines. Raises CodeTestError for null."""
    if value is None:
        raise CodeTestError("an input or output is null")
    return "\n".join(str(line) for line in value) if isinstance(value, list) else str(value)


def same_text(printed: str, expected: str, tolerance: float = 0.0) -> bool:
    """Return whether two texts are equal, apart from white space around them and at the ends of lines, and from the way
    in which numbers are written: 3.0 is 3. In a line of numbers alone, spaces before and between them do not count
    either. Numbers may differ by `tolerance`, relative or absolute, if the expected one is written with a point or an
    exponent."""
    lines, expected_lines = _trimmed_lines(printed), _trimmed_lines(expected)
    return len(lines) == len(expected_lines) and all(
        line == other or _same_words(line, other, tolerance) for line, other in zip(lines, expected_lines, strict=True)
    )


def same_value(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Return whether JSON values are equal. True is not 1; 1 is 1.0; floats may differ by `tolerance`, relative or
    absolute."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(
            same_value(entry, other, tolerance) for entry, other in zip(value, expected, strict=True)
        )
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(same_value(value[k], expected[k], tolerance) for k in expected)
    if isinstance(expected, float) and isinstance(value, int | float):
        try:
            return value == expected or _near(float(value), expected, tolerance)
        except OverflowError:  # an integer that is larger than all floats
            return False
    return bool(value == expected)


def _trimmed_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


def _same_words(line: str, expected_line: str, tolerance: float) -> bool:
    words, expected = line.split(), expected_line.split()
    if not all(map(_is_number, expected)):
        words, expected = _WORDS.findall(line), _WORDS.findall(expected_line)
    return len(words) == len(expected) and all(
        word == other or _is_number(word) and _is_number(other) and _same_number(word, other, tolerance)
        for word, other in zip(words, expected, strict=True)
    )


def _same_number(word: str, expected: str, tolerance: float) -> bool:
    """Compare decimals, of any number of digits. Raises nothing: both are numbers."""
    try:
        if Decimal(word) == Decimal(expected):
            return True
    except InvalidOperation:  # an exponent beyond all limits
        return False
    return bool(tolerance) and _is_fraction(expected) and _near(float(word), float(expected), tolerance)


def _is_number(word: str) -> bool:
    return _FRACTION.fullmatch(word) is not None


def _is_fraction(word: str) -> bool:
    return _is_number(word) and not word.lstrip("+-").isdigit()


def _near(value: float, expected: float, tolerance: float) -> bool:
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
