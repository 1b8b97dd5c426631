"""The start program of each worker of a step's job: `python3 -I -S start.py STEP_FILE`.

It redirects the outputs of the step's original command to this worker's staging directories, and then executes the
command in the same process. It uses only the standard library and imports nothing of this package, because it runs in
the step's image.

A worker's staging directory is `.gpuquota/JOB/WORKER` beside each output's final path. So publishing an output is a
rename, and the same rule stages paths and URIs.
"""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import sys
from typing import Any, NoReturn

Json = dict[str, Any]

STAGING = ".gpuquota"
EXIT_NOT_FOUND = 127
POD_NAME = "GPUQUOTA_POD_NAME"
_MOUNTS = {"gs://": "/gcs/", "minio://": "/minio/", "s3://": "/s3/"}
_IMAGE = "oci://"
_WORKSPACE = "/kfp-workspace/.artifacts"
_PLACEHOLDER = re.compile(r"\{\{gpuquota([^}]*)\}\}")
_OUTPUT = re.compile(r"\.outputs\.(parameters|artifacts)\['([^']+)'\]\.(\w+)")


def staged(location: str, tag: str) -> str:
    """Return a path or URI moved into the directory `tag` beside it."""
    directory, _, name = location.rpartition("/")
    return f"{directory}/{tag}/{name}"


def local_path(uri: str) -> str:
    """Return the path at which KFP mounts the artifact with this URI for a step."""
    for scheme, mount in _MOUNTS.items():
        if uri.startswith(scheme):
            return mount + uri[len(scheme) :]
    return uri


def input_path(artifact: Json) -> str:
    """Return the path at which a step reads an input, also for model images and files in the run's workspace."""
    uri = artifact.get("uri", "")
    model = f"/oci/{uri[len(_IMAGE) :].replace('/', '_')}/models"
    path = model if uri.startswith(_IMAGE) else local_path(uri)
    if artifact.get("metadata", {}).get("_kfp_workspace") is True:
        return f"{_WORKSPACE}/{path.lstrip('/')}"
    return path


def output_locations(executor_input: Json) -> list[tuple[Json, str]]:
    """Return the fields of an executor input that hold an output's path or URI, as (object, key)."""
    outputs = executor_input.get("outputs", {})
    found = [(outputs, "outputFile")]
    found += [(parameter, "outputFile") for parameter in outputs.get("parameters", {}).values()]
    for listed in outputs.get("artifacts", {}).values():
        found += [(artifact, key) for artifact in listed.get("artifacts", []) for key in ("uri", "customPath")]
    return [(owner, key) for owner, key in found if "/" in owner.get(key, "") and "oci://" not in owner[key]]


def folders_of(executor_input: Json) -> list[str]:
    """Return the folders of KFP's own in which a worker in a pod creates the step's files.

    An output's custom path is none of them: what the image has there must not be hidden by a volume.
    """
    listed = executor_input.get("inputs", {}).get("artifacts", {}).values()
    paths = [input_path(artifact) for each in listed for artifact in each.get("artifacts", [])]
    paths += [local_path(owner[key]) for owner, key in output_locations(executor_input)]
    mounted = [f"/{path.split('/')[1]}" for path in paths if path.startswith((*_MOUNTS.values(), "/oci/"))]
    return [*mounted, *(path.rpartition("/")[0] for path in paths if path.startswith("/tmp/kfp"))]  # noqa: S108


def redirected(executor_input: Json, tag: str) -> Json:
    """Return the executor input of a worker that writes every output into the directory `tag` beside its final path."""
    mine = copy.deepcopy(executor_input)
    for owner, key in output_locations(mine):
        owner[key] = staged(owner[key], tag)
    return mine


def work_of(step: Json, worker: str) -> tuple[list[str], Json]:
    """Return a worker's command, and its executor input."""
    mine = redirected(step["executor_input"], f"{step['tag']}/{worker}")
    return [resolved(element, mine) for element in step["argv"]], mine


def artifact_paths(executor_input: Json) -> dict[str, str]:
    """Return the local path of each output artifact by its URI."""
    locations = output_locations(executor_input)
    return {owner[key]: local_path(owner[key]) for owner, key in locations if key == "uri"}


def output_folders(executor_input: Json) -> list[str]:
    """Return the folders of the outputs, which must exist before the command starts."""
    return list(dict.fromkeys(local_path(o[k]).rpartition("/")[0] for o, k in output_locations(executor_input)))


def resolved(element: str, executor_input: Json) -> str:
    """Return one element of the original command with the masked placeholders for outputs filled in.

    One for an output that the step does not declare stays as its author wrote it, as in KFP.
    """
    return _PLACEHOLDER.sub(lambda match: _value(match[1], executor_input) or f"{{{{${match[1]}}}}}", element)


def _value(path: str, executor_input: Json) -> str:
    outputs = executor_input["outputs"]
    if not path:
        return json.dumps(executor_input)
    if path in {".outputs.output_file", ".outputMetadataUri"}:
        return str(outputs["outputFile"])
    match = _OUTPUT.fullmatch(path)
    if not match:
        return ""
    kind, name, field = match.groups()
    if name not in outputs.get(kind, {}):
        return ""
    if kind == "parameters":
        return str(outputs["parameters"][name]["outputFile"])
    artifact = outputs["artifacts"][name]["artifacts"][0]
    custom = artifact.get("customPath", "")
    return artifact["uri"] if field == "uri" else custom or local_path(artifact["uri"])


def become(argv: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process by a command, for which signals have their usual effects again. Raises OSError."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a command would inherit that
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(argv[0], argv, environment)


def main(step_file: str) -> None:
    """Execute the original command in this process. Exits with 127 where there is no such program, as a shell does."""
    with open(step_file, encoding="utf-8") as file:  # noqa: PTH123  # pathlib costs a worker 10 ms
        step = json.load(file)
    argv, mine = work_of(step, os.environ["ELASTIC_WORKER_ID"])
    for folder in output_folders(mine):
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    environment = {**os.environ, **step["environment"]}
    try:
        become(argv, environment)
    except OSError as error:
        sys.stderr.write(f"gpuquota: cannot run {argv[0]!r}: {error.strerror}\n")
        sys.exit(EXIT_NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1])
