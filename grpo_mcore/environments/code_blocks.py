"""The program in a response: its last closed block of Python between code fences."""

from __future__ import annotations

import re

# Possessive: a line of a model's must not make it backtrack.
_FENCE = re.compile(r"\s*+(?P<fence>`{3,}+|~{3,}+)\s*+(?P<language>[^`\s]*+)[^`]*+$")
_PYTHON = {"", "python", "python3", "py", "py3"}


def last_program(response: str) -> str | None:
    """The text between the last pair of fences that is marked as Python or as nothing; None where there is none.

    A fence is a line of three or more backticks or tildes; a block ends at a line with as many or more of the same and
    nothing else. The indentation of the opening fence is taken off every line.
    """
    program, inside, fence, language, indent = None, [], "", "", 0
    for line in response.replace("\r\n", "\n").split("\n"):
        match = _FENCE.match(line)
        if not fence:
            if match:
                fence, language, inside = match["fence"], match["language"].lower(), []
                indent = len(line) - len(line.lstrip())
        elif match and not match["language"] and match["fence"].startswith(fence):
            if language in _PYTHON:
                program = "\n".join(inside) + "\n"
            fence = ""
        else:
            inside.append(line[min(indent, len(line) - len(line.lstrip())) :])
    return program
