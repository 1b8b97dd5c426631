"""A mail server for tests: SMTP as RFC 5321 has it, with STARTTLS and AUTH PLAIN, over real sockets."""

from __future__ import annotations

import base64
import re
import socketserver
import ssl
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Queue
from threading import Event, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class Received:
    """One mail: who sent it to whom, its bytes, and by whom, if the client logged in over TLS."""

    sender: str
    recipients: list[str]
    content: bytes
    user: str = ""
    secure: bool = False


@dataclass
class Server:
    """`answers` to DATA are taken in turn, and the last one again; "" is a server that says no more. So `farewell`."""

    answers: list[str] = field(default_factory=lambda: ["250 OK"])
    farewell: str = "221 bye"
    refused: tuple[str, ...] = ()
    certificate: Path | None = None
    password: str = ""
    port: int = 0
    got: Queue[Received] = field(default_factory=Queue)
    over: Event = field(default_factory=Event)

    def answer(self) -> str:
        """Return the next answer to the end of a mail."""
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class _Handler(socketserver.StreamRequestHandler):
    """One connection, line by line."""

    server: _TcpServer
    disable_nagle_algorithm = True

    def handle(self) -> None:
        self.shared = self.server.shared
        self.mail = Received("", [], b"")
        self.user, self.secure = "", False
        self.say("220 test ESMTP")
        while line := self.rfile.readline(2000):
            word, _, rest = line.decode("ascii").rstrip("\r\n").partition(" ")
            if word.upper() == "QUIT":
                self.say_or_hang(self.shared.farewell)
                return
            getattr(self, f"on_{word.lower()}", self.unknown)(rest)

    def say(self, *lines: str) -> None:
        self.wfile.write("".join(f"{line}\r\n" for line in lines).encode())

    def unknown(self, _: str) -> None:
        self.say("500 what?")

    def on_ehlo(self, _: str) -> None:
        offered = ["SIZE 1000000"]
        if self.shared.certificate and not self.secure:
            offered.append("STARTTLS")
        if self.shared.password:
            offered.append("AUTH PLAIN")
        self.say("250-test", *(f"250-{one}" for one in offered[:-1]), f"250 {offered[-1]}")

    def on_starttls(self, _: str) -> None:
        self.say("220 go on")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        assert self.shared.certificate is not None
        context.load_cert_chain(self.shared.certificate)
        self.connection = context.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", buffering=0)
        self.secure = True

    def on_auth(self, rest: str) -> None:
        _, user, password = base64.b64decode(rest.partition(" ")[2]).decode().split("\0")
        self.user = user if password == self.shared.password else ""
        self.say("235 in" if self.user else "535 no")

    def on_mail(self, rest: str) -> None:
        self.mail = Received(_address(rest), [], b"", self.user, self.secure)
        self.say("250 OK")

    def on_rcpt(self, rest: str) -> None:
        address = _address(rest)
        if address in self.shared.refused:
            self.say("550 nobody")
            return
        self.mail.recipients.append(address)
        self.say("250 OK")

    def on_rset(self, _: str) -> None:
        self.say("250 OK")

    def on_data(self, _: str) -> None:
        self.say("354 go on")
        lines = []
        while (line := self.rfile.readline()) not in (b".\r\n", b""):
            lines.append(line.removeprefix(b".") if line.startswith(b"..") else line)
        self.mail.content = b"".join(lines)
        self.shared.got.put(self.mail)
        self.say_or_hang(self.shared.answer())

    def say_or_hang(self, answer: str) -> None:
        if answer:
            self.say(answer)
        else:
            self.shared.over.wait(60)


class _TcpServer(socketserver.ThreadingTCPServer):
    daemon_threads = False

    def __init__(self, shared: Server) -> None:
        self.shared = shared
        super().__init__(("127.0.0.1", 0), _Handler)


def _address(rest: str) -> str:
    found = re.match(r"(?:FROM|TO):<([^>]*)>", rest, re.IGNORECASE)
    assert found is not None, rest
    return found[1]


@contextmanager
def receiving_mail(server: Server) -> Iterator[Server]:
    """Serve until the block ends; `server.port` is set then."""
    tcp = _TcpServer(server)
    server.port = tcp.server_address[1]
    thread = Thread(target=tcp.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        tcp.shutdown()
        thread.join()
        tcp.server_close()
