"""Builds the paths of HTTP requests; no other module does, which `tests/security/test_request_paths.py` checks.

A segment may be text that a tenant wrote: a name in a label, an annotation or an owner reference. Each is quoted as one
segment. `.`, `..` and the empty segment are refused, because clients, proxies and servers remove them from a path,
quoted or not, and the request would then address another object.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote, unquote, urlencode

from kfp_gpuquota.errors import InvalidFieldError

_REMOVED: Final = frozenset({"", ".", ".."})
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_KIND: Final = re.compile(r"[A-Z][A-Za-z0-9]{0,62}")
_VERSION: Final = re.compile(r"v[1-9][0-9]{0,3}((alpha|beta)[1-9][0-9]{0,3})?")
_MAX_SUBDOMAIN: Final = 253


def join(base: str, *segments: str) -> str:
    """Return `base`, a constant or a path from here, followed by the segments. Raises InvalidFieldError."""
    return "/".join((base, *(_quoted(segment) for segment in segments)))


def with_query(path: str, **fields: object) -> str:
    """Return the path with a query; fields without a value are left out."""
    given = {name: value for name, value in fields.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


def check_path(path: str) -> None:
    """Raise InvalidFieldError for a path that a server may read as another one; clients call this before they send."""
    plain, _, _ = path.partition("?")
    parts = plain.split("/")
    if parts[0] or not path.isprintable() or not path.isascii() or " " in path or "#" in path:
        raise InvalidFieldError("path", path, "it must begin with '/' and have its special characters quoted")
    for part in parts[1:]:
        if unquote(part) in _REMOVED:
            raise InvalidFieldError("path", path, "it must have no segment that is empty, '.' or '..'")


def is_object_name(text: str) -> bool:
    """Return whether the text can be the name of a Kubernetes object: a DNS subdomain (RFC 1123)."""
    return len(text) <= _MAX_SUBDOMAIN and _SUBDOMAIN.fullmatch(text) is not None


def is_kind(text: str) -> bool:
    """Return whether the text can be a kind: a name such as RayCluster."""
    return _KIND.fullmatch(text) is not None


def is_api_version(text: str) -> bool:
    """Return whether the text can be an API version: `v1`, or a group and a version such as `batch/v1`."""
    group, slash, version = text.rpartition("/")
    return _VERSION.fullmatch(version) is not None and (not slash or is_object_name(group))


def collection(api_version: str, namespace: str, plural: str) -> str:
    """Return the path of a namespace's objects of a kind. Raises InvalidFieldError."""
    if not is_api_version(api_version):
        raise InvalidFieldError("apiVersion", api_version, "it must be a version such as v1, or a group and a version")
    base = join("/apis", *api_version.split("/")) if "/" in api_version else join("/api", api_version)
    return join(base, "namespaces", namespace, plural)


def _quoted(segment: str) -> str:
    if segment in _REMOVED:
        raise InvalidFieldError("name", segment, "it is part of a request's path, so it must not be empty, '.' or '..'")
    try:
        return quote(segment, safe="")
    except UnicodeEncodeError:  # a lone surrogate, which JSON may contain
        raise InvalidFieldError("name", segment, "it must be valid Unicode text") from None
