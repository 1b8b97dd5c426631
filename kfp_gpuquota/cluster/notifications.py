"""Sends what happens to jobs to webhooks (JSON as Slack and others read it) and by mail; on every kind of cluster.

    a commit of records ──► Notifications.notify ──► a bounded queue for each receiver ──► POST or SMTP, one at a time

A receiver is a file NAME.json of a folder that only an administrator can write: of the embedded cluster's directory, or
of a mounted Secret on Kubernetes. So no request and no object of a user chooses an address to which the cluster
connects, and addresses, which are credentials with Slack, are in no object that users read. They are in no log either.

Rejected: addresses in policies or annotations. Everybody reads policies, and a tenant's address would be requested from
within the administrator's network.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from contextlib import suppress
from functools import cached_property, partial
from random import Random
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.cluster.mail import Mail
from kfp_gpuquota.engine.notifications import Notification, Notified

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READ_EVERY_S: Final = 5.0
MOST_QUEUED: Final = 1000
MOST_RECEIVERS: Final = 100
LARGEST_FILE: Final = 65_536
LONGEST_TEXT: Final = 2000
FINAL_STATUSES: Final = range(300, 500)
"""Answers after which a message is not sent again, but for `TRY_AGAIN`: it, or the address, is wrong."""
TRY_AGAIN: Final = frozenset({408, 425, 429})

log = logging.getLogger(__name__)


class Receiver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the folder: a webhook or mail. Without `projects`, `users`, `labels` or `events` it gets those of all.

    `fields`: the message has the field `gpuquota` with the parts of the notification beside its `text`.
    """

    url: str = ""
    mail: Mail | None = None
    projects: frozenset[str] = frozenset()
    users: frozenset[str] = frozenset()
    labels: dict[str, str] = {}
    events: frozenset[Notified] = frozenset(Notified)
    fields: bool = False

    def __post_init__(self) -> None:
        if self.mail is not None and (self.url or self.fields):
            raise ValueError("mail excludes url and fields: write a file for each")
        if self.mail is None and not _is_web_address(self.url):
            raise ValueError("url must be a URL such as https://hooks.example.org/services/...")

    def wants(self, one: Notification) -> bool:
        """Return whether the receiver gets this notification."""
        return (
            one.what in self.events
            and (self.mail is None or bool(self.mail.recipients(one.user)))
            and (not self.projects or one.project in self.projects)
            and (not self.users or one.user in self.users)
            and self.labels.items() <= one.labels.items()
        )

    def message(self, one: Notification) -> dict[str, Any]:
        """Return the JSON of a notification."""
        message: dict[str, Any] = {"text": _escaped(one.text[:LONGEST_TEXT])}
        if self.fields:
            parts = one._asdict()
            message["gpuquota"] = {"event": parts.pop("what"), **parts}
            if not one.test:
                del message["gpuquota"]["test"]
        return message

    async def attempt(self, session: aiohttp.ClientSession, one: Notification, timeout_s: float) -> tuple[str, bool]:
        """Return the problem of one attempt ("": none) without an address, and whether another one is useless."""
        if self.mail is not None:
            return await self.mail.attempt(one, timeout_s)
        return await _posted(session, self.url, self.message(one))


class Limits(msgspec.Struct, frozen=True):
    """How long one attempt may take, the first and the longest pause, and for how long a message is tried, in s."""

    attempt_s: float = 10.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 300.0
    kept_s: float = 3600.0


class Notifications:
    """Sends notifications to the receivers of `folder`. `notify` returns at once, whatever they do.

    A message arrives once or more often, in the order of the notifications, or is dropped: after `limits.kept_s`, and
    the oldest one if more than `MOST_QUEUED` wait. Those that wait are in memory, and lost with the process. `private`:
    a file with a password that others than its owner may read is not used.
    """

    def __init__(self, folder: Path, limits: Limits | None = None, *, private: bool = False) -> None:
        self._folder, self._limits, self._private = folder, limits or Limits(), private
        self._receivers: dict[str, Receiver] = {}
        self._senders: dict[str, _Sender] = {}
        self._read_at = -READ_EVERY_S
        self._shown: dict[str, str] = {}

    def notify(self, one: Notification) -> None:
        """Send it soon to all receivers that want it."""
        self._read()
        for name, receiver in self._receivers.items():
            if receiver.wants(one):
                if name not in self._senders:
                    self._senders[name] = _Sender(name, partial(self._receiver, name), self._limits)
                self._senders[name].put(one)

    def _receiver(self, name: str) -> Receiver | None:
        self._read()
        return self._receivers.get(name)

    async def close(self) -> None:
        """Send nothing more."""
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            await sender.close()

    def _read(self) -> None:
        """Read the folder, at most every `READ_EVERY_S`: a file that cannot be used leaves all else in effect."""
        now = asyncio.get_running_loop().time()
        if now - self._read_at < READ_EVERY_S:
            return
        self._read_at, found, problems = now, dict[str, Receiver](), dict[str, str]()
        with suppress(OSError):  # there is no such folder: no receivers
            for path in sorted(self._folder.glob("*.json"))[:MOST_RECEIVERS]:
                try:
                    found[path.stem] = _decoded(path, private=self._private)
                except (OSError, ValueError, msgspec.DecodeError) as error:
                    problems[path.stem] = str(error)
                    if path.stem in self._receivers:  # it may be half written: what was read last stays in effect
                        found[path.stem] = self._receivers[path.stem]
        for name in problems.keys() - self._shown.keys():
            log.error("receiver %s cannot be used: %s", name, problems[name])
        for name in found.keys() - self._receivers.keys():
            log.info("receiver %s is used", name)
        self._receivers, self._shown = found, problems


