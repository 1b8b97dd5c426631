"""The API against requests made from its own OpenAPI document, right ones and wrong ones."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import schemas as _  # noqa: F401 - before other tests start threads that compile code
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kfp_gpuquota.server import openapi
from kfp_gpuquota.server.transport.unix_sockets import UnixConnection
from tests.conftest import EmbeddedCluster, running_cluster
from tests.effort import soaked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """One for all operations: what one leaves behind, the next one finds."""
    with running_cluster(tmp_path_factory.mktemp("fuzz") / "home") as made:
        made.project("team-a", 1)
        yield made


@pytest.mark.parametrize("examples", [4, pytest.param(200, marks=[pytest.mark.slow, soaked])])
def test_no_request_breaks_the_server_or_gets_an_answer_that_is_not_described(
    cluster: EmbeddedCluster, examples: int
) -> None:
    schema = schemathesis.openapi.from_dict(openapi.document("test"))
    token = cluster.home.token_file.read_text()
    seen: Counter[int] = Counter()
    with forwarded(cluster.home.socket_file) as url:
        fuzz(schema, url, token, seen, examples)
    assert {200, 201, 204, 404, 422} <= set(seen), seen


def fuzz(schema: Any, url: str, token: str, seen: Counter[int], examples: int) -> None:
    for mode in GenerationMode:
        for found in schema.get_all_operations():
            operation = found.ok()

            @given(operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=examples,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def ask(case: Any) -> None:
                steer(case)
                headers = {"Authorization": f"Bearer {token}"}
                seen[case.call_and_validate(base_url=url, headers=headers, checks=CHECKS).status_code] += 1

            ask()


@contextlib.contextmanager
def forwarded(path: Path) -> Iterator[str]:
    """A port of loopback whose connections are passed on to a Unix socket: the library that fuzzes takes URLs only."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=(server, path), daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def accept(server: socket.socket, path: Path) -> None:
    with contextlib.suppress(OSError):
        while True:
            here, _ = server.accept()
            there = UnixConnection(path, 60.0)
            there.connect()
            for source, target in ((here, there.sock), (there.sock, here)):
                threading.Thread(target=copy, args=(source, target), daemon=True).start()


def copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def steer(case: Any) -> None:
    """No request waits; half of the requests name an existing project; no job runs an invented program."""
    case.query = {key: value for key, value in (case.query or {}).items() if key != "timeout_s"}
    if "project" in (case.path_parameters or {}) and len(str(case.path_parameters["project"])) % 2:
        case.path_parameters["project"] = "team-a"
    spec = case.body.get("spec") if isinstance(case.body, dict) else None
    if isinstance(spec, dict) and isinstance(spec.get("command"), list):
        spec.update(project="team-a", command=["true"])
