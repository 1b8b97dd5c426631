"""Reviews of pods, without an API server: which are ignored, gated or refused, and with which message."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.cluster.kubernetes.admission import pods, review_types
from kfp_gpuquota.cluster.kubernetes.objects import labels

CONTROLLER = "system:serviceaccount:gpuquota-system:gpuquota-controller"
GATE = {"name": labels.QUOTA_GATE}


def pod(gpus: object = None, *, init: object = None, **changes: Any) -> dict[str, Any]:
    """A pod with one container; metadata and spec take what is given."""
    spec = {"containers": [_container(gpus)], **changes.pop("spec", {})}
    if init is not None:
        spec["initContainers"] = [_container(init)]
    return {"metadata": {"name": "a", **changes}, "spec": spec}


def _container(gpus: object) -> dict[str, Any]:
    return {"name": "main"} if gpus is None else {"name": "main", "resources": {"limits": {labels.GPU_RESOURCE: gpus}}}


def reviewed(body: dict[str, Any], user: str = "alice") -> dict[str, Any]:
    """The response to a review of the pod, its patch decoded."""
    request = {"uid": "1", "namespace": "team-a", "userInfo": {"username": user}, "object": body}
    whole = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    answer, _ = pods.answer(json.dumps(whole).encode(), CONTROLLER)
    response: dict[str, Any] = json.loads(answer)["response"]
    assert response["uid"] == "1"
    if "patch" in response:
        assert response["patchType"] == "JSONPatch"
        response["patch"] = json.loads(base64.b64decode(response["patch"]))
    return response


def patched(body: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod after the operations that admission uses."""
    whole: dict[str, Any] = json.loads(json.dumps(body))
    for operation in operations:
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place: Any = whole
        for part in path:
            place = place[int(part) if isinstance(place, list) else part]
        if operation["op"] == "test":
            continue
        if last == "-":
            place.append(operation["value"])
        elif operation["op"] == "remove":
            del place[int(last) if isinstance(place, list) else last]
        elif isinstance(place, list):
            place[int(last)] = operation["value"]
        else:
            place[last] = operation["value"]
    return whole


def gates_after(body: dict[str, Any]) -> list[dict[str, str]]:
    response = reviewed(body)
    assert response["allowed"], response
    return list(patched(body, response.get("patch", []))["spec"].get("schedulingGates") or [])


@pytest.mark.parametrize(
    "body",
    [
        pod("1"),
        pod("8"),
        pod(init="1"),
        pod("0", init="2"),
        pod("2", spec={"schedulingGates": []}),
        pod("2", spec={"schedulingGates": None}),
        pod("2", labels={labels.KIND: "build", labels.PRIORITY: "10", labels.PREEMPTIBLE: "true"}),
        pod("1", labels={labels.POD_GROUP: "g"}, annotations={labels.POD_GROUP_SIZE: "4"}),
        pod(annotations={"gpu-fraction": "0.25"}),
        pod(annotations={"gpuquota.dev/gpu-memory": "4096", "gpu-memory-limit": "8G"}),
    ],
)
def test_a_pod_that_asks_for_gpus_waits_for_its_turn(body: dict[str, Any]) -> None:
    assert gates_after(body) == [GATE]


def test_a_request_without_a_limit_counts_too() -> None:
    body = {"metadata": {}, "spec": {"containers": [{"resources": {"requests": {labels.GPU_RESOURCE: "1"}}}]}}
    assert gates_after(body) == [GATE]


@pytest.mark.parametrize("body", [pod(), pod("0"), pod(annotations={"a": "b"}), pod(spec={"nodeName": "n"}), {}])
def test_a_pod_that_asks_for_none_is_let_be_and_sees_none(body: dict[str, Any]) -> None:
    response = reviewed(body)
    assert response["allowed"]
    after = patched(body, response.get("patch", []))
    for container in after.get("spec", {}).get("containers", []):
        assert container.pop("env") == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    assert after == body
    assert "patch" not in reviewed(patched(body, response.get("patch", []))), "once"


