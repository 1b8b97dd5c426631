"""docs/membership.md shows the tables that the machine runs on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.membership.tables import GENERATION_TRANSITIONS, WORKER_TRANSITIONS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import StrEnum

PAGE = Path(__file__).parents[2] / "docs" / "membership.md"


@pytest.mark.parametrize(("name", "table"), [("worker", WORKER_TRANSITIONS), ("generation", GENERATION_TRANSITIONS)])
def test_the_page_shows_the_table(name: str, table: Mapping[StrEnum, Mapping[StrEnum, StrEnum]]) -> None:
    shown = PAGE.read_text().split(f"<!-- table: {name} -->\n")[1].split("\n\n")[0].splitlines()[2:]
    expected = {f"| {state} | {event} | {after} |" for state, row in table.items() for event, after in row.items()}
    assert set(shown) == expected
