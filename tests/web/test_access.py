"""Only browsers that `gpuquota ui` let in see the page, and only its own forms change anything."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from kfp_gpuquota.api.wire import PageAddress
from kfp_gpuquota.cluster.local.start import await_stop, start
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.web.access import LINK_VALID_S, SESSION_VALID_S, Access, Sessions
from tests.cli.conftest import Cli
from tests.security.other_user import as_root, run
from tests.web.conftest import visitor_of
from tests.web.visitor import Tags, Visitor

if TYPE_CHECKING:
    from kfp_gpuquota.server.client import Client
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
    assert attributes == {"httponly", "samesite=strict", f"path={visitor.base}".lower(), "max-age=1209600"}
    assert visitor.get("/teams").status == 200
    second = Visitor(f"{visitor.origin}{visitor.base}/enter?{visitor.query}")
    assert second.enter().status == 401
    assert not second.cookie


def test_a_cookie_of_another_servers_page_locks_nobody_out(visitor: Visitor) -> None:
    """Browsers send the cookies of all ports of a host."""
    own = visitor.cookie
    for cookies in (f"gpuquota=x; {own}", f"{own}; gpuquota=x", f'gpuquota="; {own}'):
        visitor.cookie = cookies
        assert visitor.get("/queue").status == 200, cookies
    visitor.cookie = "gpuquota=x; gpuquota="
    assert visitor.get("/queue").status == 401


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


def test_a_cookie_is_valid_for_its_lifetime_also_on_the_next_server_and_until_all_are_logged_out() -> None:
    now, stored = 0.0, list[bytes]()

    def server() -> Access:
        sessions = msgspec.json.decode(stored[-1], type=Sessions) if stored else None
        return Access(lambda: now, sessions=sessions, save=lambda made: stored.append(msgspec.json.encode(made)))

    first = server()
    cookies = [first.enter(first.new_link()) or "", first.enter(first.new_link()) or ""]
    assert not any(cookie.encode() in stored[-1] for cookie in cookies), "only digests are stored"
    now = SESSION_VALID_S - 1
    assert server().admits_some
    assert [server().admits(cookie) for cookie in cookies] == [True, True]
    assert server().form_token(cookies[0]) == first.form_token(cookies[0])
    now = SESSION_VALID_S
    assert [server().admits(cookie) for cookie in cookies] == [False, False]
    now = 0.0
    server().log_out()
    assert not server().admits_some
    assert not server().admits(cookies[0])


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


def test_an_open_page_goes_on_after_a_restart_of_the_daemon(
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
    with visitor.stream("/queue", last) as stream:
        assert "second" in json.dumps(next(stream.messages()).data)
    again = Visitor(cast("Client", embedded_cluster.client).open_page(log_out=True).url)
    assert (again.base, again.port) == (visitor.base, visitor.port)
    assert visitor.get("/queue").status == 401
    assert again.enter().status == 200
    assert embedded_cluster.home.page_sessions_file.stat().st_mode & 0o777 == 0o600


def test_a_stream_ends_when_its_browser_is_logged_out(embedded_cluster: EmbeddedCluster, visitor: Visitor) -> None:
    embedded_cluster.project("team-a", 1)
    with visitor.stream("/queue") as stream:
        embedded_cluster.submit("before")
        stream.until("before")
        cast("Client", embedded_cluster.client).open_page(log_out=True)
        embedded_cluster.submit("later")
        assert not [message for message in stream.messages() if "later" in json.dumps(message.data)]
    with pytest.raises(AssertionError, match="let in"):
        visitor.stream("/queue")


GET = """
request = f"GET {sys.argv[2]}/queue HTTP/1.1\\r\\nHost: {sys.argv[3]}\\r\\nCookie: {sys.argv[4]}\\r\\n\\r\\n"
source = (sys.argv[5], int(sys.argv[6]))
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), source_address=source) as page:
    page.sendall(request.encode())
    print(page.recv(12).decode())