def _decoded(path: Path, *, private: bool) -> Receiver:
    """Return the file's receiver. Raises OSError, ValueError, DecodeError, which quote no value."""
    with path.open("rb") as file:
        found = msgspec.json.decode(file.read(LARGEST_FILE), type=Receiver)
        mode = os.fstat(file.fileno()).st_mode
    if private and found.mail is not None and found.mail.password and mode & 0o077:
        raise ValueError(f"it has a password, and its mode {mode & 0o777:03o} lets others read it; chmod 600 it")
    return found


async def tried(folder: Path, user: str, at: float, *, private: bool) -> dict[str, str]:
    """Send a test message of `user` to each receiver, once; return the problem of each by its name ("": none)."""
    found = dict[str, str]()
    one = Notification(Notified.FAILED, "project", "job", "uid", user, {}, "if you read it, it works", at, test=True)
    timeout = aiohttp.ClientTimeout(total=Limits().attempt_s)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        for path in sorted(folder.glob("*.json")):
            try:
                receiver = _decoded(path, private=private)
            except (OSError, ValueError, msgspec.DecodeError) as error:
                found[path.stem] = f"the file cannot be used: {error}"
            else:
                found[path.stem], _ = await receiver.attempt(session, one, Limits().attempt_s)
    return found


class _Sender:
    """The queue of one receiver, and the task that empties it. `current()` is as its file says now; None: removed."""

    def __init__(self, name: str, current: Callable[[], Receiver | None], limits: Limits) -> None:
        self._name, self._current, self._limits = name, current, limits
        self._queue: deque[tuple[Notification, float]] = deque(maxlen=MOST_QUEUED)
        self._task: asyncio.Task[None] | None = None
        self._dropped = 0

    def put(self, one: Notification) -> None:
        loop = asyncio.get_running_loop()
        if len(self._queue) == MOST_QUEUED:
            self._drop("too many wait")
        self._queue.append((one, loop.time() + self._limits.kept_s))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._send_all())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def _drop(self, why: str) -> None:
        self._dropped += 1
        if self._dropped.bit_count() == 1:  # the 1st, 2nd, 4th ...
            log.warning("receiver %s: %d messages were dropped; the last one: %s", self._name, self._dropped, why)

    async def _send_all(self) -> None:
        while self._queue:  # looked at again after the session was closed, which takes a turn of the loop
            await self._send_some(aiohttp.ClientTimeout(total=self._limits.attempt_s))

    async def _send_some(self, timeout: aiohttp.ClientTimeout) -> None:
        async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
            while self._queue and (receiver := self._current()) is not None:
                one, until = self._queue.popleft()
                await self._send(session, receiver, one, until)
        if self._current() is None:
            self._queue.clear()

    async def _send(self, session: aiohttp.ClientSession, receiver: Receiver, one: Notification, until: float) -> None:
        """Send one message, again after each failure that may pass, until that time of the loop's clock."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(self._limits.first_pause_s, self._limits.longest_pause_s, jitter=self._jitter)
        tried_again = False
        while True:
            problem, final = await receiver.attempt(session, one, self._limits.attempt_s)
            if not problem:
                return
            pause_s = backoff.next_s()
            if final or loop.time() + pause_s > until:
                self._drop(problem)
                return
            log.log(
                logging.DEBUG if tried_again else logging.WARNING, "receiver %s: %s; trying again", self._name, problem
            )
            tried_again = True
            await asyncio.sleep(pause_s)
            if (current := self._current()) is None:
                return
            receiver = current

    @cached_property
    def _jitter(self) -> Random:
        return Random()  # noqa: S311 (pauses)


async def _posted(session: aiohttp.ClientSession, url: str, message: dict[str, Any]) -> tuple[str, bool]:
    try:
        async with session.post(url, json=message, allow_redirects=False) as answer:
            if answer.status < min(FINAL_STATUSES):
                return "", True
            final = answer.status in FINAL_STATUSES and answer.status not in TRY_AGAIN
            return f"it answered {answer.status}", final
    except TimeoutError:
        return "it did not answer in time", False
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return f"it cannot be reached ({type(error).__name__})", False


def _is_web_address(url: str) -> bool:
    """Return whether it is one; in no case an error, whose message could quote parts of the address."""
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _escaped(text: str) -> str:
    """Return the text as one line without what means links and mentions of people to Slack, and in Markdown.

    A space of no width does it in Markdown, as Mattermost and Rocket.Chat read it.
    """
    text = " ".join(text.split()).replace("@", "@\u200b").replace("](", "]\u200b(")
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
