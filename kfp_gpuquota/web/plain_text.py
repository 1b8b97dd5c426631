"""A job's log for the page: colors of a terminal left out, other control characters shown as escapes. Pure."""

from __future__ import annotations

import re
from typing import Final

from kfp_gpuquota.api.control_characters import visible

_COLOR: Final = re.compile("\x1b\\[[0-9;:]{0,40}[mK]")


def plain_log(raw: bytes) -> str:
    """Return a log's text: without colors, and of lines that were overwritten (progress bars) what stood last."""
    text = _COLOR.sub("", raw.decode(errors="replace")).replace("\r\n", "\n")
    return "\n".join(visible(line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n"))
