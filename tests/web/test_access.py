"""Only browsers that `gpuquota ui` let in see the page, and only its own forms change anything."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.local.start import await_stop, start
from kfp_gpuquota.web.access import LINK_VALID_S, Access
from tests.cli.conftest import Cli
from tests.web.conftest import visitor_of
from tests.web.visitor import Tags, Visitor

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

ADDRESSES = ("/", "/teams", "/queue", "/pipelines", "/nodes", "/jobs/team-a/train", "/jobs/team-a/train/log")
JOB = "/jobs/team-a/train"


def listening(pid: int) -> set[str]:
    """Addresses of the TCP ports that a process listens on."""
    inodes = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def test_no_port_is_open_before_the_page_is_asked_for_and_then_one_on_loopback(
    embedded_cluster: EmbeddedCluster,
) -> None:
    pid = embedded_cluster.client.health().pid
    assert listening(pid) == set()
    visitor_of(embedded_cluster)
    assert listening(pid) == {"0100007F"}
    assert embedded_cluster.home.page_file.stat().st_mode & 0o777 == 0o600


def test_a_link_opens_once_and_its_cookie_is_for_this_page_only(embedded_cluster: EmbeddedCluster) -> None:
    visitor = visitor_of(embedded_cluster)
    entered = visitor.enter()
    attributes = {part.strip().lower() for part in entered.headers["Set-Cookie"].split(";")[1:]}
    assert attributes == {"httponly", "samesite=strict", f"path={visitor.base}".lower()}
    assert visitor.get("/teams").status == 200
    second = Visitor(f"{visitor.origin}{visitor.base}/enter?{visitor.query}")
    assert second.enter().status == 401
    assert not second.cookie


def test_a_link_is_void_after_two_minutes_and_a_cookie_is_one_servers() -> None:
    now = 0.0
    access, other = Access(lambda: now), Access(lambda: now)
    late, early = access.new_link(), access.new_link()
    cookie = access.enter(early)
    assert cookie is not None
    assert access.admits(cookie)
    assert not other.admits(cookie)
    assert access.form_token(cookie) != other.form_token(cookie)
    now = LINK_VALID_S
    assert access.enter(late) is None


def test_without_the_cookie_nothing_is_shown(embedded_cluster: EmbeddedCluster, visitor: Visitor) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.submit("train")
    token = visitor.form_token(JOB)
    for cookie in ("", "gpuquota=wrong"):
        visitor.cookie = cookie
        for address in ADDRESSES:
            assert visitor.get(address).status == 401, address
            assert visitor.get(address, Accept="text/event-stream").status == 401, address
        assert visitor.post(f"{JOB}/delete", {"token": token}).status == 401
    assert embedded_cluster.job("train").status.phase != "Cancelled"


def test_a_foreign_host_and_a_foreign_origin_are_refused(embedded_cluster: EmbeddedCluster, visitor: Visitor) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.submit("train")
    form = {"token": visitor.form_token(JOB)}
    for host in ("evil.example", f"evil.example:{visitor.port}", "127.0.0.1"):
        assert visitor.get("/teams", Host=host).status == 421, host
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{visitor.port + 1}", ""):
        assert visitor.post(f"{JOB}/suspend", form, Origin=origin).status == 403, origin
    assert visitor.get("/teams", sec_fetch_site="cross-site", sec_fetch_mode="no-cors").status == 403
    assert visitor.get("/teams", Origin="http://evil.example").status == 403
    for token in ({}, {"token": "wrong"}):
        assert visitor.post(f"{JOB}/suspend", token).status == 403
    assert embedded_cluster.job("train").status.phase != "Suspended"
    assert visitor.post(f"{JOB}/suspend", form).status == 303
    embedded_cluster.wait_for_phase("train", "Suspended")


def test_every_page_forbids_scripts_and_styles_but_its_own(embedded_cluster: EmbeddedCluster, visitor: Visitor) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.submit("train")
    for address in (*ADDRESSES[1:], "/queue?what-if=1&project=team-a&gpus=1", "/nowhere", "/jobs/team-a/none"):
        answer = visitor.get(address)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["Referrer-Policy"] == "same-origin"
        for tag, attributes in Tags(answer.text).tags:
            assert tag != "style"
            assert tag != "script" or attributes.get("src", "").startswith(visitor.base + "/static/")  # type: ignore[union-attr]
            assert not [name for name in attributes if name == "style" or name.startswith("on")], (tag, attributes)


def test_a_cookie_ends_with_its_daemon_and_an_open_page_goes_on_after_a_new_link(
    embedded_cluster: EmbeddedCluster, visitor: Visitor
) -> None:
    embedded_cluster.project("team-a", 1)
    with visitor.stream("/queue") as stream:
        embedded_cluster.submit("first")
        last = stream.until("first").id
    embedded_cluster.client.stop_cluster()
    await_stop(embedded_cluster.home)
    with pytest.raises(OSError, match="refused"):
        visitor.get("/queue")
    start(embedded_cluster.home)
    embedded_cluster.submit("second")
    again = visitor_of(embedded_cluster)
    assert (again.base, again.port) == (visitor.base, visitor.port)
    assert visitor.get("/queue").status == 401
    again.enter()
    with again.stream("/queue", last) as stream:
        assert "second" in json.dumps(next(stream.messages()).data)


def test_actions_are_in_the_audit_log(embedded_cluster: EmbeddedCluster, visitor: Visitor) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.submit("train")
    form = {"token": visitor.form_token(JOB)}
    visitor.post(f"{JOB}/resume", form)
    visitor.post(f"{JOB}/update", {**form, "max_gpus": "0"})
    visitor.post(f"{JOB}/suspend", {})
    visitor.cookie = ""
    visitor.post(f"{JOB}/delete", form)
    lines = [json.loads(line) for line in embedded_cluster.home.audit_file.read_text().splitlines()]
    asked = [one for one in lines if JOB in one["request"]]
    assert [one["status"] for one in asked] == [303, 422, 403, 401]
    assert [one["uid"] for one in asked] == [os.geteuid()] * 3 + [-1]
    assert re.search("max_gpus is 0", asked[1]["error"])


def test_the_command_gives_the_link_to_a_browser_without_showing_it_to_other_users(
    embedded_cluster: EmbeddedCluster,
) -> None:
    cli = Cli(embedded_cluster)
    printed = cli("ui --no-browser").split()[-1]
    assert Visitor(printed).enter().status == 200
    seen = embedded_cluster.home.root / "seen"
    cli.environment["BROWSER"] = f"sh -c 'echo \"$0\" > {seen}' %s"
    assert "/enter" not in cli("ui")
    file = embedded_cluster.home.root / "open-page.html"
    assert seen.read_text().strip() == file.as_uri()
    assert file.stat().st_mode & 0o777 == 0o600
    link = re.search(r'url=([^"]+)"', file.read_text())
    assert link is not None
    assert Visitor(link[1]).enter().status == 200
    assert cli.run("--context", "somewhere", "ui").code == 2


def test_the_page_comes_back_on_another_port_where_its_own_is_taken(embedded_cluster: EmbeddedCluster) -> None:
    first = visitor_of(embedded_cluster)
    embedded_cluster.client.stop_cluster()
    await_stop(embedded_cluster.home)
    with socket.create_server(("127.0.0.1", first.port)):
        start(embedded_cluster.home)
        second = visitor_of(embedded_cluster)
        assert second.port != first.port
        assert second.enter().status == 200


def test_a_head_request_does_not_use_a_link_up(embedded_cluster: EmbeddedCluster) -> None:
    """As link previews and other programs send one before a browser opens it."""
    visitor = visitor_of(embedded_cluster)
    address = f"/enter?{visitor.query}"
    with socket.create_connection(("127.0.0.1", int(visitor.origin.rpartition(":")[2])), 20) as asking:
        host = visitor.origin.partition("://")[2]
        asking.sendall(f"HEAD {visitor.base}{address} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = asking.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 405")
    assert b"Set-Cookie" not in answer
    assert visitor.enter().status == 200
