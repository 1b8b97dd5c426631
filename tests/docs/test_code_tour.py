"""docs/code_tour.md names modules, functions and methods that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "code_tour.md").read_text()
ROWS = [line.split("|")[1:3] for line in TOUR.splitlines() if line.startswith("| `")]
NAME = re.compile(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`")


def names_in(path: Path) -> set[str]:
    """Functions, classes, constants and `Class.method`s of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{one.name}" for one in methods} | {one.name for one in methods}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip()[:60])
def test_what_the_tour_names_exists(row: list[str]) -> None:
    """A name belongs to a module of its row."""
    paths = [ROOT / path for path in re.findall(r"`([a-z_/]+\.py|[a-z_/]+/[a-z_/]+)`", " ".join(row))]
    assert paths
    assert [path for path in paths if not path.exists()] == []
    known = set[str]().union(*(names_in(path) for path in paths if path.suffix == ".py"))
    named = set(NAME.findall(row[0])) | {name for name in NAME.findall(row[1]) if "." in name or name.startswith("_")}
    elsewhere = {
        "Decisions.plan",
        "Decisions.worker_runs",
        "Decisions.worker_ended",
        "parameter.grad",
    }
    assert named - known - elsewhere == set()
