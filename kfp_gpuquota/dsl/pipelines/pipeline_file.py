"""A compiled pipeline as a file: KFP's YAML, read and written as KFP writes it. Needs PyYAML, which comes with kfp."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.dsl.pipelines.route import route_pipeline
from kfp_gpuquota.errors import DefinitionError

Json = dict[str, Any]
_BODY: Final = "\ncomponents:\n"  # keys are sorted, and a pipeline has some
_COMPILE: Final = "compile one with: kfp dsl compile --py FILE.py --output FILE.yaml"


@dataclass(frozen=True)
class Package:
    """`spec` is KFP's PipelineSpec, `more` the documents after it (what kfp-kubernetes has set), as they came."""

    comments: str
    spec: Json
    more: tuple[Json, ...] = ()

    @property
    def name(self) -> str:
        """The pipeline's."""
        return str(self.spec["pipelineInfo"]["name"])

    def routed(self, project: str | None, launcher_image: str | None = None) -> Package:
        """See `route_pipeline`."""
        return replace(self, spec=route_pipeline(self.spec, project, launcher_image, platform=self.more))

    def text(self) -> str:
        """As KFP's compiler writes it, byte for byte: so a diff shows what routing did, and nothing else."""
        documents: str = yaml.dump_all([self.spec, *self.more], sort_keys=True)
        return self.comments + documents


def parse(text: str, origin: str) -> Package:
    """The pipeline in `text`, which came from `origin`. Raises DefinitionError for anything else."""
    text = _with_whole_header(text)
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise DefinitionError(f"{origin} is not YAML: {_said(error)}") from None
    if not documents or not _is_pipeline(documents[0]):
        raise DefinitionError(f"{origin} {_otherwise(documents)}")
    return Package(_comments(text), documents[0], tuple(documents[1:]))


def _with_whole_header(text: str) -> str:
    """The same, with every line of KFP's head a comment.

    KFP writes defaults there as they are: of a prompt with several lines all but the first would be read as YAML, and
    KFP cannot load its own file.
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
