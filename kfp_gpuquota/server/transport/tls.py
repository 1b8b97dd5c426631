"""TLS contexts from certificates and keys in memory: the ssl module itself reads files only."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator


def load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a certificate and its key, both PEM, for new handshakes. Raises ssl.SSLError."""
    with _file(certificate + b"\n" + key) as path:
        context.load_cert_chain(path)


@contextmanager
def _file(content: bytes) -> Iterator[str]:
    """Yield the path of a file that only this user can read: in memory on Linux, where no disk may be writable."""
    if sys.platform != "linux":
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            yield file.name
        return
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
