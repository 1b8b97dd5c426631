"""An elastic TrainJob under the real Kubeflow Trainer and the real JobSet. `make soak` builds them and runs this.

`GPUQUOTA_TRAINER` is a folder with both programs (`jobset`, `trainer-controller-manager`), links to their modules
(`jobset-module`, `trainer-module`) for resource definitions and webhooks, and a virtual environment with Kubeflow's SDK
(`sdk`): see tools/build_trainer.
"""

from __future__ import annotations

import os
import subprocess
import time
from base64 import b64encode
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.cluster.certificates import issue, new_authority
from tests.kubernetes.controlled import holds
from tests.kubernetes.installation import MANIFESTS
from tests.kubernetes.test_managed_jobs import active, has, job_body
from tests.polling import TIMEOUT_S, until
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kubernetes.controlled import Controlled
    from tools.devcluster import DevCluster

PROGRAMS: Final = Path(os.environ.get("GPUQUOTA_TRAINER", "."))
RUNTIME: Final = MANIFESTS / "components" / "trainer" / "runtime.yaml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "GPUQUOTA_TRAINER" not in os.environ, reason="GPUQUOTA_TRAINER names no programs; make soak builds"
    ),
]
CONFIGS: Final = {
    "jobset": {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "internalCertManagement": {"enable": False},
        "leaderElection": {"leaderElect": False},
    },
    "trainer-controller-manager": {
        "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
        "certManagement": {"enable": False},
        "leaderElection": {"leaderElect": False},
    },
}
CRDS: Final = {"jobset": "config/components/crd/bases", "trainer-controller-manager": "manifests/base/crds"}
WEBHOOKS: Final = {
    "jobset": "config/components/webhook/manifests.yaml",
    "trainer-controller-manager": "manifests/base/webhook/manifests.yaml",
}
MODULES: Final = {"jobset": "jobset-module", "trainer-controller-manager": "trainer-module"}


def start(program: str, cluster: DevCluster, folder: Path) -> subprocess.Popen[bytes]:
    """Start a controller with its webhooks, as its own manifests have them, at ports of this machine."""
    folder.mkdir()
    certs = folder / "k8s-webhook-server" / "serving-certs"
    certs.mkdir(parents=True)
    authority = new_authority("webhooks", time.time())
    issued = issue(authority, ["127.0.0.1"], time.time())
    (certs / "tls.crt").write_bytes(issued.certificate)
    (certs / "tls.key").write_bytes(issued.key)
    module, port = PROGRAMS / MODULES[program], free_port()
    for definition in sorted((module / CRDS[program]).glob("*_*.yaml")):
        cluster.kubectl("apply", "--server-side", "-f", str(definition))
        spec = yaml.safe_load(definition.read_text())["spec"]
        cluster.api.until_served(f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}")
    ports = {
        "health": {"healthProbeBindAddress": f"127.0.0.1:{free_port()}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": port, "host": "127.0.0.1"},
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"kind": "Configuration", **CONFIGS[program], **ports}))
    log = (folder / "log").open("wb")
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "TMPDIR": str(folder)}
    command = [str(PROGRAMS / program), f"--config={config}"]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    hooks = [one for one in yaml.safe_load_all((module / WEBHOOKS[program]).read_text()) if one]
    for hook in hooks:
        hook["metadata"]["name"] = f"{program}-{hook['metadata']['name']}"
        for one in hook["webhooks"]:
            path = one["clientConfig"]["service"]["path"]
            one["clientConfig"] = {
                "url": f"https://127.0.0.1:{port}{path}",
                "caBundle": b64encode(authority.certificate).decode(),
            }
    answers = folder / "webhooks.yaml"
    answers.write_text(yaml.safe_dump_all(hooks))
    until(lambda: "Serving webhook server" in (folder / "log").read_text(), (folder / "log").read_text, 60.0)
    cluster.kubectl("apply", "-f", str(answers))
    return process


@pytest.fixture
def trainer(controlled: Controlled, tmp_path: Path) -> Iterator[Controlled]:
    """A cluster with Trainer, JobSet and the runtime of ours."""
    cluster = controlled.cluster
    with ExitStack() as stack:
        for program in ("jobset", "trainer-controller-manager"):
            process = start(program, cluster, tmp_path / program)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            stack.callback(cluster.kubectl, "delete", "-f", str(tmp_path / program / "webhooks.yaml"))
        cluster.kubectl("apply", "-f", str(RUNTIME))
        yield controlled


