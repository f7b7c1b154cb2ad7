"""The rules of the sliding puzzle: boards, moves, and how both are written.

An n x n board is a tuple of its tiles row by row; 0 is the empty square. The solved board is 1, 2, ..., n^2 - 1, 0.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence

Board = tuple[int, ...]

# Position of the tile that slides, relative to the empty square: (rows, columns).
_FROM = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
DIRECTIONS = tuple(_FROM)

ACTION, ACTION_END = "<action>", "</action>"
_SLIDE = re.compile(r"slide\s+0*(\d{1,9})")

RULES = """\
Solve a sliding puzzle: bring the tiles into rising order, row by row, with the empty square (_) last. A tile next to \
the empty square can slide into it. Make one move at a time and write it as one of

<action>up</action>, <action>down</action>, <action>left</action>, <action>right</action>: the tile that can slide in \
that direction does
<action>slide N</action>: tile N slides

You then see the new board.

"""


def solved_board(size: int) -> Board:
    return (*range(1, size * size), 0)


def size_of(board: Sequence[int]) -> int:
    """Return the n of an n x n board. Raises ValueError for anything else."""
    size = math.isqrt(len(board))
    if size < 2 or sorted(board) != list(range(size * size)):
        raise ValueError(f"no n x n board of the tiles 1 .. n^2 - 1 and one empty square (0): {list(board)}")
    return size


def moves(board: Board) -> dict[str, Board]:
    """Return the boards one move away, by the direction in which a tile slides."""
    size, empty = math.isqrt(len(board)), board.index(0)
    boards = {}
    for direction, (rows, columns) in _FROM.items():
        row, column = empty // size + rows, empty % size + columns
        if 0 <= row < size and 0 <= column < size:
            tiles, tile = list(board), row * size + column
            tiles[empty], tiles[tile] = tiles[tile], 0
            boards[direction] = tuple(tiles)
    return boards


def direction_of(board: Board, action: str) -> str | None:
    """Return the direction of an action (`up`, ..., `slide N`) on this board; None where it is not a legal move."""
    action = action.strip().lower()
    possible = moves(board)
    if match := _SLIDE.fullmatch(action):
        empty = board.index(0)
        return next((d for d, after in possible.items() if after[empty] == int(match[1])), None)
    return action if action in possible else None


def find_action(text: str) -> str | None:
    """Return the content of the last <action>...</action> of a text; None where there is none."""
    *closed, _ = text.split(ACTION_END)  # in linear time, unlike a regular expression
    return next((part.partition(ACTION)[2].strip() for part in reversed(closed) if ACTION in part), None)


def write_action(direction: str) -> str:
    return f"{ACTION}{direction}{ACTION_END}"


def write_board(board: Board) -> str:
    """Return the board as text, one line per row; the empty square is `_`."""
    size = math.isqrt(len(board))
    width = len(str(len(board) - 1))
    tiles = [f"{tile or '_':>{width}}" for tile in board]
    return "\n".join(" ".join(tiles[start : start + size]) for start in range(0, len(tiles), size))


def shuffled(size: int, count: int, draw: random.Random) -> tuple[Board, list[str]]:
    """Make `count` random moves from the solved board, none of which undoes the one before. Return the board and the
    moves that solve it. One more move is made where `count` of them lead back to the solved board."""
    goal = board = solved_board(size)
    home: list[str] = []
    while len(home) < count or board == goal:
        possible = moves(board)
        if home:
            possible.pop(home[-1])
        direction = draw.choice(sorted(possible))
        board = possible[direction]
        home.append(OPPOSITE[direction])
    return board, home[::-1]


def demonstration(
    board: Board, home: Sequence[str], right_share: float, longest: int, draw: random.Random
) -> list[tuple[str, Board]]:
    """Play until the board is solved, at most `longest` moves; return the moves with the boards after them. Each move
    is the next of the known solution `home` with probability `right_share`, else a random one."""
    solution, shown = list(home), list[tuple[str, Board]]()
    goal = solved_board(size_of(board))
    while board != goal and len(shown) < longest:
        possible = moves(board)
        direction = solution[0] if draw.random() < right_share else draw.choice(sorted(possible))
        if direction == solution[0]:
            solution.pop(0)
        else:
            solution.insert(0, OPPOSITE[direction])
        board = possible[direction]
        shown.append((direction, board))
    return shown
