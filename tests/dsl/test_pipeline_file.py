"""A compiled pipeline's file: read and written as KFP does it, and refused with a sentence when it is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from kfp import components

from kfp_gpuquota.dsl.pipelines.pipeline_file import parse
from kfp_gpuquota.errors import DefinitionError

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.yaml"))
PLATFORM = "---\nplatforms:\n  kubernetes:\n    deploymentSpec:\n      executors: {}\n"


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_reading_routing_again_and_writing_changes_no_byte(path: Path) -> None:
    text = path.read_text()
    assert parse(text, path.name).routed(None).text() == text


def test_what_was_set_for_a_platform_stays(tmp_path: Path) -> None:
    package = parse(GOLDEN[0].read_text() + PLATFORM, "x").routed("team-a")
    assert package.more == ({"platforms": {"kubernetes": {"deploymentSpec": {"executors": {}}}}},)
    assert components.load_component_from_text(package.text()).platform_spec.platforms.keys() == {"kubernetes"}


def test_a_default_of_several_lines_that_kfp_writes_into_a_comment_stays_one() -> None:
    text = GOLDEN[0].read_text()
    head, begins, _ = text.partition("# PIPELINE DEFINITION\n")
    assert (head, begins) == ("", "# PIPELINE DEFINITION\n")
    prompt = "# Inputs:\n#    prompt: str [Default: 'You are:\n- brief\nroot: cause']\n"
    broken = text.replace(begins, begins + prompt, 1)
    with pytest.raises(yaml.YAMLError):
        components.load_component_from_text(broken)
    package = parse(broken, "x.yaml")
    assert package.spec == parse(text, "x.yaml").spec
    assert "#    root: cause']\n" in package.text()
    components.load_component_from_text(package.text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "x.yaml is not YAML: "),
        ("", "x.yaml is not a compiled pipeline; compile one with: kfp dsl compile"),
        ("[1, 2]", "x.yaml is not a compiled pipeline"),
        ("root: {}", "x.yaml is not a compiled pipeline"),
        ("kind: Workflow\napiVersion: argoproj.io/v1alpha1", "x.yaml was compiled by KFP 1"),
        ("kind: PipelineVersion", "x.yaml is a Kubernetes manifest"),
    ],
)
def test_what_is_no_compiled_pipeline_gets_one_sentence(text: str, message: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        parse(text, "x.yaml")
    assert caught.value.message.startswith(message)
    assert "\n" not in caught.value.message
