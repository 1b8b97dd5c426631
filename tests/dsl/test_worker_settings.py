"""All that an author or an admin sets on a step's pod reaches its workers, or is refused when the step is routed."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any, Final

import pytest
from kfp import kubernetes

from kfp_gpuquota.cluster.kubernetes.admission.device_visibility import NO_DEVICES
from kfp_gpuquota.dsl.pipelines.route import RESERVED_PATHS, check_config
from kfp_gpuquota.dsl.spec import pod_volumes
from kfp_gpuquota.dsl.spec.pod_template import worker_template
from kfp_gpuquota.errors import DefinitionError
from tests.dsl.kubernetes_settings import USES, config_of
from tests.kfp_backend import shapes
from tests.kfp_backend.kubernetes_config import configured

Json = dict[str, Any]
Fact = tuple[str, str]

_NO_TASKS: Final = {"CreatePVC", "DeletePVC"}
_PAIRS: Final = [*((name,) for name in USES), *itertools.combinations(USES, 2)]
# A time limit of the pod counts the time in the queue as well; KFP ends the step by it, and the job with the step.
_LAUNCHERS: Final = {"set_timeout"}


@pytest.fixture(scope="module")
def steps_pod() -> Json:
    workflow = shapes.workflow("run-x", "1234")
    workflow["metadata"]["uid"] = "uid"
    given = {"image": "launcher:1", "command": ["sh"], "env": [{"name": "MY_ENV", "value": "1"}]}
    return shapes.executor_pod(workflow, "run-x(0).root(0).step(0).executor(0)", shapes.Step("step", given))


def facts(pod: Json) -> set[Fact]:
    """Return every setting of a pod separately."""
    spec = pod["spec"]
    main = next(one for one in spec["containers"] if one["name"] == "main")
    lists = {"env": main.get("env", []), "mount": main.get("volumeMounts", []), "volume": spec["volumes"]}
    maps = {
        **{part: pod["metadata"].get(part, {}) for part in ("labels", "annotations")},
        "spec": {name: value for name, value in spec.items() if name not in {"containers", "volumes"}},
        "container": {name: value for name, value in main.items() if name not in {"env", "volumeMounts"}},
    }
    found = {(kind, json.dumps(one, sort_keys=True)) for kind, listed in lists.items() for one in listed}
    return found | {
        (kind, json.dumps([k, v], sort_keys=True)) for kind, given in maps.items() for k, v in given.items()
    }


def test_every_setter_of_kfp_kubernetes_is_tried() -> None:
    setters = {name for name in kubernetes.__all__ if callable(getattr(kubernetes, name))}
    assert setters - _NO_TASKS == set(USES)


@pytest.mark.parametrize("names", _PAIRS, ids="+".join)
def test_what_kfp_kubernetes_sets_reaches_the_workers(names: tuple[str, ...], steps_pod: Json) -> None:
    config = config_of(*(USES[name] for name in names))
    check_config("step", config)
    added = facts(configured(steps_pod, config)) - facts(steps_pod)
    assert len({kind for kind, _ in added}) >= 1
    launcher, volumes = moved(steps_pod, config)
    workers = facts(worker_template(launcher, "", "secret", volumes=volumes))
    missing = added - workers
    assert {text for _, text in missing} == ({'["activeDeadlineSeconds", 60]'} if _LAUNCHERS & set(names) else set())
    assert not [one for one in launcher["spec"]["volumes"] if {"persistentVolumeClaim", "ephemeral"} & one.keys()]


def moved(pod: Json, config: Json) -> tuple[Json, Json]:
    """The launcher's pod after routing, and the volumes that only workers mount."""
    container: Json = {"args": []}
    left = copy.deepcopy(config)
    pod_volumes.move_to_workers(container, left, ())
    (argument,) = container["args"]
    return configured(pod, left), pod_volumes.parsed(argument.removeprefix(pod_volumes.ARGUMENT))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hostUsers", False),
        ("priorityClassName", "high"),
        ("runtimeClassName", "nvidia"),
        ("schedulerName", "volcano"),
        ("topologySpreadConstraints", [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]),
        ("dnsConfig", {"searches": ["lab"]}),
        ("hostAliases", [{"ip": "10.0.0.1", "hostnames": ["store"]}]),
        ("enableServiceLinks", False),
    ],
)
def test_fields_that_admission_sets_on_the_pod_reach_the_workers(field: str, value: object, steps_pod: Json) -> None:
    pod = {**steps_pod, "spec": {**steps_pod["spec"], field: value}}
    assert worker_template(pod, "", "s")["spec"][field] == value


def test_what_admission_hides_from_the_launcher_is_not_hidden_from_workers(steps_pod: Json) -> None:
    main = next(one for one in steps_pod["spec"]["containers"] if one["name"] == "main")
    pod = {**steps_pod, "spec": {**steps_pod["spec"], "containers": [{**main, "env": [*main["env"], NO_DEVICES]}]}}
    (container,) = worker_template(pod, "", "s")["spec"]["containers"]
    names = [entry["name"] for entry in container["env"]]
    assert names == ["MY_ENV", "KFP_POD_NAME", "KFP_POD_UID", "GPUQUOTA_POD_NAME"]


def test_a_ca_bundle_that_kfp_names_at_run_time_is_named_for_workers_that_mount_it(steps_pod: Json) -> None:
    pod = configured(steps_pod, config_of(lambda task: kubernetes.use_config_map_as_volume(task, "ca", "/kfp/certs")))
    environment = {"SSL_CERT_FILE": "/kfp/certs/ca.crt", "REQUESTS_CA_BUNDLE": "/etc/ssl/launchers-own.pem"}
    (container,) = worker_template(pod, "", "s", environment=environment)["spec"]["containers"]
    assert {"name": "SSL_CERT_FILE", "value": "/kfp/certs/ca.crt"} in container["env"]
    assert "REQUESTS_CA_BUNDLE" not in {entry["name"] for entry in container["env"]}


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("workflows.argoproj.io/workflow", "domain 'workflows.argoproj.io'"),
        ("gpuquota.dev/job", "domain 'gpuquota.dev'"),
        ("gpu-fraction", r"@gpuquota\.component\(fraction=\.\.\.\)"),
    ],
)
def test_labels_and_annotations_that_would_be_taken_off_are_refused(name: str, output: str) -> None:
    with pytest.raises(DefinitionError, match=output):
        check_config("train", config_of(lambda task: kubernetes.add_pod_label(task, name, "x")))
    with pytest.raises(DefinitionError, match=output):
        check_config("train", config_of(lambda task: kubernetes.add_pod_annotation(task, name, "x")))


@pytest.mark.parametrize("path", RESERVED_PATHS)
def test_a_volume_over_a_workers_own_files_is_refused(path: str) -> None:
    with pytest.raises(DefinitionError, match=f"step 'train': a volume is mounted at {path}"):
        check_config("train", config_of(lambda task: kubernetes.mount_pvc(task, "data", f"{path}/")))
