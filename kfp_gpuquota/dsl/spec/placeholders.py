"""KFP's placeholders that only a worker can fill in, because each worker writes to a place of its own.

KFP replaces `{{$...}}` anywhere in a step's command before the step starts. Those that stand for outputs are disguised
in the original command, so that they reach the worker; the inputs' are left to KFP. Replacing finished paths in the
finished command was rejected: an output's path may be a part of another one's, or of the author's text.
"""

from __future__ import annotations

import re
from typing import Final

EXECUTOR_INPUT: Final = "{{$}}"
DISGUISE: Final = "gpuquota"

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


def disguise(element: str) -> str:
    """One element of a command with the placeholders of outputs out of KFP's sight."""
    return _OUTPUTS.sub("{{" + DISGUISE, element)
