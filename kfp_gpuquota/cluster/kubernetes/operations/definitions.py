"""Reads the CustomResourceDefinitions of this version: a copy of manifests/crds/crds.yaml by `python -m tools.chart`.

The copy is JSON, which is parsed in a hundredth of YAML's time.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

Json = dict[str, Any]


@cache
def custom_resource_definitions() -> list[Json]:
    """Return ElasticJob, GpuQuota, WorkloadPolicy and QuotaPolicy, as objects to apply. Nobody changes them."""
    found: list[Json] = json.loads(resources.files(__package__).joinpath("definitions.json").read_text())
    return found


def schema_of_kind(kind: str) -> Json:
    """Return the schema of the objects of a kind."""
    definition = next(one for one in custom_resource_definitions() if one["spec"]["names"]["kind"] == kind)
    found: Json = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found
