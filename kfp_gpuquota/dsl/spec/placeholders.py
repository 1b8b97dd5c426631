"""Masks KFP's placeholders for outputs, which only a worker can fill in: each worker writes to its own directory.

KFP replaces `{{$...}}` anywhere in a step's command before the step starts. The placeholders for outputs are masked in
the original command, so that they reach the worker unchanged; those for inputs are left to KFP. Replacing the final
paths in the finished command was rejected: an output's path may be a part of another path, or of the author's text.
"""

from __future__ import annotations

import re
from typing import Final

EXECUTOR_INPUT: Final = "{{$}}"
MASK: Final = "gpuquota"

_OUTPUTS = re.compile(
    r"""\{\{\$(?=
        \}\}
      | \.outputs\.output_file\}\}
      | \.outputMetadataUri\}\}
      | \.outputs\.parameters\['[^']+'\]\.output_file\}\}
      | \.outputs\.artifacts\['[^']+'\]\.(?:uri|path)\}\}
    )""",
    re.VERBOSE,
)


def masked(element: str) -> str:
    """Return one element of a command with the placeholders for outputs masked, so that KFP does not replace them."""
    return _OUTPUTS.sub("{{" + MASK, element)
