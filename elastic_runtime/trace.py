"""A job's timeline, drawn from its workers' report files: `python -m elastic_runtime.trace FILE...`

One row for each worker, from its first generation to its last line: `=` in a generation, `|` where one began, `c` a
checkpoint, `!` an iteration out of memory, `x` its release, `.` finished. Below it, each change of size with its pause
and what that was made of, and each worker's steps: how long they took, how much of it was waiting for the others, and
how its own part compares with the mean of all workers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH = 100
MARKS = {"resize": "|", "checkpoint": "c", "restored": "r", "out_of_memory": "!", "left": "x", "finished": "."}


def read(paths: list[str]) -> list[dict[str, Any]]:
    """All lines of all files, by time; a line that was cut off is left out. Raises OSError."""
    rows = []
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return sorted(rows, key=lambda row: float(row["at"]))


def draw(rows: list[dict[str, Any]], width: int = WIDTH) -> str:
    """Return the timeline as text."""
    if not rows:
        return "nothing was reported\n"
    began, ended = float(rows[0]["at"]), float(rows[-1]["at"])
    scale = (width - 1) / max(ended - began, 1e-9)
    workers = list(dict.fromkeys(str(row["worker"]) for row in rows))
    margin = max(map(len, workers))
    lines = [f"{'':{margin}}  0 s{f'{ended - began:.1f} s':>{width - 3}}"]
    lines += [
        f"{worker:{margin}}  {_row([r for r in rows if r['worker'] == worker], began, scale)}" for worker in workers
    ]
    return "\n".join([*lines, "", *_changes(rows, began), *_steps(rows, margin)]) + "\n"


def _row(rows: list[dict[str, Any]], began: float, scale: float) -> str:
    places = [(int((float(row["at"]) - began) * scale), row["event"]) for row in rows]
    found = [" "] * (places[-1][0] + 1)
    entered = [place for place, event in places if event == "resize"]
    for place in range(entered[0] if entered else len(found), len(found)):
        found[place] = "="
    for place, event in places:
        if event in MARKS:
            found[place] = MARKS[event]
    return "".join(found)


def _changes(rows: list[dict[str, Any]], began: float) -> list[str]:
    """Return one line for each generation: time, members, cause, and the longest pause among them."""
    generations: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if row["event"] == "resize":
            generations.setdefault(row["generation"], []).append(row)
    return [_change(number, same, began) for number, same in generations.items()]


def _change(number: int, same: list[dict[str, Any]], began: float) -> str:
    at = min(float(row["at"]) for row in same) - began
    causes = "/".join(sorted({row["cause"] for row in same}))
    pause_ms = max(float(row["pause_ms"]) for row in same)
    size, step = len(same[0]["members"]), same[0]["step"]
    parts = ", ".join(f"{name} {ms:.1f}" for name, ms in _longest_phases(same).items())
    made_of = f" ({parts})" if parts else ""
    return (
        f"{at:9.2f} s  generation {number}: {size} workers at step {step}, {causes}, pause {pause_ms:.1f} ms{made_of}"
    )


def _longest_phases(same: list[dict[str, Any]]) -> dict[str, float]:
    """Return the pauses of members that trained before: a joiner's wait is not a pause."""
    stayed = [row for row in same if row["cause"] != "join"]
    names = dict.fromkeys(name for row in stayed for name in row.get("phases_ms", {}))
    return {name: max(float(row.get("phases_ms", {}).get(name, 0.0)) for row in stayed) for name in names}


def _steps(rows: list[dict[str, Any]], margin: int) -> list[str]:
    """One line for each worker that has timed steps: means over all of them."""
    timed: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["event"] == "steps":
            timed.setdefault(str(row["worker"]), []).append(row)
    found = [_paced(worker, same, margin) for worker, same in sorted(timed.items())]
    return ["", *found] if found else []


def _paced(worker: str, same: list[dict[str, Any]], margin: int) -> str:
    steps = sum(int(row["steps"]) for row in same)

    def mean(name: str) -> float:
        return sum(float(row[name]) * int(row["steps"]) for row in same) / steps

    return (
        f"{worker:{margin}}  {mean('step_ms'):8.1f} ms a step, of which {mean('wait_ms'):.1f} waiting; its own part "
        f"{mean('slowness'):.2f} times the mean"
    )


def main(arguments: list[str]) -> int:
    """Draw the files named."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)  # noqa: T201
        return 2
    try:
        print(draw(read(arguments)), end="")  # noqa: T201
    except OSError as error:
        print(f"{error}; name the files that ELASTIC_REPORT_FILE named", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
