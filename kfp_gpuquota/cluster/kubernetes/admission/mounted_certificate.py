"""The webhook's certificate where another program maintains it: cert-manager, or an administrator.

Its Secret is mounted into the pod, and its files change when it is renewed. Neither the Secret nor the caBundle of the
webhook's configuration is written here: their owner does that.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.certificates import KeyPair, expires_at
from kfp_gpuquota.cluster.kubernetes.admission.server import REFRESH_EVERY_S
from kfp_gpuquota.errors import RunError
from kfp_gpuquota.server.transport.tls import load_pair

if TYPE_CHECKING:
    from pathlib import Path

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"

log = logging.getLogger(__name__)


class MountedCertificate:
    """Loads `tls.crt` and `tls.key` of a directory into a TLS context, again whenever they have changed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._loaded: KeyPair | None = None
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    @property
    def expires_at(self) -> float:
        """Return when the loaded certificate expires, in seconds since 1970; 0 before the first one is loaded."""
        return expires_at(self._loaded.certificate) if self._loaded else 0.0

    def refresh(self) -> None:
        """Load the files if they have changed. Raises RunError if they cannot be used."""
        try:
            pair = KeyPair(
                certificate=(self._directory / CERTIFICATE).read_bytes(), key=(self._directory / KEY).read_bytes()
            )
            if pair != self._loaded:
                load_pair(self.context, pair.certificate, pair.key)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise RunError(
                f"--cert-dir {self._directory} has no usable {CERTIFICATE} and {KEY} ({error}); see the Secret that is "
                "mounted there"
            ) from error
        self._loaded = pair

    async def keep(self) -> None:
        """Refresh until cancelled; the last certificate that could be loaded stays in use."""
        while True:
            await asyncio.sleep(REFRESH_EVERY_S)
            try:
                self.refresh()
            except RunError as error:
                log.warning("%s", error.message)
