"""Which Ray cluster the daemon runs on, and how."""

from __future__ import annotations

from typing import Final

import msgspec

from kfp_gpuquota.api.validation import check_count, check_range
from kfp_gpuquota.errors import InvalidFieldError

MAX_SILENCE_S: Final = 3600.0


class RayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`address` as `ray.init` takes it: "auto" or HOST:PORT of the head's GCS.

    A worker whose node is cut off from the Ray cluster ends after `silence_s`, and is replaced only after that. An
    actor whose worker has ended keeps its GPUs for `warm_s`, so that the next worker there starts at once.
    `node_directory` is where workers' files are on each node (""; one below /tmp), `checkpoint_directory` where jobs'
    checkpoints are ("": in the daemon's directory): on several machines a directory that all of them share.
    `token_file` holds the token of a Ray cluster with token authentication. `port` is that of the membership service.
    """

    address: str
    silence_s: float = 60.0
    warm_s: float = 20.0
    node_directory: str = ""
    checkpoint_directory: str = ""
    token_file: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        host, separator, port = self.address.rpartition(":")
        if self.address != "auto" and not (host and separator and port.isdecimal() and "/" not in self.address):
            raise InvalidFieldError("ray", self.address, "it must be auto, or HOST:PORT as `ray start --head` shows it")
        check_range("silence_s", self.silence_s, 2, MAX_SILENCE_S, "s")
        check_range("warm_s", self.warm_s, 0, MAX_SILENCE_S, "s")
        check_count("port", self.port, 0, "", 65_535)
