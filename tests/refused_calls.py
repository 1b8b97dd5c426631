"""Programs whose kernel refuses some system calls: `python refused_calls.py NUMBER=ERRNO,... PROGRAM ARGUMENT...`.

As an older kernel, a container's filter or a file system without that feature does. The filter is the kernel's own
(seccomp), and holds for all that the program starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

NUMBERS: Final = {
    "x86_64": {"flock": 73, "fallocate": 285, "keyctl": 250, "pidfd_send_signal": 424, "pidfd_open": 434},
    "aarch64": {"flock": 32, "fallocate": 47, "keyctl": 219, "pidfd_send_signal": 424, "pidfd_open": 434},
}[platform.machine()]
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # of the number, to a number, what to do
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2


def refusing(calls: Mapping[str, int], *command: str) -> tuple[str, ...]:
    """Return the command that runs `command` without these calls: name and error number of each."""
    rules = ",".join(f"{NUMBERS[name]}={error}" for name, error in calls.items())
    return sys.executable, str(Path(__file__)), rules, *command


def refuse(calls: Mapping[int, int]) -> None:
    """Refuse the calls of these numbers in this process, and in all that it starts."""
    program = [(_LOAD, 0, 0, 0)]
    for number, error in calls.items():
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | error)]
    program.append((_RETURN, 0, 0, _ALLOW))
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    whole = struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, None), (_SECCOMP, _FILTER, whole)):
        if libc.prctl(*arguments, None, None):
            raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


if __name__ == "__main__":
    pairs = (pair.partition("=") for pair in sys.argv[1].split(",") if pair)
    refuse({int(number): int(error) for number, _, error in pairs})
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as failed:
        sys.exit(f"{sys.argv[2]}: {errno.errorcode[failed.errno or 0]}")