def test_only_containers_that_neither_hold_gpus_nor_say_what_they_see_are_made_blind() -> None:
    own = {"name": "own", "env": [{"name": "A", "value": "1"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}]}
    spec = {"containers": [_container("1"), {"name": "b", "env": [{"name": "A", "value": "1"}]}, own, _container("0")]}
    body = pod(init="2", spec=spec)
    body["spec"]["initContainers"].append({"name": "i"})
    after = patched(body, reviewed(body)["patch"])["spec"]
    void = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
    assert [c.get("env") for c in after["containers"]] == [
        None,
        [{"name": "A", "value": "1"}, void],
        own["env"],
        [void],
    ]
    assert [c.get("env") for c in after["initContainers"]] == [None, [void]]


def test_a_container_for_debugging_sees_no_gpu() -> None:
    body = {**pod("1"), "spec": {**pod("1")["spec"], "ephemeralContainers": [{"name": "debug"}]}}
    request = {"uid": "1", "userInfo": {"username": "alice"}, "object": body, "subResource": "ephemeralcontainers"}
    whole = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    _, verdict = pods.answer(json.dumps(whole).encode(), CONTROLLER)
    (operation,) = verdict.patch
    assert operation["path"] == "/spec/ephemeralContainers/0/env"


def test_gates_of_others_are_kept_and_ours_is_not_doubled() -> None:
    other = {"name": "kueue.x-k8s.io/admission"}
    assert gates_after(pod("1", spec={"schedulingGates": [other]})) == [other, GATE]
    assert gates_after(pod("1", spec={"schedulingGates": [GATE, other]})) == [GATE, other]


def test_the_controllers_own_pods_come_with_their_node() -> None:
    worker = pod("1", labels={labels.JOB: "j"}, annotations={labels.DEVICES: "0"}, spec={"nodeName": "n"})
    assert reviewed(worker, CONTROLLER) == {"uid": "1", "allowed": True}
    assert not reviewed(worker, "system:serviceaccount:team-a:gpuquota-controller")["allowed"]


def test_what_only_the_plan_writes_is_erased() -> None:
    body = pod("1", annotations={labels.DEVICES: "0", labels.REASON: "mine", "a~/b": "kept"})
    after = patched(body, reviewed(body)["patch"])
    assert after["metadata"]["annotations"] == {"a~/b": "kept"}
    assert after["spec"]["schedulingGates"] == [GATE]


OWNED = [{"kind": "ElasticJob", "apiVersion": labels.API_VERSION, "name": "j", "uid": "2"}]


