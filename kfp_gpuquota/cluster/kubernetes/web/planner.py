"""Asks the leading controller what a job would change, with a token of this process's account that is for it only.

The token, and the certificate by which the controller is verified, are files that the kubelet renews: both are read
again for each question.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from kfp_gpuquota.api.wire import Outlook
from kfp_gpuquota.cluster.kubernetes.objects.what_if import AUTHORITY, AUTHORITY_FILE, PATH, Question
from kfp_gpuquota.errors import ClusterUnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKEN_FILE: Final = "token"  # noqa: S105 (a file's name)
CONNECT_WITHIN_S: Final = 3.0
ANSWERED_WITHIN_S: Final = 30.0
AT_ONCE: Final = 8
MAX_SENTENCE: Final = 500
_UPGRADE: Final = "the controller must be upgraded to this page's version, and run with --what-if-port"

log = logging.getLogger(__name__)


class Planner:
    """`url` is the leader's, `files` a folder with `token` and `ca.crt`; an empty `url`: nobody is asked."""

    def __init__(self, url: str, files: str) -> None:
        self._url, self._files = url.rstrip("/"), Path(files)
        self._free = asyncio.Semaphore(AT_ONCE)

    async def ask(self, question: Question) -> Outlook:
        """Return the answer. Raises UsageError for a question that is refused, ClusterUnavailableError without one."""
        try:
            async with asyncio.timeout(ANSWERED_WITHIN_S), self._free:
                return await self._asked(question)
        except TimeoutError:
            raise ClusterUnavailableError("No answer in time; ask again in a moment.") from None
        except msgspec.DecodeError as error:
            log.error("what-if: the controller's answer cannot be read: %s", error)
            raise ClusterUnavailableError(f"The controller's answer cannot be read: {_UPGRADE}.") from None

    async def _asked(self, question: Question) -> Outlook:
        tls, token = await asyncio.to_thread(self._credentials)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_WITHIN_S)
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        body = msgspec.json.encode(question)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(
                    f"{self._url}{PATH}", data=body, headers=headers, ssl=tls, allow_redirects=False
                ) as response,
            ):
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            log.warning("what-if: %s does not answer: %s", self._url, error or type(error).__name__)
            raise ClusterUnavailableError(
                "No controller answers at the moment: another one takes over within seconds, so ask again in a moment. "
                f"If this stays, {_UPGRADE}."
            ) from None
        return _outlook(response.status, content)

    def _credentials(self) -> tuple[ssl.SSLContext, str]:
        """Return how the controller is verified, and the token. Raises ClusterUnavailableError."""
        try:
            authority = (self._files / AUTHORITY_FILE).read_text()
        except OSError as error:
            log.warning("what-if: %s", error)
            raise ClusterUnavailableError(
                f"The controller has not published its certificate (ConfigMap {AUTHORITY}): {_UPGRADE}."
            ) from None
        try:
            token = (self._files / TOKEN_FILE).read_text().strip()
            return ssl.create_default_context(cadata=authority), token
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            log.error("what-if: %s", error)
            raise ClusterUnavailableError("The page has no credentials for the controller; its log says why.") from None


def _outlook(status: int, content: bytes) -> Outlook:
    """Return the answer's content. Raises UsageError and ClusterUnavailableError with the controller's sentence."""
    sentence = content[:MAX_SENTENCE].decode(errors="replace").strip()
    if status == 200:
        return msgspec.json.decode(content, type=Outlook)
    log.warning("what-if: the controller answers %d: %s", status, sentence)
    errors: Mapping[int, Exception] = {
        400: UsageError(sentence),
        422: UsageError(sentence),
        503: ClusterUnavailableError(f"No answer: {sentence}."),
        404: ClusterUnavailableError(f"The controller does not answer what-ifs: {_UPGRADE}."),
    }
    raise errors.get(status) or ClusterUnavailableError(f"The controller refuses the page's question ({status}).")
