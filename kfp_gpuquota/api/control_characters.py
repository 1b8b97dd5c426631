"""Control characters in text of users, shown as escapes: a terminal or a browser would obey them."""

from __future__ import annotations

import re
from typing import Final

_OBEYED: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters of ASCII and of Latin-1, and those that change the direction of text; not tab and newline."""


def last_line(text: str, longest: int = 500) -> str:
    """Return the last line that is not empty, escaped; of a longer one than `longest` characters its beginning."""
    lines = [line for line in text.splitlines() if line.strip()]
    shown = visible(lines[-1].strip()) if lines else ""
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def visible(text: str) -> str:
    """Return the text with every such character as an escape, such as \\x1b or \\u202e."""
    return _OBEYED.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
