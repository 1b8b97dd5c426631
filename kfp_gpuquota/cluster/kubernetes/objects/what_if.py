"""What the web page asks the leading controller, and where. The answer is an `api.wire.Outlook`.

A field of a newer page is ignored by an older controller, and one of a newer controller by an older page.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kfp_gpuquota.api import Kind

PATH: Final = "/what-if"
AUDIENCE: Final = "gpuquota-controller"
"""Tokens for the controller have this audience: the API server itself accepts no such token."""
AUTHORITY: Final = "gpuquota-authority"
"""The ConfigMap in the controller's namespace with the certificate (ca.crt) that signs the controller's."""
AUTHORITY_FILE: Final = "ca.crt"
MAX_GPUS: Final = 100_000
MAX_NAME: Final = 253
MAX_VISIBLE: Final = 10_000
MAX_BODY_BYTES: Final = 1 << 20

Gpus = Annotated[int, msgspec.Meta(ge=1, le=MAX_GPUS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What if a job of this namespace asked for so many GPUs? `visible`: namespaces whose jobs the answer names."""

    namespace: Name
    gpus: Gpus
    min_gpus: Gpus | None = None
    kind: Kind = Kind.TRAIN
    visible: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_VISIBLE)] | None = None
    """None: those of all namespaces."""
