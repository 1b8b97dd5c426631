"""The chart's templates: each manifest's text, with its namespace, labels and settings turned into values. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

SYSTEM: Final = "gpuquota-system"
PART_OF: Final = "app.kubernetes.io/part-of: gpuquota"
NAMESPACE: Final = "{{ .Values.namespace }}"
KEEP: Final = "helm.sh/resource-policy: keep"
_CLUSTER_SCOPED: Final = frozenset(
    {
        "ClusterRole",
        "ClusterRoleBinding",
        "FlowSchema",
        "MutatingWebhookConfiguration",
        "Namespace",
        "PriorityClass",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    }
)
_SHARDS: Final = (
    "https://gpuquota-membership-0.gpuquota-membership.$(POD_NAMESPACE).svc:8444,"
    "https://gpuquota-membership-1.gpuquota-membership.$(POD_NAMESPACE).svc:8444"
)


class ChartError(Exception):
    """A manifest no longer has the text that a value replaces; the message names both."""


@dataclass(frozen=True)
class Change:
    """A text of a manifest, which it has `times`, and what the template has instead."""

    old: str
    new: str
    times: int = 1


@dataclass(frozen=True)
class Template:
    """A template: its manifests, what becomes a value, and the condition under which it is rendered."""

    name: str
    sources: tuple[str, ...]
    changes: tuple[Change, ...] = ()
    condition: str = ""
    kept: bool = False  # by `helm uninstall`


def _program(value: str, requests: str, limit: str, container: str, replicas: str = "  replicas: 2\n") -> list[Change]:
    """Return what the pods of a Deployment or StatefulSet let an administrator choose."""
    pod = (
        "{{- with .Values.image.pullSecrets }}\n      imagePullSecrets: {{- toYaml . | nindent 8 }}\n      {{- end }}\n"
        f"      {{{{- with .Values.{value}.nodeSelector }}}}\n"
        "      nodeSelector: {{- toYaml . | nindent 8 }}\n      {{- end }}\n"
        f"      {{{{- with .Values.{value}.tolerations }}}}\n"
        "      tolerations: {{- toYaml . | nindent 8 }}\n      {{- end }}\n"
    )
    found = [
        Change(
            f"          resources:\n            requests: {{{requests}}}\n            limits: {{memory: {limit}}}\n",
            f"          resources: {{{{- toYaml .Values.{value}.resources | nindent 12 }}}}\n",
        ),
        Change(
            f"          image: {container}\n",
            '          image: {{ include "gpuquota.image" (list . "controller") }}\n'
            "          {{- with .Values.image.pullPolicy }}\n"
            "          imagePullPolicy: {{ . }}\n"
            "          {{- end }}\n",
        ),
        Change("      containers:\n", f"      {pod}      containers:\n"),
        Change(
            "          ports:\n",
            "            {{- with .Values.extraEnv }}\n            {{- toYaml . | nindent 12 }}\n"
            "            {{- end }}\n"
            "          ports:\n",
        ),
    ]
    return [*found, Change(replicas, f"  replicas: {{{{ .Values.{value}.replicas }}}}\n")] if replicas else found


def _extra_arguments(value: str, last: str) -> Change:
    added = f"            {{{{- with .Values.{value}.extraArgs }}}}\n            {{{{- toYaml . | nindent 12 }}}}\n"
    return Change(last, f"{last}{added}            {{{{- end }}}}\n")


_PRIORITY_CLASS: Final = Change(
    "      priorityClassName: gpuquota-controller\n",
    "      {{- if .Values.priorityClasses.create }}\n      priorityClassName: gpuquota-controller\n      {{- end }}\n",
)
_RESERVATION_CLASS: Final = "            - --reservation-priority-class=gpuquota-reservation\n"
_LAST_OF_WEBHOOK: Final = "            - --metrics-port=8080\n"
_ADVERTISED: Final = "            - --advertise=https://$(POD_NAME).gpuquota-membership.$(POD_NAMESPACE).svc:8444\n"
_UNGATED: Final = "    # the first: components/fail-open takes it out\n"
_NEXT_RULE: Final = "    - expression: >-\n        variables.controller || variables.create || variables.gated\n"
_CERTIFICATES: Final = (
    "            {{- if .Values.webhook.certificate.secretName }}\n"
    "            - --cert-dir=/certificate\n"
    "            {{- end }}\n"
)
_MOUNTED: Final = """\
          {{- if .Values.webhook.certificate.secretName }}
          volumeMounts:
            - {name: certificate, mountPath: /certificate, readOnly: true}
      volumes:
        - name: certificate
          secret: {secretName: {{ .Values.webhook.certificate.secretName }}}
          {{- end }}
