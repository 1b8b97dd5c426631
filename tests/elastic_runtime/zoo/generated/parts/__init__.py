"""The parts of generated scripts, a module for each sort of them. Importing this fills `KINDS`."""

from __future__ import annotations

from tests.elastic_runtime.zoo.generated.parts import (
    around,
    counters,
    evaluation,
    gradients,
    losses,
    models,
    optimizers,
    samplers,
    schedulers,
)
from tests.elastic_runtime.zoo.generated.parts.registry import KINDS, Part

__all__ = [
    "KINDS",
    "Part",
    "around",
    "counters",
    "evaluation",
    "gradients",
    "losses",
    "models",
    "optimizers",
    "samplers",
    "schedulers",
]
