"""A browser as far as HTTP goes: it enters by a link, keeps its cookie, and may send any header."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlencode, urlsplit

from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAM = {"Accept": "text/event-stream"}


@dataclass
class Answer:
    """Status, headers and body."""

    status: int
    headers: http.client.HTTPMessage
    text: str


class Visitor:
    """`base` begins each path; `cookie` is sent once the visitor has one."""

    def __init__(self, link: str) -> None:
        parts = urlsplit(link)
        assert parts.port is not None
        self.host, self.port = f"{parts.hostname}:{parts.port}", parts.port
        self.origin = f"http://{self.host}"
        self.base = parts.path.removesuffix("/enter")
        self.query = parts.query
        self.cookie = ""

    def enter(self) -> Answer:
        """Open the link, and keep the cookie."""
        answer = self.get(f"/enter?{self.query}")
        if given := answer.headers.get("Set-Cookie", ""):
            self.cookie = given.partition(";")[0]
        return answer

    def get(self, path: str, **headers: str) -> Answer:
        """Ask for a page."""
        return self.send("GET", path, None, headers)

    def post(self, path: str, form: dict[str, str], **headers: str) -> Answer:
        """Send a form as a page of ours would."""
        body = urlencode(form).encode()
        made = {"Origin": self.origin, "Content-Type": "application/x-www-form-urlencoded", **headers}
        return self.send("POST", path, body, made)

    def form_token(self, job_path: str) -> str:
        """The token in the forms of a job's page."""
        found = re.search(r'name="token" value="([^"]+)"', self.get(job_path).text)
        assert found is not None
        return found[1]

    def send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        """One request on a connection of its own."""
        with contextlib.closing(self._begun(method, path, body, headers)) as connection:
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read().decode())

    def stream(self, path: str, last_id: str = "") -> Stream:
        """Open a page's stream."""
        headers = {**STREAM, **({"Last-Event-ID": last_id} if last_id else {})}
        connection = self._begun("GET", path, None, headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        return Stream(connection, answer)

    def _begun(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        sent = {"Host": self.host, **({"Cookie": self.cookie} if self.cookie else {}), **_named(headers)}
        if body is not None:
            sent["Content-Length"] = str(len(body))
        connection.putrequest(method, self.base + path, skip_host=True, skip_accept_encoding=True)
        for name, value in sent.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders(body)
        return connection


@dataclass
class Message:
    """One event: its kind, its id, and its data decoded."""

    kind: str
    id: str
    data: Any


@dataclass
class Stream:
    """An open stream of events."""

    connection: http.client.HTTPConnection
    answer: http.client.HTTPResponse
    seen: list[Message] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.answer.close()
        self.connection.close()

    def messages(self) -> Iterator[Message]:
        """Each event as it comes."""
        found: dict[str, str] = {}
        while line := self.answer.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if line != b"\n":
                found[name] = value
            elif "event" in found:
                data = json.loads(found["data"]) if found.get("data") else None
                message = Message(found["event"], found.get("id", ""), data)
                self.seen.append(message)
                found = {}
                yield message

    def until(self, text: str) -> Message:
        """The first message that contains the text."""
        return next(message for message in self.messages() if text in json.dumps(message.data))


class Tags(HTMLParser):
    """The tags and attributes of a page, and all its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def _named(headers: dict[str, str]) -> dict[str, str]:
    """Header names as keyword arguments: `sec_fetch_site`."""
    return {name.replace("_", "-"): value for name, value in headers.items()}
