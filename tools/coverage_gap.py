"""Modules that `make test` covers less than `make test-all`: `python -m tools.coverage_gap FOLDER [POINTS]`.

FOLDER holds what `make coverage` has measured: each process's data, in FOLDER/quick of the tests of `make test` and in
FOLDER/slow of the others. The exit code is 1 where a module lacks more than POINTS (3) of 100.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import coverage
from rich.console import Console
from rich.table import Table

REPOSITORY: Final = Path(__file__).parents[1]
PACKAGES: Final = ("kfp_gpuquota", "elastic_runtime")
POINTS: Final = 3.0


@dataclass(frozen=True)
class Module:
    """A module's lines by number: all that can be executed, and those that quick and slow tests execute."""

    name: str
    lines: frozenset[int]
    quick: frozenset[int]
    slow: frozenset[int]

    @property
    def only_slow(self) -> frozenset[int]:
        """The lines that no quick test executes, and a slow one does."""
        return self.slow - self.quick

    @property
    def gap(self) -> float:
        """The share of the lines that only slow tests execute, of 100."""
        return percent(len(self.only_slow), len(self.lines))


def percent(part: int, whole: int) -> float:
    """Return the share, of 100; of nothing it is 0."""
    return 100.0 * part / whole if whole else 0.0


def executed(folder: Path) -> dict[str, tuple[frozenset[int], frozenset[int]]]:
    """Return each module's lines, and those of them that a process with data in this folder has executed."""
    measurement = coverage.Coverage(data_file=None, config_file=str(REPOSITORY / "pyproject.toml"))
    measurement.combine([str(file) for file in folder.iterdir()], strict=True, keep=True)
    found = {}
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            _, lines, _, missing, _ = measurement.analysis2(str(path))
            found[str(path.relative_to(REPOSITORY))] = frozenset(lines), frozenset(lines) - frozenset(missing)
    return found


def modules(folder: Path) -> list[Module]:
    """Return what the two kinds of tests execute, the module with the widest gap first."""
    quick, slow = executed(folder / "quick"), executed(folder / "slow")
    found = [Module(name, lines, done, slow[name][1]) for name, (lines, done) in quick.items()]
    return sorted(found, key=lambda module: -module.gap)


def ranges(lines: frozenset[int]) -> str:
    """Return line numbers as text, neighbors joined: "3-5, 9"."""
    joined: list[list[int]] = []
    for line in sorted(lines):
        if joined and line == joined[-1][1] + 1:
            joined[-1][1] = line
        else:
            joined.append([line, line])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in joined)


def main(folder: Path, points: float = POINTS) -> int:
    """Show the modules with a gap above `points`, and the shares of all modules together."""
    found = modules(folder)
    wide = [module for module in found if module.gap > points]
    table = Table("module", "make test", "less than all by", "lines that only slow tests execute")
    for module in wide:
        share = percent(len(module.quick), len(module.lines))
        table.add_row(module.name, f"{share:.1f} %", f"{module.gap:.1f}", ranges(module.only_slow))
    console = Console(width=160)
    if wide:
        console.print(table)
    lines = sum(len(module.lines) for module in found)
    quick = sum(len(module.quick) for module in found)
    every = sum(len(module.quick | module.slow) for module in found)
    console.print(
        f"{lines} lines of {len(found)} modules: make test executes {percent(quick, lines):.1f} % of them, "
        f"make test-all {percent(every, lines):.1f} %; {len(wide)} modules lack more than {points:g} points"
    )
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(float, sys.argv[2:3])))
