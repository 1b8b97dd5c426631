"""Sends a notification by mail, with the standard library's client of SMTP.

No text of a user reaches the mail's headers: the subject is made of names, the body is encoded, and recipients are
those of the administrator's file, in which `{user}` stands for the job's owner. An attempt runs in a thread, whose
connection is shut down when the time is over: a server that answers one byte a minute holds up nothing else.
"""

from __future__ import annotations

import asyncio
import re
import smtplib
import socket
import ssl
from contextlib import suppress
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate
from threading import Thread
from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.engine.notifications import Notification

LONGEST_SUBJECT: Final = 200
MOST_RECIPIENTS: Final = 50
USER: Final = "{user}"
_LOCAL: Final = r"[A-Za-z0-9][A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]*"
_ADDRESS: Final = re.compile(rf"{_LOCAL}@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", re.ASCII)
_SERVER: Final = re.compile(r"(?P<host>[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::(?P<port>[0-9]{1,5}))?", re.ASCII)
_PORTS: Final = {"starttls": 587, "tls": 465, "none": 25}
_UNPRINTABLE: Final = re.compile(r"[^\S ]+|[\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
FAREWELL_S: Final = 1.0
"""For how long the answer to QUIT is awaited: the server has taken the mail before."""


class Mail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part `mail` of an administrator's file. `server` is HOST:PORT, by default the port of its `tls`."""

    server: str
    sender: str
    to: tuple[str, ...]
    user: str = ""
    password: str = ""
    tls: Literal["starttls", "tls", "none"] = "starttls"

    def __post_init__(self) -> None:
        found = _SERVER.fullmatch(self.server)
        if found is None or not 0 < int(found["port"] or _PORTS[self.tls]) < 1 << 16:
            raise ValueError("mail.server must be a host with or without a port, such as smtp.example.org:587")
        if not _ADDRESS.fullmatch(self.sender):
            raise ValueError("mail.sender must be an address such as gpuquota@example.org")
        addresses = [address.replace(USER, "user") for address in self.to]
        if not 1 <= len(addresses) <= MOST_RECIPIENTS or not all(map(_ADDRESS.fullmatch, addresses)):
            raise ValueError(
                f"mail.to must be 1 to {MOST_RECIPIENTS} addresses, such as ops@example.org or {USER}@example.org"
            )
        if self.password and not self.user:
            raise ValueError("mail.password needs mail.user: without, the server is not logged in to")
        if self.password and self.tls == "none":
            raise ValueError("mail.password needs mail.tls starttls or tls: without, everybody on the way can read it")

    def recipients(self, user: str) -> tuple[str, ...]:
        """Return the addresses for a job of this user; without a user those of no one in particular."""
        known = bool(_NAME.fullmatch(user))
        return tuple(address.replace(USER, user) for address in self.to if known or USER not in address)

    def message(self, one: Notification, recipients: Sequence[str]) -> EmailMessage:
        """Return the mail; one that is sent again has the same id."""
        made = EmailMessage(policy=SMTP)
        made["From"], made["To"] = self.sender, ", ".join(recipients)
        made["Subject"] = _UNPRINTABLE.sub(" ", one.headline)[:LONGEST_SUBJECT]
        made["Date"] = formatdate(one.at)
        name = re.sub(r"[^A-Za-z0-9-]", "", one.uid)
        made["Message-ID"] = f"<{one.what}.{name}.{one.at:.3f}@{self.sender.rpartition('@')[2]}>"
        made["Auto-Submitted"] = "auto-generated"
        made.set_content(_UNPRINTABLE.sub(" ", one.text) + "\n")
        return made

    async def attempt(self, one: Notification, timeout_s: float) -> tuple[str, bool]:
        """Return the problem of one attempt ("": none) without the password, and whether another one is useless."""
        recipients = self.recipients(one.user)
        attempt = _Attempt(self, self.message(one, recipients), recipients, timeout_s)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[str, bool]] = loop.create_future()

        def report(result: tuple[str, bool]) -> None:
            if not done.done():
                done.set_result(result)

        def run() -> None:
            result = attempt.result()
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(report, result)

        Thread(target=run, name="mail", daemon=True).start()
        try:
            return await asyncio.wait_for(done, timeout_s)
        except TimeoutError:
            return attempt.outcome
        finally:
            attempt.stop()


class _Attempt:
    """One attempt in a thread of its own; `stop` may be called in another one."""

    def __init__(self, mail: Mail, message: EmailMessage, recipients: Sequence[str], timeout_s: float) -> None:
        self._mail, self._message, self._recipients, self._timeout_s = mail, message, recipients, timeout_s
        self._connection: socket.socket | None = None
        self._stopped = False
        self.outcome = ("it did not answer in time", False)
        """What is known if the attempt is stopped now: a mail that the server took is not sent again."""

    def stop(self) -> None:
        """End the attempt, if it goes on."""
        self._stopped = True
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def result(self) -> tuple[str, bool]:
        """Send the mail; return the problem, and whether another attempt is useless."""
        try:
            self._send()
        except smtplib.SMTPRecipientsRefused as error:
            codes = sorted({code for code, _ in error.recipients.values()})
            return f"it refused all recipients ({', '.join(map(str, codes))})", min(codes) >= 500
        except smtplib.SMTPResponseException as error:
            return f"it answered {error.smtp_code}", error.smtp_code >= 500
        except smtplib.SMTPNotSupportedError:
            return f"it does not offer what mail.tls {self._mail.tls} or mail.user needs", True
        except (smtplib.SMTPException, OSError, ValueError) as error:
            return f"it cannot be reached ({type(error).__name__})", False
        finally:
            if self._connection is not None:
                self._connection.close()
        return self.outcome

    def _send(self) -> None:
        context = ssl.create_default_context()
        server = self._connected(context)
        try:
            if self._mail.tls == "starttls":
                server.starttls(context=context)
            if self._mail.user:
                server.login(self._mail.user, self._mail.password)
            refused = server.send_message(self._message, self._mail.sender, list(self._recipients))
            problem = f"it refused {len(refused)} of {len(self._recipients)} recipients" if refused else ""
            self.outcome = (problem, True)
            with suppress(smtplib.SMTPException, OSError):
                if server.sock is not None:
                    server.sock.settimeout(FAREWELL_S)
                server.quit()
        finally:
            server.close()

    def _connected(self, context: ssl.SSLContext) -> smtplib.SMTP:
        """Return a connection; its socket is kept twice, since TLS replaces the one that the client has."""
        found = _SERVER.fullmatch(self._mail.server)
        assert found is not None
        host, port = found["host"].strip("[]"), int(found["port"] or _PORTS[self._mail.tls])
        attempt = self

        class Kept(smtplib.SMTP):
            def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
                made = socket.create_connection((host, port), timeout)
                attempt._connection = made.dup()
                if attempt._stopped:
                    attempt.stop()
                return context.wrap_socket(made, server_hostname=host) if attempt._mail.tls == "tls" else made

        return Kept(host, port, local_hostname=socket.gethostname(), timeout=self._timeout_s)
