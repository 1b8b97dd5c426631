"""The price of GPU-hours, by type of GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api.history import HeldHours


@dataclass(frozen=True)
class Prices:
    """What a GPU-hour costs: of the types that have a price of their own, and of all others (None: not known)."""

    of_types: dict[str, float] = field(default_factory=dict)
    of_others: float | None = None

    @classmethod
    def parse(cls, given: Iterable[str]) -> Prices:
        """Return the prices that TYPE=PRICE, or PRICE for all other types, name. Raises InvalidFieldError."""
        of_types: dict[str, float] = {}
        of_others: float | None = None
        for one in given:
            gpu_type, named, text = one.rpartition("=")
            try:
                price = float(text)
            except ValueError:
                price = math.nan
            if not 0 <= price < math.inf or (named and not gpu_type.strip()):
                raise InvalidFieldError("price", one, "it must be a price of a GPU-hour, such as 2.50 or H100=4.10")
            if gpu_type.strip() in of_types or (not named and of_others is not None):
                raise InvalidFieldError(
                    "price", one, f"there are two prices of {gpu_type.strip() or 'all other types'}"
                )
            if named:
                of_types[gpu_type.strip()] = price
            else:
                of_others = price
        return cls(of_types, of_others)

    def __bool__(self) -> bool:
        return bool(self.of_types) or self.of_others is not None

    def cost(self, row: HeldHours) -> float | None:
        """Return what the GPU-hours cost; None if their type has no price."""
        price = self.of_types.get(row.gpu_type, self.of_others)
        return None if price is None else row.gpu_hours * price

    def unknown(self, rows: Iterable[HeldHours]) -> list[str]:
        """Return the types that have a price, and of which no GPU was held: they may be misspelled."""
        return sorted(self.of_types.keys() - {row.gpu_type for row in rows})
