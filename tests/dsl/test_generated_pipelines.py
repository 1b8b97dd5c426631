"""Drawn pipelines: what a routed one writes, returns and fails with is what the plain one does under kfp.local."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format  # type: ignore[import-untyped]
from kfp import dsl, local
from kfp.local import executor_output_utils, subprocess_task_handler

from kfp_gpuquota.dsl.pipelines.route import is_routed
from tests.conftest import EmbeddedCluster
from tests.dsl.generated import Wrap, drawn, plain, routed

FIRST = int(os.environ.get("PIPELINES_SEED", "0"))
GENERATED = "executor_output.json"
"""KFP's backend writes it where the command does not, as the launcher does for kfp.local, which does not."""
SAMPLE = range(8)
SEEDS = range(FIRST, FIRST + int(os.environ.get("PIPELINES", "2")))


@pytest.fixture
def cluster(embedded_cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedCluster]:
    embedded_cluster.project("team-a", 2)
    monkeypatch.setenv("GPUQUOTA_HOME", str(embedded_cluster.home.root))
    # The oracle runs container components, too: kfp.local resolves their placeholders, and refuses to run them.
    handler = subprocess_task_handler.SubprocessTaskHandler
    monkeypatch.setattr(handler, "validate_not_container_component", lambda *_: None)
    found = executor_output_utils.get_outputs_from_executor_output

    def named(executor_output: Any, executor_input: Any, component_spec: Any) -> dict[str, Any]:
        """Have the artifacts of a command that writes no `executor_output.json`, as KFP's backend has."""
        if not executor_output.artifacts:
            for name, listed in executor_input.outputs.artifacts.items():
                executor_output.artifacts[name].CopyFrom(listed)
        outputs: dict[str, Any] = found(executor_output, executor_input, component_spec)
        return outputs

    monkeypatch.setattr(executor_output_utils, "get_outputs_from_executor_output", named)
    yield embedded_cluster
    local.config.LocalExecutionConfig.instance = None


def outcome(seed: int, wrap: Wrap, root: Path) -> dict[str, Any]:
    """Everything that a run leaves: its outputs, all files by their paths, and its failure."""
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root))
    failure, outputs, pipeline = "", None, drawn(seed, wrap)
    try:
        outputs = pipeline(number=3).outputs
    except Exception as error:  # noqa: BLE001 - KFP's own defects are those of both
        failure = f"{type(error).__name__}: {error}"
    runs = list(root.iterdir()) if root.exists() else []
    files = {
        str(path.relative_to(run)): in_order(
            path.read_bytes().replace(str(run).encode(), b"RUN").replace(run.name.encode(), b"NAME")
        )
        for run in runs
        for path in run.rglob("*")
        if path.is_file()
    }
    shown = repr((stable(outputs), failure))
    for run in runs:
        shown = re.sub(f"{run}|{run.name}", "RUN", shown)
    shown = re.sub("Argument list too long: '.*'", "Argument list too long", shown)
    return {"files": files, "shown": shown, "failed": bool(failure)}


def stable(value: object) -> object:
    """Return the value with keys in order: protobuf's maps, from which KFP writes many, have a random one."""
    if isinstance(value, dict):
        return {key: stable(value[key]) for key in sorted(value)}
    if isinstance(value, dsl.Artifact):
        return type(value).__name__, value.name, value.uri, stable(value.metadata)
    return [stable(each) for each in value] if isinstance(value, list) else value


def in_order(content: bytes) -> bytes:
    """Return a JSON object with its keys in order."""
    try:
        found = json.loads(content)
    except ValueError:
        return content
    return json.dumps(found, sort_keys=True).encode() if isinstance(found, dict) else content


def differences(seed: int, root: Path) -> list[str]:
    """What differs. kfp.local runs steps that do not depend on each other in any order, so of a failed run some."""
    ours, theirs = outcome(seed, routed, root / "routed"), outcome(seed, plain, root / "plain")
    agree = ours["shown"] == theirs["shown"] or (ours["failed"] and theirs["failed"])
    found = [] if agree else [f"{ours['shown']} instead of {theirs['shown']}"]
    mine, files = ours["files"], theirs["files"]
    ran = mine.keys() & files.keys() if theirs["failed"] else mine.keys() | files.keys()
    ran -= {path for path in mine.keys() - files.keys() if Path(path).name == GENERATED}
    return found + [
        f"{path}: {mine.get(path)!r}, not {files.get(path)!r}" for path in ran if mine.get(path) != files.get(path)
    ]


def test_many_steps_of_drawn_pipelines_are_routed_and_no_others_change() -> None:
    executors = []
    for seed in SAMPLE:
        ours, theirs = (json_format.MessageToDict(drawn(seed, wrap).pipeline_spec) for wrap in (routed, plain))
        mine, others = (spec["deploymentSpec"]["executors"] for spec in (ours, theirs))
        assert mine.keys() == others.keys()
        executors += [(mine[label].get("container", {}), others[label].get("container", {})) for label in mine]
        assert ours["root"] == theirs["root"]
    ways = Counter(is_routed(mine.get("command")) for mine, _ in executors)
    assert min(ways.values()) > len(executors) / 8
    assert all(mine == other for mine, other in executors if not is_routed(mine.get("command")))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_pipeline_is_as_the_plain_one_when_it_is_routed(
    cluster: EmbeddedCluster, tmp_path: Path, seed: int
) -> None:
    found = differences(seed, tmp_path)
    assert not found, "\n".join(found)
