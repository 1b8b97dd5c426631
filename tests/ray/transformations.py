"""What tests compute of Ray datasets. Ray's tasks import the module of a function: with torch it takes seconds."""

from __future__ import annotations

from typing import Any

import numpy


def drawn(batch: dict[str, Any]) -> dict[str, Any]:
    """A transformation with a random part, which is another one each time that it is computed."""
    return {**batch, "drawn": numpy.random.default_rng().random(len(batch["x"]))}
