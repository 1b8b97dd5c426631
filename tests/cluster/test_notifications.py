"""Notifications reach webhooks that a file names; receivers that fail, hang or answer slowly delay nothing else."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from kfp_gpuquota.api import ExpectedStart, JobSpec, JobStatus, Phase
from kfp_gpuquota.cluster import notifications
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.notifications import MOST_QUEUED, Limits, Notifications
from kfp_gpuquota.engine.expected_starts import note_expected
from kfp_gpuquota.engine.job_book import JobBook
from kfp_gpuquota.engine.notifications import Notification, Notified
from kfp_gpuquota.engine.records import JobRecord
from tests import forked, programs
from tests.cli.conftest import answer_of
from tests.conftest import running_cluster
from tests.polling import TIMEOUT_S
from tests.webhook_receiver import receiving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

QUICK = Limits(attempt_s=20.0, first_pause_s=0.01, longest_pause_s=0.02, kept_s=120.0)
HASTY = Limits(attempt_s=2.0, first_pause_s=0.01, longest_pause_s=0.02, kept_s=120.0)
"""For a receiver that never answers; each other one answers within this time."""
SECRET = "T0-B0-secret"


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test."""

    @wraps(test)
    def run(*given: object, **named: object) -> None:
        asyncio.run(test(*given, **named))  # type: ignore[arg-type]

    return run


def one(
    name: str, what: Notified = Notified.FAILED, project: str = "team-a", user: str = "", **labels: str
) -> Notification:
    return Notification(what, project, name, f"uid-{name}", user, labels, "it ended with exit code 1", 1000.0)


class Receiver:
    """A real HTTP server in the loop. `answers` are taken in turn, and the last one again."""

    def __init__(self, *answers: Callable[[], Awaitable[web.Response]]) -> None:
        self.answers = list(answers) or [_ok]
        self.got: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Receiver]:
        app = web.Application()
        app.router.add_post("/{tail:.*}", self._post)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/{SECRET}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _post(self, request: web.Request) -> web.Response:
        self.got.put_nowait(await request.json())
        return await (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])()

    async def texts(self, count: int) -> list[str]:
        return [(await asyncio.wait_for(self.got.get(), 20))["text"] for _ in range(count)]


async def _ok() -> web.Response:
    return web.Response(text="ok")


async def _fails() -> web.Response:
    return web.Response(status=503)


async def _refuses() -> web.Response:
    return web.Response(status=404, text="no_service")


async def _hangs() -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


async def _is_slow() -> web.Response:
    await asyncio.sleep(0.05)
    return web.Response(text="ok")


def written(folder: Path, name: str, url: str, **rule: object) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"url": url, **rule}))


@asynccontextmanager
async def notifying(folder: Path, limits: Limits = QUICK, *, private: bool = False) -> AsyncIterator[Notifications]:
    made = Notifications(folder, limits, private=private)
    try:
        yield made
    finally:
        await made.close()


@in_loop
async def test_a_message_is_json_as_slack_reads_it(tmp_path: Path) -> None:
    async with Receiver().serving() as receiver, notifying(tmp_path) as notifications_:
        written(tmp_path, "all", receiver.url, fields=True)
        sent = one("train")._replace(why="<!channel> & @all\n[here](http://elsewhere.example)")
        notifications_.notify(sent)
        message = await asyncio.wait_for(receiver.got.get(), 20)
    text = (
        "Job train of project team-a failed: &lt;!channel&gt; &amp; @\u200ball [here]\u200b(http://elsewhere.example)"
    )
    assert message["text"] == text
    assert message["gpuquota"]["event"] == "failed"
    assert message["gpuquota"]["uid"] == "uid-train"