@pytest.mark.parametrize(
    "body",
    [
        pod("1", labels={labels.JOB: "j"}),
        pod(labels={labels.WORKER: "0"}),
        pod("1", labels={labels.ATTEMPT: "1"}),
        pod("1", ownerReferences=OWNED),
    ],
)
def test_nobody_pretends_to_be_a_worker(body: dict[str, Any]) -> None:
    status = reviewed(body)["status"]
    assert status["code"] == 403
    assert "created by the controller only" in status["message"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            pod("1", spec={"nodeName": "n"}),
            "spec.nodeName is 'n', but a pod that requests GPUs is assigned to its node",
        ),
        (pod("1k"), "nvidia.com/gpu is '1k', but it must be a whole number of devices, in digits"),
        (pod("-1"), "nvidia.com/gpu is '-1', but it must be a whole number of devices"),
        (pod("some"), "nvidia.com/gpu is 'some', but it must be a number"),
        (pod("1", labels={labels.KIND: "serve"}), "gpuquota.dev/kind is 'serve', but it must be one of train, build"),
        (pod("1", labels={labels.PRIORITY: "high"}), "gpuquota.dev/priority is 'high', but it must be a whole number"),
        (pod("1", labels={labels.PRIORITY: "1" * 18}), "priority is 111111111111111111, but it must be between 0 and"),
        (pod("1", labels={labels.POOL: "A.100"}), "node_pool is 'A.100', but a name is 1 to 63 lower-case letters"),
        (pod("1", labels={labels.PREEMPTIBLE: "no"}), "gpuquota.dev/preemptible is 'no', but it must be one of true"),
        (
            pod("1", annotations={labels.POD_GROUP_SIZE: "4"}),
            "gpuquota.dev/group-size is 4, but no label has the name of the pod's group; add gpuquota.dev/group",
        ),
        (
            pod("1", labels={labels.POD_GROUP: "g"}, annotations={labels.POD_GROUP_SIZE: "0"}),
            "gpuquota.dev/group-size is 0, but it must be at least 1 pod",
        ),
        (pod(annotations={"gpu-fraction": "1.5"}), "gpu-fraction is '1.5', but it must be more than 0"),
        (pod(annotations={"gpu-fraction": "1"}), "gpu_fraction is 1, but it must be more than 0 and less than 1"),
        (pod(annotations={"gpu-fraction-limit": "0.5"}), "there is no gpu_fraction of which it is the limit"),
        (pod("1", annotations={"gpu-fraction": "0.5"}), "nvidia.com/gpu is 1, but an annotation requests a share"),
        (pod("1", annotations={"gpu-memory": "4096"}), "nvidia.com/gpu is 1, but an annotation requests a share"),
        (pod(annotations={"gpu-memory": "4Gi"}), "gpu-memory is '4Gi', but it must be a whole number of MiB"),
        (pod(7), "the pod cannot be read"),
        ({"spec": {"containers": "none"}}, "the pod cannot be read"),
    ],
)
def test_a_pod_that_cannot_be_is_refused_in_one_sentence(body: dict[str, Any], sentence: str) -> None:
    response = reviewed(body)
    assert not response["allowed"]
    assert response["status"]["code"] == 422
    assert sentence in response["status"]["message"]
    assert "patch" not in response


def test_the_sentence_names_the_pod_also_before_it_has_a_name() -> None:
    body = pod("1k")
    assert reviewed(body)["status"]["message"].startswith("pod team-a/a: ")
    body["metadata"] = {"generateName": "job-"}
    assert reviewed(body)["status"]["message"].startswith("pod team-a/job-*: ")


def test_the_limit_in_the_first_containers_environment_is_read() -> None:
    body = pod(annotations={"gpu-fraction": "0.5"})
    body["spec"]["containers"][0]["env"] = [{"name": "RUNAI_GPU_MEMORY_LIMIT", "value": "0.25"}, {"name": "FROM"}]
    assert "gpu_fraction_limit is 0.25" in reviewed(body)["status"]["message"]


AMOUNTS = st.sampled_from(["0", "1", "8", "2k", "-1", "1e3", "0.5", "x", ""]) | st.text(max_size=4)
TEXTS = st.text(max_size=6) | st.sampled_from(["true", "false", "train", "build", "0", "4", "0.5", "1Gi"])
CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {"name": TEXTS},
        optional={
            "resources": st.dictionaries(
                st.sampled_from(["limits", "requests"]),
                st.dictionaries(st.sampled_from([labels.GPU_RESOURCE, "cpu"]), AMOUNTS),
            ),
            "env": st.lists(st.fixed_dictionaries({"name": TEXTS}, optional={"value": TEXTS}), max_size=2),
        },
    ),
    max_size=3,
)
OURS = [labels.KIND, labels.PRIORITY, labels.PREEMPTIBLE, labels.POD_GROUP, labels.JOB, labels.WORKER, "app"]
NOTES = [labels.POD_GROUP_SIZE, labels.DEVICES, labels.REASON, "gpu-fraction", "gpuquota.dev/gpu-memory", "gpu-memory"]
PODS = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {},
            optional={
                "labels": st.dictionaries(st.sampled_from(OURS), TEXTS),
                "annotations": st.dictionaries(st.sampled_from(NOTES), TEXTS),
                "ownerReferences": st.sampled_from([[], OWNED]),
            },
        ),
        "spec": st.fixed_dictionaries(
            {"containers": CONTAINERS},
            optional={
                "initContainers": CONTAINERS,
                "nodeName": st.sampled_from(["", "n"]),
                "schedulingGates": st.lists(st.sampled_from([GATE, {"name": "x"}]), max_size=2),
            },
        ),
    }
)


