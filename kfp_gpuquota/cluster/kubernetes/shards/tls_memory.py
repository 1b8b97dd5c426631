"""Reduces the memory of TLS connections in asyncio."""

from __future__ import annotations

import asyncio.sslproto
import logging
from typing import Final

BUFFER_BYTES: Final = 16 << 10
"""Bytes of a TLS record, the most that OpenSSL decrypts at once."""

log = logging.getLogger(__name__)


def bound_tls_memory() -> None:
    """Make each TLS connection that is accepted from now on read into a buffer of one record instead of 256 KiB.

    A worker sends some hundred bytes a second. The buffer's size is `SSLProtocol.max_size`, a class attribute that
    asyncio has no parameter for (CPython 3.11 to 3.14). Without it connections work, and need more memory.
    """
    protocol = asyncio.sslproto.SSLProtocol
    if not isinstance(getattr(protocol, "max_size", None), int):
        log.warning("asyncio's TLS buffers cannot be bounded: this Python has no SSLProtocol.max_size")
        return
    protocol.max_size = BUFFER_BYTES
