"""Which program of a response is run."""

from __future__ import annotations

import pytest

from grpo_mcore.environments.code_blocks import last_program


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


@pytest.mark.parametrize("line", ["``` " + " " * 10**6 + "`", "`" * 10**6 + "a`", " " * 10**6, "~~~" + "`" * 10**6])
def test_no_line_takes_for_ever(line: str) -> None:
    """With backtracking the first of them would take an hour."""
    assert last_program(line) is None