def amounts(body: dict[str, Any]) -> set[str]:
    spec = body["spec"]
    return {
        given[labels.GPU_RESOURCE]
        for container in [*spec["containers"], *spec.get("initContainers", [])]
        for given in container.get("resources", {}).values()
        if labels.GPU_RESOURCE in given
    }


@given(body=PODS)
def test_no_pod_that_breaks_a_rule_is_admitted(body: dict[str, Any]) -> None:
    response = reviewed(body)
    if not response["allowed"]:
        assert response["status"]["message"]
        return
    after = patched(body, response.get("patch", []))
    notes, written = after["metadata"].get("annotations", {}), after["metadata"].get("labels", {})
    gates = [gate["name"] for gate in after["spec"].get("schedulingGates") or []]
    assert not {labels.JOB, labels.WORKER} & set(written)
    assert after["metadata"].get("ownerReferences") != OWNED
    shared = any("gpu-" in name for name in notes)
    if amounts(after) - {"0", "00"} or shared:
        assert labels.QUOTA_GATE in gates
        assert not after["spec"].get("nodeName")
        assert not {labels.DEVICES, labels.REASON} & set(notes)
        assert all(amount.isascii() and amount.isdecimal() for amount in amounts(after))
        assert not (shared and amounts(after) - {"0", "00"})


@given(body=PODS)
def test_a_pod_that_was_admitted_is_admitted_again_as_it_is(body: dict[str, Any]) -> None:
    # the API server reviews again where another webhook has changed the pod after us
    response = reviewed(body)
    if response["allowed"]:
        again = reviewed(patched(body, response.get("patch", [])))
        assert again == {"uid": "1", "allowed": True}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["request", "uid", "object", "spec", "containers"]), inner)
    ),
    max_leaves=20,
)


