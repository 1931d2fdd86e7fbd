from __future__ import annotations

import math
from pathlib import Path

import pytest
from milepost.config.documents import Node, leaves, merge, read_file, read_sets
from milepost.errors import Problem


def read(tmp_path: Path, text: str) -> tuple[Node | None, list[Problem]]:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    problems: list[Problem] = []
    return read_file(path, "a.yaml", problems.append), problems


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-6", 1e-6),
        ("2.5E3", 2500.0),
        ("-1.", -1.0),
        (".5", 0.5),
        ("1_000_000", 1_000_000),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("-3", -3),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("on", "on"),
        ("off", "off"),
        ("no", "no"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("1e", "1e"),
        ("[1e-6, on]", [1e-6, "on"]),
    ],
)
def test_scalars_mean_what_they_say(tmp_path: Path, text: str, expected: object) -> None:
    node, problems = read(tmp_path, f"a: {{b: {text}}}" if not text.startswith("[") else f"a:\n  b: {text}")
    assert problems == []
    assert node is not None
    value = node.plain()["a"]["b"]
    assert value == expected
    assert type(value) is type(expected)
    flag = read_sets((f"a.b={text}",), problems.append)
    assert flag.plain() == {"a": {"b": expected}}


def test_infinity_and_nan(tmp_path: Path) -> None:
    node, _ = read(tmp_path, "a: {b: -.inf, c: .nan}")
    assert node is not None
    assert node.plain()["a"]["b"] == -math.inf
    assert math.isnan(node.plain()["a"]["c"])


def test_every_value_knows_its_line(tmp_path: Path) -> None:
    node, _ = read(tmp_path, "a:\n  b: 1\n  c:\n    - x: 1\n      y: 2\n    - x: 3\nd: {e: 5}\n")
    assert node is not None
    origins = {path: node.origin_of(path) for path in ("a", "a.b", "a.c", "a.c.0.y", "a.c.1.x", "d.e")}
    assert origins == {
        "a": "a.yaml:1",
        "a.b": "a.yaml:2",
        "a.c": "a.yaml:3",
        "a.c.0.y": "a.yaml:5",
        "a.c.1.x": "a.yaml:6",
        "d.e": "a.yaml:7",
    }
    assert node.origin_of("a.c.1.nothing") == "a.yaml:6"


def test_duplicate_keys_are_reported_with_both_lines(tmp_path: Path) -> None:
    _, problems = read(tmp_path, "a:\n  b: 1\n  c: 2\n  b: 3\n")
    assert [(p.path, p.origin) for p in problems] == [("a.b", "a.yaml:4")]
    assert "first at a.yaml:2" in problems[0].message


@pytest.mark.parametrize(
    ("text", "message", "origin"),
    [
        ("a: [1, 2\nb: 3\n", "not valid YAML", "a.yaml:2"),
        ("a:\n\tb: 1\n", "not valid YAML", "a.yaml:2"),
        ("- a\n- b\n", "got a list", "a.yaml:1"),
        ("hello\n", "got a single value", "a.yaml:1"),
        ("a: {1: x}\n", "a key must be text, got 1", "a.yaml:1"),
        ("a: {true: x}\n", "a key must be text, got true", "a.yaml:1"),
        ("a: &x\n  b: *x\n", "refers to itself", "a.yaml:1"),
        ("a: !!python/object:os.system {}\n", "cannot read this value", "a.yaml:1"),
        ("a: 1\n---\nb: 2\n", "not valid YAML", "a.yaml:2"),
        ("a: \0\n", "not valid YAML", "a.yaml"),
        ("a: {<<: 3}\n", "expected a mapping to take keys from", "a.yaml:1"),
    ],
)
def test_unreadable_documents(tmp_path: Path, text: str, message: str, origin: str) -> None:
    _, problems = read(tmp_path, text)
    assert len(problems) == 1
    assert message in problems[0].message
    assert problems[0].origin == origin


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    node, problems = read(tmp_path, "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: {<<: [*a, *a]}\n")
    assert problems == []
    assert node is not None
    assert node.plain() == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}


def test_empty_file_and_empty_sections(tmp_path: Path) -> None:
    node, problems = read(tmp_path, "# nothing\n")
    assert (node and node.plain(), problems) == ({}, [])
    node, problems = read(tmp_path, "model:\n  # path: all commented out\n")
    assert (node and node.plain(), problems) == ({"model": {}}, [])


def test_merge_rules(tmp_path: Path) -> None:
    problems: list[Problem] = []
    base = read_sets(("a.b=1", "a.c=[1, 2]", "a.d.e=1", "f=1"), problems.append)
    over = read_sets(("a.c=[3]", "a.d.g=2", "f={h: 1}"), problems.append)
    merged = merge(base, over, problems.append)
    assert merged.plain() == {"a": {"b": 1, "c": [3], "d": {"e": 1, "g": 2}}, "f": {"h": 1}}
    assert problems == []


def test_sets_reach_into_lists() -> None:
    problems: list[Problem] = []
    base = read_sets(("a=[{x: 1, y: 2}, {x: 3}]",), problems.append)
    merged = merge(base, read_sets(("a.1.x=4",), problems.append), problems.append)
    assert merged.plain() == {"a": [{"x": 1, "y": 2}, {"x": 4}]}
    merge(base, read_sets(("a.2.x=4",), problems.append), problems.append)
    assert [(p.path, p.message) for p in problems] == [
        ("a.2", "there is no element 2: the list has 2 (counted from 0)")
    ]


def test_sets_are_split_at_the_first_equals_sign_and_the_last_wins() -> None:
    problems: list[Problem] = []
    assert read_sets(("a.b=x=y", "a.c=1", "a.c=2", "a.d="), problems.append).plain() == {
        "a": {"b": "x=y", "c": 2, "d": None}
    }
    assert problems == []


@pytest.mark.parametrize("flag", ["a.b", "=1", "a..b=1", ".a=1", ""])
def test_malformed_sets(flag: str) -> None:
    problems: list[Problem] = []
    read_sets((flag,), problems.append)
    assert len(problems) == 1
    assert "expected KEY=VALUE" in problems[0].message
    assert repr(flag) in problems[0].message


def test_leaves() -> None:
    data = {"a": {"b": 1, "c": []}, "d": {}, "e": [{"x": 1}, {"x": 2}], "f": [1, 2]}
    assert dict(leaves(data)) == {"a.b": 1, "a.c": [], "d": {}, "e.0.x": 1, "e.1.x": 2, "f": [1, 2]}
