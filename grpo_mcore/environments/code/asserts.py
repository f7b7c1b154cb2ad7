"""Assertions split in two: the sandbox evaluates an expression, and the value is compared outside. So only the right
value passes, whatever a program does to `==`, to built-in functions and to the process that it runs in; and the
expected value is nowhere that the program could look for it.

These shapes are split, also behind `not` and joined by `and`:

    assert EXPRESSION == LITERAL     also !=, and with the literal on the left
    assert EXPRESSION is None        also True, False, `is not`
    assert CALL                      its truth value
    assert abs(EXPRESSION - NUMBER) < NUMBER, <=
    assert math.isclose(EXPRESSION, NUMBER, rel_tol=NUMBER, abs_tol=NUMBER)

at the top level of a test, or in a function that the test's last line calls, such as `def check(candidate)` and
`def test_sum()`. Any other
assertion runs as it is, in the program's process.
"""

import ast
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Step = tuple[str, ...]
"""An instruction to the sandbox: ("run", statements), ("value" | "truth", expression), or ("scope", expression, name),
which opens a scope for the rest, in which the name has that value."""

Claim = Any
"""A value as sandbox/program.py's `plain` encodes it. It comes from a program's process, so it may be anything."""

Condition = Callable[[Claim], bool]

_CONTAINERS: dict[type, str] = {tuple: "tuple", set: "set", dict: "dict"}


@dataclass(frozen=True)
class SplitTest:
    """A test's steps, and one condition for each step "value" or "truth", in their order."""

    steps: tuple[Step, ...]
    conditions: tuple[Condition, ...]

    def holds(self, values: Claim) -> bool:
        if not isinstance(values, list) or len(values) != len(self.conditions):
            return False
        return all(condition(value) for condition, value in zip(self.conditions, values, strict=True))