@in_loop
async def test_a_webhook_gets_what_its_file_selects(tmp_path: Path) -> None:
    async with Receiver().serving() as receiver, notifying(tmp_path) as notifications_:
        rule = {"projects": ["team-a"], "users": ["ann"], "labels": {"run": "7"}, "events": ["failed", "late"]}
        written(tmp_path, "ann", receiver.url, **rule)
        (tmp_path / "invalid.json").write_text('{"url": "file:///etc/passwd"}')
        (tmp_path / "bytes.json").write_bytes(b'{"url": "\xff')
        for each in (
            one("other-user", user="bob", run="7"),
            one("other-team", project="team-b", user="ann", run="7"),
            one("other-event", Notified.STARTED, user="ann", run="7"),
            one("other-label", user="ann", run="8"),
            one("mine", user="ann", run="7", more="x"),
        ):
            notifications_.notify(each)
        assert await receiver.texts(1) == ["Job mine of project team-a failed: it ended with exit code 1"]
        assert receiver.got.empty()


@pytest.mark.parametrize(
    "url",
    [
        f"http://[{SECRET}]/x", f"http://me:{SECRET}\u2100@hooks.example/x", f"ftp://h/{SECRET}",
        f"http://h:{SECRET}/x", f"/{SECRET}",
    ],
)  # fmt: skip
@in_loop
async def test_a_file_that_cannot_be_used_is_named_without_its_address(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with notifying(tmp_path) as notifications_:
        written(tmp_path, "bad", url)
        notifications_.notify(one("a"))
        assert not notifications_._senders
    assert "receiver bad cannot be used: url must be a URL" in caplog.text
    assert SECRET not in caplog.text


@in_loop
async def test_a_file_that_is_half_written_leaves_what_it_said_before_in_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "READ_EVERY_S", 0.0)
    async with Receiver().serving() as receiver, notifying(tmp_path) as notifications_:
        written(tmp_path, "all", receiver.url)
        notifications_.notify(one("a"))
        (tmp_path / "all.json").write_text('{"url": "htt')
        notifications_.notify(one("b"))
        assert ["Job a" in text or "Job b" in text for text in await receiver.texts(2)] == [True, True]


@in_loop
async def test_a_message_that_is_sent_again_goes_to_the_address_of_the_present_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "READ_EVERY_S", 0.0)
    async with (
        Receiver(_fails).serving() as old,
        Receiver().serving() as new,
        notifying(tmp_path) as notifications_,
    ):
        written(tmp_path, "all", old.url)
        notifications_.notify(one("a"))
        await old.texts(1)
        written(tmp_path, "all", new.url)
        assert "Job a" in (await new.texts(1))[0]


