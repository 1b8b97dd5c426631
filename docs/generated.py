"""Reference pages that are made from the code when the site is built: the command line, our kinds, the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from kfp_gpuquota.cli.main import application
from kfp_gpuquota.cluster.kubernetes.controller.metrics import Metrics
from kfp_gpuquota.cluster.kubernetes.operations.definitions import custom_resource_definitions
from kfp_gpuquota.server.routes import ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Json = dict[str, Any]


def write(folder: Path) -> None:
    """Write the pages into `folder`, where they differ from what is there."""
    for name, text in (("cli", command_line()), ("kinds", kinds()), ("metrics", metrics()), ("http", http())):
        page = folder / f"{name}.md"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def command_line() -> str:
    """Return a page with the help text of every command."""
    lines = ["# Command line", "", "Every command works on the embedded cluster of this machine, or, with `--context`,"]
    lines += ["on a Kubernetes cluster.", ""]
    return "\n".join([*lines, *_help(typer.main.get_command(application()), "gpuquota", None)]) + "\n"


def kinds() -> str:
    """Return a page with a table for each of our kinds: every field with its type and description."""
    lines = ["# Kinds", "", "The custom resources of `gpuquota.dev`, from their CustomResourceDefinitions."]
    for definition in custom_resource_definitions():
        spec = definition["spec"]
        for version in spec["versions"]:
            lines += ["", f"## {spec['names']['kind']}", ""]
            lines += [f"`gpuquota.dev/{version['name']}`, {spec['scope'].lower()}.", "", "| field | type | meaning |"]
            lines += ["|---|---|---|"]
            schema = version["schema"]["openAPIV3Schema"]
            lines += [_row(*field) for field in _fields(schema, "")]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Return a page with a table of the controller's Prometheus metrics."""
    lines = [
        "# Metrics",
        "",
        "What the controller serves at `/metrics`.",
        "",
        "| metric | type | meaning |",
        "|---|---|---|",
    ]
    for metric in Metrics().registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        lines.append(f"| `{name}` | {metric.type} | {metric.documentation} |")
    return "\n".join(lines) + "\n"


def http() -> str:
    """Return a page with a table of the embedded cluster's HTTP API."""
    lines = ["# HTTP API", "", "The API of the embedded cluster, over its Unix socket with the token of the cluster."]
    lines += ["`GET /v1/openapi.json`, and `openapi.json` of the web page, describe it with all of its", "structures."]
    lines += ["", "| request | does | query |", "|---|---|---|"]
    for route in ROUTES:
        query = "<br>".join(f"`{name}`: {meaning}" for name, meaning in route.query.items())
        lines.append(f"| `{route.method} {route.path}` | {route.summary} | {query} |")
    return "\n".join(lines) + "\n"


def _help(described: Any, name: str, parent: typer.Context | None) -> Iterator[str]:
    context = typer.Context(described, info_name=name, parent=parent)
    yield from (f"## {context.command_path}", "", "```text", described.get_help(context), "```", "")
    for each in described.list_commands(context) if hasattr(described, "list_commands") else ():
        yield from _help(described.get_command(context, each), each, context)


def _fields(schema: Json, path: str) -> Iterator[tuple[str, Json]]:
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        if here in {"apiVersion", "kind", "metadata"}:
            continue
        yield here, field
        inner = field.get("items", field)
        yield from _fields(inner, here + ("[]" if "items" in field else ""))


def _row(path: str, field: Json) -> str:
    kind = field.get("type", "any")
    if kind == "array":
        kind = f"list of {field['items'].get('type', 'any')}"
    allowed = ", ".join(f"`{value}`" for value in field.get("enum", []))
    meaning = " ".join(str(field.get("description", "")).split()).replace("|", "\\|")
    return f"| `{path}` | {kind} | {meaning}{f' One of {allowed}.' if allowed else ''} |"
