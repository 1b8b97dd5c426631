"""Reads the leader's /debug/state, with a token of the service account that may, through a port forward."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.objects.labels import DEBUG_STATE as PATH
from kfp_gpuquota.cluster.kubernetes.user_client.port_forward import forwarded
from kfp_gpuquota.errors import ClusterUnavailableError, NotFoundError, RunError, UnauthorizedError

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls

SYSTEM: Final = "gpuquota-system"
ACCOUNT: Final = "gpuquota-debug"
METRICS_PORT: Final = 8080
TOKEN_S: Final = 600
ANSWERS_WITHIN_S: Final = 60.0
_LEASE: Final = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/gpuquota-controller"


def read(calls: Calls, context: str) -> bytes:
    """Return the dump as JSON. Raises UnauthorizedError for a user without the rights, and what `forwarded` raises."""
    pod, token = leader(calls), token_of(calls)
    with forwarded(context, SYSTEM, f"pod/{pod}", METRICS_PORT, needed_by="gpuquota debug state") as url:
        return fetch(url, token)


def leader(calls: Calls) -> str:
    """Return the name of the leader's pod. Raises NotFoundError where none leads."""
    holder: str = calls.get(_LEASE).get("spec", {}).get("holderIdentity", "")
    if not holder:
        raise NotFoundError("no controller leads, so that there is no state; see: gpuquota doctor")
    return holder.rpartition("_")[0]


def token_of(calls: Calls) -> str:
    """Return a token of the account that may read the state, and nothing else."""
    return calls.service_account_token(SYSTEM, ACCOUNT, TOKEN_S)


def fetch(url: str, token: str) -> bytes:
    """Return what the controller at `url` answers to the token's user."""
    request = urllib.request.Request(f"{url}{PATH}", headers={"Authorization": f"Bearer {token}"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=ANSWERS_WITHIN_S) as response:  # noqa: S310 (a local port)
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        why = error.read().decode(errors="replace").strip()
        kind = UnauthorizedError if error.code in {401, 403} else RunError
        raise kind(f"the controller refuses {PATH} ({error.code}): {why}") from error
    except OSError as error:
        raise ClusterUnavailableError(f"the controller does not answer {PATH}: {error}") from error
