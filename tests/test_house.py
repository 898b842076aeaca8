"""Arrows point one way: a room imports only from rooms below it."""

import ast
import re
from pathlib import Path

import pytest

import gradmem

#: From the ground up; rooms on one floor do not import each other.
FLOORS = [
    {"version", "validation", "trees", "files", "interrupts"},
    {"checkpoint", "cuda", "data", "networks", "published"},
    {"memory", "streams", "projection"},
    {"gradients"},
    {"distributed"},
    {"constraints"},
    {"gradient_memory", "learners"},
    {"checks", "evaluation"},
    {"benchmarks", "integrations"},
    {"runs"},
    {"sweeps", "reports"},
    {"reproduction", "board"},
    {"cli"},
    {"__main__"},
]
ROOT = Path(gradmem.__file__).parent
TESTS = Path(__file__).parent
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path):
    """The rooms that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gradmem"):
            names = node.module.split(".")[1:]
            yield from names[:1] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("gradmem"):
                    yield from alias.name.split(".")[1:2]


FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_from_below(path):
    room = room_of(path)
    wrong = [other for other in imported(path) if other != room and FLOOR[other] >= FLOOR[room]]
    assert not wrong, f"{room} is on floor {FLOOR[room]} and imports {wrong}"


def test_every_room_is_on_a_floor():
    assert {room_of(path) for path in FILES} == set(FLOOR)


def test_no_files_of_a_room_import_each_other():
    """Inside a room, too, there is an order: no cycle of files."""
    edges = {}
    for path in FILES:
        module = ".".join(["gradmem", *path.relative_to(ROOT).with_suffix("").parts])
        tree = ast.parse(path.read_text("utf-8"))
        found = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
        names = {node.module for node in found}
        names |= {f"{node.module}.{alias.name}" for node in found for alias in node.names}
        edges[module] = {name for name in names if name.startswith("gradmem.")}

    def reach(start):
        seen, todo = set(), [start]
        while todo:
            for name in edges.get(todo.pop(), ()):
                if name not in seen:
                    seen.add(name)
                    todo.append(name)
        return seen

    assert not [module for module in edges if module in reach(module)]


def test_every_test_that_a_guarantee_names_exists():
    text = (TESTS.parent / "docs/GUARANTEES.md").read_text("utf-8")
    tests = "".join(path.read_text("utf-8") for path in TESTS.glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 40
    assert not [name for name in sorted(named) if f"def {name}(" not in tests]
