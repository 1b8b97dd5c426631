"""Notifications reach people by mail, from a real SMTP server on; no text of a user becomes a header or a recipient."""

from __future__ import annotations

import asyncio
import email
import json
import threading
import time
from email.policy import SMTP
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.cluster.certificates import maintained
from kfp_gpuquota.cluster.mail import Mail
from kfp_gpuquota.engine.notifications import Notification, Notified
from tests.cluster.test_notifications import HASTY, QUICK, SECRET, in_loop, notifying, one
from tests.polling import TIMEOUT_S, until
from tests.smtp_receiver import Received, Server, receiving_mail

if TYPE_CHECKING:
    from email.message import EmailMessage
    from pathlib import Path


def written(folder: Path, receiver: Server, **more: object) -> None:
    """Write the file of a receiver that gets all."""
    mail: dict[str, object] = {
        "server": f"127.0.0.1:{receiver.port}",
        "sender": "gpuquota@example.org",
        "to": ["ops@example.org"],
    }
    mail |= {"tls": "none", **more}
    path = folder / "ops.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps({"mail": mail}))


async def received(server: Server) -> Received:
    return await asyncio.to_thread(server.got.get, timeout=TIMEOUT_S)


def parsed(mail: Received) -> EmailMessage:
    return email.message_from_bytes(mail.content, policy=SMTP)


def body_of(message: EmailMessage) -> str:
    return str(message.get_content()).strip()


async def sent(folder: Path, server: Server, **more: object) -> Received:
    """Return what the server gets of a notification about a failed job."""
    written(folder, server, **more)
    async with notifying(folder) as made:
        made.notify(one("train7", user="ann"))
        return await received(server)


@in_loop
async def test_a_mail_says_what_happened_to_which_job(tmp_path: Path) -> None:
    with receiving_mail(Server()) as server:
        mail = await sent(tmp_path, server, to=["ops@example.org", "{user}@example.org"])
    message = parsed(mail)
    assert mail.sender == "gpuquota@example.org"
    assert mail.recipients == ["ops@example.org", "ann@example.org"]
    assert message["Subject"] == "Job train7 of project team-a failed"
    assert message["To"] == "ops@example.org, ann@example.org"
    assert body_of(message) == "Job train7 of project team-a failed: it ended with exit code 1"
    assert message["Message-ID"] == "<failed.uid-train7.1000.000@example.org>"
    assert message["Auto-Submitted"] == "auto-generated"


HOSTILE = st.text(st.sampled_from('ab.\r\n\t\0:<>@,;"\\ é漢\u2028\x85\x1b'), max_size=40)
MAIL = Mail(server="mail.example.org", sender="gpuquota@example.org", to=("ops@example.org", "{user}@example.org"))


