"""Whether a checkpoint file is this job's own, as far as the file system records it.

Objects that only pickle can make are a program for their reader. They are decoded only from files that this user, root
or the owner of the folder has written, and that not everybody may write to. Jobs that share a volume and run as one
user cannot be told apart: there a job's files are as trusted as its volume.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io import BufferedReader


def is_own(file: BufferedReader) -> bool:
    """Return whether objects of this open file may be unpickled."""
    facts, folder = os.fstat(file.fileno()), Path(file.name).parent.stat()
    owners = {os.geteuid(), 0}
    if not folder.st_mode & stat.S_IWOTH or folder.st_mode & stat.S_ISVTX:
        owners.add(folder.st_uid)  # the volume of another user's number, as NFS shows root's files
    return facts.st_uid in owners and not facts.st_mode & stat.S_IWOTH
