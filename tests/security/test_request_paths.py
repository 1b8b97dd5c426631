"""Text that tenants write reaches no other object of the API server than the one it names."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kfp_gpuquota
from kfp_gpuquota.api.request_paths import check_path, collection, is_object_name, join, with_query
from kfp_gpuquota.cluster.kubernetes.convert import owners
from kfp_gpuquota.cluster.kubernetes.elasticjob import workflows
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata, OwnerReference, Pod
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.gc_pause import collector_paused

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(kfp_gpuquota.__file__).parent
EXEMPT = (
    "api/request_paths.py",  # the builder
    "dsl/worker/",  # a worker's container has no other package; its paths are of files, or in a query
    "web/site_config.py",  # fills in an administrator's template of an address
    "cluster/kubernetes/user_client/kubeconfig.py",  # quotes the name of a header
    "cluster/local/workers/",  # paths of files
    "fractions/",  # paths of files
)
ROOTS = ("/api/", "/apis/", "/v1/", "/namespaces/")

TRAVERSALS = (
    "..", ".", "", "../../../../../../api/v1/pods?watch=1", "%2e%2e", "..%2f..%2fsecrets", "a/b", "a?watch=1", "a#b",
    "a\r\nHost: other", "a b", "a\x00", "a/../b", "\ud800", "é", "A", "-a", "a" * 300, "a\n", "a%00", ";a", "a\\..\\b",
)  # fmt: skip
hostile = st.one_of(st.sampled_from(TRAVERSALS), st.text(max_size=40), st.from_regex(r"[a-z0-9./%?#-]{1,30}"))
version = st.one_of(hostile, st.sampled_from(["v1", "batch/v1", "ray.io/v1", "jobset.x-k8s.io/v1alpha2", "apps/v1"]))
kind = st.one_of(hostile, st.sampled_from(["Job", "JobSet", "RayCluster", "ReplicaSet", "PyTorchJob", "Workflow"]))


@given(st.lists(hostile, min_size=1, max_size=5))
def test_a_path_has_exactly_the_segments_that_it_was_built_from(segments: list[str]) -> None:
    try:
        path = join("/apis/batch/v1/namespaces", *segments)
    except InvalidFieldError:
        assert any(segment in {"", ".", ".."} or not _is_unicode(segment) for segment in segments)
        return
    check_path(path)
    parts = urlsplit(path)
    assert (parts.query, parts.fragment) == ("", "")
    assert [unquote(part) for part in parts.path.split("/")[5:]] == segments


@given(version, hostile, hostile)
def test_a_collection_stays_within_its_group_and_namespace(api_version: str, namespace: str, plural: str) -> None:
    try:
        path = collection(api_version, namespace, plural)
    except InvalidFieldError:
        return
    check_path(path)
    parts = path.split("/")
    assert parts[1] == ("apis" if "/" in api_version else "api")
    assert parts[-4] == api_version.rpartition("/")[2]
    assert parts[-3:] == ["namespaces", *(parts[-2:])]


@given(hostile)
def test_a_query_has_exactly_the_fields_that_it_was_built_from(text: str) -> None:
    try:
        query = urlsplit(with_query("/v1/jobs", project=text)).query
    except UnicodeEncodeError:
        assert not _is_unicode(text)
        return
    assert query.count("=") == bool(text)


@pytest.mark.parametrize(
    "path",
    ["/api/../v1", "/api/%2e%2E/v1", "/a//b", "/a/./b", "/a/", "a/b", "/a b", "/a\n", "/a#b", "/é", "/api/.%2e?x=1"],
)
def test_clients_refuse_a_path_that_a_server_may_read_as_another_one(path: str) -> None:
    with pytest.raises(InvalidFieldError):
        check_path(path)


FIELDS = {
    "labels": [
        owners.POD_GROUP_LABEL, owners.JOBSET_LABEL, owners.LEADER_WORKER_LABEL, owners.REPLICA_LABEL,
        "gpuquota.dev/group",
    ],
    "annotations": [owners.VOLCANO_ANNOTATION, owners.INDEX_ANNOTATION],
}  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(FIELDS["labels"]), hostile),
    st.dictionaries(st.sampled_from(FIELDS["annotations"]), hostile),
    st.lists(st.builds(OwnerReference, api_version=version, kind=kind, name=hostile, controller=st.booleans())),
)
def test_whatever_a_pod_says_of_its_owner_the_request_is_for_an_object_of_its_namespace(
    labels: dict[str, str], annotations: dict[str, str], references: list[OwnerReference]
) -> None:
    metadata = Metadata(
        name="pod", namespace="team-a", labels=labels, annotations=annotations, owner_references=tuple(references)
    )
    owner = owners.owner_of(Pod(metadata=metadata))
    if owner is None:
        return
    check_path(owner.path)
    parts = owner.path.split("/")
    assert len(parts) == (8 if "/" in owner.api_version else 7)
    assert parts[-4:-2] == ["namespaces", "team-a"]
    assert parts[-1] == owner.name
    assert is_object_name(owner.name)


@given(st.lists(st.builds(OwnerReference, api_version=version, kind=kind, name=hostile)))
def test_the_run_of_a_job_is_a_workflow_of_its_namespace(references: list[OwnerReference]) -> None:
    run = workflows.owner_of(tuple(references))
    if run is not None:
        path = workflows.path("team-a", run.name)
        check_path(path)
        assert path == f"/apis/argoproj.io/v1alpha1/namespaces/team-a/workflows/{run.name}"


def test_no_module_builds_a_path_of_its_own() -> None:
    found = [
        f"{name}:{line}: {what}"
        for name in sorted(str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py"))
        if not name.startswith(EXEMPT)
        for line, what in _built_paths(_parsed((PACKAGE / name).read_text()))
    ]
    assert found == [], "build these with kfp_gpuquota.api.request_paths:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        'call("GET", "/api/v1/namespaces/" + namespace)',
        'path = f"/api/v1/namespaces/{namespace}/pods"',
        'path = "/api/v1/namespaces/" + namespace',
        'path = "/api/v1/namespaces/%s" % namespace',
        'path = "/api/v1/namespaces/{}".format(namespace)',
        'LIST = "/apis/argoproj.io/v1alpha1/namespaces/{namespace}/workflows"\nLIST.format(namespace=x)',
        'call("GET", f"{collection}/{name}")',
        'path = f"{collection}/{name}"\ncall("GET", path)',
        'Write(verb="GET", path=f"{pods_path(namespace)}/{name}")',
        "def _path(meta): return f'{JOBS}/{meta.name}'",
        "from urllib.parse import quote",
    ],
)
def test_the_rule_notices_each_way_to_build_a_path(source: str) -> None:
    assert list(_built_paths(_parsed(source)))


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _parsed(source: str) -> ast.AST:
    """Parse without garbage collection, which lets other threads run: those that print a traceback parse, too, and
    CPython counts the depth of all of them together (SystemError: AST constructor recursion depth mismatch).
    """
    with collector_paused():
        return ast.parse(source)


def _built_paths(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the lines that join text to a request's path. Constants in capitals are no text of others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "urllib.parse":
            if any(name.name.startswith("quote") for name in node.names):
                yield node.lineno, "imports quote"
        elif isinstance(node, ast.Constant) and "namespaces/{" in str(node.value):
            yield node.lineno, f"a template of a path: {node.value!r}"
        elif isinstance(node, ast.JoinedStr | ast.BinOp) and _follows_root(_parts(node)):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call):
            yield from _of_request(node)
        elif isinstance(node, ast.Assign) and any("collection" in ast.unparse(one) for one in _joined(node.value)):
            yield node.lineno, ast.unparse(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name.strip("_").endswith("path"):
            returned = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return) and inner.value]
            yield from ((one.lineno, ast.unparse(one)) for one in returned if _joined(one))


def _of_request(call: ast.Call) -> Iterator[tuple[int, str]]:
    """Yield a path that is joined where a request is made."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    first = {"call": 2, "read": 1, "chunks": 1, "stream": 1, "get": 1, "create": 1, "patch": 1, "delete": 1, "Built": 1}
    if ast.unparse(call.func).startswith("web.") or (called not in first and called != "Write"):
        return
    arguments = [*call.args[: first.get(called, 0)], *(word.value for word in call.keywords if word.arg == "path")]
    for one in arguments:
        if _joined(one) and "/" in ast.unparse(one):
            yield one.lineno, ast.unparse(one)


def _follows_root(parts: list[ast.expr]) -> bool:
    """Return whether text follows the constant beginning of an API's path; `{name}` in one is a server's route."""
    roots = [n for n, one in enumerate(parts) if isinstance(one, ast.Constant) and _has_root(str(one.value))]
    return bool(roots) and any(_is_text(one) for one in parts[roots[0] + 1 :])


def _has_root(text: str) -> bool:
    return any(root in text for root in ROOTS) and " " not in text and "{" not in text


def _joined(node: ast.AST) -> list[ast.expr]:
    """Return what a string joins that is no constant."""
    return [part for part in _parts(node) if _is_text(part)]


def _parts(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.JoinedStr):
        return [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        return [*(_parts(node.left) or [node.left]), node.right]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return [node.func.value, *node.args, *(word.value for word in node.keywords)]
    return []


def _is_text(part: ast.expr) -> bool:
    name = part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
    return not isinstance(part, ast.Constant) and not name.isupper()
