"""The API against requests made from its own OpenAPI document, right ones and wrong ones."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kfp_gpuquota.server import openapi
from tests.conftest import EmbeddedCluster, running_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.xdist_group("fuzz")  # the last test counts what the others have seen

schema = schemathesis.openapi.from_dict(openapi.document("test"))
schema.config.generation.update(modes=list(schemathesis.GenerationMode))

seen: Counter[int] = Counter()

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """One for all operations: what one leaves behind, the next one finds."""
    with running_cluster(tmp_path_factory.mktemp("fuzz") / "home") as made:
        made.project("team-a", 1)
        yield made


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_breaks_the_server_or_gets_an_answer_that_is_not_described(
    cluster: EmbeddedCluster, case: Any
) -> None:
    url, token = cluster.home.url_file.read_text(), cluster.home.token_file.read_text()
    case.query = {key: value for key, value in (case.query or {}).items() if key != "timeout_s"}  # no waiting
    steer(case)
    answer = case.call_and_validate(base_url=url, headers={"Authorization": f"Bearer {token}"}, checks=CHECKS)
    seen[answer.status_code] += 1


def steer(case: Any) -> None:
    """Half of the requests name a project that exists, and no job runs an invented program."""
    if "project" in (case.path_parameters or {}) and len(str(case.path_parameters["project"])) % 2:
        case.path_parameters["project"] = "team-a"
    spec = case.body.get("spec") if isinstance(case.body, dict) else None
    if isinstance(spec, dict) and isinstance(spec.get("command"), list):
        spec.update(project="team-a", command=["true"])


def test_the_requests_were_of_every_kind(cluster: EmbeddedCluster) -> None:
    assert {200, 201, 204, 401, 404, 422} <= set(seen)