@given(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
def test_no_text_becomes_a_header_or_a_recipient(job: str, project: str, kind: str, why: str, user: str) -> None:
    hostile = Notification(Notified.FAILED, project, job, f"{job}{why}", user, {job: why}, why, 1000.0, kind)
    recipients = MAIL.recipients(user)
    assert recipients[0] == "ops@example.org"
    assert all(recipient.count("@") == 1 and recipient.endswith("@example.org") for recipient in recipients)
    sent_bytes = MAIL.message(hostile, recipients).as_bytes()
    head, _, _ = sent_bytes.partition(b"\r\n\r\n")
    message: EmailMessage = email.message_from_bytes(sent_bytes, policy=SMTP)
    wanted = ["From", "To", "Subject", "Date", "Message-ID", "Auto-Submitted"]
    assert sorted(message.keys()) == sorted([*wanted, "Content-Type", "Content-Transfer-Encoding", "MIME-Version"])
    assert b"\n" not in head.replace(b"\r\n", b"")
    assert b"\r" not in head.replace(b"\r\n", b"")
    assert message["To"] == ", ".join(recipients)
    assert "\n" not in message["Subject"]
    assert not message.is_multipart()


@in_loop
async def test_a_hostile_reason_reaches_a_real_server_as_text(tmp_path: Path) -> None:
    hostile = one("train7")._replace(
        why="bad\r\n.\r\nMAIL FROM:<x@y>\nBcc: all@example.org\n\n<b>\x1b[31m", kind="Job\r\nX: y"
    )
    with receiving_mail(Server()) as server:
        written(tmp_path, server)
        async with notifying(tmp_path) as notifications_:
            notifications_.notify(hostile)
            mail = await received(server)
        assert server.got.empty()
    message = parsed(mail)
    assert mail.recipients == ["ops@example.org"]
    assert message["Bcc"] is None
    assert message["X"] is None
    assert "MAIL FROM:<x@y> Bcc: all@example.org <b> [31m" in body_of(message)


@in_loop
async def test_the_password_is_sent_over_tls_to_the_server_of_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    material = maintained(None, ["127.0.0.1"], time.time())
    (tmp_path / "ca.pem").write_bytes(material.authority.certificate)
    (tmp_path / "server.pem").write_bytes(material.serving.certificate + material.serving.key)
    login = {"tls": "starttls", "user": "gpuquota", "password": SECRET}
    with receiving_mail(Server(certificate=tmp_path / "server.pem", password=SECRET)) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        mail = await sent(tmp_path, server, **login)
        assert (mail.user, mail.secure) == ("gpuquota", True)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
        problem = await _problem(server, **login)
        assert problem == ("it cannot be reached (SSLCertVerificationError)", False)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert await _problem(server, **{**login, "password": "wrong"}) == ("it answered 535", True)
    with receiving_mail(Server()) as server:
        problem = await _problem(server, **login)
        assert problem == ("it does not offer what mail.tls starttls or mail.user needs", True)
        assert server.got.empty()


async def _problem(server: Server, **more: object) -> tuple[str, bool]:
    given = {"server": f"127.0.0.1:{server.port}", "sender": "a@b", "to": ("ops@example.org",), "tls": "none", **more}
    return await Mail(**given).attempt(one("a"), TIMEOUT_S)  # type: ignore[arg-type]


@in_loop
async def test_a_server_that_is_busy_gets_the_same_mail_again(tmp_path: Path) -> None:
    with receiving_mail(Server(answers=["451 later", "421 closing", "250 OK"])) as server:
        written(tmp_path, server)
        async with notifying(tmp_path, QUICK) as notifications_:
            for name in "ab":
                notifications_.notify(one(name))
            ids = [parsed(await received(server))["Message-ID"] for _ in range(4)]
    assert [each.split(".")[1] for each in ids] == ["uid-a"] * 3 + ["uid-b"]
    assert len(set(ids)) == 2


@in_loop
async def test_what_a_server_refuses_is_dropped_and_named_without_its_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving_mail(Server(answers=[f"554 {SECRET}", "250 OK"], refused=("gone@example.org",))) as server:
        written(tmp_path, server, to=["ops@example.org", "gone@example.org"])
        async with notifying(tmp_path, QUICK) as notifications_:
            for name in "ab":
                notifications_.notify(one(name))
            for _ in range(2):
                await received(server)
        assert await _problem(server, to=("gone@example.org",)) == ("it refused all recipients (550)", True)
        both = await _problem(server, to=("gone@example.org", "ops@example.org"))
        assert both == ("it refused 1 of 2 recipients", True)
    assert "receiver ops: 1 messages were dropped; the last one: it answered 554" in caplog.text
    assert SECRET not in caplog.text


@in_loop
async def test_a_server_that_hangs_ends_neither_other_mail_nor_the_process(tmp_path: Path) -> None:
    with receiving_mail(Server(answers=["", "250 OK"])) as server:
        written(tmp_path, server)
        async with notifying(tmp_path, HASTY) as notifications_:
            notifications_.notify(one("a"))
            assert [parsed(await received(server))["Subject"].split()[1] for _ in range(2)] == ["a", "a"]
    until(lambda: not any(thread.name == "mail" for thread in threading.enumerate()))


@pytest.mark.parametrize("farewell", ["", "421 too many connections", "554 no"])
@in_loop
async def test_a_mail_that_the_server_took_is_not_sent_again_however_the_connection_ends(
    tmp_path: Path, farewell: str, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving_mail(Server(farewell=farewell)) as server:
        written(tmp_path, server)
        async with notifying(tmp_path, QUICK) as notifications_:
            for name in "ab":
                notifications_.notify(one(name))
            got = [parsed(await received(server))["Subject"].split()[1] for _ in range(2)]
            assert got == ["a", "b"]
    assert "dropped" not in caplog.text


@in_loop
async def test_a_text_that_no_mail_can_have_stops_no_other_mail(tmp_path: Path) -> None:
    with receiving_mail(Server()) as server:
        written(tmp_path, server)
        async with notifying(tmp_path, QUICK) as notifications_:
            notifications_.notify(one("a")._replace(why="no file \udcff", job="a\udcff"))
            notifications_.notify(one("b"))
            first, second = [parsed(await received(server)) for _ in range(2)]
    assert "no file" in body_of(first)
    assert second["Subject"] == "Job b of project team-a failed"


@in_loop
async def test_a_job_without_a_user_is_mailed_only_to_those_who_get_all(tmp_path: Path) -> None:
    with receiving_mail(Server()) as server:
        written(tmp_path, server, to=["{user}@example.org"])
        async with notifying(tmp_path) as notifications_:
            notifications_.notify(one("of-nobody"))
            notifications_.notify(one("of-ann", user="ann"))
            mail = await received(server)
        assert server.got.empty()
    assert mail.recipients == ["ann@example.org"]
    assert "of-ann" in parsed(mail)["Subject"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"server": f"smtp://me:{SECRET}@h"}, "mail.server must be a host"),
        ({"server": "h:65536"}, "mail.server must be a host"),
        ({"server": "h:0"}, "mail.server must be a host"),
        ({"password": SECRET, "tls": "tls"}, "mail.password needs mail.user"),
        ({"sender": "a@b\r\nBcc: x@y"}, "mail.sender must be an address"),
        ({"to": []}, "mail.to must be 1 to 50 addresses"),
        ({"to": ["a@b", "c@d, e@f"]}, "mail.to must be 1 to 50 addresses"),
        ({"user": "u", "password": SECRET}, "mail.password needs mail.tls starttls or tls"),
        ({"tls": "ssl"}, "Invalid enum value"),
        ({"passwort": SECRET}, "unknown field"),
    ],
)
@in_loop
async def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, more: dict[str, object], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, Server(port=25), **more)
    async with notifying(tmp_path) as notifications_:
        notifications_.notify(one("a"))
        assert not notifications_._senders
    assert "receiver ops cannot be used: " in caplog.text
    assert words in caplog.text
    assert SECRET not in caplog.text


@in_loop
async def test_a_password_that_others_may_read_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path, Server(port=25), tls="starttls", user="u", password=SECRET)
    (tmp_path / "ops.json").chmod(0o640)
    async with notifying(tmp_path, private=True) as notifications_:
        notifications_.notify(one("a"))
        assert not notifications_._senders
    assert "its mode 640 lets others read it; chmod 600 it" in caplog.text
