"""Print the oldest versions that pyproject.toml admits of what some extras need, as pip takes them: EXTRA..."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Final

_REQUIREMENT: Final = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?>=(?P<oldest>[0-9.]+)")


def oldest(extras: list[str], text: str) -> list[str]:
    """Return `name==version` for each requirement of these extras with a lower bound."""
    declared: dict[str, list[str]] = tomllib.loads(text)["project"]["optional-dependencies"]
    found = [_REQUIREMENT.match(one) for extra in extras for one in declared[extra]]
    return sorted({f"{match['name']}=={match['oldest']}" for match in found if match})


if __name__ == "__main__":
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    sys.stdout.write(" ".join(oldest(sys.argv[1:], text)) + "\n")
