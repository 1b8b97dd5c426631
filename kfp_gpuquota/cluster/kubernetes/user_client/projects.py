"""The part of the Kubernetes client that reads and changes quotas, policies and nodes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from kfp_gpuquota.api.lending import with_lent
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.convert.known_gpus import divided_of
from kfp_gpuquota.cluster.kubernetes.convert.published_devices import Allocations, PublishedDevices
from kfp_gpuquota.cluster.kubernetes.objects import core_types, custom_types, device_types, labels, paths
from kfp_gpuquota.cluster.kubernetes.quota import workload_policies
from kfp_gpuquota.cluster.kubernetes.user_client import views
from kfp_gpuquota.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidFieldError,
    NotFoundError,
    UnauthorizedError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kfp_gpuquota.api import Project
    from kfp_gpuquota.api.policy import WorkloadPolicy
    from kfp_gpuquota.api.wire import MembersChange, NodeView, ProjectView
    from kfp_gpuquota.cluster.kubernetes.convert.published_devices import Shown
    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls

T = TypeVar("T")


class _Namespace(core_types.Struct, frozen=True):
    metadata: core_types.Metadata


class ProjectCalls:
    """The quotas, policies and nodes of one API server; `calls` are its requests."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.left_out = ""  # what the last list of nodes lacks, for want of which right

    def list_projects(self) -> tuple[ProjectView, ...]:
        """Return all quotas, by name; invalid ones, which have a condition, are left out."""
        shown = []
        for quota_ in self._items(paths.QUOTAS, custom_types.GpuQuota):
            with suppress(InvalidFieldError):
                shown.append(views.project_view(quota_))
        return with_lent(sorted(shown, key=lambda view: view.project.name))

    def get_project(self, name: str) -> ProjectView:
        """Return a project. Raises NotFoundError."""
        try:
            found = self.calls.read(paths.quota(name), custom_types.GpuQuota)
        except NotFoundError:
            raise NotFoundError(
                f"project {name!r} has no GPU quota; an admin sets it in its Profile, or with: "
                f"gpuquota project create {name} --guaranteed N"
            ) from None
        return views.project_view(found)

    def create_project(self, project: Project) -> ProjectView:
        """Create a project. Raises AlreadyExistsError."""
        try:
            self.calls.create(paths.QUOTAS, views.gpu_quota(project))
        except AlreadyExistsError:
            raise AlreadyExistsError(
                f"project {project.name!r} already exists; change it with: gpuquota project set {project.name}"
            ) from None
        return self.get_project(project.name)

    def set_project(self, project: Project, *, expected: Project | None = None) -> ProjectView:
        """Create a project, or replace its quota.

        Raises ConflictError if a Profile defines it, or if it differs from `expected`.
        """
        if expected is not None and self.get_project(project.name).project != expected:
            raise ConflictError(f"the quota of {project.name!r} was changed in the meantime; read it again and retry")
        path = paths.quota(project.name)
        try:
            before = self.calls.read(path, custom_types.GpuQuota)
        except NotFoundError:
            return self.create_project(project)
        self.calls.patch(path, views.quota_patch(before, project))
        return self.get_project(project.name)

    def change_members(self, project: str, change: MembersChange) -> ProjectView:  # noqa: ARG002 (the protocol's)
        """Refuse: a namespace has no members."""
        raise UsageError(
            f"RoleBindings of namespace {project} decide who submits jobs to it; see: kubectl create rolebinding --help"
        )

    def quota_gap(self, name: str) -> str:
        """Return a warning if the namespace is not labelled, so that its pods start without a quota; else ""."""
        try:
            found = self.calls.read(join("/api/v1/namespaces", name), _Namespace)
        except NotFoundError:
            return f"namespace {name!r} does not exist; a team needs one, a department does not"
        if found.metadata.labels.get(labels.MANAGED) == "true":
            return ""
        return (
            f"pods in namespace {name!r} are not under the quota, only ElasticJobs are; put them under it with: "
            f"kubectl label namespace {name} {labels.MANAGED}=true"
        )

    def delete_project(self, name: str) -> None:
        """Delete a project's quota, but not its namespace. Raises ConflictError while it has jobs."""
        if jobs := [job.metadata.name for job in self._items(paths.jobs_of(name), custom_types.ElasticJob)]:
            raise ConflictError(f"project {name!r} still has {len(jobs)} jobs; delete them first: {' '.join(jobs[:5])}")
        self.calls.delete(paths.quota(name))

    def list_policies(self) -> tuple[WorkloadPolicy, ...]:
        """Return all policies, by name; invalid ones are left out."""
        shown = []
        for stored in self._items(paths.WORKLOAD_POLICIES, custom_types.PolicyObject):
            with suppress(InvalidFieldError):
                shown.append(workload_policies.policy_of(stored))
        return tuple(sorted(shown, key=lambda policy: policy.name))

    def set_policy(self, policy: WorkloadPolicy) -> WorkloadPolicy:
        """Create or replace a policy. Raises InvalidFieldError for a rule on unused GPUs that nothing measures."""
        if policy.idle is not None and not self._measures_use():
            rule = "nothing measures whether GPUs are used: gpuUse.exporter of the QuotaPolicy names no Service"
            raise InvalidFieldError("idle", policy.name, rule, hint="name that of dcgm-exporter there first")
        path, wanted = join(paths.WORKLOAD_POLICIES, policy.name), workload_policies.policy_body(policy)
        try:
            self.calls.create(paths.WORKLOAD_POLICIES, wanted)
        except AlreadyExistsError:
            self.calls.patch(path, [{"op": "replace", "path": "/spec", "value": wanted["spec"]}])
        return workload_policies.policy_of(self.calls.read(path, custom_types.PolicyObject))

    def delete_policy(self, name: str) -> None:
        """Delete a policy. Raises NotFoundError."""
        try:
            self.calls.delete(join(paths.WORKLOAD_POLICIES, name))
        except NotFoundError:
            raise NotFoundError(f"there is no policy {name!r}; see: gpuquota policy list") from None

    def list_nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes with GPUs, and the pods that hold their devices.

        Those of DRA drivers are left out for a user who may not read ResourceSlices, ResourceClaims and DeviceClasses:
        then `left_out` has the reason.
        """
        from kfp_gpuquota.cluster.kubernetes.sharing import gpu_ledger  # noqa: PLC0415 (it imports aiohttp, which a launcher lacks)

        nodes = self._items("/api/v1/nodes", core_types.Node)
        pods = self._items("/api/v1/pods", core_types.Pod, fieldSelector="spec.nodeName!=")
        table = self.gpu_resources()
        published = self._published(table)
        shown = (
            views.node_view(
                node, pods, gpu_ledger.views_of(node.metadata.name, pods), table, published(node.metadata.name)
            )
            for node in nodes
        )
        return tuple(sorted((view for view in shown if view.has_gpus), key=lambda view: view.node.name))

    def _published(self, table: Sequence[custom_types.GpuResource]) -> Callable[[str], Mapping[str, Shown]]:
        """Return a function of a node's name that returns the devices that DRA drivers publish there, by resource."""
        allocations = Allocations(with_namespace=False)
        self.left_out = ""
        try:
            devices = self.published_devices([row.name for row in table], dict(divided_of(table)))
            if devices.count_any:
                for claim in self._items(device_types.CLAIMS, device_types.ResourceClaim):
                    allocations.put(claim)
        except NotFoundError:
            return lambda _name: {}
        except UnauthorizedError as error:
            self.left_out = (
                f"GPUs that DRA drivers publish are left out: {error.message}; an administrator can give you the right "
                "to list deviceclasses, resourceslices and resourceclaims (resource.k8s.io) in all namespaces"
            )
            return lambda _name: {}
        return lambda name: devices.shown_on(name, allocations)

    def _measures_use(self) -> bool:
        """Return whether the QuotaPolicy names exporters, or may not be read."""
        try:
            policy = self.calls.read(join(paths.QUOTA_POLICIES, "default"), custom_types.QuotaPolicyObject)
        except NotFoundError:
            return False
        except UnauthorizedError:
            return True
        return policy.spec.gpu_use is not None

    def published_devices(self, counted: Collection[str], divided: Mapping[str, str] | None = None) -> PublishedDevices:
        """Return the devices of DRA drivers, as in `set_counted`. Raises NotFoundError and UnauthorizedError."""
        devices = PublishedDevices(lambda _node: None, lambda *_: None)
        devices.set_counted(counted, divided)
        for device_class in self._items(device_types.CLASSES, device_types.DeviceClass):
            devices.put_class(device_class)
        if devices.count_any:
            for found in self._items(device_types.SLICES, device_types.ResourceSlice):
                devices.put_slice(found)
        return devices

    def gpu_resources(self) -> tuple[custom_types.GpuResource, ...]:
        """Return the resources that count as GPUs; none without a QuotaPolicy, or if it may not be read."""
        from kfp_gpuquota.cluster.kubernetes.quota import quota_policy  # noqa: PLC0415 (it imports aiohttp)

        try:
            policy = self.calls.read(join(paths.QUOTA_POLICIES, quota_policy.NAME), custom_types.QuotaPolicyObject)
        except (NotFoundError, UnauthorizedError):
            return ()
        return policy.spec.gpu_resources or ()

    def _items(self, path: str, kind: type[T], **query: object) -> list[T]:
        page: core_types.Page[T] = self.calls.read(path, core_types.Page[kind], **query)  # type: ignore[valid-type]
        return page.items or []
