"""What the scripts share: data, and the list of scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

SAMPLES, GLOBAL_BATCH, EPOCHS = 48, 12, 5
"""Four steps an epoch, twenty in all: enough for every change of size."""

fetched: list[int] = []
"""Indices of the samples that this process has read, in order."""


@dataclass(frozen=True)
class Script:
    """`refused`: a pattern of the message with which it ends alone; "": it trains. `modes`: reductions that it has.
    `first_step`: where it begins. `rehearsed`: a pattern of what a rehearsal says of one that trains alone, and goes
    wrong on a cluster; "": it goes right. `noted`: a pattern of the variables of the loop that it names in a note.
    """

    name: str
    body: Callable[..., Any]
    refused: str = ""
    modes: tuple[str, ...] = ("fast", "exact")
    first_step: int = 0
    rehearsed: str = ""
    noted: str = ""


SCRIPTS: dict[str, Script] = {}


def script(
    *, refused: str = "", modes: tuple[str, ...] = ("fast", "exact"), first_step: int = 0, rehearsed: str = ""
) -> Callable[[Any], Any]:
    """Enter a function into SCRIPTS under its name."""

    def enter(body: Any) -> Any:
        name = body.__name__
        assert name not in SCRIPTS
        SCRIPTS[name] = Script(name, body, refused, modes, first_step, rehearsed)
        return body

    return enter


class Samples(Dataset[Any]):
    """Items drawn by their index, which are written down as they are read."""

    def __init__(self, make: Callable[[torch.Generator], Any], samples: int = SAMPLES) -> None:
        self._items = [make(torch.Generator().manual_seed(index)) for index in range(samples)]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        fetched.append(index)
        return self._items[index]


def vector(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight features, and one of three classes."""
    return torch.randn(8, generator=generator), torch.randint(0, 3, (), generator=generator)


def image(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Three channels of 8 x 8, and one of three classes."""
    return torch.randn(3, 8, 8, generator=generator), torch.randint(0, 3, (), generator=generator)


def tokens(generator: torch.Generator) -> torch.Tensor:
    """Nine tokens of eleven."""
    return torch.randint(0, 11, (9,), generator=generator)


def vectors() -> DataLoader[Any]:
    """Return a shuffling loader."""
    return DataLoader(Samples(vector), batch_size=GLOBAL_BATCH, shuffle=True)


def images() -> DataLoader[Any]:
    """Return a shuffling loader."""
    return DataLoader(Samples(image), batch_size=GLOBAL_BATCH, shuffle=True)


def texts() -> DataLoader[Any]:
    """Return a shuffling loader."""
    return DataLoader(Samples(tokens), batch_size=GLOBAL_BATCH, shuffle=True)


def flat(modules: Any) -> dict[str, torch.Tensor]:
    """All values of one module or several, by name."""
    several: list[nn.Module] = list(modules) if isinstance(modules, list | tuple) else [modules]
    return {f"{number}.{name}": v for number, m in enumerate(several) for name, v in m.state_dict().items()}
