"""The application that serves the pages: its routes, its errors as pages, and the headers of every answer.

An address answers with HTML, or with a stream of what changes on that page where `text/event-stream` is asked for.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

from aiohttp import web
from markupsafe import Markup

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.errors import GpuQuotaError
from kfp_gpuquota.server import openapi
from kfp_gpuquota.server.audit import CLIENT_CLOSED, TARGET, Writing, begin_change
from kfp_gpuquota.version import __version__
from kfp_gpuquota.web.access import AGAIN, COOKIE, SESSION_VALID_S, guarded, headers
from kfp_gpuquota.web.actions import STOPPING, Chosen
from kfp_gpuquota.web.rendering import render
from kfp_gpuquota.web.views import confirmation, logs, quota

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from aiohttp.typedefs import Handler, Middleware
    from multidict import MultiDictProxy

    from kfp_gpuquota.web.access import Access, Door, Refusal
    from kfp_gpuquota.web.live import Live
    from kfp_gpuquota.web.pages import Page
    from kfp_gpuquota.web.site_config import SiteConfig
    from kfp_gpuquota.web.source import Source

RETRY_MS: Final = 1000
MAX_FORM_BYTES: Final = 1 << 18  # a page of the queue has up to 1,000 jobs, and each of them may be chosen
THEME: Final = "gpuquota-theme"
THEMES: Final = ("auto", "light", "dark")
THEME_KEPT_S: Final = 400 * 86_400
MAX_LINE_BYTES: Final = 1 << 16  # what is asked by the queue's form is in the address, with the whole command
STATIC: Final = Path(__file__).with_name("static")

log = logging.getLogger(__name__)


def build_pages(
    door: Door, site: SiteConfig, *, enter: Handler | None = None, outer: Iterable[Middleware] = ()
) -> web.Application:
    """Return the application; `door` says who sees what.

    `enter` answers the address by which a browser is let in, where there is one. `outer` are middlewares around all
    others, such as the audit log.
    """

    def refuse(request: web.Request, found: Refusal) -> web.Response:
        if request.headers.get("Accept", "").startswith("text/html"):
            return message(site.base, found.status, "Not opened", found.sentence, step=found.step)
        answer = web.Response(text=found.sentence, status=found.status)
        answer["error"] = found.sentence
        return answer

    application = web.Application(
        client_max_size=MAX_FORM_BYTES, middlewares=[*outer, _finished(site), guarded(door, site, refuse)]
    )
    handlers, base = _Handlers(door, site), site.path
    job = f"{base}/jobs/{{project}}/{{name}}"
    application.add_routes([
        web.get(f"{base}/", handlers.start),
        web.get(f"{base}/theme", handlers.theme),
        *([web.get(f"{base}/openapi.json", described)] if site.http_api else []),
        web.get(f"{base}/teams", handlers.page),
        web.get(f"{base}/queue", handlers.page),
        web.get(f"{base}/pipelines", handlers.page),
        web.get(f"{base}/timeline", handlers.page),
        web.get(f"{base}/nodes", handlers.page),
        web.get(f"{base}/teams/{{team}}", handlers.quota),
        web.post(f"{base}/teams/{{team}}/update", handlers.change_quota),
        web.post(f"{base}/queue/submit", handlers.submit),
        web.post(f"{base}/queue/confirm", handlers.confirm_several),
        web.post(f"{base}/queue/stop", handlers.stop),
        *(web.get(f"{base}/queue/{form}", handlers.to_queue) for form in ("submit", "confirm", "stop")),
        web.get(f"{base}/nodes/{{node}}", handlers.page),
        web.get(job, handlers.page),
        web.get(f"{job}/log", handlers.log),
        web.get(f"{job}/log.txt", handlers.download),
        web.get(f"{job}/{{action}}", handlers.confirm),
        web.post(f"{job}/{{action}}", handlers.act),
        web.static(f"{base}/static", STATIC),
    ])  # fmt: skip
    if enter is not None:
        application.router.add_get(f"{base}/enter", enter, allow_head=False)  # a HEAD would use the link up
    return application


async def described(_request: web.Request) -> web.Response:
    """Answer with the description of the HTTP API."""
    return web.json_response(openapi.document(__version__))


def entering(access: Access, base: str, origins: frozenset[str]) -> Handler:
    """Return what takes a one-time token, and gives the browser its cookie: for HTTPS only, where that is an origin.

    The answer is a page that leads on, not a redirect: a cookie that is `SameSite=Strict` would not be sent with the
    next request of a navigation that another program began.
    """

    async def enter(request: web.Request) -> web.Response:
        cookie = access.enter(request.query.get("token", ""))
        if cookie is None:
            return message(base, 401, "Not opened", "This link was used before, or is too old.", step=AGAIN)
        answer = message(base, 200, "gpuquota", "The page opens.", leads_to=f"{base}/teams")
        secure = f"https://{request.host}" in origins
        answer.set_cookie(
            COOKIE, cookie, path=base, max_age=int(SESSION_VALID_S), httponly=True, samesite="Strict", secure=secure
        )
        return answer

    return enter


class _Handlers:
    """The handlers."""

    def __init__(self, door: Door, site: SiteConfig) -> None:
        self._door, self._site, self._base = door, site, site.base
        self._headers = headers(framed=site.framed)

    async def start(self, request: web.Request) -> web.Response:
        query = f"?{request.query_string}" if request.query_string else ""
        raise web.HTTPSeeOther(f"{self._base}/teams{query}")

    async def to_queue(self, request: web.Request) -> web.Response:
        """Lead to the queue from the address of an answer to its forms, which the answer's links and filters have."""
        query = f"?{request.query_string}" if request.query_string else ""
        raise web.HTTPSeeOther(f"{self._base}/queue{query}")

    async def theme(self, request: web.Request) -> web.Response:
        """Keep the colors that the browser's user chose, and lead back to the page that has the link."""
        chosen = request.query.get("to", "")
        came_from = urlsplit(request.headers.get("Referer", ""))
        there = f"{came_from.path}?{came_from.query}" if came_from.query else came_from.path
        if not there.startswith(f"{self._base}/") or there.startswith("//"):
            there = f"{self._base}/teams"
        answer = web.Response(status=303, headers={"Location": there})
        if chosen in THEMES:
            answer.set_cookie(
                THEME, chosen, path=f"{self._base}/", max_age=THEME_KEPT_S, httponly=True, samesite="Strict"
            )
        return answer

    async def page(self, request: web.Request) -> web.StreamResponse:
        """Answer with the page, or with its stream."""
        shown = self._door.site_for(request)
        page = shown.pages.at(request.path, request.match_info, request.query)
        await page.live.prepared()
        if _wants_stream(request):
            return await self._stream(request, shown.live, page)
        return _html(await self._whole(request, page))

    async def _whole(self, request: web.Request, page: Page, **more: Any) -> str:
        """Return the HTML of a page; `more` are values in place of its own."""
        shown = self._door.site_for(request)
        later = await page.later() if page.later is not None else {}
        revision = shown.source.revision()
        elements = page.live.render()
        lists = {name: Markup("").join(Markup(row) for row in rows.values()) for name, rows in elements.lists.items()}  # noqa: S704
        values = {
            "title": page.title,
            "active": page.active,
            **self._common(request),
            "revision": revision,
            "parts": elements.parts,
            "lists": lists,
            **page.values,
            **later,
            **more,
        }
        return render(page.template, **values)

    async def _stream(self, request: web.Request, live: Live, page: Page) -> web.StreamResponse:
        query = sorted((key, value) for key, value in request.query.items() if key != "after")
        messages = live.messages(f"{request.path}?{urlencode(query)}", page.live, _last_id(request))
        return await self._sent(request, "page", messages)

    async def log(self, request: web.Request) -> web.StreamResponse:
        """Answer with a worker's log, or with the stream of what it prints."""
        source, project, name, worker = self._of_worker(request)
        if not _wants_stream(request):
            found = await logs.page(source, project, name, worker, request.query.get("q", ""), self._base)
            return _html(render("log.html", title=f"Log of {name}", active="queue", **self._common(request), **found))
        source.job(project, name)
        pieces = logs.follow(source, project, name, worker, _last_id(request))
        return await self._sent(request, "log", pieces)

    async def download(self, request: web.Request) -> web.StreamResponse:
        """Answer with all of a worker's log, byte for byte."""
        source, project, name, worker = self._of_worker(request)
        job = source.job(project, name)
        pieces = logs.whole(source, project, name, worker)
        first = await anext(pieces, b"")
        more = {"Content-Disposition": f'attachment; filename="{job.spec.name}.log"'}
        answer = web.StreamResponse(headers={**more, **self._headers})
        answer.content_type = "text/plain"
        await answer.prepare(request)
        await answer.write(first)
        async for text in pieces:
            await answer.write(text)
        return answer

    async def act(self, request: web.Request) -> web.Response:
        """Do what a form asks for, and lead back to where that shows."""
        form = await _fields(request)
        action = request.match_info["action"]
        begin_change(request, Writing.RESERVED if action in STOPPING else Writing.FIRST)
        there = await self._door.site_for(request).actions.do(
            action, request.match_info["project"], request.match_info["name"], form
        )
        if request.headers.get("Accept") == "text/plain":
            return web.Response(status=204)
        raise web.HTTPSeeOther(there)

    async def submit(self, request: web.Request) -> web.Response:
        """Submit the job of the queue's form; one that is refused is shown again, with the reason."""
        form = await _fields(request)
        request[TARGET] = f"{form.get('project', '')}/{form.get('name', '')}"
        shown = self._door.site_for(request)
        try:
            begin_change(request)
            there = await shown.actions.submit(form)
        except GpuQuotaError as error:
            form = {name: value for name, value in form.items() if name != "token"} | {"what-if": ""}
            page = shown.pages.at(f"{self._site.path}/queue", {}, {**form, "kind": "", "state": ""})
            values = {"refusal": error.message, "revision": "", "request_id": form.get("request", "")}
            answer = _html(await self._whole(request, replace(page, later=None), **values), error.http_status)
            answer["error"] = error.message
            return answer
        raise web.HTTPSeeOther(there)

    async def confirm(self, request: web.Request) -> web.Response:
        """Show what one job would lose."""
        names = request.match_info
        return self._confirmation(request, names["action"], [Chosen(names["project"], names["name"])])

    async def confirm_several(self, request: web.Request) -> web.Response:
        """Show what the chosen jobs would lose."""
        form = await _fields(request)
        begin_change(request, Writing.REFUSED)
        return self._confirmation(request, form.get("action", ""), _chosen(await request.post()))

    def _confirmation(self, request: web.Request, action: str, jobs: Sequence[Chosen]) -> web.Response:
        source, common = self._door.site_for(request).source, self._common(request)
        values = confirmation.values(source, self._site, action, jobs)
        back = join(self._base, "jobs", *jobs[0][:2]) if len(jobs) == 1 else f"{self._base}/queue"
        title = f"{action.capitalize()}?"
        return _html(
            render("confirmation.html", title=title, active="queue", revision="", back=back, **common, **values)
        )

    async def stop(self, request: web.Request) -> web.Response:
        """Delete, suspend or cancel the jobs of a confirmation, and lead back to where that shows."""
        form, jobs = await _fields(request), _chosen(await request.post())
        request[TARGET] = f"{form.get('action', '')} {','.join(f'{job.project}/{job.name}' for job in jobs)}"
        begin_change(request, Writing.RESERVED)
        raise web.HTTPSeeOther(await self._door.site_for(request).actions.stop(form.get("action", ""), jobs))

    async def quota(self, request: web.Request) -> web.Response:
        """Show a project's quota, with the forms that change it where the user may."""
        source, team = self._door.site_for(request).source, request.match_info["team"]
        found = quota.values(source, team)
        fixed = await source.fixed_quota(team) if self._site.quotas else quota.ELSEWHERE.format(team)
        return _html(
            render("quota.html", title=team, active="teams", revision="", fixed=fixed, **self._common(request), **found)
        )

    async def change_quota(self, request: web.Request) -> web.Response:
        """Change a project's quota, and lead back to it."""
        form, team = await _fields(request), request.match_info["team"]
        begin_change(request)
        raise web.HTTPSeeOther(await self._door.site_for(request).actions.change_quota(team, form))

    def _common(self, request: web.Request) -> dict[str, Any]:
        """Return the values that every page has."""
        chosen = request.cookies.get(THEME, "")
        theme = chosen if chosen in THEMES else THEMES[0]
        return {
            "base": self._base,
            "site": self._site,
            "token": self._door.form_token(request),
            "theme": theme,
            "now": f"{self._door.site_for(request).source.now():.1f}",
            "next_theme": THEMES[(THEMES.index(theme) + 1) % len(THEMES)],
        }

    def _of_worker(self, request: web.Request) -> tuple[Source, str, str, str]:
        """Return the source, project and name of a request for a log, and the worker, "" for the first."""
        names = request.match_info
        return self._door.site_for(request).source, names["project"], names["name"], request.query.get("worker", "")

    async def _sent(
        self, request: web.Request, kind: str, messages: AsyncGenerator[tuple[int, bytes] | None, None]
    ) -> web.StreamResponse:
        """Send each (id, data) as an event of that kind, and an empty comment for None; at the end an event `end`.

        A stream that fails is cut off, so that the browser opens it again; one whose reader was logged out, too.
        """
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", **self._headers})
        await answer.prepare(request)
        await answer.write(f"retry: {RETRY_MS}\n\n".encode())
        try:
            async with contextlib.aclosing(messages):
                async for message_ in messages:
                    if (found := await self._door.refusal(request)) is not None:
                        log.info("a stream of %s ends: %s", request.path, found.sentence)
                        return answer
                    await answer.write(b": \n\n" if message_ is None else _event(kind, *message_))
            await answer.write(b"event: end\ndata: \n\n")
        except (GpuQuotaError, ConnectionError) as error:
            log.info("a stream of %s ends: %s", request.path, error)
        except Exception:
            log.exception("the stream of %s failed", request.path)
        return answer


