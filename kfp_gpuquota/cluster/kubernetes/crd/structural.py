"""Converts structs to structural JSON Schema, and builds CustomResourceDefinitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfp_gpuquota.api.schema import schema_of
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Struct

Schema = dict[str, Any]


def described(fields: dict[str, tuple[str, str]], vocabulary: type, read: type[Struct]) -> dict[str, Schema]:
    """Return the schemas of the fields that the controller reads; unsupported fields are left out."""
    found = _properties(vocabulary)
    return {
        wire: {**found[source], "description": text}
        for wire, (source, text) in fields.items()
        if wire in read.__struct_encode_fields__
    }


def _properties(struct: type) -> dict[str, Schema]:
    whole = schema_of(struct)
    found: dict[str, Schema] = _structural(whole, whole["$defs"])["properties"]
    for schema in found.values():
        schema.pop("nullable", None)  # users omit unset fields; null is an error
    return found


def status(struct: type) -> Schema:
    """Return the schema of a status, whose conditions are a list-map by type."""
    whole = schema_of(struct)
    found = _structural(whole, whole["$defs"])
    found["properties"]["conditions"] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    return found


def _structural(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return a structural schema: without references, alternatives and defaults, with bounds as in OpenAPI 3.0."""
    if "$ref" in schema:
        return _structural(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        (given,) = (one for one in schema["anyOf"] if one != {"type": "null"})
        return {**_structural(given, definitions), "nullable": True}
    kept = {name: value for name, value in schema.items() if name not in {"title", "default", "examples"}}
    if not kept.get("required", True):
        del kept["required"]
    if "exclusiveMinimum" in kept:
        kept |= {"minimum": kept["exclusiveMinimum"], "exclusiveMinimum": True}
    if "enum" in kept:
        kept["type"] = "string"
    if kept.get("additionalProperties") is False:
        del kept["additionalProperties"]  # the API server prunes unknown fields, and warns of them on request
    for holder in ("items", "additionalProperties"):
        if isinstance(kept.get(holder), dict):
            kept[holder] = _structural(kept[holder], definitions)
    if "properties" in kept:
        kept["properties"] = {name: _structural(one, definitions) for name, one in kept["properties"].items()}
    return kept


def rule(holds: str, message: str, *values: str) -> Schema:
    """A rule in CEL, and the sentence where it does not hold; each %s in that is one of the expressions `values`."""
    if not values:
        return {"rule": holds, "message": message}
    # Not by concatenation: the server cannot bound the length of string(self.gpus), and refuses expensive rules.
    text = message.replace("'", "\\'")
    return {"rule": holds, "messageExpression": f"'{text}'.format([{', '.join(values)}])"}


def column(name: str, kind: str, path: str, description: str = "", *, wide: bool = False) -> Schema:
    """A column of `kubectl get`, a `wide` one only with -o wide."""
    found: Schema = {"name": name, "type": kind, "jsonPath": path}
    if description:
        found["description"] = description
    return {**found, "priority": 1} if wide else found


def definition(kind: str, plural: str, short: str, scope: str, body: Schema, columns: list[Schema]) -> Schema:
    """One version, stored and served; a second one needs a conversion webhook here and nothing else."""
    version = {
        "name": labels.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": body},
        "subresources": {"status": {}},
        "additionalPrinterColumns": columns,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{labels.GROUP}"},
        "spec": {
            "group": labels.GROUP,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": ["kfp-gpuquota"],
            },
            "scope": scope,
            "conversion": {"strategy": "None"},
            "versions": [version],
        },
    }
