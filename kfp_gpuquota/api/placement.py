"""Where a worker runs, or is to run."""

from __future__ import annotations

import msgspec


class Placement(msgspec.Struct, frozen=True):
    """The node and the device indices of one worker. `part` is the part of the job that it belongs to."""

    node: str
    devices: tuple[int, ...]
    part: str = ""
