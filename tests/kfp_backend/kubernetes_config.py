"""What KFP's driver makes of a task's Kubernetes configuration (what kfp-kubernetes sets) on the step's pod. Pure.

As the driver of KFP 2.17 does it; a recorded pod is the measure (test_kubernetes_config.py).
"""

from __future__ import annotations

import copy
from typing import Any, Final

Json = dict[str, Any]

_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"


def configured(pod: Json, config: Json) -> Json:
    """The pod with the configuration applied, which is the JSON form of KubernetesExecutorConfig."""
    made = copy.deepcopy(pod)
    spec = made["spec"]
    main = next(one for one in spec["containers"] if one["name"] == "main")
    for part in ("labels", "annotations"):
        made["metadata"].setdefault(part, {}).update(config.get("podMetadata", {}).get(part, {}))
    _volumes(spec, main, config)
    main.setdefault("env", [])[0:0] = _environment(config)
    if "activeDeadlineSeconds" in config:
        spec["activeDeadlineSeconds"] = int(config["activeDeadlineSeconds"])
    if "imagePullPolicy" in config:
        main["imagePullPolicy"] = config["imagePullPolicy"]
    if secrets := config.get("imagePullSecret"):
        spec["imagePullSecrets"] = [{"name": secret["secretName"]} for secret in secrets]
    if tolerations := [toleration for one in config.get("tolerations", []) for toleration in _tolerations(one)]:
        spec["tolerations"] = [*spec.get("tolerations", []), *tolerations]
    if selector := config.get("nodeSelector"):
        spec["nodeSelector"] = {**selector.get("labels", {}), **_constant(selector.get("nodeSelectorJson"))}
    if affinities := config.get("nodeAffinity"):
        spec["affinity"] = {"nodeAffinity": _affinity(affinities)}
    if context := config.get("securityContext"):
        numbers = {name: value if isinstance(value, bool) else int(value) for name, value in context.items()}
        main["securityContext"] = {**main.get("securityContext", {}), **numbers}
    return made


def _volumes(spec: Json, main: Json, config: Json) -> None:
    def add(name: str, source: Json, path: str, **more: Any) -> None:
        spec["volumes"].append({"name": name, **source})
        main["volumeMounts"].append({"name": name, "mountPath": path, **more})

    for one in config.get("pvcMount", []):
        claim = {"persistentVolumeClaim": {"claimName": one["constant"]}}
        add(one["constant"], claim, one["mountPath"], **({"subPath": one["subPath"]} if one.get("subPath") else {}))
    for one in config.get("secretAsVolume", []):
        source = {"secretName": one["secretName"], "optional": one.get("optional", False)}
        add(one["secretName"], {"secret": source}, one["mountPath"])
    for one in config.get("configMapAsVolume", []):
        source = {"name": one["configMapName"], "optional": one.get("optional", False)}
        add(one["configMapName"], {"configMap": source}, one["mountPath"])
    for one in config.get("emptyDirMounts", []):
        source = {name: one[name] for name in ("medium", "sizeLimit") if one.get(name)}
        add(one["volumeName"], {"emptyDir": source}, one["mountPath"])
    for one in config.get("genericEphemeralVolume", []):
        claim = {"accessModes": one["accessModes"], "resources": {"requests": {"storage": one["size"]}}}
        claim |= {"storageClassName": one["storageClassName"]} if one.get("storageClassName") else {}
        template = {"metadata": one.get("metadata", {}), "spec": claim}
        add(one["volumeName"], {"ephemeral": {"volumeClaimTemplate": template}}, one["mountPath"])


def _environment(config: Json) -> list[Json]:
    kinds = (
        ("secretAsEnv", "secretKeyRef", "secretName", "secretKey"),
        ("configMapAsEnv", "configMapKeyRef", "configMapName", "configMapKey"),
    )
    found = [
        {
            "name": pair["envVar"],
            "valueFrom": {reference: {"name": one[name], "key": pair[key], "optional": one.get("optional", False)}},
        }
        for field, reference, name, key in kinds
        for one in config.get(field, [])
        for pair in one["keyToEnv"]
    ]
    return found + [
        {"name": one["name"], "valueFrom": {"fieldRef": {"fieldPath": one["fieldPath"]}}}
        for one in config.get("fieldPathAsEnv", [])
    ]


def _tolerations(given: Json) -> list[Json]:
    if "tolerationJson" in given:
        found = _constant(given["tolerationJson"])
        return found if isinstance(found, list) else [found]
    return [{name: int(value) if name == "tolerationSeconds" else value for name, value in given.items()}]


def _affinity(terms: list[Json]) -> Json:
    found: Json = {}
    for term in terms:
        if "nodeAffinityJson" in term:
            found |= _constant(term["nodeAffinityJson"])
            continue
        match = {name: term[name] for name in ("matchExpressions", "matchFields") if name in term}
        if "weight" in term:
            found.setdefault(_PREFERRED, []).append({"weight": term["weight"], "preference": match})
        else:
            found.setdefault(_REQUIRED, {}).setdefault("nodeSelectorTerms", []).append(match)
    return found


def _constant(parameter: Json | None) -> Any:
    return parameter["runtimeValue"]["constant"] if parameter else {}