TRAIN: Final = """
import sys
from kubeflow.common.types import KubernetesBackendConfig
from kubeflow.trainer import CustomTrainer, TrainerClient

def train():
    import elastic_runtime as elastic
    job = elastic.init()

client = TrainerClient(KubernetesBackendConfig(namespace=sys.argv[1], config_file=sys.argv[2]))
if len(sys.argv) == 3:
    print(client.train("gpuquota-elastic-torch", trainer=CustomTrainer(func=train, num_nodes=2)))
else:
    job = client.get_job(sys.argv[3])
    print(job.status, *sorted(step.name for step in job.steps))
"""


@dataclass
class Client:
    """A user's script with Kubeflow's SDK."""

    cluster: DevCluster
    team: str
    script: Path

    def __call__(self, *job: str) -> str:
        """What it prints: the name of the TrainJob that it starts, or how that goes."""
        command = [PROGRAMS / "sdk" / "bin" / "python", self.script, self.team, self.cluster.kubeconfig, *job]
        done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def test_a_train_job_changes_its_size_and_no_controller_restarts_anything(trainer: Controlled, tmp_path: Path) -> None:
    api = trainer.cluster.api
    trainer.add_nodes(1, gpus=4)
    team, owner = trainer.team("borrower", guaranteed=0), trainer.team("owner", guaranteed=4)
    trainer.start()
    client = Client(trainer.cluster, team, tmp_path / "script.py")
    client.script.write_text(TRAIN)
    name = client()
    train_job = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{team}/trainjobs/{name}"
    path = f"/apis/batch/v1/namespaces/{team}/jobs/{name}-node-0"
    trainer.wait(lambda: api.exists(path), trainer.log)
    uid = active(trainer, path, 4)["metadata"]["uid"]
    steps = " ".join(f"node-{index}" for index in range(4))
    trainer.wait(lambda: client(name).endswith(steps), lambda: client(name))
    trainer.until_bound(trainer.pod(owner, "back", gpus=3))
    assert active(trainer, path, 1)["metadata"]["uid"] == uid
    api.patch(train_job, {"spec": {"suspend": True}})
    trainer.until(path, lambda job: has(job, "Suspended"))
    trainer.until(train_job, lambda job: has(job, "Suspended"))
    api.patch(train_job, {"spec": {"suspend": False}})
    active(trainer, path, 1)
    (pod,) = trainer.bound(team)
    trainer.finish(f"/api/v1/namespaces/{team}/pods/{pod}")
    done = trainer.until(train_job, lambda job: has(job, "Complete"))
    assert not has(done, "Failed")
    assert client(name).startswith("Complete")
    job_set = api.get(f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{team}/jobsets/{name}")
    assert job_set["status"].get("restarts", 0) == 0


def is_bound(uid: str, pod: dict[str, Any]) -> bool:
    """It is a pod of this Job."""
    return holds(pod) and pod["metadata"]["labels"]["batch.kubernetes.io/controller-uid"] == uid


def test_a_job_set_restarts_a_job_that_has_failed_under_the_same_name(trainer: Controlled) -> None:
    """The ElasticJob of the failed one is in the way until the garbage collector has deleted it."""
    api = trainer.cluster.api
    trainer.add_nodes(1, gpus=2)
    team = trainer.team(guaranteed=2)
    trainer.start()
    body = job_body(2)
    metadata = {name: body["metadata"][name] for name in ("labels", "annotations")}
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "set"},
        "spec": {
            "failurePolicy": {"maxRestarts": 1},
            "replicatedJobs": [{"name": "node", "template": {"metadata": metadata, "spec": body["spec"]}}],
        },
    }
    path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{team}/jobsets"
    api.create(path, job_set)
    job = f"/apis/batch/v1/namespaces/{team}/jobs/set-node-0"
    uids = set[str]()

    def exists_anew() -> bool:
        found = {one["metadata"]["uid"] for one in api.items(job.rpartition("/")[0])}
        return bool(found - uids)

    for _ in range(2):
        trainer.wait(exists_anew, trainer.log)
        uid = active(trainer, job, 2)["metadata"]["uid"]
        uids.add(uid)
        pod = trainer.cluster.api.until(f"/api/v1/namespaces/{team}/pods/set-node-0-0", partial(is_bound, uid))
        trainer.finish(f"/api/v1/namespaces/{team}/pods/{pod['metadata']['name']}", exit_code=1)
    trainer.until(f"{path}/set", lambda one: has(one, "Failed"))