"""


@as_root
def test_another_users_program_is_refused_even_with_the_cookie(visitor: Visitor) -> None:
    """Also from a port that is the one of the user's own connection on another address of the loopback interface."""
    assert visitor.get("/queue").status == 200
    request = (visitor.port, visitor.base, visitor.host, visitor.cookie)
    assert run(GET, *request, "127.0.0.1", 0) == "HTTP/1.1 403"
    with socket.create_connection(("127.0.0.1", visitor.port)) as own:
        assert run(GET, *request, "127.0.0.2", own.getsockname()[1]) == "HTTP/1.1 403"


def test_the_page_is_served_for_a_proxy_that_keeps_its_path(
    embedded_cluster: EmbeddedCluster, visitor: Visitor
) -> None:
    client = cast("Client", embedded_cluster.client)
    address = PageAddress(origin="https://hub.example.org:443", base_path="/user/a%40b.c/proxy/absolute/{port}/")
    link = client.open_page(address).url
    base = f"/user/a%40b.c/proxy/absolute/{visitor.port}{visitor.base}"
    assert link.startswith(f"https://hub.example.org{base}/enter?token=")
    assert client.open_page().url.startswith("https://hub.example.org/"), "it stays so"
    visitor.base, visitor.host, visitor.query = base, "hub.example.org", link.partition("?")[2]
    entered = visitor.enter()
    assert {"Secure", f"Path={base}"} <= {part.strip() for part in entered.headers["Set-Cookie"].split(";")}
    shown = visitor.get("/teams")
    assert f'href="{base}/queue"' in shown.text
    assert "<h1>Queue" in visitor.get("/queue").text
    assert visitor.get("/static/page.js").status == 200
    assert visitor.get("/teams", Host="evil.example").status == 421
    origins = ("hub.example.org", "http://[::1", "http://a@b", "http://a:x")
    for wrong in [
        *(PageAddress(origin=origin) for origin in origins),
        *(PageAddress(base_path=path) for path in ("user", "/a b", "/{", "/{name}", "/%C3%A9")),
    ]:
        with pytest.raises(InvalidFieldError, match="it must"):
            client.open_page(wrong)
    assert client.open_page(PageAddress(base_path="/")).url.startswith("http://127.0.0.1:")


def test_the_colors_are_kept_in_a_cookie_and_lead_back_to_the_same_page(visitor: Visitor) -> None:
    def chosen(to: str, came_from: str) -> tuple[str | None, str]:
        answer = visitor.get(f"/theme?to={to}", Referer=came_from)
        assert answer.status == 303
        return answer.headers["Location"], answer.headers.get("Set-Cookie", "").partition(";")[0]

    page = f"{visitor.base}/queue?sort=job"
    assert chosen("dark", visitor.origin + page) == (page, "gpuquota-theme=dark")
    elsewhere = (f"{visitor.base}/teams", "")
    for came_from in ("", "http://evil.example/x", f"{visitor.origin}//evil.example"):
        assert chosen("x", came_from) == elsewhere
    for theme, shown in (("dark", "dark"), ("<", "auto")):
        cookie = visitor.cookie
        visitor.cookie = f"{cookie}; gpuquota-theme={theme}"
        assert f'data-theme="{shown}"' in visitor.get("/teams").text
        visitor.cookie = cookie


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


def test_a_daemon_starts_though_its_page_cannot_be_served(embedded_cluster: EmbeddedCluster, visitor: Visitor) -> None:
    """Here because of a stored address that nothing can be served at."""
    assert visitor.get("/queue").status == 200
    embedded_cluster.client.stop_cluster()
    await_stop(embedded_cluster.home)
    file = embedded_cluster.home.page_file
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "address": {"origin": "nowhere"}}))
    start(embedded_cluster.home)
    client = cast("Client", embedded_cluster.client)
    assert not client.list_jobs().jobs
    with pytest.raises(InvalidFieldError, match="origin is 'nowhere'"):
        client.open_page()
    again = Visitor(client.open_page(PageAddress(base_path="/")).url)
    assert (again.port, again.base) == (visitor.port, visitor.base)
    assert visitor.get("/queue").status == 200


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
