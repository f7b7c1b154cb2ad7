import sys

import pytest

from grpo_mcore.recipe import RecipeError
from grpo_mcore.recipe.yaml_tree import Node, parse_file, parse_text


@pytest.mark.parametrize("text", ["a: &x {b: *x}", "a: &x [1, *x]", "a: &x {<<: *x}"])
def test_an_alias_inside_of_its_own_anchor_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="the alias .* refers to the mapping or list that contains it"):
        parse_text(text, "k", "here")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-8", 1e-8),
        ("5.0e-6", 5e-6),
        ("-3", -3),
        ("1_000_000", 1_000_000),
        ("0x10", 16),
        (".5", 0.5),
        ("true", True),
        ("no", "no"),
        ("on", "on"),
        ("null", None),
        ("~", None),
        ("", None),
        ("00:03:50:00", "00:03:50:00"),
        ("2024-01-01", "2024-01-01"),
        ("'5'", "5"),
        ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-1.5B"),
        ("[1, a, null]", [1, "a", None]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    result = parse_text(text, "k", "here").plain()
    assert result == value and type(result) is type(value)


def test_every_value_knows_its_line_and_key(write) -> None:
    tree = parse_file(write("a:\n  b: 1\n  c:\n    - x: 2\n    - 3\n"), "r.yaml")
    found = {path: (tree.find(path).source, tree.find(path).key) for path in ("a", "a.b", "a.c.0.x", "a.c.1")}
    assert found == {
        "a": ("r.yaml:1", "a"),
        "a.b": ("r.yaml:2", "a.b"),
        "a.c.0.x": ("r.yaml:4", "a.c.0.x"),
        "a.c.1": ("r.yaml:5", "a.c.1"),
    }


def test_anchors_and_merge_keys(write) -> None:
    tree = parse_file(write("base: &b {x: 1, y: 2}\nz:\n  <<: *b\n  y: 3\n"), "r.yaml")
    assert tree.plain()["z"] == {"x": 1, "y": 3}


def test_of_and_plain_are_inverse() -> None:
    value = {"a": [1, {"b": None}], "c": {"d": "x"}}
    assert Node.of(value, "here").plain() == value


def test_a_key_given_twice_is_reported_with_both_lines(write) -> None:
    with pytest.raises(RecipeError) as error:
        parse_file(write("grpo:\n  seed: 1\n  seed: 2\n"), "r.yaml")
    assert str(error.value).splitlines()[1] == (
        "  r.yaml:3: grpo.seed: the key is given twice; the first time at r.yaml:2"
    )


def test_a_colon_without_a_space_is_reported(write) -> None:
    with pytest.raises(RecipeError, match=r"r.yaml:2: a.b: b:1 is one word in YAML; write b: 1, with a space"):
        parse_file(write("x: 1\na: {b:1}\n"), "r.yaml")
    tree = parse_file(write('a: {b: , "c:1": , http://d: 2, e: f:g}'), "r.yaml")
    assert tree.plain() == {"a": {"b": None, "c:1": None, "http://d": 2, "e": "f:g"}}


def test_broken_yaml_has_its_line(write) -> None:
    with pytest.raises(RecipeError) as error:
        parse_file(write("grpo:\n  seed: [1\n  x: 2\n"), "r.yaml")
    assert str(error.value).splitlines()[1].startswith("  r.yaml:3: not valid YAML: ")


def test_a_file_that_is_not_text(tmp_path) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(b"a: \xff\xfe")
    with pytest.raises(RecipeError, match="not UTF-8 text"):
        parse_file(file, "r.yaml")


def test_a_file_that_no_reader_survives_is_refused(write, tmp_path) -> None:
    bomb = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    with pytest.raises(RecipeError, match=r"more than 100,000 values, aliases \(\*name\) counted where they stand"):
        parse_file(write(bomb), "r.yaml")
    with pytest.raises(RecipeError, match="mappings or lists are nested too deeply"):
        parse_file(write("[" * 3 * sys.getrecursionlimit()), "r.yaml")
    with pytest.raises(RecipeError, match="r.yaml: cannot be read: Is a directory"):
        parse_file(tmp_path, "r.yaml")


def test_keys_are_words_and_override_is_a_switch(write) -> None:
    with pytest.raises(RecipeError, match=r"r.yaml:1: a: a key must be a single word"):
        parse_file(write("a: {[b]: 1}\n"), "r.yaml")
    with pytest.raises(RecipeError, match=r"r.yaml:1: a._override_: expected true or false, got 3"):
        parse_file(write("a: {_override_: 3}\n"), "r.yaml")


def test_unknown_tags_are_rejected(write) -> None:
    with pytest.raises(RecipeError, match=r"r.yaml:1: a: a value of kind !python/name:os cannot stand"):
        parse_file(write("a: !python/name:os x\n"), "r.yaml")
    for value in ("!include {b: 1}", "!include [1]", "!!set {b}"):
        with pytest.raises(RecipeError, match=r"r.yaml:1: a: a value of kind \S+(?:include|set) cannot stand"):
            parse_file(write(f"a: {value}\n"), "r.yaml")
