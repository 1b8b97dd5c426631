"""JSON Schema of the vocabulary, made from the structs: for the OpenAPI document, for CRDs, for editors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

REFERENCE: Final = "#/components/schemas/{name}"


def schema_of(kind: Any) -> dict[str, Any]:
    """The schema of one type, whole, with what it refers to under $defs."""
    return msgspec.json.schema(kind)


def schemas_of(kinds: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a schema for each of `kinds`, the structs they refer to by name), for an OpenAPI document's components.

    An infinite default is left out: JSON cannot express it, and such a field is absent where it has the default.
    """
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    for component in components.values():
        for field in component.get("properties", {}).values():
            if isinstance(field.get("default"), float) and math.isinf(field["default"]):
                del field["default"]
    return list(schemas), components