@functools.lru_cache(maxsize=256)
def split_test(code: str) -> SplitTest | None:
    """Split a test's assertions. Return None if none can be split, or the code is not valid Python."""
    try:
        steps, conditions = _Splitter().split(ast.parse(code).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return SplitTest(tuple(steps), tuple(conditions)) if conditions else None


class _Splitter:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.conditions: list[Condition] = []
        self.rest: list[ast.stmt] = []

    def split(self, statements: list[ast.stmt]) -> tuple[list[Step], list[Condition]]:
        check = _checker(statements)
        if check is None:
            self.add(statements)
        else:
            function, argument = check
            self.add([statement for statement in statements[:-1] if statement is not function])
            self.run_rest()
            name = function.args.args[0].arg if function.args.args else "_"
            self.steps.append(("scope", ast.unparse(argument), name))
            self.add(function.body)
        self.run_rest()
        return self.steps, self.conditions

    def add(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            parts = _parts(statement.test) if isinstance(statement, ast.Assert) else None
            if parts is None:
                self.rest.append(statement)
                continue
            self.run_rest()
            for kind, expression, condition in parts:
                self.steps.append((kind, ast.unparse(expression)))
                self.conditions.append(condition)

    def run_rest(self) -> None:
        if self.rest:
            self.steps.append(("run", ast.unparse(ast.Module(self.rest, []))))
            self.rest = []


def _checker(statements: list[ast.stmt]) -> tuple[ast.FunctionDef, ast.expr] | None:
    """Return the function of at most one argument that the last statement calls, and that argument (the constant None
    if there is none). Return None if there is no such function, or its body cannot be moved to the top level."""
    match statements[-1:]:
        case [ast.Expr(ast.Call(ast.Name(name), [] | [_] as arguments, []))]:
            functions = [part for part in statements if isinstance(part, ast.FunctionDef) and part.name == name]
            nodes = [node for statement in statements for node in ast.walk(statement)]
            uses = sum(isinstance(node, ast.Name) and node.id == name for node in nodes)
            if len(functions) == uses == 1 and _can_be_inlined(functions[0], len(arguments)):
                return functions[0], arguments[0] if arguments else ast.Constant(None)
    return None


def _can_be_inlined(function: ast.FunctionDef, arguments: int) -> bool:
    formal = function.args
    others = formal.posonlyargs or formal.kwonlyargs or formal.vararg or formal.kwarg
    plain = len(formal.args) == arguments and not others
    needs_function = (ast.Return, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal)
    inside = [node for statement in function.body for node in ast.walk(statement)]
    return plain and not function.decorator_list and not any(isinstance(node, needs_function) for node in inside)


Part = tuple[str, ast.expr, Condition]


def _parts(test: ast.expr) -> list[Part] | None:
    """Return (kind of step, expression, condition) for each part of an assertion; None if it must run as it is."""
    match test:
        case ast.BoolOp(ast.And(), parts):
            nested = [_parts(part) for part in parts]
            return None if None in nested else [part for parts in nested for part in parts or []]
        case ast.UnaryOp(ast.Not(), operand):
            inner = _parts(operand)
            if inner is None or len(inner) != 1:
                return None
            kind, expression, condition = inner[0]
            return [(kind, expression, lambda claim: not condition(claim))]
    return next(_shapes(test), None)


def _shapes(test: ast.expr) -> Iterator[list[Part]]:
    match test:
        case ast.Compare(left, [ast.Eq() | ast.NotEq() as operator], [right]):
            for expression, other in ((left, right), (right, left)):
                if (literal := _literal(other)) is not None:
                    equal = functools.partial(_same, expected=literal[0])
                    unequal = functools.partial(_differs, expected=literal[0])
                    yield [("value", expression, equal if isinstance(operator, ast.Eq) else unequal)]
        case ast.Compare(left, [ast.Is() | ast.IsNot() as operator], [ast.Constant(None | True | False as constant)]):
            must_be = isinstance(operator, ast.Is)
            yield [("value", left, lambda claim: (claim is constant) is must_be)]
        case ast.Compare(
            ast.Call(ast.Name("abs"), [ast.BinOp(left, ast.Sub(), right)], []),
            [ast.Lt() | ast.LtE() as operator],
            [bound],
        ):
            for expression, other in ((left, right), (right, left)):
                if (number := _number(other)) is not None and (most := _number(bound)) is not None:
                    below = isinstance(operator, ast.Lt)
                    yield [("value", expression, functools.partial(_near, expected=number, most=most, below=below))]
        case ast.Call(ast.Name("isclose") | ast.Attribute(ast.Name("math"), "isclose"), [left, right], keywords):
            tolerances = {word.arg: _number(word.value) for word in keywords}
            if tolerances.keys() <= {"rel_tol", "abs_tol"} and None not in tolerances.values():
                for expression, other in ((left, right), (right, left)):
                    if (number := _number(other)) is not None:
                        close = functools.partial(_close, expected=number, tolerances=tolerances)
                        yield [("value", expression, close)]
            else:
                yield [("truth", test, _is_true)]
        case ast.Call():
            yield [("truth", test, _is_true)]


def _literal(node: ast.expr) -> tuple[Any] | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    has_ellipsis = any(isinstance(part, ast.Constant) and part.value is ... for part in ast.walk(node))
    return None if has_ellipsis else (value,)


def _number(node: ast.expr) -> Any:
    literal = _literal(node)
    return literal[0] if literal is not None and isinstance(literal[0], int | float | complex) else None


def _is_true(claim: Claim) -> bool:
    return claim is True


def _false_on_error(condition: Callable[..., bool]) -> Callable[..., bool]:
    """Make a condition False for a claim that does not encode a value."""

    @functools.wraps(condition)
    def safe(claim: Claim, **of: Any) -> bool:
        try:
            return condition(claim, **of)
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            return False

    return safe


@_false_on_error
def _same(claim: Claim, *, expected: Any) -> bool:
    return _equal(claim, expected)


def _differs(claim: Claim, *, expected: Any) -> bool:
    return not _same(claim, expected=expected)


@_false_on_error
def _near(claim: Claim, *, expected: Any, most: Any, below: bool) -> bool:
    distance = abs(_scalar(claim) - expected)
    return bool(distance < most if below else distance <= most)


@_false_on_error
def _close(claim: Claim, *, expected: Any, tolerances: dict[str, Any]) -> bool:
    return math.isclose(_scalar(claim), expected, **tolerances)


def _equal(claim: Claim, expected: Any) -> bool:
    """Compare a claimed value with the expected one as Python does. No more keys are hashed than are expected, because
    they may have been chosen to collide."""
    kind, items = _CONTAINERS.get(type(expected)), claim
    if kind is not None:
        items = claim.get(kind) if isinstance(claim, dict) else None
    elif not isinstance(expected, list):
        return bool(_scalar(claim) == expected)
    if not isinstance(items, list) or len(items) != len(expected):
        return False
    if kind == "set":
        return {_key(item) for item in items} == expected
    if kind == "dict":
        values = {_key(key): value for key, value in items}
        return values.keys() == expected.keys() and all(_equal(values[key], expected[key]) for key in expected)
    return all(_equal(item, other) for item, other in zip(items, expected, strict=True))


def _key(claim: Claim) -> Any:
    if isinstance(claim, dict) and isinstance(claim.get("tuple"), list):
        return tuple(_key(item) for item in claim["tuple"])
    return _scalar(claim)


def _scalar(claim: Claim) -> Any:
    """Decode a scalar. Raises ValueError, TypeError or ArithmeticError for anything else."""
    if not isinstance(claim, dict | list):
        return claim
    match claim:
        case {"bytes": str(digits)}:
            return bytes.fromhex(digits)
        case {"complex": [int() | float() as real, int() | float() as imaginary]}:
            return complex(real, imaginary)
        case {"ratio": [int(above), int(below)]}:
            return Fraction(above, below)
    raise ValueError("not a plain value")