@given(body=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_is_sent_is_answered_or_called_malformed(body: bytes) -> None:
    try:
        answer, verdict = pods.answer(body, CONTROLLER)
    except pods.MalformedReviewError as error:
        assert "AdmissionReview" in str(error)  # noqa: PT017  either way is good
    else:
        assert msgspec.json.decode(answer)["response"]["allowed"] is verdict.allowed


@given(body=PODS, depth=st.integers(0, 40), junk=JSON)
def test_a_review_with_a_damaged_pod_is_answered(body: dict[str, Any], depth: int, junk: Any) -> None:
    places: list[tuple[Any, Any]] = []
    pending: list[Any] = [body]
    while pending:
        value = pending.pop()
        keys = value.keys() if isinstance(value, dict) else range(len(value))
        for key in keys:
            places.append((value, key))
            if isinstance(value[key], dict | list):
                pending.append(value[key])
    holder, key = places[depth % len(places)]
    holder[key] = junk
    reviewed(body)


# A share of a GPU


def given_share(body: dict[str, Any], uid: str = "0a1b2c3d-0000-4000-8000-000000000000") -> dict[str, Any]:
    """The pod as it is created."""
    verdict = pods.review(msgspec.convert(body, review_types.Pod), uid=uid)
    assert verdict.allowed, verdict.message
    return patched(body, list(verdict.patch))


def environment(body: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in body["spec"]["containers"][0]["env"]}


def test_a_pod_with_a_share_reads_its_gpus_from_a_config_map() -> None:
    made = given_share(pod(annotations={"gpu-fraction": "0.25", "gpu-fraction-limit": "0.8", "gpu-compute": "0.5"}))
    name = made["metadata"]["annotations"][labels.GPU_CONFIG]
    assert name == "gpuquota-gpu-0a1b2c3d00004000"
    variables = environment(made)
    assert variables["NVIDIA_VISIBLE_DEVICES"] == {"configMapKeyRef": {"name": name, "key": "NVIDIA_VISIBLE_DEVICES"}}
    assert variables["CUDA_VISIBLE_DEVICES"]["configMapKeyRef"]["name"] == name
    assert variables["ELASTIC_SIMULATED_DEVICES"]["configMapKeyRef"]["optional"]
    assert variables["RUNAI_GPU_MEMORY_LIMIT"] == "0.8"
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50.0"
    (volume,), (mount,) = made["spec"]["volumes"], made["spec"]["containers"][0]["volumeMounts"]
    assert (volume["name"], mount["mountPath"]) == (mount["name"], variables["ELASTIC_MEMORY_DIR"])


def test_what_the_pod_has_already_stays_and_its_own_choice_of_gpus_does_not() -> None:
    body = pod(annotations={"gpu-memory": "4096"}, spec={"volumes": [{"name": "data"}]})
    body["spec"]["containers"] = [
        {
            "name": "main",
            "env": [{"name": "MINE", "value": "1"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        },
        {"name": "beside"},
    ]
    made = given_share(body)
    variables = environment(made)
    assert variables["MINE"] == "1"
    assert "configMapKeyRef" in variables["NVIDIA_VISIBLE_DEVICES"]
    assert variables["RUNAI_GPU_MEMORY_LIMIT"] == str(4 << 30)
    assert [one["name"] for one in made["spec"]["containers"][0]["env"]].count("NVIDIA_VISIBLE_DEVICES") == 1
    assert [one["name"] for one in made["spec"]["volumes"]] == ["data", "gpuquota-memory"]
    assert made["spec"]["containers"][1]["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]


def test_a_pod_that_comes_by_twice_is_given_its_references_once() -> None:
    once = given_share(pod(annotations={"gpu-fraction": "0.5"}))
    assert given_share(once, uid="another-review") == once


def test_a_limit_from_the_variable_stands_in_the_annotation_too() -> None:
    body = pod(annotations={"gpu-memory": "1024"})
    body["spec"]["containers"][0]["env"] = [{"name": "RUNAI_GPU_MEMORY_LIMIT", "value": "2Gi"}]
    made = given_share(body)
    assert made["metadata"]["annotations"]["gpuquota.dev/gpu-memory-limit"] == "2048Mi"
    assert environment(made)["RUNAI_GPU_MEMORY_LIMIT"] == str(2 << 30)


@pytest.mark.parametrize("name", ["kube-root-ca.crt", "gpuquota-gpu-XYZ", ""])
def test_a_pod_cannot_have_another_config_map_written(name: str) -> None:
    made = given_share(pod(annotations={"gpu-fraction": "0.5", labels.GPU_CONFIG: name}))
    assert made["metadata"]["annotations"][labels.GPU_CONFIG] == "gpuquota-gpu-0a1b2c3d00004000"


@pytest.mark.parametrize(
    ("body", "asked", "given"),
    [
        (pod("1"), 86_400, 60),
        (pod("1"), 30, 30),
        (pod("1", labels={labels.PREEMPTIBLE: "false"}), 600, 600),
        (pod("1", labels={labels.NOTEBOOK: "nb"}), 600, 600),
        (pod(annotations={"gpu-fraction": "0.5"}), 600, 60),
    ],
    ids=["long", "short", "not preemptible", "session", "share"],
)
def test_the_grace_period_of_a_pod_that_may_borrow_is_capped_and_its_creator_is_warned(
    body: dict[str, Any], asked: int, given: int
) -> None:
    body = {**body, "spec": {**body["spec"], "terminationGracePeriodSeconds": asked}}
    verdict = pods.review(msgspec.convert(body, review_types.Pod))
    assert patched(body, list(verdict.patch))["spec"]["terminationGracePeriodSeconds"] == given
    warned = f"spec.terminationGracePeriodSeconds is {asked}, and was set to {given}"
    assert bool(verdict.warnings) == (asked != given)
    assert all(warned in warning for warning in verdict.warnings)
