"""Templates: HTML with every value escaped, and the words in which durations and amounts are shown."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import jinja2
from markupsafe import Markup

from kfp_gpuquota.api.control_characters import visible
from kfp_gpuquota.api.quantity import as_number, show_gpus
from kfp_gpuquota.web import charts

if TYPE_CHECKING:
    from kfp_gpuquota.api import ExpectedStart

_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400


@functools.cache
def environment() -> jinja2.Environment:
    """Return the templates of this package; a name that is not defined is an error."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("kfp_gpuquota.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    made.filters.update(
        duration=duration,
        short=charts.short,
        gpus=show_gpus,
        number=as_number,
        amount=amount,
        moment=moment,
        since=since,
        exactly=exactly,
        expected=expected,
    )
    return made


def render(template: str, **values: Any) -> Markup:
    """Return a template's HTML."""
    return Markup(environment().get_template(template).render(**values))  # noqa: S704 (escaped by the template)


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: "45s", "12m", "3h 5m", "2d 4h"."""
    whole = int(max(0.0, seconds))
    if whole < _MINUTE_S:
        return f"{whole}s"
    if whole < _HOUR_S:
        minutes, rest = divmod(whole, _MINUTE_S)
        return f"{minutes}m {rest}s" if minutes < 10 and rest else f"{minutes}m"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S}h {whole % _HOUR_S // _MINUTE_S}m"
    return f"{whole // _DAY_S}d {whole % _DAY_S // _HOUR_S}h"


def amount(gpus: float) -> str:
    """Return a number of GPUs that is a sum of parts, to two places: "3", "1,024", "0.43"."""
    return f"{as_number(round(gpus, 2)):,}"


def moment(at: float) -> str:
    """Return a time as ISO 8601, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


@functools.lru_cache(8192)
def since(at: float) -> Markup:
    """Return an element that the page's script replaces by the age of `at`; without it the time is shown."""
    text = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" data-since="{:.0f}">{}</time>').format(moment(at), at, text)


def exactly(at: float) -> Markup:
    """Return a time, and an element in which the page's script shows how long ago that was."""
    text = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}">{}</time> <small data-since="{:.0f}" data-ago></small>').format(
        moment(at), text, at
    )


def expected(start: ExpectedStart) -> str:
    """Return when a job is expected to start: "between 2026-11-25 14:10 and 14:40 UTC"; one time within a minute."""
    earliest, latest = (datetime.fromtimestamp(at, UTC) for at in (start.earliest, start.latest))
    if f"{earliest:%F %H:%M}" == f"{latest:%F %H:%M}":
        return f"at about {latest:%Y-%m-%d %H:%M} UTC"
    same_day = earliest.date() == latest.date()
    return f"between {earliest:%Y-%m-%d %H:%M} and {latest:{'%H:%M' if same_day else '%Y-%m-%d %H:%M'}} UTC"


def _finalize(value: object) -> object:
    """Show control characters of every string as escapes; what is already HTML stays."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