def _finished(site: SiteConfig) -> Middleware:
    """Return a middleware that shows errors as pages, and adds the headers that every answer has."""
    base, added = site.base, headers(framed=site.framed)

    @web.middleware
    async def finish(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            answer = await handler(request)
        except GpuQuotaError as error:
            answer = _failure(base, request, error.http_status, error.message)
        except web.HTTPMove as moved:
            answer = web.Response(status=moved.status, headers={"Location": str(moved.location)})
        except web.HTTPException as error:
            answer = _failure(base, request, error.status, f"{request.method} {request.path}: {error.reason}")
        except ConnectionError:  # the browser went elsewhere; nobody reads this answer
            answer = web.Response(status=CLIENT_CLOSED)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            answer = _failure(base, request, 500, "The page could not be made; the server's log says why.")
        if not answer.prepared:
            for name, value in added.items():
                answer.headers.setdefault(name, value)
        return answer

    return finish


def _failure(base: str, request: web.Request, status: int, sentence: str) -> web.Response:
    """A page, or the sentence alone for the page's own script."""
    if request.headers.get("Accept") == "text/plain":
        answer = web.Response(text=sentence, status=status)
    else:
        answer = message(base, status, "This did not work", sentence)
    answer["error"] = sentence
    return answer


def message(base: str, status: int, title: str, sentence: str, *, step: str = "", leads_to: str = "") -> web.Response:
    """Return a page of one sentence, with what its reader can do, or with the address that it leads to."""
    html = render("message.html", base=base, title=title, sentence=sentence, step=step, next=leads_to)
    return web.Response(text=html, content_type="text/html", charset="utf-8", status=status)


async def _fields(request: web.Request) -> dict[str, str]:
    """Return the fields of a form; of one that is there several times the last."""
    return {name: str(value) for name, value in (await request.post()).items()}


def _chosen(form: MultiDictProxy[Any]) -> list[Chosen]:
    """Return the jobs whose boxes are ticked, or that were confirmed."""
    return [Chosen.of(str(each)) for each in form.getall("job", [])]


def _html(html: str, status: int = 200) -> web.Response:
    answer = web.Response(
        text=html, content_type="text/html", charset="utf-8", headers={"Vary": "Accept"}, status=status
    )
    answer.enable_compression()
    return answer


def _wants_stream(request: web.Request) -> bool:
    return "text/event-stream" in request.headers.get("Accept", "")


def _last_id(request: web.Request) -> int:
    """What the browser has seen: the last event's id after a reconnect, else that of its page."""
    text = request.headers.get("Last-Event-ID") or request.query.get("after", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else 0


def _event(kind: str, number: int, data: bytes) -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % (kind.encode(), number, data)
