"""The pods of a step's workers: what the step's own pod is, with another command. Pure.

KFP puts on the step's pod what its author asked for (`set_memory_limit`, and by kfp-kubernetes volumes, secrets,
tolerations, node selectors, pull secrets). The workers do the step's work, so they get all of that; what KFP and Argo
added for themselves they do not.
"""

from __future__ import annotations

from typing import Any, Final

from kfp_gpuquota.dsl.worker import POD_NAME

Json = dict[str, Any]

MAIN: Final = "main"
MOUNT: Final = "/var/run/gpuquota/relay"
VOLUME: Final = "gpuquota-relay"
_KEPT_OF_POD: Final = (
    "nodeSelector", "tolerations", "affinity", "imagePullSecrets", "serviceAccountName", "runtimeClassName",
    "securityContext", "priorityClassName", "hostAliases", "dnsConfig", "dnsPolicy", "schedulerName",
)  # fmt: skip
_KEPT_OF_CONTAINER: Final = ("resources", "securityContext", "workingDir", "imagePullPolicy", "envFrom")
_NOT_PASSED_ON: Final = ("GPUQUOTA_", "KFP_", "ARGO_", "ELASTIC_")
_NOT_KEPT_VOLUMES: Final = ("argo", "kfp-", "var-run-argo", "tmp-dir-argo", "input-artifacts", "kube-api-access")
_SCRATCH: Final = "-scratch"
_NODE_LOCAL: Final = ("emptyDir", "projected", "downwardAPI")

# Runs in whatever Python the image has: it fetches the rest from the launcher, which may not be up yet.
BOOTSTRAP: Final = """\
import os, sys, tempfile, time, urllib.request
directory, last = sys.argv[1], time.monotonic() + 900
while True:
    try:
        url, token = (open(os.path.join(directory, name)).read().strip() for name in ("url", "token"))
        asked = urllib.request.Request(url + "/package", headers={"Authorization": "Bearer " + token})
        content = urllib.request.urlopen(asked, timeout=60).read()
        break
    except OSError as error:
        if time.monotonic() > last:
            sys.exit("gpuquota: the step's launcher does not answer: %s" % error)
        time.sleep(1)
package = os.path.join(tempfile.mkdtemp(), "gpuquota.zip")
open(package, "wb").write(content)
sys.path.insert(0, package)
from gpuquota_remote import remote
sys.exit(remote.main(directory))
"""
# An image without Python runs the command itself: it reads and writes what its volumes hold.
_SHELL: Final = 'if command -v python3 >/dev/null 2>&1; then exec python3 -I -c "$0" "$1"; fi; shift; exec "$@"'


def worker_template(own_pod: Json, image: str, secret: str, argv: list[str]) -> Json:
    """A pod template for workers in `image` ("": that of the step's own pod) that start from the relay in `secret`.

    `argv` is what runs in an image without Python.
    """
    spec = own_pod.get("spec", {})
    own = _container(spec)
    volumes = [volume for volume in spec.get("volumes", []) if _is_kept(volume)]
    names = {volume["name"] for volume in volumes}
    mounts = [mount for mount in own.get("volumeMounts", []) if mount["name"] in names]
    container = {
        "name": MAIN,
        "image": image or own.get("image", ""),
        "command": ["sh", "-c", _SHELL, BOOTSTRAP, MOUNT, *argv],
        "env": [
            *(entry for entry in own.get("env", []) if not entry["name"].startswith(_NOT_PASSED_ON)),
            {"name": POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "volumeMounts": [*mounts, {"name": VOLUME, "mountPath": MOUNT, "readOnly": True}],
        **{field: own[field] for field in _KEPT_OF_CONTAINER if own.get(field)},
    }
    return {
        "spec": {
            **{field: spec[field] for field in _KEPT_OF_POD if spec.get(field)},
            "containers": [container],
            "restartPolicy": "Never",
            "volumes": [*volumes, {"name": VOLUME, "secret": {"secretName": secret, "defaultMode": 0o444}}],
        },
    }


def _container(spec: Json) -> Json:
    """KFP calls the container that runs the user's code "main"."""
    containers: list[Json] = spec.get("containers", [])
    return next((each for each in containers if each["name"] == MAIN), containers[0] if containers else {})


def _is_kept(volume: Json) -> bool:
    """Whether it is the author's, and holds more than what this pod put into it.

    KFP mounts an empty volume (gcs-scratch, s3-scratch, ...) where artifacts lie, so that images that are not root's
    can write there: the workers get such volumes of their own.
    """
    if volume["name"].endswith(_SCRATCH):
        return True
    return not volume["name"].startswith(_NOT_KEPT_VOLUMES) and not any(kind in volume for kind in _NODE_LOCAL)