"""
_INJECTED: Final = """\
  {{- with .Values.webhook.certificate.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
"""
_DROPPED: Final = "            capabilities: {drop: [ALL]}\n"

_SITE: Final = """\
            - --base-path=/gpuquota/
            - --user-header=kubeflow-userid
            - --trusted-proxy=127.0.0.6/32
            - --origin=https://kubeflow.example.org
            - --dashboard
            - --run-page=/_/pipeline/?ns={namespace}#/runs/details/{run}
            - --what-if=https://gpuquota-controller.gpuquota-system.svc
"""
_SITE_VALUES: Final = """\
            - --base-path={{ .Values.webPage.basePath }}
            - --user-header={{ .Values.webPage.userHeader }}
            {{- with .Values.webPage.groupsHeader }}
            - --groups-header={{ . }}
            {{- end }}
            {{- range .Values.webPage.trustedProxies }}
            - --trusted-proxy={{ . }}
            {{- end }}
            {{- range .Values.webPage.origins }}
            - --origin={{ . }}
            {{- end }}
            {{- if .Values.webPage.dashboard }}
            - --dashboard
            {{- end }}
            {{- with .Values.webPage.runPage }}
            - --run-page={{ . }}
            {{- end }}
            - --what-if=https://gpuquota-controller.gpuquota-system.svc
            {{- if .Values.webPage.submit }}
            - --submit
            {{- end }}
            {{- if .Values.webPage.quotas }}
            - --quotas
            {{- end }}
            {{- with .Values.webPage.extraArgs }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
"""
_OF_PAGE: Final = ("rbac", "policy", "deployment", "network-policy", "what-if")
_OF_AGENTS: Final = ("namespace", "rbac", "policy", "network-policy", "daemonset")

TEMPLATES: Final = (
    Template("namespace.yaml", ("base/namespace.yaml",), condition="ne .Values.namespace .Release.Namespace"),
    Template("namespaces.yaml", ("reservations/namespace.yaml", "keys/namespace.yaml"), kept=True),
    Template("keys-rbac.yaml", ("keys/rbac.yaml",)),
    Template("controller-rbac.yaml", ("base/controller-rbac.yaml",)),
    Template("user-roles.yaml", ("base/user-roles.yaml",)),
    Template("debug-rbac.yaml", ("base/debug-rbac.yaml",)),
    Template("launcher-role.yaml", ("base/launcher-role.yaml",)),
    Template("flow-schemas.yaml", ("base/flow-schemas.yaml",)),
    Template(
        "controller.yaml",
        ("base/deployment.yaml",),
        (
            *_program("controller", "cpu: 250m, memory: 256Mi", "1Gi", "controller"),
            Change(
                "---\napiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata:\n  name: gpuquota-controller\n",
                "{{- if .Values.priorityClasses.create }}\n---\n"
                "apiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata:\n  name: gpuquota-controller\n",
            ),
            Change("value: 1000000000\n", "value: {{ .Values.priorityClasses.value | int }}\n", 2),
            Change("preemptionPolicy: Never\n", "preemptionPolicy: Never\n{{- end }}\n"),
            _PRIORITY_CLASS,
            Change(
                f"            - >-\n              --membership-shards={_SHARDS}\n",
                '            - --membership-shards={{ include "gpuquota.shards" . }}\n',
            ),
            Change(f"kfp-gpuquota/reservation:{__version__}", '{{ include "gpuquota.image" (list . "reservation") }}'),
            Change(
                _RESERVATION_CLASS,
                "            {{- if .Values.priorityClasses.create }}\n"
                f"{_RESERVATION_CLASS}"
                "            {{- end }}\n"
                "            {{- with .Values.controller.runtimeImage }}\n"
                "            - --runtime-image={{ . }}\n"
                "            {{- end }}\n"
                "            {{- with .Values.controller.reservationRuntimeClass }}\n"
                "            - --reservation-runtime-class={{ . }}\n"
                "            {{- end }}\n"
                "            {{- if and .Values.webPage.enabled .Values.webPage.origins }}\n"
                "            - --page-url={{ first .Values.webPage.origins }}{{ .Values.webPage.basePath }}\n"
                "            {{- end }}\n"
                "            {{- if .Values.webPage.enabled }}\n"
                "            - --what-if-port=8445\n"
                "            {{- end }}\n"
                "            {{- with .Values.controller.extraArgs }}\n"
                "            {{- toYaml . | nindent 12 }}\n"
                "            {{- end }}\n",
            ),
        ),
    ),
    Template(
        "webhook-deployment.yaml",
        ("base/webhook-deployment.yaml",),
        (
            *_program("webhook", "cpu: 100m, memory: 96Mi", "512Mi", "controller"),
            _PRIORITY_CLASS,
            Change(_LAST_OF_WEBHOOK, _LAST_OF_WEBHOOK + _CERTIFICATES),
            _extra_arguments("webhook", _CERTIFICATES),
            Change(_DROPPED, _DROPPED + _MOUNTED),
        ),
    ),
    Template(
        "membership.yaml",
        ("base/membership.yaml",),
        (
            *_program("membership", "cpu: 250m, memory: 128Mi", "1Gi", "controller"),
            _PRIORITY_CLASS,
            _extra_arguments("membership", _ADVERTISED),
        ),
    ),
    Template("services.yaml", ("base/services.yaml",)),
    Template("network-policy.yaml", ("base/network-policy.yaml",)),
    Template(
        "webhook.yaml",
        ("base/webhook.yaml",),
        (
            Change("failurePolicy: Fail", 'failurePolicy: {{ ternary "Ignore" "Fail" .Values.webhook.failOpen }}', 3),
            Change("}\nwebhooks:\n", f"}}\n{_INJECTED}webhooks:\n"),
        ),
    ),
    Template(
        "policies.yaml",
        ("base/policies.yaml",),
        (
            Change(_UNGATED, "    {{- if not .Values.webhook.failOpen }}\n"),
            Change(_NEXT_RULE, "    {{- end }}\n" + _NEXT_RULE),
        ),
    ),
    Template("reclaim-policies.yaml", ("base/reclaim-policies.yaml",)),
    Template("device-policies.yaml", ("base/device-policies.yaml",)),
    Template("account-policies.yaml", ("base/account-policies.yaml",)),
    Template("kubeflow.yaml", ("overlays/kubeflow/profile-policy.yaml",), condition=".Values.kubeflow.enabled"),
    Template(
        "pipeline-runner.yaml",
        ("components/pipeline-runner/pipeline-runner.yaml",),
        (
            Change(
                "  - {kind: ServiceAccount, name: pipeline-runner, namespace: kubeflow}\n",
                "  - kind: ServiceAccount\n"
                "    name: {{ .Values.kubeflow.pipelineRunner.serviceAccount }}\n"
                "    namespace: {{ .Values.kubeflow.pipelineRunner.namespace }}\n",
            ),
            Change("  namespace: kubeflow\n", "  namespace: {{ .Values.kubeflow.pipelineRunner.namespace }}\n"),
        ),
        condition="and .Values.kubeflow.enabled .Values.kubeflow.pipelineRunner.serviceAccount",
    ),
    Template(
        "node-agent.yaml",
        tuple(f"components/node-agent/{name}.yaml" for name in _OF_AGENTS),
        (
            *_program("nodeAgent", "cpu: 50m, memory: 64Mi", "256Mi", "node-agent", replicas=""),
            Change(
                "      tolerations:\n        - operator: Exists\n",
                "",
            ),
            Change(
                "          args: [--metrics-port=8081]\n",
                "          args:\n            - --metrics-port=8081\n"
                "            {{- if .Values.nodeAgent.killer }}\n            - --killer\n            {{- end }}\n"
                "            {{- with .Values.nodeAgent.extraArgs }}\n            {{- toYaml . | nindent 12 }}\n"
                "            {{- end }}\n",
            ),
            Change(
                _DROPPED,
                "            capabilities:\n              drop: [ALL]\n"
                "              {{- if .Values.nodeAgent.killer }}\n              add: [KILL]\n"
                "              {{- end }}\n",
            ),
            Change(
                "      # where GPUs need a runtime class of their own: runtimeClassName: nvidia\n",
                "      {{- with .Values.nodeAgent.runtimeClassName }}\n      runtimeClassName: {{ . }}\n"
                "      {{- end }}\n",
            ),
        ),
        condition=".Values.nodeAgent.enabled",
    ),
    Template(
        "web-page.yaml",
        tuple(f"components/web-page/{name}.yaml" for name in _OF_PAGE),
        (
            *_program("webPage", "cpu: 100m, memory: 128Mi", "1Gi", "web-page", replicas=""),
            Change(_SITE, _SITE_VALUES),
            Change(
                "kubernetes.io/metadata.name: istio-system",
                "kubernetes.io/metadata.name: {{ .Values.webPage.proxyNamespace }}",
            ),
        ),
        condition=".Values.webPage.enabled",
    ),
    *(
        Template(
            f"web-page-{name}.yaml",
            (f"components/web-page-{name}/rbac.yaml",),
            condition=f"and .Values.webPage.enabled .Values.webPage.{name}",
        )
        for name in ("submit", "quotas")
    ),
    Template(
        "monitoring.yaml",
        tuple(f"components/monitoring/{name}.yaml" for name in ("service-monitor", "pod-monitors", "rules")),
        condition=".Values.monitoring.enabled",
    ),
)  # fmt: skip


def render(template: Template, sources: Sequence[str]) -> str:
    """Return the template of these manifests. Raises ChartError where they lack what a value replaces."""
    documents = [_labelled(one, kept=template.kept) for source in sources for one in _documents(source)]
    text = "\n---\n".join(documents) + "\n"
    for change in template.changes:
        if (found := text.count(change.old)) != change.times:
            raise ChartError(f"{template.name}: {change.old!r} is there {found} times, not {change.times}")
        text = text.replace(change.old, change.new)
    text = text.replace(SYSTEM, NAMESPACE)
    if template.condition:
        text = f"{{{{- if {template.condition} }}}}\n{text}{{{{- end }}}}\n"
    return f"{{{{- /* Made by: python -m tools.chart, of manifests/ */}}}}\n{text}"


def _documents(text: str) -> list[str]:
    if "{{" in text:
        raise ChartError(f"a manifest has '{{{{', which begins an action of a template: {text[:200]!r}")
    return [part.strip("\n") for part in re.split(r"^---$", text, flags=re.MULTILINE)]


def _labelled(document: str, *, kept: bool) -> str:
    """Return the document as kustomize makes it: with the namespace, and with the label of what belongs together."""
    kind = re.search(r"^kind: (\w+)$", document, re.MULTILINE)
    metadata = re.search(r"^metadata:\n((?:  .*\n?)+)", document, re.MULTILINE)
    if kind is None or metadata is None:
        raise ChartError(f"a manifest has no kind or no metadata: {document[:200]!r}")
    body = metadata[1] if metadata[1].endswith("\n") else metadata[1] + "\n"
    if kind[1] not in _CLUSTER_SCOPED and "\n  namespace:" not in body:
        body = re.sub(r"^(  name: .*\n)", rf"\1  namespace: {SYSTEM}\n", body)
    if "part-of" not in body:
        body = _with_label(body)
    if kept:
        body += f"  annotations: {{{KEEP}}}\n"
    return (document[: metadata.start(1)] + body + document[metadata.end(1) :]).rstrip("\n")


def _with_label(body: str) -> str:
    if "  labels: {" in body:
        return body.replace("  labels: {", f"  labels: {{{PART_OF}, ")
    if "  labels:\n" in body:
        return body.replace("  labels:\n", f"  labels:\n    {PART_OF}\n")
    return f"{body}  labels: {{{PART_OF}}}\n"