@pytest.mark.parametrize("trouble", [_fails, _hangs], ids=["fails", "hangs"])
@in_loop
async def test_a_receiver_that_fails_or_hangs_gets_the_message_again_and_delays_no_other(
    tmp_path: Path, trouble: Callable[[], Awaitable[web.Response]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="kfp_gpuquota")
    async with (
        Receiver(trouble, trouble, _ok).serving() as bad,
        Receiver(_is_slow).serving() as slow,
        notifying(tmp_path, HASTY if trouble is _hangs else QUICK) as notifications_,
    ):
        written(tmp_path, "bad", bad.url)
        written(tmp_path, "slow", slow.url)
        for name in "ab":
            notifications_.notify(one(name))
        of = "of project team-a failed: it ended with exit code 1"
        assert await slow.texts(2) == [f"Job a {of}", f"Job b {of}"]
        assert await bad.texts(4) == [f"Job a {of}"] * 3 + [f"Job b {of}"]
    why = "it did not answer in time" if trouble is _hangs else "it answered 503"
    assert f"receiver bad: {why}; trying again" in caplog.text
    assert SECRET not in caplog.text


@in_loop
async def test_a_receiver_that_refuses_a_message_does_not_get_it_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Receiver(_refuses, _ok).serving() as receiver, notifying(tmp_path) as notifications_:
        written(tmp_path, "all", receiver.url)
        for name in "ab":
            notifications_.notify(one(name))
        assert [text.split()[1] for text in await receiver.texts(2)] == ["a", "b"]
    assert "receiver all: 1 messages were dropped; the last one: it answered 404" in caplog.text
    assert SECRET not in caplog.text


@in_loop
async def test_a_redirect_leads_to_no_other_address(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Receiver().serving() as inside, notifying(tmp_path) as notifications_:

        async def leads_inside() -> web.Response:
            return web.Response(status=307, headers={"Location": inside.url})

        async with Receiver(leads_inside, _ok).serving() as receiver:
            written(tmp_path, "all", receiver.url)
            for name in "ab":
                notifications_.notify(one(name))
            await receiver.texts(2)
        assert inside.got.empty()
    assert "receiver all: 1 messages were dropped; the last one: it answered 307" in caplog.text


@in_loop
async def test_the_queue_of_a_receiver_that_is_not_there_is_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with notifying(tmp_path, Limits(first_pause_s=1000.0)) as notifications_:
        written(tmp_path, "gone", "http://127.0.0.1:9/hook")
        for number in range(MOST_QUEUED + 16):
            notifications_.notify(one(f"job-{number}"))
        (sender,) = notifications_._senders.values()
        assert len(sender._queue) == MOST_QUEUED
    assert "16 messages were dropped; the last one: too many wait" in caplog.text


@in_loop
async def test_a_webhook_whose_file_is_removed_gets_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "READ_EVERY_S", 0.0)
    async with Receiver().serving() as receiver, notifying(tmp_path) as notifications_:
        written(tmp_path, "all", receiver.url)
        notifications_.notify(one("a"))
        await receiver.texts(1)
        (tmp_path / "all.json").unlink()
        notifications_.notify(one("b"))
        written(tmp_path, "all", receiver.url)
        notifications_.notify(one("c"))
        assert "Job c" in (await receiver.texts(1))[0]


def test_a_job_that_waits_longer_than_first_expected_is_notified_of_once() -> None:
    book, found = JobBook({}), list[Notification]()
    book.notify = found.append
    spec = JobSpec(name="train", project="team-a", command=("train",))
    book.put_job(JobRecord(uid="1", spec=spec, status=JobStatus(phase=Phase.PENDING)))
    for now in range(0, 1000, 100):
        latest = 300.0 + 10 * now  # later estimates move away
        note_expected(book, {"1": ExpectedStart(earliest=200.0, latest=latest)}, float(now))
    assert [each.what for each in found] == [Notified.LATE]
    assert found[0].at == 400.0
    assert found[0].text.endswith("it was first expected to start by 1970-01-01 00:05 UTC")


def test_a_cluster_notifies_of_a_jobs_start_and_failure(tmp_path: Path) -> None:
    config = ClusterConfig(gpus_per_node=1, gpu_memory_mib=1024)
    with receiving() as (url, texts), running_cluster(tmp_path / "home", config) as cluster:
        folder = cluster.home.notifications
        assert folder.stat().st_mode & 0o777 == 0o700
        written(folder, "all", f"{url}/{SECRET}")
        cluster.project("team-a", 1)
        cluster.submit("train", "sh", "-c", "exit 7")
        assert texts.get(timeout=TIMEOUT_S).startswith("Job train of project team-a started")
        assert texts.get(timeout=TIMEOUT_S).startswith("Job train of project team-a failed")
        assert SECRET not in cluster.home.log_file.read_text()


def test_each_receiver_is_tried_by_a_command_that_names_what_fails(tmp_path: Path) -> None:
    with receiving() as (url, texts):
        files = {
            "broken": '{"url": "https://hooks.example.org", "colour": "red"}',
            "closed": '{"url": "http://127.0.0.1:1/x"}',
            "works": json.dumps({"url": url, "projects": ["other"], "events": ["late"]}),
        }
        for name, body in files.items():
            (tmp_path / f"{name}.json").write_text(body)
        answer = answer_of(forked.run(programs.gpuquota, "cluster", "test-notifications", "--folder", str(tmp_path)))
        assert texts.get(timeout=TIMEOUT_S) == "This is a test message of gpuquota: if you read it, it works"
    lines = answer.out.splitlines()
    assert lines[0].startswith("broken: the file cannot be used: Object contains unknown field `colour`")
    assert lines[1:] == ["closed: it cannot be reached (ClientConnectorError)", "works: sent"]
    assert answer.code == 1


def test_a_test_of_receivers_without_any_says_where_they_belong(tmp_path: Path) -> None:
    answer = answer_of(forked.run(programs.gpuquota, "cluster", "test-notifications", "--folder", str(tmp_path)))
    assert answer.code == 2
