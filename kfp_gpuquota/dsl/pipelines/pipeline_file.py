"""Reads and writes compiled pipelines, KFP's YAML files, as KFP's compiler writes them. Needs PyYAML, as kfp does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.dsl.pipelines.route import route_documents
from kfp_gpuquota.errors import DefinitionError

Json = dict[str, Any]
_BODY: Final = "\ncomponents:\n"  # the first key: keys are sorted, and every pipeline has components
_COMPILE: Final = "compile one with: kfp dsl compile --py FILE.py --output FILE.yaml"


@dataclass(frozen=True)
class Package:
    """A compiled pipeline: KFP's PipelineSpec, and in `more` the documents after it (settings of kfp-kubernetes)."""

    comments: str
    spec: Json
    more: tuple[Json, ...] = ()

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return str(self.spec["pipelineInfo"]["name"])

    def routed(self, project: str | None, launcher_image: str | None = None) -> Package:
        """Return the pipeline with its GPU steps routed through the quota of `project` (`route_documents`)."""
        spec, more = route_documents(self.spec, self.more, project, launcher_image)
        return replace(self, spec=spec, more=more)

    def text(self) -> str:
        """Return the YAML byte for byte as KFP's compiler writes it, so that a diff shows only what routing changed."""
        documents: str = yaml.dump_all([self.spec, *self.more], sort_keys=True)
        return self.comments + documents


def parse(text: str, origin: str) -> Package:
    """Return the pipeline in `text`; errors name its `origin`. Raises DefinitionError where it is not a pipeline."""
    text = _with_whole_header(text)
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise DefinitionError(f"{origin} is not YAML: {_said(error)}") from None
    if not documents or not _is_pipeline(documents[0]):
        raise DefinitionError(f"{origin} {_otherwise(documents)}")
    return Package(_comments(text), documents[0], tuple(documents[1:]))


def _with_whole_header(text: str) -> str:
    """Return the text with every line of KFP's header as a comment.

    KFP writes parameters' defaults into the header without escaping: all but the first line of a multi-line default
    would be parsed as YAML, and KFP itself cannot load such a file.
    """
    head, begins, body = text.partition(_BODY)
    if not begins or not text.startswith("# PIPELINE DEFINITION"):
        return text
    return "\n".join(line if line.startswith("#") else f"#    {line}" for line in head.split("\n")) + begins + body


def _said(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{error.problem} (line {mark.line + 1})" if mark else str(error)


def _is_pipeline(document: object) -> bool:
    return isinstance(document, dict) and {"deploymentSpec", "pipelineInfo", "root"} <= document.keys()


def _otherwise(documents: list[Any]) -> str:
    kind = documents[0].get("kind") if documents and isinstance(documents[0], dict) else None
    if kind == "Workflow":
        return f"was compiled by KFP 1, whose pipelines cannot be routed; with kfp 2 {_COMPILE}"
    if kind in {"Pipeline", "PipelineVersion"}:
        return "is a Kubernetes manifest; compile the pipeline without kubernetes_manifest_format=True"
    return f"is not a compiled pipeline; {_COMPILE}"


def _comments(text: str) -> str:
    lines = text.splitlines(keepends=True)
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "".join(lines[:end])
