"""The puzzle's rules, on all 2 x 2 boards and on samples of larger ones."""

import random
import time
from itertools import permutations

import pytest

from examples.sliding_puzzle.puzzle import (
    DIRECTIONS,
    OPPOSITE,
    Board,
    demonstration,
    direction_of,
    find_action,
    moves,
    shuffled,
    size_of,
    solved_board,
    write_action,
    write_board,
)


def reachable(size: int, depth: int = 100) -> dict[Board, int]:
    """Return boards and their distances from the solved one, by breadth-first search."""
    found = {solved_board(size): 0}
    edge = list(found)
    for distance in range(1, depth + 1):
        edge = [after for board in edge for after in moves(board).values() if after not in found]
        found |= dict.fromkeys(edge, distance)
    return found


def is_solvable(board: Board) -> bool:
    """Decide by parity (Johnson and Story, 1879): a move swaps the empty square with a neighbour."""
    size = size_of(board)
    odd = sum(a > b > 0 for i, a in enumerate(board) for b in board[i:]) % 2
    rows_from_bottom = size - 1 - board.index(0) // size
    return odd == 0 if size % 2 else (odd + rows_from_bottom) % 2 == 0


def test_every_2_x_2_board_is_solvable_or_out_of_reach() -> None:
    boards = reachable(2)
    assert len(boards) == 12 and max(boards.values()) == 6
    for board in permutations(range(4)):
        assert (board in boards) == is_solvable(board), board


def test_3_x_3_boards_within_reach_are_solvable() -> None:
    """The numbers of 3 x 3 boards at distances 0, 1, ... are known (OEIS A089473)."""
    boards = reachable(3, depth=9)
    counts = [list(boards.values()).count(distance) for distance in range(10)]
    assert counts == [1, 2, 4, 8, 16, 20, 39, 62, 116, 152]
    assert all(is_solvable(board) for board in boards)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_moves_can_be_taken_back(size: int) -> None:
    draw = random.Random(size)
    for _ in range(30):
        board, _ = shuffled(size, 20, draw)
        possible = moves(board)
        corner = board.index(0) in (0, size - 1, size * (size - 1), size * size - 1)
        assert len(possible) == 2 if corner else 3 <= len(possible) <= 4
        for direction, after in possible.items():
            assert after != board and sorted(after) == sorted(board)
            assert moves(after)[OPPOSITE[direction]] == board


def test_a_tile_slides_in_the_named_direction() -> None:
    board = (1, 2, 3, 4, 0, 5, 7, 8, 6)  # 1 2 3 / 4 _ 5 / 7 8 6
    assert moves(board) == {
        "up": (1, 2, 3, 4, 8, 5, 7, 0, 6),
        "down": (1, 0, 3, 4, 2, 5, 7, 8, 6),
        "left": (1, 2, 3, 4, 5, 0, 7, 8, 6),
        "right": (1, 2, 3, 0, 4, 5, 7, 8, 6),
    }
    actions = {"up": "up", "slide 8": "up", " Slide  2 ": "down", "LEFT": "left", "slide 4": "right"}
    assert {action: direction_of(board, action) for action in actions} == actions
    for wrong in ("slide 1", "slide 9", "slide 0", "slide", "slide -8", "slide 8 8", "jump", "", "up up"):
        assert direction_of(board, wrong) is None, wrong
    assert direction_of((0, 1, 2, 3), "down") is None  # no tile above the empty square


def test_the_text_of_boards_and_actions() -> None:
    assert write_board((1, 2, 3, 0)) == "1 2\n3 _"
    assert write_board((*range(1, 16), 0)).splitlines()[2:] == [" 9 10 11 12", "13 14 15  _"]
    assert [find_action(f"I think {write_action(d)}") for d in DIRECTIONS] == list(DIRECTIONS)
    assert find_action("<action>up</action> no: <action>\n left </action>") == "left"
    assert find_action("<action>up") is None and find_action("<action></action>") == ""
    assert find_action("<action>up</action> or </action>") == "up" and find_action("</action><action>") is None
    assert find_action("<action>up <action>left</action>") == "up <action>left"


def test_an_action_of_any_length_is_read_in_linear_time() -> None:
    board = solved_board(3)
    start = time.perf_counter()
    assert direction_of(board, "slide " + "9" * 4400) is None
    assert direction_of(board, "slide" + " " * 50_000) is None
    assert direction_of(board, "slide " + "0" * 50_000 + "8") == "right"
    assert find_action("<action>" * 20_000) is None
    assert find_action("<action>" * 20_000 + "</action>" * 20_000) is not None
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 5, 12, 30])
def test_a_shuffled_board_is_unsolved_and_its_solution_solves_it(size: int, count: int) -> None:
    for seed in range(20):
        board, home = shuffled(size, count, random.Random(seed))
        assert board != solved_board(size) and is_solvable(board)
        assert len(home) >= count
        assert all(OPPOSITE[a] != b for a, b in zip(home, home[1:], strict=False))
        for direction in home:
            board = moves(board)[direction]
        assert board == solved_board(size)


def test_2_x_2_boards_are_as_far_as_they_are_shuffled() -> None:
    distances = reachable(2)
    for count in range(1, 7):
        boards = {shuffled(2, count, random.Random(seed))[0] for seed in range(20)}
        assert {distances[board] for board in boards} == {count}


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_demonstrations(share: float) -> None:
    solved = right = shown = 0
    for seed in range(200):
        draw = random.Random(seed)
        start, home = shuffled(3, 4, draw)
        board = start
        game = demonstration(start, home, share, 10, draw)
        for direction, after in game:
            assert after == moves(board)[direction]
            board = after
        assert len(game) == 10 or board == solved_board(3)
        assert solved_board(3) not in [after for _, after in game[:-1]]
        solved += board == solved_board(3)
        right += game[0][0] == home[0]
        shown += len(game)
    if share == 1.0:
        assert (solved, right, shown) == (200, 200, 800)
    elif share == 0.0:
        assert solved < 60 and 60 < right < 120  # random: one of 2 to 4 moves
    else:
        assert 60 < solved < 190 and 110 < right < 180


def test_invalid_boards() -> None:
    for wrong in ([1, 2, 0], [1, 1, 2, 0], [1, 2, 3, 4], [0], []):
        with pytest.raises(ValueError, match="no n x n board"):
            size_of(wrong)
