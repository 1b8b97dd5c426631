"""The OpenAPI document, made from the table of routes and the structs of the vocabulary."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.wire import ErrorAnswer
from kfp_gpuquota.server.routes import ROUTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.server.routes import Route

_REFERENCE: Final = "#/components/schemas/{name}"
_FAILURES: Final = {
    "400": "the request cannot be understood",
    "401": "the token is missing or wrong",
    "403": "the user may not do that",
    "404": "something named does not exist",
    "409": "the present state forbids it",
    "413": "the body is too large",
    "422": "a field holds what it may not hold",
}


def document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1 for everything under /v1 that a client of the cluster may call."""
    types = [t for route in ROUTES for t in (route.body, route.answer) if t is not None]
    schemas, components = _schemas_of([*types, ErrorAnswer])
    by_type = dict(zip([str(t) for t in [*types, ErrorAnswer]], schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "gpuquota", "version": version, "license": {"name": "Apache-2.0"}},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.handler.__name__.strip("_"),
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": {
            _success(route): {"description": "done", **_content(route.answer, schemas)},
            **{code: {"description": why, **_content(ErrorAnswer, schemas)} for code, why in _FAILURES.items()},
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, **_content(route.body, schemas)}
    return operation


def _success(route: Route) -> str:
    return "204" if route.answer is None else "201" if route.created else "200"


def _content(answer: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    return {} if answer is None else {"content": {"application/json": {"schema": schemas[str(answer)]}}}


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)}", route.path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    kinds = {"after": "integer", "offset": "integer", "timeout_s": "number", "since_s": "number"}
    return [
        {"name": name, "in": "query", "description": text, "schema": {"type": kinds.get(name, "string")}}
        for name, text in route.query.items()
    ]


def _schemas_of(kinds: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a schema for each of `kinds`, and by name the structs they refer to.

    An infinite default is left out: JSON cannot express it, and such a field is absent where it has the default.
    """
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    for component in components.values():
        for field in component.get("properties", {}).values():
            if isinstance(field.get("default"), float) and math.isinf(field["default"]):
                del field["default"]
    return list(schemas), components
