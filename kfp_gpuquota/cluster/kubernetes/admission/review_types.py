"""An AdmissionReview as structs with only the fields that a review needs: decoding skips the others."""

from __future__ import annotations

from typing import Any

import msgspec


class _Narrow(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """Base class of the decoded parts of a review; other fields are skipped while decoding."""


class Variable(_Narrow, frozen=True):
    """An environment variable; `value` is None if it has another source."""

    name: str = ""
    value: str | None = None
    value_from: dict[str, Any] | None = None


class Named(_Narrow, frozen=True):
    """A volume, of which only the name matters."""

    name: str = ""


class Mount(_Narrow, frozen=True):
    """A mount of a volume in a container."""

    mount_path: str = ""


class Resources(_Narrow, frozen=True):
    """Quantities by resource, as normalized by the API server."""

    limits: dict[str, str] | None = None
    requests: dict[str, str] | None = None


class Container(_Narrow, frozen=True):
    """One container."""

    resources: Resources | None = None
    env: tuple[Variable, ...] | None = None
    volume_mounts: tuple[Mount, ...] | None = None


class Gate(_Narrow, frozen=True):
    """A scheduling gate."""

    name: str = ""


class PodSpec(_Narrow, frozen=True):
    """The specification of the pod."""

    node_name: str | None = None
    scheduling_gates: tuple[Gate, ...] | None = None
    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None
    ephemeral_containers: tuple[Container, ...] | None = None
    volumes: tuple[Named, ...] | None = None
    termination_grace_period_seconds: float | None = None
    resource_claims: tuple[Named, ...] | None = None


class Owner(_Narrow, frozen=True):
    """An owner of the pod."""

    kind: str = ""
    api_version: str = ""


class Metadata(_Narrow, frozen=True):
    """The metadata of the pod."""

    name: str | None = None
    generate_name: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: tuple[Owner, ...] | None = None


class Pod(_Narrow, frozen=True):
    """The pod to be created."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()


class User(_Narrow, frozen=True):
    """The user that creates the pod."""

    username: str = ""


class Resource(_Narrow, frozen=True):
    """The kind of the object."""

    resource: str = "pods"


class Request(_Narrow, frozen=True):
    """An admission request; `object` is decoded only if it is needed."""

    uid: str
    namespace: str = ""
    user_info: User = User()
    resource: Resource = Resource()
    sub_resource: str = ""
    object: msgspec.Raw = msgspec.Raw(b"{}")


class Review(_Narrow, frozen=True):
    """The AdmissionReview in the body of a call."""

    request: Request
