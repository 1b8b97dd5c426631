"""JSON Schema of the vocabulary, made from the structs: for the OpenAPI document, for CRDs, for editors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

REFERENCE: Final = "#/components/schemas/{name}"


def schema_of(kind: Any) -> dict[str, Any]:
    """The schema of one type, whole, with what it refers to under $defs."""
    return msgspec.json.schema(kind)


def schemas_of(kinds: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a schema for each of `kinds`, the structs they refer to by name), for an OpenAPI document's components."""
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    return list(schemas), components
